"""What the kernels compile to for GPUs that are not here: no spills, no double precision, 128-bit loads."""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed")

from ahead_of_time import TARGETS, Built, built_by

from andrea_exp.ops import fast, triton_activation, triton_norm

M = 4096
# Rows that share a tile, of no power of two, whole at the widest, in chunks backward, in chunks both ways.
WIDTHS = [64, 768, 4096, triton_norm.WIDEST_BACKWARD, triton_norm.WIDEST_FORWARD, 32768]
VARIANTS = ["layernorm", "rmsnorm", "add layernorm", "add rmsnorm", "scaled layernorm", "layernorm add"]


def empty(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def assert_lean(built: list[Built]) -> None:
    for kernel in built:
        what = f"{kernel.name}: {kernel.registers} registers, {kernel.shared} bytes of shared memory"
        assert kernel.spilled == 0, f"{what}: spills {kernel.spilled}"
        assert not kernel.doubles, f"{what}: {kernel.doubles[:3]}"
        assert kernel.widest_load == 128, f"{what}: loads {kernel.widest_load} bits at once"


def elementwise(dtype: torch.dtype) -> Iterator[Callable[[], object]]:
    x, half, sliced = empty(M, 2752, dtype=dtype), empty(M, 1376, dtype=dtype), empty(M, 8192, dtype=dtype)[:, :2752]
    for kind in fast.ACTIVATIONS:
        yield lambda kind=kind: triton_activation.activation(x, kind)
        yield lambda kind=kind: triton_activation.activation_backward(x, x, kind)
    yield lambda: triton_activation.activation_backward(sliced, x, "gelu")
    for kind in fast.GATES.values():
        yield lambda kind=kind: triton_activation.gate(x, kind)
        yield lambda kind=kind: triton_activation.gate_backward(half, x, kind)


def norms(dtype: torch.dtype, N: int, variant: str) -> Iterator[Callable[[], object]]:
    """Forward and backward of a variant, with float32 parameters as autocast has them."""
    x, gain = empty(M, N, dtype=dtype), empty(N, dtype=torch.float32)
    kind, adds = "layernorm" if "layernorm" in variant else "rmsnorm", variant.startswith(("add", "scaled"))
    scale, bias = 1.5 if "scaled" in variant else 1.0, gain if kind == "layernorm" else None
    delta, residual = x if adds else None, x if variant.endswith("add") else None
    yield lambda: triton_norm.norm_forward(
        x, gain, bias, 1e-5, kind, delta=delta, residual=residual, stream_scale=scale, out_scale=0.5
    )
    statistics = empty(2 if bias is not None else 1, M, dtype=torch.float32)
    yield lambda: triton_norm.norm_backward(
        *(x, delta, x, gain, statistics, bias is not None),
        dx_dtype=dtype,
        dstream_dtype=dtype if scale != 1 else None,
        stream_scale=scale,
        out_scale=0.5,
    )


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_activations_and_gates(dtype: torch.dtype, target: str) -> None:
    for call in elementwise(dtype):
        assert_lean(built_by(call, TARGETS[target]))


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("N", WIDTHS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms(dtype: torch.dtype, N: int, target: str) -> None:
    for variant in VARIANTS:
        for call in norms(dtype, N, variant):
            assert_lean(built_by(call, TARGETS[target]))


def test_one_of_each_kernel() -> None:
    """The quick form of the above: bfloat16 on sm_90."""
    calls = [next(elementwise(torch.bfloat16)), *norms(torch.bfloat16, 4096, "add layernorm")]
    calls += norms(torch.bfloat16, 32768, "add rmsnorm")
    for call in calls:
        assert_lean(built_by(call, TARGETS["sm_90"]))


def test_the_backward_pass_loads_ahead() -> None:
    """On Hopper the next tile is copied asynchronously while one is computed."""
    _, backward = norms(torch.bfloat16, 4096, "add rmsnorm")
    (kernel,) = built_by(backward, TARGETS["sm_90"])
    assert "cp.async" in kernel.text


def test_shared_memory_fits_the_smallest_of_the_gpus() -> None:
    """sm_80 has 163 KiB a block, gfx942 64 KiB."""
    for target, limit in (("sm_80", 163 << 10), ("gfx942", 64 << 10)):
        _, backward = norms(torch.float32, triton_norm.WIDEST_BACKWARD, "scaled layernorm")
        assert built_by(backward, TARGETS[target])[0].shared <= limit
