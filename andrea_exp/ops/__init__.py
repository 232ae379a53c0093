"""The front door to the operations that fast kernels will serve: one name an op, one choice of implementation.

A fast implementation swaps the computation, never parameters or meaning; `reference.py` is the definition.
"""

from andrea_exp.ops.reference import add_norm, gelu, gelu_tanh, layer_norm, relu, rms_norm, swiglu

__all__ = ["add_norm", "gelu", "gelu_tanh", "implementation", "layer_norm", "relu", "rms_norm", "swiglu"]


def implementation(requested: str) -> str:
    """The implementation that runs on this machine for a requested `ops.impl`: a run records it."""
    return "reference" if requested == "auto" else requested
