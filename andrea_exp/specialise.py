"""Do layers specialise? A finished run's validation loss with its blocks skipped, silenced, swapped, read out early.

- skipped: both corrections of a block are 0. What stands on the stream stays: post-norm's and DeepNorm's norms of the
  sum still work, on the stream alone, and so does the norm of the next reading.
- without attn, without mlp: one of the two corrections is 0; in a parallel block, one of the two terms of their sum.
- swapped: two neighbouring blocks exchange their weights, each with its norms, its learned multiplier and the norm
  that it reads through. What belongs to a depth and not to a block stays: layer-scaled norm's 1/sqrt(l), a post-norm
  block's place in `mix` (such a pair has no swap).
- lens: the loss of the stream after each block through the model's own final norm and head; first of the embedding.

Before training blocks are draws from one distribution, so that swapping changes the loss by chance alone: an untrained
arm is the control. B batch, T time.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor, nn
from torch.nn import functional as F

from andrea_exp import data, ops
from andrea_exp.config import Device, RunConfig
from andrea_exp.data.batches import val_batch
from andrea_exp.diagnostics import blocks_of, junctions_of, tapped
from andrea_exp.errors import UserError
from andrea_exp.model import GPT
from andrea_exp.model.gpt import Block
from andrea_exp.model.residual import Junction
from andrea_exp.record import LAYERS, finite, load_config, read_json, write_json
from andrea_exp.trace import lens, streams_by_depth
from andrea_exp.trained import corpus_of, load_model

Batches = list[tuple[Tensor, Tensor]]  # tokens and targets, (B, T) each


def measured(folder: Path) -> bool:
    """Whether a run's blocks are measured, with the weights that it has now."""
    known, summary = read_json(folder / LAYERS), read_json(folder / "summary.json") or {}
    return known is not None and known.get("weights") == summary.get("weights")


def measure_missing(folders: Sequence[Path], corpora: Path) -> list[str]:
    """Measures each finished run that is not measured yet, and returns why some cannot be."""
    refused = []
    for folder in track(folders, "measuring blocks", console=Console(stderr=True), transient=True):
        try:
            if not measured(folder):
                measure_run(folder, corpora)
        except UserError as error:
            refused.append(str(error))
    return refused


def measure_run(folder: Path, corpora: Path) -> None:
    """Writes a finished run's `layers.json`, from its weights and its own validation windows. Raises UserError."""
    config, summary = load_config(folder), read_json(folder / "summary.json") or {}
    torch.set_num_threads(summary.get("threads", 1))  # as it validated: the same bits
    model = load_model(folder, config)
    on_gpu = config.train.device is not Device.cpu and torch.cuda.is_available()
    device = torch.device("cuda" if on_gpu else "cpu")
    found = measure(model.to(device), _windows(config, corpus_of(folder, config, corpora), device))
    write_json(
        folder / LAYERS, finite({"weights": summary.get("weights"), "windows": config.data.val_windows, **found})
    )


def _windows(config: RunConfig, corpus: Path, device: torch.device) -> Batches:
    ids = val_batch(data.load(corpus), config.data.val_windows, config.model.seq_len)
    tokens, targets = (torch.from_numpy(a).to(device) for a in ids)
    size = max(1, config.train.batch_size // config.train.accumulate)
    return list(zip(tokens.split(size), targets.split(size), strict=True))


@torch.no_grad()
def measure(model: GPT, batches: Batches) -> dict[str, Any]:
    """All losses in nats a token, a list over blocks each; None where a measure has no meaning.

    Without a residual a stream has nothing but its branches: there is no skipping them.
    """
    blocks = blocks_of(model)
    residual = blocks[0].mlp_junction.residual

    def each(change: Callable[..., Any], *how: str) -> list[float] | None:
        return [_loss(model, batches, change(block, *how)) for block in blocks] if residual else None

    with ops.definitions():
        return {
            "loss": _loss(model, batches, ExitStack()),
            "skipped": each(skipped),
            "without": {branch: each(silenced, branch) for branch in ("attn", "mlp")},
            "swapped": [_swapped_loss(model, batches, index) for index in range(len(blocks) - 1)],
            "lens": _lens_losses(model, batches),
        }


def _loss(model: GPT, batches: Batches, changed: Any) -> float:
    """Mean over all tokens, within a context that changes the model."""
    with changed:
        return torch.cat([model.loss(x, y, reduction="none").double() for x, y in batches]).mean().item()


@contextmanager
def skipped(block: Block) -> Iterator[None]:
    """Nothing that the block computes is added to the stream, within."""
    handles = [junction.register_forward_hook(_nothing_added) for _, junction in junctions_of(block)]
    with _removed(handles):
        yield


@contextmanager
def silenced(block: Block, branch: str) -> Iterator[None]:
    """Nothing that one branch computes is added to the stream, within."""
    if block.attn_junction is None:
        handle = block.get_submodule(branch).register_forward_hook(lambda _, args, out: torch.zeros_like(out))
    else:
        handle = dict(junctions_of(block))[branch].register_forward_hook(_nothing_added)
    with _removed([handle]):
        yield


def _nothing_added(junction: nn.Module, args: tuple[Tensor, Tensor], _: Any) -> tuple[Tensor, Tensor]:
    """A correction of 0, which a norm on the branch with a bias would not make of a branch that gives 0."""
    assert isinstance(junction, Junction)
    stream, delta = args
    return junction.meet(stream, torch.zeros_like(delta))


@contextmanager
def _removed(handles: list[Any]) -> Iterator[None]:
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def own_parameters(model: GPT, index: int) -> dict[str, nn.Parameter]:
    """What a block takes along: all but the norm of the next block's reading, and the norm that it reads through."""
    block, before = blocks_of(model)[index], blocks_of(model)[index - 1].mlp_junction if index else model.trunk.opening
    own = {k: p for k, p in block.named_parameters() if not k.startswith("mlp_junction.read_norm.")}
    reads = before.read_norm.named_parameters() if before.read_norm is not None else ()
    return own | {f"reads.{name}": parameter for name, parameter in reads}


@contextmanager
def swapped(model: GPT, index: int) -> Iterator[None]:
    """A block and the next one in each other's place, within."""
    pairs = list(zip(own_parameters(model, index).values(), own_parameters(model, index + 1).values(), strict=True))

    def exchange() -> None:
        for one, other in pairs:
            one.data, other.data = other.data, one.data

    exchange()
    try:
        yield
    finally:
        exchange()


def _swapped_loss(model: GPT, batches: Batches, index: int) -> float | None:
    alike = own_parameters(model, index).keys() == own_parameters(model, index + 1).keys()
    return _loss(model, batches, swapped(model, index)) if alike else None


def _lens_losses(model: GPT, batches: Batches) -> list[float]:
    losses = []
    for tokens, targets in batches:
        with tapped(model) as taps:
            model(tokens)
        logits = (lens(model, stream) for stream in streams_by_depth(model, taps).values())
        losses.append([F.cross_entropy(x.double().flatten(0, 1), targets.flatten(), reduction="sum") for x in logits])
    tokens_in_all = sum(targets.numel() for _, targets in batches)
    return [(sum(depth) / tokens_in_all).item() for depth in zip(*losses, strict=True)]
