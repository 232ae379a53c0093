"""What happens inside the blocks: sizes and gradients of the stream, and of what each branch adds to it.

Taken from a forward and backward pass of its own on a fixed batch, whose gradients are thrown away, so that
looking changes no bit of training. Gradients reach every stream because this pass runs the reference ops.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from andrea_exp import ops
from andrea_exp.model import GPT
from andrea_exp.model.gpt import Block
from andrea_exp.model.residual import Junction

Metrics = dict[str, float]


@dataclass
class Taps:
    """Tensors caught on their way through the junctions, attentions and MLPs, in the order of the forward pass."""

    streams: list[Tensor] = field(default_factory=list)  # entering each junction, (B, T, D)
    deltas: list[Tensor] = field(default_factory=list)
    attention: list[tuple[Tensor, Tensor | None]] = field(default_factory=list)  # what it reads, its bias
    hidden: list[Tensor] = field(default_factory=list)  # (B, T, F), after the activation
    outputs: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # of each junction: stream and next reading


def blocks_of(model: GPT) -> list[Block]:
    return [block for block in model.trunk.blocks if isinstance(block, Block)]


def junctions_of(block: Block) -> list[tuple[str, Junction]]:
    """A block's junctions and the branch that each closes; a parallel block has one, for the sum of both."""
    if block.attn_junction is None:
        return [("attn+mlp", block.mlp_junction)]
    return [("attn", block.attn_junction), ("mlp", block.mlp_junction)]


def block_name(model: GPT, index: int) -> str:
    """Blocks count from 00, in as many digits as the deepest needs, so that names sort."""
    return f"block_{index:0{max(2, len(str(len(model.trunk.blocks) - 1)))}d}"


def groups(model: GPT) -> dict[str, str]:
    """Parameter name -> the part of the model that its gradient is reported under."""

    def part(name: str) -> str:
        words = name.split(".")
        if words[0] != "trunk":  # "embedding" has everything before the trunk: tables, T5's bias, its norm
            return "head" if words[0] == "head" else "embedding"
        if words[1] == "opening":
            return "opening"
        sublayer = words[3] if words[3] in ("attn", "mlp") else "norm"
        return f"{block_name(model, int(words[2]))}/{sublayer}"

    return {name: part(name) for name, _ in model.named_parameters()}


class GroupNorms:
    """Euclidean norms over a model's parameters, in all and by group, in a handful of tensor operations."""

    def __init__(self, model: GPT) -> None:
        part_of = groups(model)
        self.names = list(dict.fromkeys(part_of.values()))
        rows = [self.names.index(part) for part in part_of.values()]
        first = next(model.parameters())
        dtype = torch.promote_types(first.dtype, torch.float32)
        self.member = torch.zeros(len(self.names), len(rows), dtype=dtype, device=first.device)
        self.member[rows, range(len(rows))] = 1

    def __call__(self, tensors: list[Tensor]) -> Tensor:
        """(1 + groups,) float32 or wider, the total first. One tensor a parameter, in `named_parameters` order."""
        each = torch.stack(torch._foreach_norm(tensors)).to(self.member.dtype)
        return torch.cat((each.norm()[None], (self.member @ each.square()).sqrt()))

    def named(self, prefix: str, norms: Tensor) -> Metrics:
        return {f"{prefix}/{name}": v for name, v in zip(["total", *self.names], norms.tolist(), strict=True)}


def diagnose(model: GPT, tokens: Tensor, targets: Tensor) -> Metrics:
    """All metrics of one batch (B, T) of ids: streams, branches, attention, gradients. Weights stay untouched."""
    training = model.training
    model.eval()
    with (
        torch.compiler.set_stance("force_eager"),
        ops.definitions(),
        torch.enable_grad(),
        tapped(model) as taps,
    ):
        loss = model.loss(tokens, targets)
        gradients = torch.autograd.grad(loss, [*taps.streams, *model.parameters()])
    model.train(training)
    stream_grads, parameter_grads = gradients[: len(taps.streams)], list(gradients[len(taps.streams) :])
    norms = GroupNorms(model)
    metrics = norms.named("grad_norm", norms(parameter_grads))
    with torch.no_grad():
        passed = iter(zip(taps.streams, taps.deltas, stream_grads, strict=True))
        for index, block in enumerate(blocks_of(model)):
            name = block_name(model, index)
            for number, (branch, junction) in enumerate(junctions_of(block)):
                stream, delta, gradient = next(passed)
                if number == 0:
                    metrics |= _stream_metrics(name, stream, gradient)
                ratio = rms(junction.correction(delta)) / rms(stream)
                metrics[f"branch/ratio/{name}/{branch}"] = ratio.item()
            metrics |= _attention_metrics(name, block.attn.logits(*taps.attention[index]))
            metrics |= _activation_metrics(name, taps.hidden[index], block.mlp.activation is ops.relu)
        metrics["stream/rms/final"] = rms(taps.outputs[-1][0]).item()
    return metrics


