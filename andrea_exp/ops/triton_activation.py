"""Activations and gates in Triton: one pass over memory each way; the backward pass recomputes from the input.

Arithmetic in float32, one rounding to the output's dtype. Formulas: `reference.py`. x is M rows x N columns, a
gate's buffer M x 2N with [gate, up] in each row; rows may lie any stride apart, columns are dense.

| kernel                | reads    | writes     | elements moved of M x N |
|-----------------------|----------|------------|-------------------------|
| _activation           | x        | y          | 2                       |
| _activation_backward  | dy, x    | dx         | 3                       |
| _gate                 | gate, up | y          | 3                       |
| _gate_backward        | all + dy | dgate, dup | 5                       |

tanh(u) is written 2 sigmoid(2u) - 1, so that GELU's tanh form is x sigmoid(2u): 1 + tanh(u) would cancel in the
negative tail. Comparisons are such that NaN passes through ReLU, as in torch.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from andrea_exp.ops.tiles import as_few_rows, as_rows, elementwise_tile, require_kernel_dtypes

SQRT_HALF = tl.constexpr(0.7071067811865476)
INV_SQRT_2PI = tl.constexpr(0.3989422804014327)
TWICE_SQRT_2_OVER_PI = tl.constexpr(2 * 0.7978845608028654)
CUBIC = tl.constexpr(0.044715)
CUBIC_SLOPE = tl.constexpr(3 * 0.044715)


@triton.jit
def _twice_u(x):
    """2u of GELU's tanh form. In the interpreter a constexpr on the left would swallow the tensor: it stands right."""
    return x * TWICE_SQRT_2_OVER_PI * (x * x * CUBIC + 1.0)


@triton.jit
def _phi(x, KIND: tl.constexpr):
    """phi(x) of a float32 tile."""
    if KIND == "identity":
        return x
    elif KIND == "relu":
        return tl.where(x <= 0, 0.0, x)
    elif KIND == "relu2":
        positive = tl.where(x <= 0, 0.0, x)
        return positive * positive
    elif KIND == "sigmoid":
        return tl.sigmoid(x)
    elif KIND == "silu":
        return x * tl.sigmoid(x)
    elif KIND == "gelu":
        return 0.5 * x * (1.0 + tl.erf(x * SQRT_HALF))
    else:
        tl.static_assert(KIND == "gelu_tanh")
        return x * tl.sigmoid(_twice_u(x))


@triton.jit
def _phi_slope(x, KIND: tl.constexpr):
    """phi'(x) of a float32 tile."""
    if KIND == "identity":
        return tl.full(x.shape, 1.0, tl.float32)
    elif KIND == "relu":
        return tl.where(x <= 0, 0.0, 1.0)
    elif KIND == "relu2":
        return tl.where(x <= 0, 0.0, 2.0 * x)
    elif KIND == "sigmoid":
        s = tl.sigmoid(x)
        return s * (1.0 - s)
    elif KIND == "silu":
        s = tl.sigmoid(x)
        return s * (1.0 + x * (1.0 - s))
    elif KIND == "gelu":
        return 0.5 * (1.0 + tl.erf(x * SQRT_HALF)) + x * INV_SQRT_2PI * tl.exp(x * x * -0.5)
    else:
        tl.static_assert(KIND == "gelu_tanh")
        near = tl.minimum(tl.maximum(x, -10.0), 10.0)  # farther out the slope is 0 or 1, and exp would overflow
        fall = tl.exp(-_twice_u(near))
        s = 1.0 / (1.0 + fall)
        # 1 - s is fall s: subtracting would cancel.
        return s + x * s * (fall * s) * TWICE_SQRT_2_OVER_PI * (near * near * CUBIC_SLOPE + 1.0)


