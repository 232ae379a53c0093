"""What one token meets on its way through a model: sizes, norms, readings at each depth, attention, hidden units.

From one forward pass of the definitions, in the precision of the weights. T time, D d_model, V vocab.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from andrea_exp import ops
from andrea_exp.config import formula
from andrea_exp.data.tokenizer import ids_of
from andrea_exp.describe import named
from andrea_exp.diagnostics import Taps, block_name, blocks_of, entropy_shares, junctions_of, rms, tapped
from andrea_exp.errors import UserError
from andrea_exp.model import GPT
from andrea_exp.model.residual import Junction
from andrea_exp.trained import fresh_model, load_model, tokenizer_of


@dataclass(frozen=True)
class Normed:
    """What a norm did to the traced token: root mean squares before and after."""

    place: str  # "branch": what a branch gives; "sum": the stream with it; "read": what the next branch reads
    before: float
    after: float


@dataclass(frozen=True)
class Crossing:
    """A branch's correction meeting the stream, for the traced token; sizes are root mean squares over D."""

    block: str
    branch: str  # attn, mlp, or attn+mlp of a parallel block
    stream: float  # before the correction
    correction: float  # as it is added
    ratio: float  # of the two
    cosine: float  # between the two; 0 where either is 0
    ratio_of_text: float  # the same ratio over all tokens of the text
    norms: list[Normed]  # in the order in which they work


@dataclass(frozen=True)
class Guess:
    token: int
    probability: float


@dataclass(frozen=True)
class Reading:
    """The stream at one depth read out by the model's own final norm, where it has one, and head (a logit lens)."""

    depth: str  # "embedding", or the block that it follows
    stream: float
    guesses: list[Guess]  # the likeliest first
    next_probability: float | None  # of the token that follows in the text; None after the last
    next_loss: float | None  # nats


@dataclass(frozen=True)
class Head:
    """Where one head looks from the traced token."""

    position: int  # attended most
    weight: float
    entropy: float  # of the whole text: mean share of the largest, 1 where all earlier tokens weigh the same


@dataclass(frozen=True)
class Looking:
    block: str
    heads: list[Head]


@dataclass(frozen=True)
class Hidden:
    """A block's hidden units over the whole text."""

    block: str
    units: int
    dead: int  # exactly 0 on every token
    loudest: float  # with its sign
    unit: int
    position: int


@dataclass(frozen=True)
class Trace:
    tokens: list[int]
    position: int  # of the traced token, from 0
    opening: Normed | None  # the norm before the first branch
    crossings: list[Crossing]
    readings: list[Reading]  # one more than blocks
    looking: list[Looking]
    hidden: list[Hidden]


@dataclass(frozen=True)
class Traced:
    """A trace with what it takes to show it."""

    found: Trace
    spelled: Callable[[int], str]  # a token's text on one line
    title: str
    notes: list[str]


def of_text(name: str, overrides: Sequence[str], text: str, token: int) -> Traced:
    """Follows one token (negative: from the end) of a text through a recorded run, a recipe or a changed config.

    A text longer than the model's window loses its beginning. Raises UserError.
    """
    config, folder = named(name, overrides)
    records = Path(config.records)
    tokenizer = tokenizer_of(config, folder, (folder.parents[1] if folder else records) / "corpora")
    ids, seq_len = ids_of(tokenizer, text), config.model.seq_len
    notes = [] if folder else ["untrained weights"]
    if cut := max(0, len(ids) - seq_len):
        notes.append(f"the text has {len(ids)} tokens, the window {seq_len}: its first {cut} are left out")
    ids = ids[cut:]
    if not ids:
        raise UserError("the text is empty: give at least one token to trace")
    if not -len(ids) <= token < len(ids):
        raise UserError(f"--token {token}: the text has {len(ids)} tokens; use {-len(ids)} to {len(ids) - 1}")
    model = load_model(folder, config) if folder else fresh_model(config)
    found = trace(model, torch.tensor([ids]), token % len(ids))
    title = f"{folder.name if folder else name}: {formula(config.model)}, {config.model.n_layers} blocks"
    return Traced(found, tokenizer.spelled, title, notes)


