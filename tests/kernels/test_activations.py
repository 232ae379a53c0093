"""Activations and gates: outputs and gradients against float64, and each fault that other kernels had."""

import math

import pytest
import torch
from oracle import DEVICE, DTYPES, check, evaluate, noise
from torch import Tensor

from andrea_exp.ops import fast, reference, triton_activation

NAMES = (*fast.ACTIVATIONS, *fast.GATES)
SHAPES = [(1,), (7,), (2, 3, 42), (2, 2, 3, 10), (3, 2050), (133, 6), (1, 4098)]


def out_like(name: str, x: Tensor, seed: int = 9) -> Tensor:
    width = x.shape[-1] // (2 if name in fast.GATES else 1)
    return noise(*x.shape[:-1], width, dtype=x.dtype, seed=seed)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NAMES)
def test_against_float64(name: str, dtype: torch.dtype) -> None:
    for shape in SHAPES:
        if name not in fast.GATES or shape[-1] % 2 == 0:
            x = 3 * noise(*shape, dtype=dtype)
            check(name, [x], [out_like(name, x)])


@pytest.mark.parametrize("name", NAMES)
def test_rows_and_values_in_any_layout(name: str) -> None:
    """Sliced, transposed, expanded and offset inputs and upstream gradients."""
    wide = 2 * noise(6, 5, 40, seed=1)
    for x in (wide[..., 3:23], wide[::2], wide[:, 1:3], wide.transpose(0, 1), wide.transpose(1, 2)[..., :4], wide[1:]):
        dy = out_like(name, x)
        check(name, [x], [dy])
        check(name, [x], [dy.transpose(0, 1).contiguous().transpose(0, 1)])
        check(name, [x], [dy[:1].expand(dy.shape)])
        check(name, [x], [torch.ones((), device=DEVICE).expand(dy.shape)])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", [(0, 8), (3, 0), (2, 0, 6)])
def test_no_elements(name: str, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is launched."""
    monkeypatch.setattr(triton_activation, "_launch", None)
    x = noise(*shape)
    check(name, [x], [out_like(name, x)])


@pytest.mark.parametrize("name", NAMES)
def test_upstream_gradient_survives_and_backward_runs_twice(name: str) -> None:
    x = noise(4, 20).requires_grad_()
    dy = out_like(name, x)
    before, y = dy.clone(), fast.OPS[name](x)
    first = torch.autograd.grad(y, x, dy, retain_graph=True)[0].clone()
    assert torch.equal(torch.autograd.grad(y, x, dy)[0], first)
    assert torch.equal(dy, before)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", fast.ACTIVATIONS)
def test_extreme_inputs(name: str, dtype: torch.dtype) -> None:
    """Far out every activation is 0 or x itself (x^2), with slope 0 or 1 (2x): no overflow on the way; NaN stays."""
    far = 1e4 if dtype is torch.float16 else 1e18
    x = torch.tensor([far, 1e4, 30, 11, -11, -30, -1e4, -far], dtype=dtype, device=DEVICE)
    if name == "relu2":
        x = x.clamp(-100, 100)
    y, dx = evaluate(fast.OPS[name], [x], [torch.ones_like(x)])
    square = name == "relu2"
    torch.testing.assert_close(y, torch.where(x > 0, x * x if square else x, 0), rtol=1e-3, atol=2e-4)
    torch.testing.assert_close(dx, torch.where(x > 0, 2 * x if square else torch.ones_like(x), 0), rtol=1e-3, atol=2e-4)
    lost = torch.tensor([math.nan], dtype=dtype, device=DEVICE)
    assert all(
        t.isnan().all() for t in evaluate(fast.OPS[name], [lost], [torch.ones_like(lost)])[: 1 + (name != "relu")]
    )


def test_infinite_inputs_follow_the_definition_or_the_limit() -> None:
    x = torch.tensor([math.inf, -math.inf], device=DEVICE)
    for name in fast.ACTIVATIONS:
        y, limit = fast.OPS[name](x), torch.tensor([math.inf, 0.0], device=DEVICE)
        assert torch.where(y.isnan(), getattr(reference, name)(x).isnan(), y == limit).all(), name


def test_the_tanh_form_keeps_its_negative_tail() -> None:
    """Where 1 + tanh(u) cancels: GELU(-5) is -2.29e-7 to more than three digits."""
    x = torch.tensor([-5.0, -4.0, -6.0], device=DEVICE)
    exact = reference.gelu_tanh(x.double())
    torch.testing.assert_close(fast.OPS["gelu_tanh"](x).double(), exact, rtol=1e-4, atol=0)


@pytest.mark.parametrize("name", fast.GATES)
def test_gate_comes_first_and_up_second(name: str) -> None:
    """With gate and up far apart in size, a swap would show in value and in both gradients."""
    gate_up = torch.cat((0.3 * noise(3, 17), 5 + noise(3, 17, seed=1)), dim=-1)
    check(name, [gate_up], [noise(3, 17, seed=2)])


def test_odd_gates_and_float64_are_refused() -> None:
    with pytest.raises(ValueError, match="two halves"):
        fast.OPS["swiglu"](noise(3, 7))
    for name in ("gelu", "swiglu"):
        with pytest.raises(TypeError, match="float64"):
            fast.OPS[name](noise(2, 4).double())
