"""The yardstick: a fast op against its definition in float64, no worse than twice the definition's own error."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from andrea_exp.ops import fast, reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
EPS = 1e-5
Result = list[Tensor | None]


def noise(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(DEVICE, dtype)


def evaluate(op: Callable[..., Any], inputs: Sequence[Tensor | None], grads: Sequence[Tensor | None]) -> Result:
    """Outputs, then the gradient of every input, for the outputs' given gradients (None: not used further on)."""
    leaves = [None if t is None else t.detach().requires_grad_() for t in inputs]
    outputs = op(*leaves)
    outputs = list(outputs) if isinstance(outputs, tuple) else [outputs]
    used = [(o, g) for o, g in zip(outputs, grads, strict=True) if g is not None]
    wanted = [t for t in leaves if t is not None]
    found = torch.autograd.grad([o for o, _ in used], wanted, [g for _, g in used])
    return [*(o.detach() for o in outputs), *found]


def check(name: str, inputs: Sequence[Tensor | None], grads: Sequence[Tensor | None], **options: Any) -> Result:
    """Asserts that the fast op is right on outputs and gradients, dtypes and shapes included; returns them."""

    def definition(*args: Tensor | None) -> Any:
        return getattr(reference, name)(*args, **options)

    def wide(tensors: Sequence[Tensor | None]) -> list[Tensor | None]:
        return [None if t is None else t.double() for t in tensors]

    found = evaluate(lambda *args: fast.OPS[name](*args, **options), inputs, grads)
    exact = evaluate(definition, wide(inputs), wide(grads))
    given = [t for t in inputs if t is not None]
    eager = _eager(definition, inputs, grads, found)
    largest = max((t.abs().max().item() for t in (*given, *grads) if t is not None and t.numel()), default=0.0)
    for ours, theirs, truth in zip(found, eager, exact, strict=True):
        assert_no_worse(ours, theirs, truth, largest)
    for ours, leaf in zip(found[len(grads) :], given, strict=True):
        assert (ours.dtype, ours.shape) == (leaf.dtype, leaf.shape)
    return found


def _eager(definition: Callable[..., Any], inputs: Any, grads: Any, found: Result) -> Result:
    """The definition at the inputs' dtypes; mixed ones at the widest, as promotion has it, then rounded as ours."""
    dtypes = {t.dtype for t in (*inputs, *grads) if t is not None}
    if len(dtypes) == 1:
        return evaluate(definition, inputs, grads)
    lifted = [[None if t is None else t.float() for t in tensors] for tensors in (inputs, grads)]
    return [e.to(f.dtype) for e, f in zip(evaluate(definition, *lifted), found, strict=True)]


def assert_no_worse(ours: Tensor, eager: Tensor, exact: Tensor, largest: float) -> None:
    """At most twice eager's largest error, 2 units in the last place, and 4 float32 roundings of the largest value.

    The last is what a sum in float32 may lose where large terms cancel; `largest` is the largest input's size.
    """
    assert ours.shape == exact.shape
    if not exact.numel():
        return
    found, size = (ours.double() - exact).abs(), exact.abs()
    inside = 4 * torch.finfo(torch.float32).eps * max(largest, size.max().item())
    allowed = 2 * (eager.double() - exact).abs().max().item() + inside
    worst = (found - 2 * torch.finfo(ours.dtype).eps * size).max().item()
    assert worst <= allowed, f"error {worst:.3g} beyond 2 ulp where {allowed:.3g} is allowed"
