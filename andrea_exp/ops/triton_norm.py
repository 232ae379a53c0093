"""LayerNorm and RMSNorm in Triton, alone or fused with the addition before or after them.

One forward and one backward kernel serve three ops, M rows x N columns:

| op       | y                              | elements moved of M x N, forward / backward             |
|----------|--------------------------------|---------------------------------------------------------|
| norm     | N(x)                           | 2: x, y / 3: dy, x, dx                                  |
| add_norm | b N(s), s = a stream + delta   | 4: stream, delta, s, y / 4: dy, ds, s, ddelta (5: a != 1) |
| norm_add | stream + N(delta)              | 3: stream, delta, y / 3: dy, delta, ddelta              |

N(x) = (x - mean) rstd gain + bias, rstd = 1 / sqrt(mean((x - mean)^2) + eps); RMSNorm has neither mean nor bias.
With n = (x - mean) rstd and g = dy gain: dx = (g - n mean(g n) - mean(g)) rstd, the last mean for LayerNorm only;
dgain = sum over rows of dy n; dbias = sum of dy. Ba et al. 2016, eq. 4; Zhang & Sennrich 2019, eq. 4.

Sums and statistics are float32. The variance is taken of differences from the mean, never as E[x^2] - E[x]^2.
s is rounded to its stored dtype first and normalised then, so that both passes see one tensor. Gains' gradients
need a sum over all rows: persistent programs keep one (N,) partial sum each, and one sum over the partials ends it,
in the same order every time and without atomics. Rows wider than registers hold go in chunks, read twice (the second
time from the L2 cache).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from andrea_exp.ops.tiles import Tile, as_rows, launch_options, norm_tile, persistent_programs, require_kernel_dtypes

WIDEST_FORWARD, WIDEST_BACKWARD = 16384, 8192  # columns that a whole-row kernel holds without spilling registers
CHUNK = Tile(1, 4096, 16)  # of wider rows
STAGES = 2  # of the backward pass: the next tile's loads are under way while one is computed


@triton.jit
def _rows_of(tile, ROWS: tl.constexpr):
    """Row numbers of a tile, (ROWS, 1) in int64: they are multiplied by strides."""
    return tile * ROWS + tl.arange(0, ROWS).to(tl.int64)[:, None]


@triton.jit
def _load(x, row, column, stride, inside):
    """A tile in float32; 0 outside."""
    return tl.load(x + row * stride + column, inside, other=0.0).to(tl.float32)


@triton.jit
def _input(x, delta, total, row, column, inside, x_row, delta_row, N, stream_scale):
    """What is normalised: x, or the sum stream_scale x + delta, stored and rounded as stored."""
    value = _load(x, row, column, x_row, inside)
    if delta is not None:
        summed = (value * stream_scale + _load(delta, row, column, delta_row, inside)).to(total.dtype.element_ty)
        tl.store(total + row * N + column, summed, inside)
        value = summed.to(tl.float32)
    return value


@triton.jit
def _output(normalised, gain, bias, residual, row, column, inside, residual_row, N, out_scale):
    """residual + out_scale (normalised gain + bias)."""
    value = normalised
    if gain is not None:
        value = value * tl.load(gain + column, column < N, other=0.0).to(tl.float32)
    if bias is not None:
        value = value + tl.load(bias + column, column < N, other=0.0).to(tl.float32)
    value = value * out_scale
    if residual is not None:
        value = value + _load(residual, row, column, residual_row, inside)
    return value


@triton.jit
def _forward(
    x, delta, residual, gain, bias, y, total, statistics,
    M, x_row, delta_row, residual_row, out_scale,
    N: tl.constexpr, eps: tl.constexpr, stream_scale: tl.constexpr, CENTRED: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """One program a tile of ROWS whole rows. `statistics` is rstd of all rows, then for LayerNorm their means."""
    row = _rows_of(tl.program_id(0), ROWS)
    column = tl.arange(0, COLUMNS)[None, :]
    inside = (row < M) & (column < N)
    value = _input(x, delta, total, row, column, inside, x_row, delta_row, N, stream_scale)
    if CENTRED:
        mean = tl.sum(value, 1, keep_dims=True) / N
        value = tl.where(inside, value - mean, 0.0)
        tl.store(statistics + M + row, mean, row < M)
    rstd = tl.rsqrt(tl.sum(value * value, 1, keep_dims=True) / N + eps)
    tl.store(statistics + row, rstd, row < M)
    result = _output(value * rstd, gain, bias, residual, row, column, inside, residual_row, N, out_scale)
    tl.store(y + row * N + column, result, inside)


@triton.jit
def _forward_wide(
    x, delta, residual, gain, bias, y, total, statistics,
    M, x_row, delta_row, residual_row, out_scale,
    N: tl.constexpr, eps: tl.constexpr, stream_scale: tl.constexpr, CENTRED: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """One program a row, in chunks whose means and squares are merged as Chan et al. 1979 do (eq. 2.1)."""
    row = _rows_of(tl.program_id(0), ROWS)
    mean = tl.zeros((ROWS, 1), tl.float32)
    squares = tl.zeros((ROWS, 1), tl.float32)
    for start in range(0, N, COLUMNS):
        column = start + tl.arange(0, COLUMNS)[None, :]
        inside = (row < M) & (column < N)
        value = _input(x, delta, total, row, column, inside, x_row, delta_row, N, stream_scale)
        if CENTRED:
            here = tl.minimum(tl.full((ROWS, 1), N - start, tl.float32), COLUMNS)  # columns in this chunk
            chunk_mean = tl.sum(value, 1, keep_dims=True) / here
            value = tl.where(inside, value - chunk_mean, 0.0)
            apart, share = chunk_mean - mean, here / (start + here)
            mean += apart * share
            squares += apart * apart * share * start
        squares += tl.sum(value * value, 1, keep_dims=True)
    rstd = tl.rsqrt(squares / N + eps)
    tl.store(statistics + row, rstd, row < M)
    if CENTRED:
        tl.store(statistics + M + row, mean, row < M)
    source, source_row = x, x_row
    if delta is not None:
        tl.debug_barrier()  # what other threads stored of the sum is read below
        source, source_row = total, N
    for start in range(0, N, COLUMNS):
        column = start + tl.arange(0, COLUMNS)[None, :]
        inside = (row < M) & (column < N)
        normalised = (_load(source, row, column, source_row, inside) - mean) * rstd
        result = _output(normalised, gain, bias, residual, row, column, inside, residual_row, N, out_scale)
        tl.store(y + row * N + column, result, inside)


@triton.jit
def _normalised(x, statistics, row, column, inside, M, x_row, CENTRED: tl.constexpr):
    """((x - mean) rstd, rstd) of a tile; what lies outside means nothing."""
    value = _load(x, row, column, x_row, inside)
    rstd = tl.load(statistics + row, row < M, other=0.0)
    if CENTRED:
        value = value - tl.load(statistics + M + row, row < M, other=0.0)
    return value * rstd, rstd


@triton.jit
def _factor(gain, column, N, out_scale):
    """out_scale gain (1, COLUMNS); without a gain the number alone."""
    factor = out_scale
    if gain is not None:
        factor = tl.load(gain + column, column < N, other=0.0).to(tl.float32) * out_scale
    return factor


@triton.jit
def _store_gradient(grad, dsum, dx, dstream, row, column, inside, dsum_row, N, stream_scale):
    """dx = grad + dsum, where the sum has a gradient of its own; dstream = stream_scale dx."""
    if dsum is not None:
        grad = grad + _load(dsum, row, column, dsum_row, inside)
    tl.store(dx + row * N + column, grad, inside)
    if dstream is not None:
        tl.store(dstream + row * N + column, grad * stream_scale, inside)


@triton.jit
def _backward(
    dy, dsum, x, gain, statistics, dx, dstream, partials,
    M, dy_row, dsum_row, x_row, out_scale,
    N: tl.constexpr, stream_scale: tl.constexpr, CENTRED: tl.constexpr, HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Program p of P takes tiles p, p + P, ... of ROWS whole rows, and leaves partials[:, p] (dgain, then dbias)."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    column = tl.arange(0, COLUMNS)[None, :]
    factor = _factor(gain, column, N, out_scale)
    dgain = tl.zeros((ROWS, COLUMNS), tl.float32)
    dbias = tl.zeros((ROWS, COLUMNS), tl.float32)
    for tile in tl.range(program, (M - 1) // ROWS + 1, programs, num_stages=STAGES):
        row = _rows_of(tile, ROWS)
        inside = (row < M) & (column < N)
        dout = _load(dy, row, column, dy_row, inside)
        normalised, rstd = _normalised(x, statistics, row, column, inside, M, x_row, CENTRED)
        scaled = dout * factor
        grad = scaled - normalised * (tl.sum(scaled * normalised, 1, keep_dims=True) / N)
        if CENTRED:
            grad = grad - tl.sum(scaled, 1, keep_dims=True) / N
        _store_gradient(grad * rstd, dsum, dx, dstream, row, column, inside, dsum_row, N, stream_scale)
        if gain is not None:
            dgain += dout * normalised
        if HAS_BIAS:
            dbias += dout
    if gain is not None:
        to = partials + program.to(tl.int64) * N + column
        tl.store(to, tl.sum(dgain, 0, keep_dims=True) * out_scale, column < N)
    if HAS_BIAS:
        to = partials + (programs + program).to(tl.int64) * N + column
        tl.store(to, tl.sum(dbias, 0, keep_dims=True) * out_scale, column < N)


@triton.jit
def _backward_wide(
    dy, dsum, x, gain, statistics, dx, dstream, partials,
    M, dy_row, dsum_row, x_row, out_scale,
    N: tl.constexpr, stream_scale: tl.constexpr, CENTRED: tl.constexpr, HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """As `_backward`, a row at a time in chunks; the partial sums, zero at first, live in memory (in the L2 cache)."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    for tile in range(program, M, programs):
        row = _rows_of(tile, ROWS)
        along = tl.zeros((ROWS, 1), tl.float32)  # N mean(scaled normalised)
        mean = tl.zeros((ROWS, 1), tl.float32)  # N mean(scaled)
        for start in tl.range(0, N, COLUMNS, num_stages=STAGES):
            column = start + tl.arange(0, COLUMNS)[None, :]
            inside = (row < M) & (column < N)
            scaled = _load(dy, row, column, dy_row, inside) * _factor(gain, column, N, out_scale)
            normalised, _ = _normalised(x, statistics, row, column, inside, M, x_row, CENTRED)
            along += tl.sum(scaled * normalised, 1, keep_dims=True)
            if CENTRED:
                mean += tl.sum(scaled, 1, keep_dims=True)
        for start in range(0, N, COLUMNS):
            column = start + tl.arange(0, COLUMNS)[None, :]
            inside = (row < M) & (column < N)
            dout = _load(dy, row, column, dy_row, inside)
            normalised, rstd = _normalised(x, statistics, row, column, inside, M, x_row, CENTRED)
            grad = (dout * _factor(gain, column, N, out_scale) - normalised * (along / N) - mean / N) * rstd
            _store_gradient(grad, dsum, dx, dstream, row, column, inside, dsum_row, N, stream_scale)
            if gain is not None:
                to = partials + program.to(tl.int64) * N + column
                tl.store(to, tl.load(to, inside) + dout * normalised * out_scale, inside)
            if HAS_BIAS:
                to = partials + (programs + program).to(tl.int64) * N + column
                tl.store(to, tl.load(to, inside) + dout * out_scale, inside)
        tl.debug_barrier()  # the partial sums stored are those that the next row loads