@triton.jit
def _tile(M, N, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """This program's rows (ROWS, 1) and columns (1, COLUMNS), and which exist.

    Rows are int64, since they are multiplied by strides; columns are as wide as N was passed, int64 from 2^31 on.
    """
    program = tl.program_id(0)
    across = (N - 1) // COLUMNS + 1  # tl.cdiv adds first, and overflows just below 2^31
    row = (program // across).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = (program % across) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    return row, column, (row < M) & (column < N)


@triton.jit
def _activation(x, y, M, N, x_row, KIND: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    row, column, inside = _tile(M, N, ROWS, COLUMNS)
    value = tl.load(x + row * x_row + column, inside).to(tl.float32)
    tl.store(y + row * N + column, _phi(value, KIND), inside)


@triton.jit
def _activation_backward(dy, x, dx, M, N, dy_row, x_row, KIND: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    row, column, inside = _tile(M, N, ROWS, COLUMNS)
    grad = tl.load(dy + row * dy_row + column, inside).to(tl.float32)
    value = tl.load(x + row * x_row + column, inside).to(tl.float32)
    tl.store(dx + row * N + column, grad * _phi_slope(value, KIND), inside)


@triton.jit
def _gate(x, y, M, N: tl.constexpr, x_row, KIND: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    row, column, inside = _tile(M, N, ROWS, COLUMNS)
    at = x + row * x_row + column
    gate = tl.load(at, inside).to(tl.float32)
    up = tl.load(at + N, inside).to(tl.float32)
    tl.store(y + row * N + column, _phi(gate, KIND) * up, inside)


@triton.jit
def _gate_backward(
    dy, x, dx, M, N: tl.constexpr, dy_row, x_row, KIND: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    row, column, inside = _tile(M, N, ROWS, COLUMNS)
    at = x + row * x_row + column
    grad = tl.load(dy + row * dy_row + column, inside).to(tl.float32)
    gate = tl.load(at, inside).to(tl.float32)
    up = tl.load(at + N, inside).to(tl.float32)
    to = dx + row * (2 * N) + column
    tl.store(to, grad * up * _phi_slope(gate, KIND), inside)
    tl.store(to + N, grad * _phi(gate, KIND), inside)


def activation(x: Tensor, kind: str) -> Tensor:
    """phi(x) of any shape and strides, contiguous, in x's dtype."""
    require_kernel_dtypes(x)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    (rows,) = as_few_rows(x)
    if y.numel():
        _launch(_activation, (rows, y), rows.shape[1], kind)
    return y


def activation_backward(dy: Tensor, x: Tensor, kind: str) -> Tensor:
    """dx = dy phi'(x), contiguous, in x's dtype. dy and x of one shape."""
    require_kernel_dtypes(dy, x)
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    grads, rows = as_few_rows(dy, x)
    if dx.numel():
        _launch(_activation_backward, (grads, rows, dx), rows.shape[1], kind)
    return dx


def gate(gate_up: Tensor, kind: str) -> Tensor:
    """phi(gate) * up: (..., 2N) -> (..., N), contiguous, in the input's dtype."""
    require_kernel_dtypes(gate_up)
    N = half_width(gate_up)
    y = torch.empty((*gate_up.shape[:-1], N), dtype=gate_up.dtype, device=gate_up.device)
    rows = as_rows(gate_up)
    if y.numel():
        _launch(_gate, (rows, y), N, kind)
    return y


def gate_backward(dy: Tensor, gate_up: Tensor, kind: str) -> Tensor:
    """[dgate, dup] = [dy up phi'(gate), dy phi(gate)] in one buffer: (..., N), (..., 2N) -> (..., 2N)."""
    require_kernel_dtypes(dy, gate_up)
    N = half_width(gate_up)
    dx = torch.empty(gate_up.shape, dtype=gate_up.dtype, device=gate_up.device)
    grads, rows = as_rows(dy), as_rows(gate_up)
    if dx.numel():
        _launch(_gate_backward, (grads, rows, dx), N, kind)
    return dx


def half_width(gate_up: Tensor) -> int:
    if gate_up.shape[-1] % 2:
        raise ValueError(f"a gate's buffer holds two halves, but its width is {gate_up.shape[-1]}")
    return gate_up.shape[-1] // 2


def _launch(kernel: triton.JITFunction, tensors: tuple[Tensor, ...], N: int, kind: str) -> None:
    """One program a tile of M x N; all tensors but the last, the output, are given as rows."""
    inputs = tensors[:-1]
    M, strides = inputs[0].shape[0], [t.stride(0) for t in inputs]
    tile = elementwise_tile(N, max(t.element_size() for t in tensors))
    grid = (triton.cdiv(M, tile.rows) * triton.cdiv(N, tile.columns),)
    with torch.cuda.device_of(inputs[0]):
        kernel[grid](*tensors, M, N, *strides, kind, tile.rows, tile.columns, num_warps=tile.warps)
