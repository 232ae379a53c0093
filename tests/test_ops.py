"""Every op's definition against its formula, written out number by number in float64."""

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from andrea_exp import ops

torch.set_num_threads(1)
EPS = 1e-5
DTYPES = [torch.float64, torch.float32, torch.bfloat16]


def layer_norm(row: list[float], gain: list[float], bias: list[float] | None) -> list[float]:
    mean = math.fsum(row) / len(row)
    variance = math.fsum((x - mean) ** 2 for x in row) / len(row)
    shift = bias or [0.0] * len(row)
    return [(x - mean) / math.sqrt(variance + EPS) * g + b for x, g, b in zip(row, gain, shift, strict=True)]


def rms_norm(row: list[float], gain: list[float]) -> list[float]:
    square = math.fsum(x * x for x in row) / len(row)
    return [x / math.sqrt(square + EPS) * g for x, g in zip(row, gain, strict=True)]


def relu(x: float) -> float:
    return x if x > 0 else 0.0


def gelu(x: float) -> float:
    return x * (1 + math.erf(x / math.sqrt(2))) / 2


def gelu_tanh(x: float) -> float:
    return x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2


def silu(x: float) -> float:
    return x / (1 + math.exp(-x))


def swiglu(row: list[float]) -> list[float]:
    half = len(row) // 2
    return [silu(gate) * up for gate, up in zip(row[:half], row[half:], strict=True)]


def by_row(formula: Callable[[list[float]], list[float]], x: Tensor) -> Tensor:
    """A formula on lists of numbers, for every row of x; float64."""
    rows = [formula(row.tolist()) for row in x.double().flatten(0, -2)]
    return torch.tensor(rows, dtype=torch.float64).view(*x.shape[:-1], -1)


