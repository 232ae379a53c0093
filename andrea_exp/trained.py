"""A recorded run opened again: its model with the weights that it ended with, its tokenizer, its text."""

from pathlib import Path
from typing import Any

import psutil
import torch

from andrea_exp import accounting, data
from andrea_exp.config import Keep, ModelConfig, RunConfig
from andrea_exp.config import Tokenizer as Kind
from andrea_exp.data.tokenizer import BPE, Bytes, Tokenizer, make_tokenizer
from andrea_exp.errors import UserError
from andrea_exp.model import GPT
from andrea_exp.record import read_json, status


def fresh_model(config: RunConfig) -> GPT:
    """An untrained model, in evaluation mode. Raises UserError for one that this machine's memory cannot hold."""
    needed = 4 * sum(accounting.parameters(config.model).values())
    if needed > psutil.virtual_memory().available:
        raise UserError(f"the weights take {needed / 2**30:.0f} GiB, more memory than is free; add scale=demo")
    return GPT(config.model, config.seed).eval()


def load_model(folder: Path, config: RunConfig) -> GPT:
    """A finished run's model in evaluation mode, on the CPU, in the precision of its weights.

    Raises UserError where the run left no weights, or a file that is not whole.
    """
    path = folder / "weights.pt"
    if not path.exists():
        kept = "the run kept none" if config.checkpoint.keep is Keep.none else "unpacked records have none"
        why = kept if status(folder).finished else f"it is {status(folder)}"
        raise UserError(f"{folder.name}: no weights.pt ({why}); forget and run it again to have them")
    try:
        weights: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
        model = _empty(config.model, next(iter(weights.values())).dtype)
        model.load_state_dict(weights)
    except Exception as error:  # torch raises nothing more special for a torn file
        raise UserError(f"{path}: not this run's weights ({str(error).splitlines()[0]})") from error
    return model.eval()


def _empty(config: ModelConfig, dtype: torch.dtype) -> GPT:
    """A model whose tables of positions are computed in a dtype, as where it was trained."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        return GPT(config)
    finally:
        torch.set_default_dtype(before)


def fingerprint_of(folder: Path, config: RunConfig) -> str:
    """The recorded name of a run's tokens; of a record without one, that of the text as it is now."""
    recorded = (read_json(folder / "provenance.json") or {}).get("data_fingerprint")
    identity = (read_json(folder / "identity.json") or {}).get("data", {}).get("fingerprint")
    return recorded or identity or data.fingerprint(config.data)


def corpus_of(folder: Path, config: RunConfig, corpora: Path) -> Path:
    """A run's prepared tokens, made where they are not there. Raises UserError where its text is another now."""
    wanted = fingerprint_of(folder, config)
    if (corpora / wanted / "meta.json").exists():
        return corpora / wanted
    if data.fingerprint(config.data) != wanted:
        raise UserError(f"{folder.name}: its text changed since it ran (tokens {wanted} are not in {corpora}/)")
    return data.prepare(config.data, corpora, config.model.seq_len)


def tokenizer_of(config: RunConfig, folder: Path | None, corpora: Path) -> Tokenizer:
    """A run's tokenizer; `folder` is None for a model that is no run."""
    if config.data.tokenizer is Kind.bytes:
        return Bytes()
    if folder is not None:
        return BPE.load(corpus_of(folder, config, corpora) / "tokenizer.json")
    if config.data.tokenizer is Kind.file:
        return make_tokenizer(config.data, [])
    return BPE.load(data.prepare(config.data, corpora, config.model.seq_len) / "tokenizer.json")
