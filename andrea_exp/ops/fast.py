"""The Triton kernels as operators of torch: `OPS` has a function for each op of `reference.py` that has a kernel.

One path serves eager mode, torch.compile, autocast and activation checkpointing: operators of torch's own dispatcher,
which a compiler does not look into. Each forward op has a fake form (shapes and dtypes alone), a derivative that is
again an operator, and no second derivative: asking for one raises. Autocast changes no dtype: the kernels compute in
float32 whatever they read. There is no CPU form: on a CPU the kernels run only in Triton's interpreter, so that
nothing else can run under their name.

| operator                       | inputs                                        | outputs                             |
|--------------------------------|-----------------------------------------------|-------------------------------------|
| activation                     | x (...)                                       | y                                   |
| gate                           | [gate, up] (..., 2N)                          | y (..., N)                          |
| norm                           | x (..., N), gain, bias (N,)                   | y, statistics                       |
| add_norm                       | stream, delta (..., N), gain, bias            | sum, y, statistics                  |
| norm_add                       | stream, delta (..., N), gain, bias            | y, statistics                       |

`statistics` is what the backward pass needs of each of the M rows, (1 or 2, M) float32. dtypes: float32, bfloat16,
float16, mixed as they come; a sum has the wider dtype of its terms, all else its input's.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from andrea_exp.ops import triton_activation
from andrea_exp.ops.triton_activation import half_width
from andrea_exp.ops.triton_norm import norm_backward, norm_forward, output_dtype

ACTIVATIONS = ("relu", "gelu", "gelu_tanh", "silu", "relu2")
GATES = {
    "glu": "sigmoid",
    "bilinear": "identity",
    "reglu": "relu",
    "geglu": "gelu",
    "geglu_tanh": "gelu_tanh",
    "swiglu": "silu",
}
Grads = tuple[Tensor | None, ...]
kernels = torch.ops.andrea_exp


def _define(
    schema: str,
    run: Callable[..., Any],
    fake: Callable[..., Any],
    backward: Callable[..., Grads] | None = None,
    keep: Callable[..., None] | None = None,
) -> None:
    """Registers an operator by all that it is. Without a `backward` it refuses to be differentiated."""
    name = f"andrea_exp::{schema.split('(')[0]}"
    torch.library.define(name, schema.removeprefix(schema.split("(")[0]))
    torch.library.impl(name, ("cpu", "cuda"))(run)
    torch.library.register_fake(name)(fake)
    torch.library.register_autograd(name, backward or _refuse, setup_context=keep)


def _refuse(ctx: Any, *_: Tensor) -> Grads:
    raise NotImplementedError("the fast ops have no second derivative; use ops.impl=reference")


def _new(like: Tensor, shape: tuple[int, ...] | torch.Size, dtype: torch.dtype | None = None) -> Tensor:
    return like.new_empty(shape, dtype=dtype or like.dtype)


# Activations and gates: the input is kept, and the backward pass recomputes what it needs of it.


def define_elementwise(
    name: str,
    forward: Callable[[Tensor, str], Tensor],
    backward: Callable[[Tensor, Tensor, str], Tensor],
    shape: Callable[[Tensor], tuple[int, ...]] = lambda x: tuple(x.shape),
) -> None:
    """Registers (x, kind) -> y, of a shape that follows from x, and (dy, x, kind) -> dx."""

    def keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, ctx.kind = inputs
        ctx.save_for_backward(x)

    def grad(ctx: Any, dy: Tensor) -> Grads:
        return getattr(kernels, f"{name}_backward")(dy, *ctx.saved_tensors, ctx.kind), None

    _define(f"{name}(Tensor x, str kind) -> Tensor", forward, lambda x, kind: _new(x, shape(x)), grad, keep)
    _define(f"{name}_backward(Tensor dy, Tensor x, str kind) -> Tensor", backward, lambda dy, x, kind: _new(x, x.shape))


define_elementwise("activation", triton_activation.activation, triton_activation.activation_backward)
define_elementwise(
    "gate", triton_activation.gate, triton_activation.gate_backward, lambda x: (*x.shape[:-1], half_width(x))
)


# Norms. What was normalised is kept: x, the sum, or delta.


def _statistics(x: Tensor, kind: str) -> Tensor:
    """Their fake form: one row for RMSNorm, two for LayerNorm, with a column for each row of x."""
    M = 1
    for size in x.shape[:-1]:
        M *= size
    return _new(x, (1 + (kind == "layernorm"), M), torch.float32)


def _norm(x: Tensor, gain: Tensor | None, bias: Tensor | None, eps: float, kind: str) -> tuple[Tensor, Tensor]:
    y, _, statistics = norm_forward(x, gain, bias, eps, kind)
    return y, statistics


def _add_norm(
    stream: Tensor,
    delta: Tensor,
    gain: Tensor | None,
    bias: Tensor | None,
    eps: float,
    kind: str,
    stream_scale: float,
    out_scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    y, total, statistics = norm_forward(
        stream, gain, bias, eps, kind, delta=delta, stream_scale=stream_scale, out_scale=out_scale
    )
    assert total is not None
    return total, y, statistics


def _norm_add(
    stream: Tensor, delta: Tensor, gain: Tensor | None, bias: Tensor | None, eps: float, kind: str
) -> tuple[Tensor, Tensor]:
    y, _, statistics = norm_forward(delta, gain, bias, eps, kind, residual=stream)
    return y, statistics


def _keep(ctx: Any, normalised: Tensor, gain: Tensor | None, bias: Tensor | None, statistics: Tensor) -> None:
    ctx.save_for_backward(normalised, gain, statistics)
    ctx.bias_dtype = None if bias is None else bias.dtype
    ctx.mark_non_differentiable(statistics)
    ctx.set_materialize_grads(False)


def _keep_norm(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, gain, bias, *_ = inputs
    _keep(ctx, x, gain, bias, output[1])


def _keep_add_norm(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    stream, delta, gain, bias, _, _, ctx.stream_scale, ctx.out_scale = inputs
    ctx.dtypes = stream.dtype, delta.dtype
    _keep(ctx, output[0], gain, bias, output[2])


def _keep_norm_add(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    stream, delta, gain, bias, *_ = inputs
    ctx.stream_dtype = stream.dtype
    _keep(ctx, delta, gain, bias, output[1])


def _norm_backward(
    dy: Tensor,
    dsum: Tensor | None,
    x: Tensor,
    gain: Tensor | None,
    statistics: Tensor,
    has_bias: bool,
    dx_dtype: torch.dtype,
    dstream_dtype: torch.dtype | None,
    stream_scale: float,
    out_scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """`triton_norm.norm_backward` with empty tensors for what is absent: an operator's outputs are all tensors."""
    dx, dstream, sides = norm_backward(
        dy,
        dsum,
        x,
        gain,
        statistics,
        has_bias,
        dx_dtype=dx_dtype,
        dstream_dtype=dstream_dtype,
        stream_scale=stream_scale,
        out_scale=out_scale,
    )
    return dx, _new(x, (0,)) if dstream is None else dstream, statistics.new_empty(0) if sides is None else sides


