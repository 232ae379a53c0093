"""The front door to the operations that fast kernels will serve: one name an op, one choice of implementation.

A fast implementation swaps the computation, never parameters or meaning; `reference.py` is the definition.
"""

from andrea_exp.ops.reference import (
    add_norm,
    bilinear,
    dyt,
    geglu,
    geglu_tanh,
    gelu,
    gelu_tanh,
    glu,
    identity,
    layer_norm,
    norm_add,
    reglu,
    relu,
    relu2,
    rms_norm,
    silu,
    swiglu,
)

__all__ = [
    "add_norm",
    "bilinear",
    "dyt",
    "geglu",
    "geglu_tanh",
    "gelu",
    "gelu_tanh",
    "glu",
    "identity",
    "implementation",
    "layer_norm",
    "norm_add",
    "reglu",
    "relu",
    "relu2",
    "rms_norm",
    "silu",
    "swiglu",
]


def implementation(requested: str) -> str:
    """The implementation that runs on this machine for a requested `ops.impl`: a run records it."""
    return "reference" if requested == "auto" else requested
