"""The kernels themselves: natively where there is a GPU, in Triton's interpreter on a CPU. `test_kernels.py` runs them.

The interpreter must be chosen before Triton is first imported, so these tests have a process of their own.
"""

import os
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"
sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))  # for models that are built without Hydra
pytest.importorskip("triton", reason="triton is not installed")


def _round_to_bfloat16(wide: np.ndarray) -> np.ndarray:
    """float32 -> bfloat16 as uint16, to nearest even as a GPU does; NaN stays NaN."""
    bits = wide.view(np.uint32)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(wide), np.uint16(0x7FC0), rounded)


def _patch_interpreter() -> None:
    """Triton's interpreter truncates where a GPU rounds to nearest, which would hide or make errors of one ulp."""
    import triton.language as tl
    from triton.runtime import interpreter

    usual = interpreter.InterpreterBuilder.cast_impl

    def cast(self, source, to):
        if source.dtype.scalar == tl.float32 and to.scalar == tl.bfloat16:
            return interpreter.TensorHandle(_round_to_bfloat16(np.ascontiguousarray(source.data)), tl.bfloat16)
        return usual(self, source, to)

    interpreter.InterpreterBuilder.cast_impl = cast


if DEVICE == "cpu":
    _patch_interpreter()
