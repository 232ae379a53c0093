"""How tensors are cut for the kernels: views as rows, and launch shapes from small tables. Knows no Triton.

A tile is ROWS x COLUMNS elements, both powers of two as Triton asks; M x N is the tensor seen as rows.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
CPU_PROGRAMS = 4  # of a persistent kernel where there is no GPU: few, so that each loops


class Tile(NamedTuple):
    rows: int
    columns: int
    warps: int


def power_of_2(number: int) -> int:
    """The smallest power of two that is not below `number`."""
    return 1 << max(0, number - 1).bit_length()


def require_kernel_dtypes(*tensors: Tensor | None) -> None:
    for tensor in tensors:
        if tensor is not None and tensor.dtype not in DTYPES:
            raise TypeError(f"the kernels take float32, bfloat16 and float16, not {tensor.dtype}")


def as_rows(x: Tensor) -> Tensor:
    """(..., N) as (M, N) with dense columns and any row stride: a view where the strides allow it, else a copy."""
    N = x.shape[-1] if x.ndim else 1
    rows = x.reshape(math.prod(x.shape[:-1]), N)
    return rows if N < 2 or rows.stride(1) == 1 else rows.contiguous()


def as_few_rows(*tensors: Tensor) -> list[Tensor]:
    """Tensors of one shape as (M, N) each; as one long row where all are contiguous, so that no row has a tail."""
    if all(t.is_contiguous() for t in tensors):
        return [t.view(1, -1) for t in tensors]
    return [as_rows(t) for t in tensors]


def elementwise_tile(N: int, element_bytes: int) -> Tile:
    """8 KiB of each operand: with 4 warps, four 128-bit loads in flight a thread."""
    columns = min(power_of_2(N), 1024)
    return Tile(8192 // element_bytes // columns, columns, 4)


def norm_tile(N: int, elements: int, values_per_thread: int) -> Tile:
    """Whole rows in registers: a row below `elements` shares its tile with others, up to `elements` in all."""
    columns = power_of_2(N)
    rows = max(1, elements // columns)
    return Tile(rows, columns, max(4, rows * columns // (32 * values_per_thread)))


def launch_options(warps: int, registers: int | None = None) -> dict[str, int]:
    """Warps, and how many registers a thread may have, where ptxas left to itself aims lower and spills a few.

    AMD's compiler knows no such limit.
    """
    limited = registers is not None and torch.version.hip is None
    return {"num_warps": warps} | ({"maxnreg": registers} if limited and registers else {})


def persistent_programs(device: torch.device, tiles: int, warps: int) -> int:
    """As many programs as the GPU holds at 32 warps a multiprocessor, but none without a tile."""
    if device.type != "cuda":
        return min(tiles, CPU_PROGRAMS)
    multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
    return min(tiles, multiprocessors * max(1, 32 // warps))