def noise(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def assert_near(found: Tensor, exact: Tensor, dtype: torch.dtype) -> None:
    """Within 8 roundings of the dtype, which the op also keeps: computed wider inside, and rounded few times."""
    assert found.dtype == dtype
    allowed = 8 * torch.finfo(dtype).eps * exact.abs().clamp(min=1)
    assert ((found.double() - exact).abs() <= allowed).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_bias", [True, False])
def test_layer_norm(dtype: torch.dtype, has_bias: bool) -> None:
    x, gain = 3 * noise(2, 3, 20, dtype=dtype) + 1, noise(20, dtype=dtype, seed=1)
    bias = noise(20, dtype=dtype, seed=2) if has_bias else None
    lists = gain.tolist(), None if bias is None else bias.tolist()
    assert_near(ops.layer_norm(x, gain, bias, EPS), by_row(lambda row: layer_norm(row, *lists), x), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm(dtype: torch.dtype) -> None:
    x, gain = 3 * noise(2, 3, 20, dtype=dtype) + 1, noise(20, dtype=dtype, seed=1)
    assert_near(ops.rms_norm(x, gain, EPS), by_row(lambda row: rms_norm(row, gain.tolist()), x), dtype)


def test_eps_stands_under_the_root() -> None:
    """A row of zeros stays zero, and one as small as sqrt(eps) shrinks by sqrt(2)."""
    gain = torch.ones(4, dtype=torch.float64)
    small = torch.tensor([1.0, -1.0, 1.0, -1.0], dtype=torch.float64) * math.sqrt(EPS)
    for norm in (lambda x: ops.rms_norm(x, gain, EPS), lambda x: ops.layer_norm(x, gain, None, EPS)):
        assert norm(torch.zeros_like(small)).eq(0).all()
        torch.testing.assert_close(norm(small).abs(), torch.full_like(small, 1 / math.sqrt(2)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("op", "formula"), [(ops.relu, relu), (ops.gelu, gelu), (ops.gelu_tanh, gelu_tanh)])
def test_activation(op: Callable[[Tensor], Tensor], formula: Callable[[float], float], dtype: torch.dtype) -> None:
    x = torch.cat((torch.linspace(-12, 12, 999, dtype=torch.float64), noise(100))).to(dtype)
    exact = torch.tensor([formula(v) for v in x.tolist()], dtype=torch.float64)
    assert_near(op(x), exact, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_swiglu(dtype: torch.dtype) -> None:
    """The first half of the buffer is the gate, the second the value it lets through."""
    x = noise(2, 3, 20, dtype=dtype)
    assert_near(ops.swiglu(x), by_row(swiglu, x), dtype)


@pytest.mark.parametrize("kind", ["layernorm", "rmsnorm"])
@pytest.mark.parametrize("scale", [1, 2.5, -0.3])
@pytest.mark.parametrize("dtype", DTYPES)
def test_add_norm_is_add_then_norm(kind: str, scale: float, dtype: torch.dtype) -> None:
    stream, delta = noise(2, 3, 20, dtype=dtype), noise(2, 3, 20, dtype=dtype, seed=1)
    gain, bias = noise(20, dtype=dtype, seed=2), noise(20, dtype=dtype, seed=3) if kind == "layernorm" else None
    total, normed = ops.add_norm(stream, delta, gain, bias, EPS, kind, scale)
    assert_near(total, scale * stream.double() + delta.double(), dtype)
    if kind == "layernorm":
        exact = by_row(lambda row: layer_norm(row, gain.tolist(), bias.tolist()), total)
    else:
        exact = by_row(lambda row: rms_norm(row, gain.tolist()), total)
    assert_near(normed, exact, dtype)


def test_gelu_tanh_stays_within_its_stated_distance_of_gelu() -> None:
    x = torch.linspace(-10, 10, 2_000_001, dtype=torch.float64)
    distance = (ops.gelu_tanh(x) - ops.gelu(x)).abs().max().item()
    assert 4.73e-4 < distance < 4.74e-4


def test_least_value_of_gelu() -> None:
    x = torch.linspace(-2, 0, 2_000_001, dtype=torch.float64)
    least, where = ops.gelu(x).min(0)
    assert least.item() == pytest.approx(-0.169971, abs=5e-7)
    assert x[where].item() == pytest.approx(-0.7518, abs=5e-5)


@pytest.mark.parametrize("op", [ops.relu, ops.gelu, ops.gelu_tanh, ops.swiglu])
def test_activation_gradients_equal_finite_differences(op: Callable[[Tensor], Tensor]) -> None:
    assert torch.autograd.gradcheck(op, (noise(2, 6, seed=4).requires_grad_(),))


@pytest.mark.parametrize("kind", ["layernorm", "rmsnorm"])
def test_add_norm_gradients_equal_finite_differences(kind: str) -> None:
    shapes = [(2, 5), (2, 5), (5,), (5,)] if kind == "layernorm" else [(2, 5), (2, 5), (5,)]
    inputs = tuple(noise(*shape, seed=i).requires_grad_() for i, shape in enumerate(shapes))

    def outputs(stream: Tensor, delta: Tensor, gain: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return ops.add_norm(stream, delta, gain, bias, EPS, kind, 1.7)

    assert torch.autograd.gradcheck(outputs, inputs)


@given(st.lists(st.floats(-100, 100), min_size=2, max_size=12), st.floats(0.1, 10), st.floats(-10, 10))
@settings(max_examples=50, deadline=None)
def test_what_norms_ignore(row: list[float], factor: float, shift: float) -> None:
    """With a vanishing eps both norms ignore the row's scale, and LayerNorm its mean as well."""
    x, gain = torch.tensor(row, dtype=torch.float64), torch.ones(len(row), dtype=torch.float64)
    assume(x.std() > 1e-3)
    close = {"rtol": 1e-6, "atol": 1e-6}
    torch.testing.assert_close(ops.rms_norm(factor * x, gain, 1e-20), ops.rms_norm(x, gain, 1e-20), **close)
    moved = ops.layer_norm(factor * x + shift, gain, None, 1e-20)
    torch.testing.assert_close(moved, ops.layer_norm(x, gain, None, 1e-20), **close)
