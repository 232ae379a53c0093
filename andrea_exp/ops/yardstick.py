"""How right a fast op is: outputs and gradients against its definition in float64. Tests and benchmarks share it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Tensors = Sequence[Tensor | None]


@dataclass(frozen=True)
class Error:
    """Of one tensor against float64: the largest, the largest beyond 2 units in the last place, and how much may be."""

    largest: float
    beyond: float
    allowed: float

    @property
    def right(self) -> bool:
        return self.beyond <= self.allowed  # not of NaN


def evaluate(op: Callable[..., Any], inputs: Tensors, grads: Tensors) -> list[Tensor]:
    """Outputs, then the gradient of every input, for the outputs' given gradients (None: not used further on)."""
    leaves = [None if t is None else t.detach().requires_grad_() for t in inputs]
    outputs = op(*leaves)
    outputs = list(outputs) if isinstance(outputs, tuple) else [outputs]
    used = [(o, g) for o, g in zip(outputs, grads, strict=True) if g is not None]
    wanted = [t for t in leaves if t is not None]
    found = torch.autograd.grad([o for o, _ in used], wanted, [g for _, g in used])
    return [*(o.detach() for o in outputs), *found]


def largest_value(*tensors: Tensor | None) -> float:
    """The size of the largest element of any of them."""
    return max((t.abs().max().item() for t in tensors if t is not None and t.numel()), default=0.0)


def error_of(ours: Tensor, eager: Tensor, exact: Tensor, largest: float) -> Error:
    """Against the float64 `exact`, where `eager` is the definition at our dtype and `largest` the largest input's size.

    Allowed are twice eager's largest error, 2 units in the last place, and 4 float32 roundings of the largest value:
    what a sum in float32 may lose where large terms cancel.
    """
    if not exact.numel():
        return Error(0.0, 0.0, 0.0)
    found, size = (ours.double() - exact).abs_(), exact.abs()
    inside = 4 * torch.finfo(torch.float32).eps * max(largest, size.max().item())
    allowed = 2 * (eager.double() - exact).abs_().max().item() + inside
    beyond = (found - size.mul_(2 * torch.finfo(ours.dtype).eps)).max().item()
    return Error(found.max().item(), beyond, allowed)