def norm_forward(
    x: Tensor,
    gain: Tensor | None,
    bias: Tensor | None,
    eps: float,
    kind: str,
    *,
    delta: Tensor | None = None,
    residual: Tensor | None = None,
    stream_scale: float = 1.0,
    out_scale: float = 1.0,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """(y, s or None, statistics) with y = residual + out_scale N(s), s = stream_scale x + delta; see the module.

    x, delta and residual are (..., N) of one shape; y has the widest dtype of what is summed, s that of its terms.
    `statistics` is float32: rstd, and for LayerNorm the mean, (1 or 2, M).
    """
    require_kernel_dtypes(x, delta, residual, gain, bias)
    _require_shapes(x, (delta, residual), (gain, bias))
    N, centred = x.shape[-1], kind == "layernorm"
    rows, deltas, residuals = as_rows(x), _as_rows(delta), _as_rows(residual)
    M = rows.shape[0]
    y = torch.empty(x.shape, dtype=output_dtype(x, delta, residual), device=x.device)
    total = None if delta is None else torch.empty_like(y)
    statistics = torch.empty(1 + centred, M, dtype=torch.float32, device=x.device)
    if y.numel():
        wide = N > WIDEST_FORWARD
        tile = CHUNK if wide else norm_tile(N, 4096, values_per_thread=16)
        with torch.cuda.device_of(x):
            (_forward_wide if wide else _forward)[(triton.cdiv(M, tile.rows),)](
                *(rows, deltas, residuals, _dense(gain), _dense(bias), y, total, statistics),
                *(M, rows.stride(0), _stride(deltas), _stride(residuals), out_scale),
                *(N, eps, stream_scale, centred, tile.rows, tile.columns),
                **launch_options(tile.warps, registers=64),
            )
    return y, total, statistics


def norm_backward(
    dy: Tensor,
    dsum: Tensor | None,
    x: Tensor,
    gain: Tensor | None,
    statistics: Tensor,
    has_bias: bool,
    *,
    dx_dtype: torch.dtype,
    dstream_dtype: torch.dtype | None = None,
    stream_scale: float = 1.0,
    out_scale: float = 1.0,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """(dx, dstream, (dgain, dbias)) of y = out_scale N(x) and of the sum x, whose own gradient is `dsum`.

    `x` is what was normalised. dstream = stream_scale dx, where its dtype is given. The last is (1 or 2, N) float32,
    None without gain and bias.
    """
    require_kernel_dtypes(dy, dsum, x, gain)
    N, centred = x.shape[-1], statistics.shape[0] == 2
    grads, sums, rows = as_rows(dy), _as_rows(dsum), as_rows(x)
    M, device = rows.shape[0], x.device
    dx = torch.empty(x.shape, dtype=dx_dtype, device=device)
    dstream = None if dstream_dtype is None else torch.empty(x.shape, dtype=dstream_dtype, device=device)
    sides = int(gain is not None or has_bias) + int(has_bias)
    if not dx.numel():
        return dx, dstream, torch.zeros(sides, N, device=device) if sides else None
    wide = N > WIDEST_BACKWARD
    tile = CHUNK if wide else norm_tile(N, 1024, values_per_thread=16 if N > 4096 else 8)
    programs = persistent_programs(device, triton.cdiv(M, tile.rows), tile.warps)
    unused = gain is None and has_bias  # rows of partials that no program writes
    partials = (torch.zeros if wide or unused else torch.empty)(sides, programs, N, device=device)
    with torch.cuda.device_of(x):
        (_backward_wide if wide else _backward)[(programs,)](
            *(grads, sums, rows, _dense(gain), statistics, dx, dstream, partials if sides else None),
            *(M, grads.stride(0), _stride(sums), rows.stride(0), out_scale),
            *(N, stream_scale, centred, has_bias, tile.rows, tile.columns, STAGES),
            **launch_options(tile.warps, registers=128 if wide else None),
        )
    return dx, dstream, partials.sum(1) if sides else None


def output_dtype(*terms: Tensor | None) -> torch.dtype:
    """The widest dtype of the terms of a sum."""
    dtypes = [t.dtype for t in terms if t is not None]
    widest = dtypes[0]
    for dtype in dtypes[1:]:
        widest = torch.promote_types(widest, dtype)
    return widest


def _require_shapes(x: Tensor, terms: tuple[Tensor | None, ...], parameters: tuple[Tensor | None, ...]) -> None:
    for term in terms:
        if term is not None and term.shape != x.shape:
            raise ValueError(f"stream and delta must have one shape, not {tuple(x.shape)} and {tuple(term.shape)}")
    for vector in parameters:
        if vector is not None and vector.shape != x.shape[-1:]:
            raise ValueError(f"rows of {x.shape[-1]} need a gain of ({x.shape[-1]},), not {tuple(vector.shape)}")


def _as_rows(x: Tensor | None) -> Tensor | None:
    return None if x is None else as_rows(x)


def _dense(vector: Tensor | None) -> Tensor | None:
    return None if vector is None else vector.contiguous()


def _stride(rows: Tensor | None) -> int:
    return 0 if rows is None else rows.stride(0)
