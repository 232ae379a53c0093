"""Compiles what a kernel's launch would run, for GPUs that are not here: launches are caught, not made."""

import os
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
POINTERS = {torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16"}


@dataclass
class Launch:
    kernel: JITFunction
    arguments: dict[str, Any]
    options: dict[str, int]


@dataclass
class Built:
    """A kernel as one GPU would run it: `text` is PTX or AMD's assembly."""

    name: str
    text: str
    spilled: int  # bytes a thread, or registers on AMD
    registers: int
    shared: int

    @property
    def doubles(self) -> list[str]:
        """Double-precision instructions."""
        return re.findall(r"^\s+(\S*[._]f64\S*)", self.text, re.MULTILINE)

    @property
    def widest_load(self) -> int:
        """Bits that one thread loads from global memory at once."""
        if self.text.lstrip().startswith("//"):
            vectors = re.findall(r"ld\.global\S*?(?:\.v(\d))?\.b(\d+)", self.text)
            copies = re.findall(r"cp\.async\.\S+ \[[^]]*\], \[[^]]*\], (0x\w+|\d+)", self.text)
            widths = [int(count or 1) * int(bits) for count, bits in vectors]
            return max(widths + [8 * int(size, 0) for size in copies], default=0)
        words = re.findall(r"(?:global|buffer)_load_dword(?:x(\d))?\b", self.text)
        return 32 * max((int(w or 1) for w in words), default=0)


@contextmanager
def caught() -> Iterator[list[Launch]]:
    """Collects the launches within."""
    launches: list[Launch] = []
    usual = JITFunction.run

    def catch(self: JITFunction, *arguments: Any, grid: Any, warmup: bool, **options: int) -> None:
        launches.append(Launch(self, dict(zip(self.arg_names, arguments, strict=True)), options))

    JITFunction.run = catch
    try:
        yield launches
    finally:
        JITFunction.run = usual


def build(launch: Launch, target: GPUTarget) -> Built:
    """Specialises as a launch does: integers equal to 1, and what is divisible by 16."""
    signature, constants, aligned = {}, {}, {}
    for index, parameter in enumerate(launch.kernel.params):
        value = launch.arguments[parameter.name]
        if parameter.is_constexpr or value is None or (isinstance(value, int) and value == 1):
            signature[parameter.name], constants[parameter.name] = "constexpr", value
            continue
        signature[parameter.name] = _type_of(value)
        if isinstance(value, Tensor) or (isinstance(value, int) and value % 16 == 0):
            aligned[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(launch.kernel, signature, constants, aligned)
    known = {k: v for k, v in launch.options.items() if k != "maxnreg" or target.backend == "cuda"}
    return _read(launch.kernel.__name__, triton.compile(source, target=target, options=known), target)


def _type_of(value: Any) -> str:
    if isinstance(value, Tensor):
        return POINTERS[value.dtype]
    if isinstance(value, float):
        return "fp32"
    return "i64" if value > 2**31 - 1 else "i32"


def _read(name: str, compiled: Any, target: GPUTarget) -> Built:
    if target.backend == "hip":
        text = compiled.asm["amdgcn"]
        counts = {k: int(v) for k, v in re.findall(r"\.(vgpr_spill_count|sgpr_spill_count|vgpr_count):\s+(\d+)", text)}
        spilled = counts["vgpr_spill_count"] + counts["sgpr_spill_count"]
        return Built(name, text, spilled, counts["vgpr_count"], compiled.metadata.shared)
    (usage,) = resources(compiled.asm["cubin"]).values()
    return Built(name, compiled.asm["ptx"], usage["STACK"] + usage["LOCAL"], usage["REG"], compiled.metadata.shared)


def resources(cubin: bytes) -> dict[str, dict[str, int]]:
    """REG, STACK and LOCAL of each kernel in a cubin: stack and local memory are what registers did not hold."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(cubin)
        done = subprocess.run([CUOBJDUMP, "-res-usage", file.name], capture_output=True, text=True, check=True)
    kernels = re.findall(r"Function (\S+):\s+(.*)", done.stdout)
    return {name: {k: int(v) for k, v in re.findall(r"(REG|STACK|LOCAL):(\d+)", line)} for name, line in kernels}


def instructions(cubin: bytes) -> dict[str, str]:
    """Each kernel's machine code as text."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(cubin)
        path = {"PATH": f"{CUOBJDUMP.parent}:{os.environ['PATH']}"}  # it calls its neighbour nvdisasm
        done = subprocess.run([CUOBJDUMP, "-sass", file.name], capture_output=True, text=True, check=True, env=path)
    return dict(re.findall(r"Function : (\S+)\n(.*?)\n\s*\.{5,}", done.stdout, re.DOTALL))


def built_by(call: Callable[[], object], target: GPUTarget) -> list[Built]:
    """What the launches of a call compile to."""
    with caught() as launches:
        call()
    assert launches, "no kernel was launched"
    return [build(launch, target) for launch in launches]
