"""The token file on disk: written once, under a temporary name, and renamed.

A prepared folder holds `train.bin` and `val.bin` (flat little-endian ids), `token_bytes.npy` (bytes a token
stands for), `unigram.npy` (counts of training tokens), `doc_offsets.npy`, `tokenizer.json`, `meta.json`.
Its name is a hash of content, split rule and tokenizer, so equal names mean equal tokens.
"""

import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from andrea_exp.config import DataConfig
from andrea_exp.data.corpus import Document, content_hash, documents
from andrea_exp.data.tokenizer import Tokenizer, make_tokenizer
from andrea_exp.errors import UserError

LEFT_OVER_S = 86400
SPLIT_RULE = "groups by SHA-256 until the fraction of bytes is held out, v1"

Ids = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Prepared:
    """An opened token folder. `train` and `val` are read-only memory maps of token ids."""

    folder: Path
    train: npt.NDArray[np.integer]
    val: npt.NDArray[np.integer]
    token_bytes: npt.NDArray[np.int64]
    unigram: npt.NDArray[np.int64]
    meta: dict[str, Any]


def fingerprint(data: DataConfig) -> str:
    """Names the prepared tokens by everything that decides them, without preparing them."""
    recipe = {
        "content": content_hash(data),
        "split": [SPLIT_RULE, data.val_fraction],
        "tokenizer": [data.tokenizer.name, data.vocab_size],
    }
    return hashlib.sha256(json.dumps(recipe, sort_keys=True).encode()).hexdigest()[:16]


def prepare(data: DataConfig, corpora: Path, seq_len: int) -> Path:
    """The folder with a corpus's tokens, made if it is not there yet, and verified if it is.

    Safe under concurrent starts (whoever renames first wins) and under kills (nothing half-made is found).
    Raises UserError for a corpus without usable text, too short for one window, or spoilt on disk.
    """
    folder = corpora / fingerprint(data)
    if not folder.exists():
        _build(data, folder, seq_len)
    _verify(folder)
    prepared = load(folder)
    _require_windows({"train": len(prepared.train), "val": len(prepared.val)}, seq_len)
    return folder


def load(folder: Path) -> Prepared:
    """Opens a prepared folder, by memory map."""
    meta = json.loads((folder / "meta.json").read_text())
    train, val = (np.memmap(folder / f"{name}.bin", dtype=meta["dtype"], mode="r") for name in ("train", "val"))
    token_bytes, unigram = (np.load(folder / f"{name}.npy") for name in ("token_bytes", "unigram"))
    return Prepared(folder, train, val, token_bytes, unigram, meta)


def split(docs: Sequence[Document], val_fraction: float) -> tuple[list[Document], list[Document]]:
    """Training and validation documents; whole groups are held out, chosen by hash, never by date."""
    groups: dict[str, int] = {}
    for doc in docs:
        groups[doc.group] = groups.get(doc.group, 0) + len(doc.text.encode())
    wanted, held = val_fraction * sum(groups.values()), set()
    for group in sorted(groups, key=lambda g: hashlib.sha256(g.encode()).hexdigest())[: len(groups) - 1]:
        if wanted <= 0:
            break
        held.add(group)
        wanted -= groups[group]
    return [d for d in docs if d.group not in held], [d for d in docs if d.group in held]


def _build(data: DataConfig, folder: Path, seq_len: int) -> None:
    docs = documents(data)
    train, val = split(docs, data.val_fraction)
    if not val:
        raise UserError(f"data: {len(docs)} document is too little to hold one out for validation")
    tokenizer = make_tokenizer(data, [d.text for d in train])
    if data.vocab_size and len(tokenizer.lengths) < data.vocab_size:
        raise UserError(f"data.vocab_size={data.vocab_size}: this text yields no more than {len(tokenizer.lengths)}")
    splits = {name: _encode(docs, tokenizer) for name, docs in (("train", train), ("val", val))}
    _require_windows({name: sum(map(len, pieces)) for name, pieces in splits.items()}, seq_len)
    folder.parent.mkdir(parents=True, exist_ok=True)
    _clear_leftovers(folder.parent)
    partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        _write(partial, data, tokenizer, splits)
        try:
            partial.rename(folder)
        except OSError:  # another process was first, with the same tokens
            if not folder.exists():
                raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _clear_leftovers(corpora: Path) -> None:
    """Removes what preparations that were killed a day ago or more had begun."""
    for partial in corpora.glob(".*.*"):
        if time.time() - partial.stat().st_mtime > LEFT_OVER_S:
            shutil.rmtree(partial, ignore_errors=True)


def _encode(docs: Sequence[Document], tokenizer: Tokenizer) -> list[Ids]:
    """The tokens of each document, its end among them."""
    return [np.append(tokenizer.encode(doc.text), tokenizer.end_of_text) for doc in docs]


def _write(folder: Path, data: DataConfig, tokenizer: Tokenizer, splits: dict[str, list[Ids]]) -> None:
    size = len(tokenizer.lengths)
    dtype = "<u2" if size <= 65536 else "<u4"
    meta: dict[str, Any] = {
        "source": {"corpus": data.corpus.name if data.corpus else None, "sha256": content_hash(data)},
        "split": SPLIT_RULE,
        "val_fraction": data.val_fraction,
        "tokenizer": data.tokenizer.name,
        "vocab_size": size,
        "dtype": dtype,
        "files": {},
    }
    for name, pieces in splits.items():
        tokens = np.concatenate(pieces)
        _write_synced(folder / f"{name}.bin", tokens.astype(dtype).tobytes())
        meta["files"][f"{name}.bin"] = _hash_file(folder / f"{name}.bin")
        meta[name] = {
            "documents": len(pieces),
            "tokens": len(tokens),
            "bytes": int(tokenizer.lengths[tokens].sum()),
        }
        if name == "train":
            counts = np.bincount(tokens, minlength=size)
            p = counts[counts > 0] / counts.sum()
            meta["unigram_entropy_nats"] = float(-(p * np.log(p)).sum())
            np.save(folder / "unigram.npy", counts)
            np.save(folder / "doc_offsets.npy", np.cumsum([0] + [len(x) for x in pieces]))
    np.save(folder / "token_bytes.npy", tokenizer.lengths)
    tokenizer.save(folder / "tokenizer.json")
    for other in ("token_bytes.npy", "unigram.npy", "doc_offsets.npy", "tokenizer.json"):
        meta["files"][other] = _hash_file(folder / other)
    _write_synced(folder / "meta.json", json.dumps(meta, indent=2).encode())


def _write_synced(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _hash_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _verify(folder: Path) -> None:
    try:
        recorded = json.loads((folder / "meta.json").read_text())["files"]
        spoilt = [name for name, digest in recorded.items() if _hash_file(folder / name) != digest]
    except (OSError, ValueError, KeyError) as error:
        spoilt = [str(getattr(error, "filename", None) or "meta.json")]
    if spoilt:
        raise UserError(
            f"prepared corpus {folder}: {', '.join(spoilt)} does not have its recorded hash; "
            "delete that folder, and it is made again"
        )


def _require_windows(lengths: dict[str, int], seq_len: int) -> None:
    for name, tokens in lengths.items():
        if tokens < seq_len + 1:
            raise UserError(
                f"data: the {name} split has {tokens} tokens, too short for one window of "
                f"model.seq_len={seq_len} and its target; use more text or a shorter window"
            )