@contextmanager
def tapped(model: GPT) -> Iterator[Taps]:
    """Catches what passes through a model within."""
    taps = Taps()

    def at_junction(_: nn.Module, args: tuple[Tensor, Tensor], output: tuple[Tensor, Tensor]) -> None:
        taps.streams.append(args[0])
        taps.deltas.append(args[1])
        taps.outputs.append(output)

    handles = []
    for block in blocks_of(model):
        handles += [junction.register_forward_hook(at_junction) for _, junction in junctions_of(block)]
        handles.append(block.attn.register_forward_pre_hook(lambda _, args: taps.attention.append(args)))
        handles.append(block.mlp.down_proj.register_forward_pre_hook(lambda _, args: taps.hidden.append(args[0])))
    try:
        yield taps
    finally:
        for handle in handles:
            handle.remove()


def scaled(x: Tensor, dim: int | tuple[()]) -> tuple[Tensor, Tensor]:
    """`x` over the power of two that brings its largest value along `dim` (all: ()) to between 1 and 2; that power.

    Bits stay as they are, and no square overflows or vanishes: streams reach 1e-20 and 1e30 where norms are left out.
    """
    wide = x if x.dtype is torch.float64 else x.float()
    largest = wide.double().abs().amax(dim, keepdim=True)
    power = largest / (2 * torch.frexp(largest).mantissa)
    power = torch.where(power > 0, power, 1.0)  # zeros, and what is not finite, stay
    return (wide.double() / power).to(wide.dtype), power


def rms(x: Tensor) -> Tensor:
    small, power = scaled(x, ())
    return (small.square().mean().sqrt() * power.reshape(())).to(small.dtype)


def _norm(x: Tensor) -> Tensor:
    small, power = scaled(x, ())
    return (small.norm() * power.reshape(())).to(small.dtype)


def _stream_metrics(name: str, stream: Tensor, gradient: Tensor) -> Metrics:
    x, _ = scaled(stream, -1)
    T = x.shape[-2]
    unit = nn.functional.normalize(x, dim=-1)
    tokens = (x != 0).any(-1).sum(-1)  # one that is 0 has no direction, and is alike to none
    pair_sum = unit.sum(-2).square().sum(-1) - tokens  # over ordered pairs of different tokens
    return {
        f"stream/rms/{name}": rms(stream).item(),
        f"stream/grad_norm/{name}": _norm(gradient).item(),
        f"stream/token_cosine/{name}": (pair_sum / max(1, T * (T - 1))).mean().item(),
        f"stream/kurtosis/{name}": (x.pow(4).mean(-1) / x.square().mean(-1).square()).mean().item(),
        f"stream/max_abs/{name}": stream.float().abs().max().item(),
    }


def _attention_metrics(name: str, logits: Tensor) -> Metrics:
    """From scores (B, H, T, T): entropy in nats as a share of its largest value, and the largest score."""
    wide = logits.float()
    shares = entropy_shares(wide)
    return {
        f"attention/entropy/{name}": shares.mean().item() if shares.shape[-1] else 0.0,
        f"attention/max_logit/{name}": wide.masked_fill(wide == -math.inf, 0).abs().max().item(),
    }


def entropy_shares(logits: Tensor) -> Tensor:
    """(..., T - 1) of scores (..., T, T): a token's attention entropy over its largest; the first has no choice."""
    entropy = torch.special.entr(logits.softmax(-1)).sum(-1)[..., 1:]
    return entropy / torch.arange(2, logits.shape[-1] + 1, device=logits.device).log()


def _activation_metrics(name: str, hidden: Tensor, can_die: bool) -> Metrics:
    """The largest hidden value and, where units can die (ReLU), the fraction that are 0 on every token."""
    largest = hidden.float().abs().amax((0, 1))
    metrics = {f"activation/max_abs/{name}": largest.max().item()}
    return metrics | ({f"activation/dead/{name}": (largest == 0).float().mean().item()} if can_die else {})
