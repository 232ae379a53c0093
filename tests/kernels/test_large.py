"""Offsets above 2^31 elements: in memory that is reserved but never touched, each test in a process of its own."""

import subprocess
import sys

import pytest
import torch
from oracle import DEVICE

PREPARE = """
import sys
sys.path.insert(0, {folder!r})
import conftest, torch
from oracle import DEVICE, EPS, noise
from andrea_exp.ops import fast, reference, triton_activation, triton_norm

def far_rows(like, stride):
    '''The rows of `like` with a stride that lies below 2^31 but takes the third row beyond.'''
    M, N = like.shape
    memory = torch.empty((M - 1) * stride + N, dtype=like.dtype, device=DEVICE)
    rows = memory.as_strided((M, N), (stride, 1))
    rows.copy_(like)
    assert rows.stride(0) < 2**31 < (M - 1) * stride
    return rows

near, dy = noise(3, 64, dtype=torch.float16), noise(3, 64, dtype=torch.float16, seed=1)
far, far_dy = far_rows(near, 2**30 + 64), far_rows(dy, 2**30 + 128)
def same(a, b):
    assert torch.equal(a, b), (a - b).abs().max()
"""
ROWS = {
    "activation": "same(fast.OPS['gelu'](far), fast.OPS['gelu'](near))",
    "activation_backward": """
same(fast.kernels.activation_backward(far_dy, far, 'gelu'), fast.kernels.activation_backward(dy, near, 'gelu'))""",
    "gate": "same(fast.OPS['swiglu'](far), fast.OPS['swiglu'](near))",
    "gate_backward": """
same(fast.kernels.gate_backward(far_dy[:, :32], far, 'silu'), fast.kernels.gate_backward(dy[:, :32], near, 'silu'))""",
    "norm": """
for narrow in (True, False):
    triton_norm.WIDEST_FORWARD = 16384 if narrow else 32
    triton_norm.CHUNK = triton_norm.CHUNK._replace(columns=32)
    ours = triton_norm.norm_forward(far, None, None, EPS, 'layernorm', delta=far_dy, residual=far)
    theirs = triton_norm.norm_forward(near, None, None, EPS, 'layernorm', delta=dy, residual=near)
    [same(a, b) for a, b in zip(ours, theirs)]""",
    "norm_backward": """
gain, statistics = noise(64), noise(2, 3).abs()
for narrow in (True, False):
    triton_norm.WIDEST_BACKWARD = 8192 if narrow else 32
    triton_norm.CHUNK = triton_norm.CHUNK._replace(columns=32)
    ours = triton_norm.norm_backward(far_dy, far, far, gain, statistics, True, dx_dtype=torch.float16)
    theirs = triton_norm.norm_backward(dy, near, near, gain, statistics, True, dx_dtype=torch.float16)
    same(ours[0], theirs[0]), same(ours[2], theirs[2])""",
    # One program, as if it were the one at 2^31 elements of a long contiguous tensor: its number is moved there.
    "program number": """
from triton.runtime.interpreter import interpreter_builder as builder
size = 2**31 + 8192
for kernel, count in ((triton_activation._activation, 1), (triton_activation._activation_backward, 2)):
    inputs = [torch.empty(1, size, dtype=torch.float16) for _ in range(count)]
    out = torch.empty(size, dtype=torch.float16)
    for i, tensor in enumerate(inputs):
        tensor[0, -8192:] = noise(8192, dtype=torch.float16, seed=i)
    usual, builder.set_grid_idx = builder.set_grid_idx, lambda *_: setattr(builder, 'grid_idx', (2**31 // 1024, 0, 0))
    kernel[(1,)](*inputs, out, 1, size, *[size] * count, 'relu', 1, 1024)
    builder.set_grid_idx = usual
    x = inputs[-1][0, -8192:-7168]
    expected = x.relu() if count == 1 else inputs[0][0, -8192:-7168] * (x > 0)
    same(out[-8192:-7168], expected)""",
}


@pytest.mark.parametrize("case", [c for c in ROWS if c != "program number" or DEVICE == "cpu"])
def test_offsets_beyond_int32(case: str) -> None:
    from pathlib import Path

    code = PREPARE.format(folder=str(Path(__file__).parent)) + ROWS[case]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_launches_go_to_the_tensors_device() -> None:
    from andrea_exp.ops import fast

    x = torch.randn(4, 64, device="cuda:1", requires_grad=True)
    with torch.cuda.device(0):
        y = fast.OPS["gelu"](x)
        y.sum().backward()
    assert y.device == x.grad.device == x.device
