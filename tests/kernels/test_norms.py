"""Norms alone and fused with additions: outputs and gradients against float64, and each fault that others had."""

from typing import Any

import pytest
import torch
from oracle import DEVICE, DTYPES, EPS, check, evaluate, noise
from torch import Tensor

from andrea_exp.ops import fast, tiles, triton_norm

OPS = ("layer_norm", "rms_norm", "add_norm", "norm_add")
FUSED = [(op, kind) for op in ("add_norm", "norm_add") for kind in ("layernorm", "rmsnorm")]
CASES = [("layer_norm", "layernorm"), ("rms_norm", "rmsnorm"), *FUSED]
NARROW = [1, 3, 64, 769]
ROWS = [1, 2, 3, 131, 133]


def tensors(op: str, kind: str, x: Tensor, affine: bool = True, bias: bool = True) -> list[Tensor | None]:
    """An op's tensors in order: x, or stream and delta; gain; bias where the op takes one."""
    N, parameters = x.shape[-1], torch.float32 if x.dtype is torch.float32 else x.dtype
    gain = 1 + 0.5 * noise(N, dtype=parameters, seed=7) if affine else None
    shift = noise(N, dtype=parameters, seed=8) if affine and bias and kind == "layernorm" else None
    first = [x] if op in ("layer_norm", "rms_norm") else [noise(*x.shape, dtype=x.dtype, seed=5), x]
    return [*first, gain] if op == "rms_norm" else [*first, gain, shift]


def options(op: str, kind: str, **scales: float) -> dict[str, Any]:
    named = {"eps": EPS} | ({"kind": kind} if op in ("add_norm", "norm_add") else {})
    return named | (scales if op == "add_norm" else {})


def upstream(op: str, x: Tensor, dtype: torch.dtype | None = None) -> list[Tensor]:
    count = 2 if op == "add_norm" else 1
    return [noise(*x.shape, dtype=dtype or x.dtype, seed=20 + i) for i in range(count)]


def verify(op: str, kind: str, x: Tensor, affine: bool = True, bias: bool = True, **scales: float) -> None:
    check(op, tensors(op, kind, x, affine, bias), upstream(op, x), **options(op, kind, **scales))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("op", "kind"), CASES)
def test_against_float64(op: str, kind: str, dtype: torch.dtype) -> None:
    for N in NARROW:
        for M in (1, 5):
            verify(op, kind, 1 + 2 * noise(M, N, dtype=dtype))


@pytest.mark.parametrize("N", [5125, 8193, 16385])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("op", "kind"), CASES)
def test_wide_rows(op: str, kind: str, dtype: torch.dtype, N: int) -> None:
    """Whole rows that fill no power of two, and rows in chunks: backward above 8192 columns, forward above 16384."""
    verify(op, kind, 1 + noise(7, N, dtype=dtype))


@pytest.mark.parametrize("M", ROWS)
@pytest.mark.parametrize("N", [10, 600])
@pytest.mark.parametrize(("op", "kind"), CASES)
def test_any_number_of_rows(op: str, kind: str, M: int, N: int) -> None:
    """More and fewer than the programs that share them, divisible or not."""
    verify(op, kind, noise(M, N))


