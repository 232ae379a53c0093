"""The yardstick: a fast op against its definition in float64, no worse than twice the definition's own error."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from andrea_exp.ops import fast, reference
from andrea_exp.ops.yardstick import error_of, evaluate, largest_value

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
EPS = 1e-5


def noise(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(DEVICE, dtype)


def check(
    name: str,
    inputs: Sequence[Tensor | None],
    grads: Sequence[Tensor | None],
    fast_op: Callable[..., Any] | None = None,
    **options: Any,
) -> list[Tensor]:
    """Asserts that the fast op is right on outputs and gradients, dtypes and shapes included; returns them.

    `fast_op` stands in for the Triton op of that name.
    """

    def definition(*args: Tensor | None) -> Any:
        return getattr(reference, name)(*args, **options)

    def wide(tensors: Sequence[Tensor | None]) -> list[Tensor | None]:
        return [None if t is None else t.double() for t in tensors]

    found = evaluate(partial(fast_op or fast.OPS[name], **options), inputs, grads)
    exact = evaluate(definition, wide(inputs), wide(grads))
    given = [t for t in inputs if t is not None]
    eager = _eager(definition, inputs, grads, found)
    largest = largest_value(*given, *grads)
    for ours, theirs, truth in zip(found, eager, exact, strict=True):
        assert_no_worse(ours, theirs, truth, largest)
    for ours, leaf in zip(found[len(grads) :], given, strict=True):
        assert (ours.dtype, ours.shape) == (leaf.dtype, leaf.shape)
    return found


def _eager(definition: Callable[..., Any], inputs: Any, grads: Any, found: list[Tensor]) -> list[Tensor]:
    """The definition at the inputs' dtypes; mixed ones at the widest, as promotion has it, then rounded as ours."""
    dtypes = {t.dtype for t in (*inputs, *grads) if t is not None}
    if len(dtypes) == 1:
        return evaluate(definition, inputs, grads)
    lifted = [[None if t is None else t.float() for t in tensors] for tensors in (inputs, grads)]
    return [e.to(f.dtype) for e, f in zip(evaluate(definition, *lifted), found, strict=True)]


def assert_no_worse(ours: Tensor, eager: Tensor, exact: Tensor, largest: float) -> None:
    assert ours.shape == exact.shape
    error = error_of(ours, eager, exact, largest)
    assert error.right, f"error {error.beyond:.3g} beyond 2 ulp where {error.allowed:.3g} is allowed"
