"""`gelu.cu` as operators of torch: compiled by NVRTC for the GPU at hand, loaded through NVIDIA's cuda.core.

Not through torch's extension builder: that needs a compiler and torch's headers where a run starts, and its build lock
can hang where several processes build. NVRTC needs neither, takes about a second, and once a process is enough.

`kind` is "gelu", "gelu_tanh", or "gelu_tanh_approx", the form with the instruction tanh.approx.f32: it is here to be
measured, and no config asks for it, since it loses the tail (2^-11 of tanh).
"""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from andrea_exp.ops.fast import define_elementwise
from andrea_exp.ops.tiles import require_kernel_dtypes

SOURCE = Path(__file__).with_name("gelu.cu")
TYPES = {torch.float32: "float", torch.bfloat16: "bf16", torch.float16: "f16"}
THREADS, PACK_BYTES = 256, 16


def build(arch: str) -> Any:
    """The kernels' cubin for "sm_90" and the like: a cuda.core.ObjectCode. Needs no GPU."""
    from cuda.core import Program, ProgramOptions

    return Program(SOURCE.read_text(), "c++", ProgramOptions(arch=arch, std="c++17")).compile("cubin")


@functools.cache
def _kernel(name: str, arch: str) -> Any:
    return _built(arch).get_kernel(name)


_built = functools.cache(build)


def forward(x: Tensor, kind: str) -> Tensor:
    """GELU(x), contiguous, in x's dtype. Moves 2 elements for each of x."""
    require_kernel_dtypes(x)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch(f"{kind}_{TYPES[x.dtype]}", x.contiguous(), y)
    return y


def backward(dy: Tensor, x: Tensor, kind: str) -> Tensor:
    """dy GELU'(x), contiguous, in x's dtype. Moves 3 elements for each of x."""
    require_kernel_dtypes(x)
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch(f"{kind}_{TYPES[x.dtype]}_backward", dy.to(x.dtype).contiguous(), x.contiguous(), dx)
    return dx


def _launch(name: str, *tensors: Tensor) -> None:
    """Over all elements of dense tensors of one dtype, on the current stream of their GPU."""
    n, out = tensors[-1].numel(), tensors[-1]
    if not n:
        return
    from cuda.core import Device, LaunchConfig, Stream, launch

    major, minor = torch.cuda.get_device_capability(out.device)
    with torch.cuda.device_of(out):
        Device(out.device.index).set_current()
        stream = Stream.from_handle(torch.cuda.current_stream().cuda_stream)
        blocks = -(-n * out.element_size() // (THREADS * PACK_BYTES))
        config = LaunchConfig(grid=blocks, block=THREADS)
        launch(stream, config, _kernel(name, f"sm_{major}{minor}"), *(t.data_ptr() for t in tensors), n)


def _op(kind: str) -> Callable[[Tensor], Tensor]:
    return functools.partial(torch.ops.andrea_exp.cuda_gelu, kind=kind)


define_elementwise("cuda_gelu", forward, backward)
OPS: dict[str, Callable[..., Any]] = {kind: _op(kind) for kind in ("gelu", "gelu_tanh")}