@pytest.mark.parametrize(("op", "kind"), CASES)
def test_rows_lost_or_counted_twice(op: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The gain's gradient with one program, with as many as tiles, and with a number that divides nothing."""
    x = noise(29, 600)
    found = []
    for programs in (1, 3, 29):
        monkeypatch.setattr(triton_norm, "persistent_programs", lambda *_, p=programs: p)
        verify(op, kind, x)
        found.append(evaluate_again(op, kind, x)[-1])
    torch.testing.assert_close(found[0], found[1])
    torch.testing.assert_close(found[0], found[2])


def evaluate_again(op: str, kind: str, x: Tensor) -> list[Tensor]:
    return evaluate(lambda *t: fast.OPS[op](*t, **options(op, kind)), tensors(op, kind, x), upstream(op, x))


@pytest.mark.parametrize(("op", "kind"), CASES)
@pytest.mark.parametrize("N", [40, 9000])
def test_programs_without_rows_add_nothing(op: str, kind: str, N: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Buffers begin as NaN, as freed memory may; more programs than tiles leave no row of it unwritten."""
    usual = torch.empty

    def poisoned(*args: Any, **named: Any) -> Tensor:
        made = usual(*args, **named)
        return made.fill_(torch.nan) if made.dtype.is_floating_point and made.device.type != "meta" else made

    monkeypatch.setattr(torch, "empty", poisoned)
    monkeypatch.setattr(triton_norm, "persistent_programs", lambda *_: 6)
    verify(op, kind, noise(4, N))


@pytest.mark.parametrize(("op", "kind"), CASES)
def test_no_rows(op: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is launched; gradients of parameters are 0."""
    monkeypatch.setattr(triton_norm, "launch_options", None)
    for shape in ((0, 12), (2, 0, 12)):
        x = noise(*shape)
        found = evaluate_again(op, kind, x)
        assert found[0].shape == shape
        outputs = 2 if op == "add_norm" else 1
        assert all(not t.any() for t in found[outputs:])


@pytest.mark.parametrize(("op", "kind"), CASES)
@pytest.mark.parametrize("shape", [(50,), (2, 3, 50), (2, 2, 3, 50)])
def test_any_rank(op: str, kind: str, shape: tuple[int, ...]) -> None:
    verify(op, kind, noise(*shape))


@pytest.mark.parametrize(("op", "kind"), CASES)
def test_any_layout(op: str, kind: str) -> None:
    """Inputs, gains, upstream gradients: sliced, transposed, expanded; the values count, not where they lie."""
    wide = noise(6, 5, 60, seed=3)
    for x in (wide[..., 7:47], wide[::2], wide.transpose(0, 1), wide.transpose(1, 2)[..., :4], wide[1:, 1:3]):
        given, grads = tensors(op, kind, x), upstream(op, x)
        check(op, given, grads, **options(op, kind))
        strided = [None if t is None else _strided(t) for t in given]
        check(op, strided, [g.transpose(0, 1).contiguous().transpose(0, 1) for g in grads], **options(op, kind))
        check(op, given, [g[:1].expand(g.shape) for g in grads], **options(op, kind))
        check(op, given, [torch.ones((), device=DEVICE).expand(g.shape) for g in grads], **options(op, kind))


def _strided(x: Tensor) -> Tensor:
    """The same values with every second place of memory empty."""
    spread = torch.full((*x.shape, 2), torch.nan, dtype=x.dtype, device=x.device)
    spread[..., 0] = x
    return spread[..., 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("N", [769, 9000, 16385])
@pytest.mark.parametrize(("op", "kind"), CASES)
def test_large_mean_and_small_spread(op: str, kind: str, N: int, dtype: torch.dtype) -> None:
    """E[x^2] - E[x]^2 would lose the variance; so would padding columns that count as zeros."""
    verify(op, kind, (1e4 + noise(3, N, dtype=torch.float64)).to(dtype))


@pytest.mark.parametrize(("op", "kind"), CASES)
def test_long_sums_in_bfloat16(op: str, kind: str) -> None:
    """A running sum of 8192 ones in bfloat16 stops at 256."""
    verify(op, kind, 1 + noise(3, 8192, dtype=torch.bfloat16))
    verify(op, kind, 1 + noise(700, 3, dtype=torch.bfloat16))


@pytest.mark.parametrize("N", [20, 9000])
@pytest.mark.parametrize(("op", "kind"), CASES)
def test_without_parameters(op: str, kind: str, N: int) -> None:
    verify(op, kind, noise(5, N), affine=False)
    verify(op, kind, noise(5, N), bias=False)


@pytest.mark.parametrize("N", [20, 9000])
def test_a_bias_without_a_gain(N: int) -> None:
    x = noise(5, N)
    check("layer_norm", [x, None, noise(N, seed=8)], upstream("layer_norm", x), eps=EPS)


@pytest.mark.parametrize("N", [20, 9000])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["layernorm", "rmsnorm"])
def test_scales(kind: str, dtype: torch.dtype, N: int) -> None:
    """DeepNorm's alpha on the stream, layer-scaled norm's factor on what is read."""
    for scales in ({"stream_scale": 1.7}, {"out_scale": 0.5}, {"stream_scale": -0.3, "out_scale": 3.0}):
        verify("add_norm", kind, noise(5, N, dtype=dtype), **scales)


@pytest.mark.parametrize("N", [20, 9000])
@pytest.mark.parametrize("kind", ["layernorm", "rmsnorm"])
def test_one_output_used_alone(kind: str, N: int) -> None:
    """post-norm goes on from the normed copy alone; the sum alone has nothing to do with the norm."""
    x = noise(5, N)
    given, grads = tensors("add_norm", kind, x), upstream("add_norm", x)
    check("add_norm", given, [None, grads[1]], **options("add_norm", kind, stream_scale=1.7))
    found = evaluate(
        lambda *t: fast.OPS["add_norm"](*t, **options("add_norm", kind, stream_scale=1.7)), given, [grads[0], None]
    )
    torch.testing.assert_close(found[2:4], [1.7 * grads[0], grads[0]])
    assert not found[4].any()


@pytest.mark.parametrize(("op", "kind"), FUSED)
@pytest.mark.parametrize("first", [torch.float32, torch.bfloat16])
def test_mixed_dtypes(op: str, kind: str, first: torch.dtype) -> None:
    """As autocast mixes them: one of stream and delta is bfloat16, the parameters float32; the sum is float32."""
    second = torch.bfloat16 if first is torch.float32 else torch.float32
    for N in (40, 9000):
        stream, delta = noise(3, N, dtype=first), noise(3, N, dtype=second, seed=1)
        gain, bias = noise(N, seed=2), noise(N, seed=3) if kind == "layernorm" else None
        grads = upstream(op, stream, torch.float32)
        found = check(op, [stream, delta, gain, bias], grads, **options(op, kind))
        assert found[0].dtype is torch.float32


@pytest.mark.parametrize(("op", "kind"), CASES)
def test_upstream_gradient_survives_and_backward_runs_twice(op: str, kind: str) -> None:
    leaves = [None if t is None else t.requires_grad_() for t in tensors(op, kind, noise(5, 30))]
    outputs = fast.OPS[op](*leaves, **options(op, kind))
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    grads, inputs = upstream(op, leaves[0]), [t for t in leaves if t is not None]
    before = [g.clone() for g in grads]
    first = [g.clone() for g in torch.autograd.grad(outputs, inputs, grads, retain_graph=True)]
    again = torch.autograd.grad(outputs, inputs, grads)
    assert all(torch.equal(a, b) for a, b in zip([*first, *grads], [*again, *before], strict=True))


def test_the_stored_sum_is_what_is_normalised() -> None:
    """In bfloat16 the sum is rounded first: normalising the unrounded one would differ from the stored one's norm."""
    stream, delta = noise(4, 256, dtype=torch.bfloat16), 100 * noise(4, 256, dtype=torch.bfloat16, seed=1)
    total, y = fast.OPS["add_norm"](stream, delta, None, None, EPS, "rmsnorm")
    assert torch.equal(y, fast.OPS["rms_norm"](total, None, EPS))


def test_what_does_not_fit_is_refused() -> None:
    x = noise(3, 8)
    with pytest.raises(ValueError, match="one shape"):
        fast.OPS["add_norm"](x, x[:1], None, None, EPS, "rmsnorm")
    with pytest.raises(ValueError, match=r"gain of \(8,\)"):
        fast.OPS["rms_norm"](x, noise(4), EPS)
    with pytest.raises(TypeError, match="float64"):
        fast.OPS["rms_norm"](x.double(), None, EPS)


def test_tiles_hold_whole_rows() -> None:
    for N in range(1, triton_norm.WIDEST_FORWARD + 1, 61):
        tile = tiles.norm_tile(N, 1024, values_per_thread=8)
        assert tile.columns >= N > tile.columns // 2
        assert tile.rows * tile.columns <= max(1024, tile.columns)
