"""What is measured: ops, the bytes they must move, their rivals, shapes in order of importance."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from itertools import product
from typing import Any

import torch
from torch import Tensor

from andrea_exp import ops
from andrea_exp.ops import reference

EPS = 1e-5

# Elements of the M x N tensor that must move, forward and backward: each input read once, each output written once.
# Gains, biases and their gradients are left out: they are N elements, or 2N. A gate's buffer counts as two tensors.
MOVED: dict[str, tuple[int, int]] = {
    **dict.fromkeys(("gelu_tanh", "gelu", "relu2", "silu", "relu"), (2, 3)),  # x, y; dy, x, dx
    **dict.fromkeys(("swiglu", "geglu_tanh", "geglu", "reglu", "glu", "bilinear"), (3, 5)),
    **dict.fromkeys(("rms_norm", "layer_norm"), (2, 3)),
    "add_norm": (4, 4),  # stream, delta, s, y; ds, dy, s, and one gradient for both
    "norm_add": (3, 3),  # stream, delta, y; dy, delta, ddelta: the stream's gradient is dy itself
}
UNFUSED = (5, 6)  # of add_norm as an addition and a norm: s is written and read again, and so is its gradient
GATES = frozenset(name for name, moved in MOVED.items() if moved == (3, 5))
OURS = ("triton", "unfused", "cuda")
INEXACT = "cuda_approx"
IMPLEMENTATIONS = {
    "reference": "the definition, eager torch",
    "compile": "torch.compile of the definition",
    "triton": "our Triton kernel",
    "unfused": "torch's addition, then our norm (for add_norm)",
    "cuda": "our gelu.cu",
    "cuda_approx": "our gelu.cu with tanh.approx.f32, known to be inexact: its error is the question",
    "liger": "Liger-Kernel",
}
LIGER = {  # its GEGLU reads gate and up from two tensors, so that here it would be timed with copies of its own
    "rms_norm": ("rms_norm", "LigerRMSNormFunction"),
    "layer_norm": ("layer_norm", "LigerLayerNormFunction"),
    "add_norm rmsnorm": ("fused_add_rms_norm", "LigerFusedAddRMSNormFunction"),
    "swiglu": ("swiglu", "LigerFusedGateUpSiLUMulFunction"),
    "relu2": ("relu_squared", "LigerReLUSquaredFunction"),
}
Op = Callable[..., Any]


@dataclass(frozen=True)
class Case:
    """An op, and for a fused one the kind of its norm."""

    op: str
    kind: str | None = None

    @property
    def name(self) -> str:
        return f"{self.op} {self.kind}" if self.kind else self.op

    @property
    def options(self) -> dict[str, Any]:
        return ({"eps": EPS} if "norm" in self.op else {}) | ({"kind": self.kind} if self.kind else {})

    @property
    def has_bias(self) -> bool:
        return self.op == "layer_norm" or self.kind == "layernorm"


MAIN = (
    *(Case("add_norm", "rmsnorm"), Case("add_norm", "layernorm"), Case("rms_norm"), Case("layer_norm")),
    *(Case("gelu_tanh"), Case("swiglu")),
)
OTHERS = (
    *(Case("gelu"), Case("norm_add", "rmsnorm"), Case("norm_add", "layernorm"), Case("relu2"), Case("geglu_tanh")),
    *(Case(op) for op in ("silu", "relu", "geglu", "reglu", "glu", "bilinear")),
)


@dataclass(frozen=True)
class Work:
    """One case at one shape and dtype, by some implementations. M x N is the tensor that the op gives."""

    case: Case
    dtype: torch.dtype
    M: int
    N: int
    impls: tuple[str, ...]

    @property
    def where(self) -> dict[str, Any]:
        return {"op": self.case.name, "dtype": str(self.dtype).removeprefix("torch."), "M": self.M, "N": self.N}

    @property
    def tensor_bytes(self) -> int:
        return self.M * self.N * self.dtype.itemsize


Shapes = tuple[tuple[int, int], ...]
HALF, WIDE = torch.bfloat16, torch.float32


@dataclass(frozen=True)
class Grid:
    """Shapes timed, the most important first, and odd ones where only correctness counts."""

    main: Shapes
    more: Shapes
    dtypes: tuple[torch.dtype, ...]
    odd: Shapes


MAIN_SHAPE = (16384, 4096)  # 128 MiB in bfloat16


def _large(most: int) -> Shapes:
    """Rows 1k to 64k, columns 256 to 32k, up to `most` elements, the largest tensors first."""
    pairs = [(M << 10, N) for M in (1, 4, 16, 64) for N in (256, 1024, 4096, 8192, 16384, 32768)]
    fitting = (p for p in pairs if p[0] * p[1] <= most and p != MAIN_SHAPE)
    return tuple(sorted(fitting, key=lambda p: -p[0] * p[1]))


# Odd: rows and columns that fill no tile, each path of the kernels (8192, 16384 and more columns), many short rows.
ODD = ((1, 1), (3, 769), (133, 5125), (7, 8193), (5, 16385), (65537, 256))
GRIDS = {
    "small": Grid(((8, 64),), (), (WIDE, HALF, torch.float16), ((3, 50),)),
    "device": Grid((MAIN_SHAPE,), ((65536, 1024), (4096, 32768), (16384, 8192)), (HALF, WIDE, torch.float16), ODD[2:3]),
    "full": Grid((MAIN_SHAPE,), _large(2**29), (HALF, WIDE, torch.float16), ODD),
}


def works(grid: Grid, impls: Sequence[str]) -> Iterator[Work]:
    """What to time, the most important first; torch.compile, which takes seconds a shape, later than what is quick."""
    quick, slow = [i for i in impls if i != "compile"], [i for i in impls if i == "compile"]
    every, (first, *others) = (*MAIN, *OTHERS), grid.dtypes
    order = (
        (quick, every, [first], grid.main),
        (quick, MAIN, [first], grid.more),
        (slow, MAIN, [first], grid.main),
        (quick, every, others, grid.main),
        (slow, OTHERS, [first], grid.main),
        (slow, MAIN, [first], grid.more),
        (quick, OTHERS, [first], grid.more),
        (slow, every, others, grid.main),
        (slow, OTHERS, [first], grid.more),
        (quick, every, others, grid.more),
        (slow, every, others, grid.more),
    )
    for chosen, cases, dtypes, shapes in order:
        for dtype, (M, N), case in product(dtypes, shapes, cases):
            if has := tuple(i for i in chosen if applies(i, case)):
                yield Work(case, dtype, M, N, has)


def odd_works(grid: Grid, impls: Sequence[str]) -> Iterator[Work]:
    """Where only ours are checked, in the first dtype: the others are checked where they are timed."""
    odd = replace(grid, main=grid.odd, more=(), dtypes=grid.dtypes[:1])
    return works(odd, [i for i in impls if i in OURS])


def applies(impl: str, case: Case) -> bool:
    """Whether an implementation has this op."""
    return {
        "unfused": case.op == "add_norm",
        "cuda": case.op in ("gelu", "gelu_tanh"),
        "cuda_approx": case.op == "gelu_tanh",
        "liger": case.name in LIGER,
    }.get(impl, True)


def absent(impl: str, device: str) -> str | None:
    """Why an implementation cannot run here, in one line; None where it can."""
    if impl in ("triton", "unfused"):
        return ops.refusal("triton", device)
    if impl in ("cuda", "cuda_approx"):
        return ops.refusal("cuda", device)
    if impl == "liger" and device != "cuda":
        return "liger needs a CUDA GPU"
    if impl == "liger" and find_spec("liger_kernel") is None:
        return "liger is not installed: pip install 'andrea-exp[peers]'"
    return None


def build(impl: str, case: Case) -> Op:
    """The op as one implementation computes it, from its tensors alone."""
    definition = partial(getattr(reference, case.op), **case.options)
    if impl == "reference":
        return definition
    if impl == "compile":
        torch._dynamo.reset()  # each shape is compiled for itself, and none counts towards a limit
        return torch.compile(lambda *tensors: definition(*tensors), dynamic=False)
    if impl == "liger":
        return _liger(case)
    if impl in ("cuda", "cuda_approx"):
        import_module("andrea_exp.ops.cuda_gelu")  # which defines the operator
        return partial(torch.ops.andrea_exp.cuda_gelu, kind=case.op + impl.removeprefix("cuda"))
    from andrea_exp.ops import fast

    if impl == "unfused":
        return partial(_unfused, fast.OPS["layer_norm" if case.has_bias else "rms_norm"])
    return partial(fast.OPS[case.op], **case.options)


def _unfused(norm: Op, stream: Tensor, delta: Tensor, gain: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    total = stream + delta
    return total, norm(total, gain, EPS) if bias is None else norm(total, gain, bias, EPS)


def _liger(case: Case) -> Op:
    """Its autograd function, which takes no names. Norms compute in float32 as ours do, and leave dy as it is."""
    module, name = LIGER[case.name]
    apply = getattr(import_module(f"liger_kernel.ops.{module}"), name).apply
    if case.name == "rms_norm":
        return lambda x, gain: apply(x, gain, EPS, 0.0, "gemma", False)
    if case.op == "add_norm":
        return lambda stream, delta, gain, _: apply(delta, stream, gain, EPS, 0.0, "gemma", False)[::-1]
    return lambda *tensors: apply(*tensors, *((EPS,) if case.op == "layer_norm" else ()))


def tensors(work: Work, device: str, sets: int = 1) -> list[tuple[list[Tensor | None], list[Tensor]]]:
    """`sets` times the op's tensors in its order, and its outputs' gradients: fresh noise, the same for every call."""
    generator = torch.Generator(device).manual_seed(0)

    def noise(*shape: int) -> list[Tensor]:
        return list(torch.randn(sets, *shape, generator=generator, device=device, dtype=work.dtype))

    op, M, N = work.case.op, work.M, work.N
    grads = [noise(M, N) for _ in range(2 if op == "add_norm" else 1)]
    if "norm" not in op:
        inputs: list[list[Tensor] | list[None]] = [noise(M, 2 * N if op in GATES else N)]
    else:
        inputs = [noise(M, N) for _ in range(2 if "add" in op else 1)]
        inputs += [[1 + 0.5 * gain for gain in noise(N)], noise(N) if work.case.has_bias else [None] * sets]
        inputs = inputs[:-1] if op == "rms_norm" else inputs
    return [(list(i), list(g)) for i, g in zip(zip(*inputs, strict=True), zip(*grads, strict=True), strict=True)]