@torch.no_grad()
def trace(model: GPT, tokens: Tensor, position: int, guesses: int = 3) -> Trace:
    """Follows the token at `position` (from 0) of one text (1, T) of ids. `model` is in evaluation mode."""
    with ops.definitions(), tapped(model) as taps:
        model(tokens)
    following = int(tokens[0, position + 1]) if position + 1 < tokens.shape[1] else None
    return Trace(
        tokens[0].tolist(),
        position,
        _opening(model, taps, position),
        list(_crossings(model, taps, position)),
        list(_readings(model, taps, position, following, guesses)),
        list(_looking(model, taps, position)),
        list(_hidden(model, taps)),
    )


def streams_by_depth(model: GPT, taps: Taps) -> dict[str, Tensor]:
    """(B, T, D) each: the embedding, and the stream after each block."""
    ends, at = {"embedding": taps.streams[0]}, -1
    for index, block in enumerate(blocks_of(model)):
        at += len(junctions_of(block))
        ends[block_name(model, index)] = taps.outputs[at][0]
    return ends


def lens(model: GPT, stream: Tensor) -> Tensor:
    """(..., D) of any depth -> (..., V) logits as if no block followed. nostalgebraist 2020."""
    return model.read_out(blocks_of(model)[-1].mlp_junction.read(stream))


def _opening(model: GPT, taps: Taps, position: int) -> Normed | None:
    norm, embedded = model.trunk.opening.read_norm, taps.streams[0][0, position]
    return None if norm is None else _normed("read", embedded, norm(embedded))


def _crossings(model: GPT, taps: Taps, position: int) -> Iterator[Crossing]:
    passed = zip(taps.streams, taps.deltas, taps.outputs, strict=True)
    for index, block in enumerate(blocks_of(model)):
        for branch, junction in junctions_of(block):
            stream, delta, (total, read) = next(passed)
            added = junction.correction(delta)
            x, d = stream[0, position], added[0, position]
            yield Crossing(
                block_name(model, index),
                branch,
                stream=rms(x).item(),
                correction=rms(d).item(),
                ratio=(rms(d) / rms(x)).item(),
                cosine=torch.nn.functional.cosine_similarity(x.double(), d.double(), dim=0).item(),
                ratio_of_text=(rms(added) / rms(stream)).item(),
                norms=list(_norms(junction, x, delta[0, position], d, total[0, position], read[0, position])),
            )


def _norms(
    junction: Junction, x: Tensor, delta: Tensor, added: Tensor, total: Tensor, read: Tensor
) -> Iterator[Normed]:
    """Of one token, (D,) each."""
    if junction.branch_norm is not None:
        yield _normed("branch", delta, junction.branch_norm(delta))
    if junction.stream_norm is not None:
        yield _normed("sum", junction.stream_scale * x + added if junction.residual else added, total)
    if junction.read_norm is not None:
        yield _normed("read", total, read)


def _normed(place: str, before: Tensor, after: Tensor) -> Normed:
    return Normed(place, rms(before).item(), rms(after).item())


def _readings(model: GPT, taps: Taps, position: int, following: int | None, guesses: int) -> Iterator[Reading]:
    for depth, stream in streams_by_depth(model, taps).items():
        # Of all tokens together, as the model reads them: a single row would differ in its last bits.
        logs = lens(model, stream)[0, position].double().log_softmax(-1)
        top = logs.topk(min(guesses, len(logs)))
        named = zip(top.indices.tolist(), top.values.exp().tolist(), strict=True)
        loss = None if following is None else -logs[following].item()
        probability = None if loss is None else math.exp(-loss)
        yield Reading(depth, rms(stream[0, position]).item(), [Guess(*found) for found in named], probability, loss)


def _looking(model: GPT, taps: Taps, position: int) -> Iterator[Looking]:
    for index, (block, seen) in enumerate(zip(blocks_of(model), taps.attention, strict=True)):
        logits = block.attn.logits(*seen)[0].float()  # (H, T, T)
        weight, at = logits[:, position].softmax(-1).max(-1)
        spread = entropy_shares(logits).mean(-1).nan_to_num()  # a text of one token leaves no choice
        rows = zip(at.tolist(), weight.tolist(), spread.tolist(), strict=True)
        yield Looking(block_name(model, index), [Head(*row) for row in rows])


def _hidden(model: GPT, taps: Taps) -> Iterator[Hidden]:
    for index, hidden in enumerate(taps.hidden):
        units = hidden[0]  # (T, F)
        position, unit = divmod(int(units.abs().argmax()), units.shape[1])
        dead = int((units == 0).all(0).sum())
        yield Hidden(block_name(model, index), units.shape[1], dead, units[position, unit].item(), unit, position)