def _fake_norm_backward(
    dy: Tensor,
    dsum: Tensor | None,
    x: Tensor,
    gain: Tensor | None,
    statistics: Tensor,
    has_bias: bool,
    dx_dtype: torch.dtype,
    dstream_dtype: torch.dtype | None,
    *_: float,
) -> tuple[Tensor, Tensor, Tensor]:
    shape = (0,) if dstream_dtype is None else x.shape
    sides = (1 + has_bias, x.shape[-1]) if gain is not None or has_bias else (0,)
    return _new(x, x.shape, dx_dtype), _new(x, shape, dstream_dtype), _new(statistics, sides)


def _gradients(
    ctx: Any,
    dy: Tensor | None,
    dsum: Tensor | None,
    dx_dtype: torch.dtype | None = None,
    dstream_dtype: torch.dtype | None = None,
    stream_scale: float = 1.0,
    out_scale: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """(dx, dstream, dgain, dbias); dstream is dx itself where no dtype of its own is asked for."""
    x, gain, statistics = ctx.saved_tensors
    dy = torch.zeros_like(x) if dy is None else dy
    has_bias = ctx.bias_dtype is not None
    dx, dstream, sides = kernels.norm_backward(
        *(dy, dsum, x, gain, statistics, has_bias),
        *(dx_dtype or x.dtype, dstream_dtype, stream_scale, out_scale),
    )
    dgain = None if gain is None else sides[0].to(gain.dtype)
    return dx, dx if dstream_dtype is None else dstream, dgain, sides[1].to(ctx.bias_dtype) if has_bias else None


def _norm_grad(ctx: Any, dy: Tensor, _statistics: None) -> Grads:
    dx, _, dgain, dbias = _gradients(ctx, dy, None)
    return dx, dgain, dbias, None, None


def _add_norm_grad(ctx: Any, dsum: Tensor | None, dy: Tensor | None, _statistics: None) -> Grads:
    stream, delta = ctx.dtypes
    own = None if ctx.stream_scale == 1 and stream == delta else stream
    ddelta, dstream, dgain, dbias = _gradients(ctx, dy, dsum, delta, own, ctx.stream_scale, ctx.out_scale)
    return dstream, ddelta, dgain, dbias, None, None, None, None


def _norm_add_grad(ctx: Any, dy: Tensor, _statistics: None) -> Grads:
    ddelta, _, dgain, dbias = _gradients(ctx, dy, None)
    return dy.to(ctx.stream_dtype), ddelta, dgain, dbias, None, None


_define(
    "norm(Tensor x, Tensor? gain, Tensor? bias, float eps, str kind) -> (Tensor, Tensor)",
    _norm,
    lambda x, gain, bias, eps, kind: (_new(x, x.shape), _statistics(x, kind)),
    _norm_grad,
    _keep_norm,
)
_define(
    "add_norm(Tensor stream, Tensor delta, Tensor? gain, Tensor? bias, float eps, str kind, float stream_scale, "
    "float out_scale) -> (Tensor, Tensor, Tensor)",
    _add_norm,
    lambda stream, delta, gain, bias, eps, kind, stream_scale, out_scale: (
        _new(stream, stream.shape, output_dtype(stream, delta)),
        _new(stream, stream.shape, output_dtype(stream, delta)),
        _statistics(stream, kind),
    ),
    _add_norm_grad,
    _keep_add_norm,
)
_define(
    "norm_add(Tensor stream, Tensor delta, Tensor? gain, Tensor? bias, float eps, str kind) -> (Tensor, Tensor)",
    _norm_add,
    lambda stream, delta, gain, bias, eps, kind: (
        _new(stream, stream.shape, output_dtype(stream, delta)),
        _statistics(delta, kind),
    ),
    _norm_add_grad,
    _keep_norm_add,
)
_define(
    "norm_backward(Tensor dy, Tensor? dsum, Tensor x, Tensor? gain, Tensor statistics, bool has_bias, "
    "ScalarType dx_dtype, ScalarType? dstream_dtype, float stream_scale, float out_scale) -> (Tensor, Tensor, Tensor)",
    _norm_backward,
    _fake_norm_backward,
)


def layer_norm(x: Tensor, gain: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    return kernels.norm(x, gain, bias, eps, "layernorm")[0]


def rms_norm(x: Tensor, gain: Tensor | None, eps: float) -> Tensor:
    return kernels.norm(x, gain, None, eps, "rmsnorm")[0]


def add_norm(
    stream: Tensor,
    delta: Tensor,
    gain: Tensor | None,
    bias: Tensor | None,
    eps: float,
    kind: str,
    stream_scale: float = 1,
    out_scale: float = 1,
) -> tuple[Tensor, Tensor]:
    total, y, _ = kernels.add_norm(stream, delta, gain, bias, eps, kind, stream_scale, out_scale)
    return total, y


def norm_add(stream: Tensor, delta: Tensor, gain: Tensor | None, bias: Tensor | None, eps: float, kind: str) -> Tensor:
    return kernels.norm_add(stream, delta, gain, bias, eps, kind)[0]


OPS: dict[str, Callable[..., Any]] = {
    **{name: partial(kernels.activation, kind=name) for name in ACTIVATIONS},
    **{name: partial(kernels.gate, kind=phi) for name, phi in GATES.items()},
    "layer_norm": layer_norm,
    "rms_norm": rms_norm,
    "add_norm": add_norm,
    "norm_add": norm_add,
}
