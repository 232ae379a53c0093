"""gelu.cu as it is launched on a GPU. Its arithmetic and its code are tested without one, in tests/test_gelu_cu.py."""

from importlib.util import find_spec

import pytest
import torch
from oracle import DEVICE, DTYPES, check, evaluate, noise
from torch import Tensor
from torch.utils.checkpoint import checkpoint

pytestmark = pytest.mark.skipif(DEVICE == "cpu" or find_spec("cuda.core") is None, reason="needs a GPU and cuda.core")
KINDS = ["gelu", "gelu_tanh"]


def ours(kind: str, x: Tensor) -> Tensor:
    from andrea_exp.ops.cuda_gelu import OPS

    return OPS[kind](x)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_against_float64(kind: str, dtype: torch.dtype) -> None:
    """Any length, and memory that is not aligned to 16 bytes, sliced, transposed, expanded."""
    flat = 3 * noise(70_001, dtype=dtype)
    wide = 3 * noise(6, 5, 40, dtype=dtype)
    for x in (flat[:1], flat[:7], flat, flat[1:], flat[3:5000], wide[..., 3:23], wide.transpose(0, 1), wide[:1, :1]):
        check(kind, [x], [noise(*x.shape, dtype=dtype, seed=1)], fast_op=lambda t: ours(kind, t))
    dy = noise(6, 5, 40, dtype=dtype, seed=1)[:1].expand(6, 5, 40)
    check(kind, [wide], [dy], fast_op=lambda t: ours(kind, t))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_extreme_inputs(kind: str, dtype: torch.dtype) -> None:
    far = 1e4 if dtype is torch.float16 else 1e18
    x = torch.tensor([far, 1e4, 30, -30, -1e4, -far, torch.nan], dtype=dtype, device=DEVICE)
    y, dx = evaluate(lambda t: ours(kind, t), [x], [torch.ones_like(x)])
    torch.testing.assert_close(y, x.relu(), equal_nan=True)
    torch.testing.assert_close(dx[:-1], (x > 0).to(dtype)[:-1])
    assert dx[-1].isnan()


@pytest.mark.parametrize("kind", KINDS)
def test_no_elements(kind: str) -> None:
    assert ours(kind, noise(0, 8)).shape == (0, 8)


def test_in_torchs_machinery() -> None:
    """Compiled without a graph break, recomputed, on another stream: the same bits."""
    x = noise(64, 257).requires_grad_()

    def twice(t: Tensor) -> Tensor:
        return ours("gelu_tanh", ours("gelu", t))

    plain = twice(x)
    slope = torch.autograd.grad(plain.sum(), x)[0]
    torch._dynamo.reset()
    for other in (torch.compile(twice, fullgraph=True), lambda t: checkpoint(twice, t, use_reentrant=False)):
        y = other(x)
        assert torch.equal(y, plain)
        assert torch.equal(torch.autograd.grad(y.sum(), x)[0], slope)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        y = twice(x)
    stream.synchronize()
    assert torch.equal(y, plain)


def test_the_approximate_form_is_near() -> None:
    """tanh.approx.f32 is off by 2^-11 at most, so GELU by half of that of x, and more than the exact form."""
    import andrea_exp.ops.cuda_gelu  # noqa: F401

    x = torch.linspace(-6, 6, 100_001, device=DEVICE)
    exact = torch.nn.functional.gelu(x.double(), approximate="tanh")
    off = [(torch.ops.andrea_exp.cuda_gelu(x, kind) - exact).abs().max() for kind in ("gelu_tanh", "gelu_tanh_approx")]
    assert off[0] < 2e-6 < off[1] < 6 * 2**-11
