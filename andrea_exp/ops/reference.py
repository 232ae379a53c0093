"""Every op's definition in plain torch: the documentation, the CPU path, and the oracle of fast kernels.

Shapes: (..., D) for norms, (..., F) for activations; any float dtype, results in the input's dtype.
"""

import torch
from torch import Tensor
from torch.nn import functional as F


def layer_norm(x: Tensor, gain: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """(x - mean) / sqrt(var + eps) * gain + bias over the last dimension. Ba et al. 2016, eq. 4."""
    return F.layer_norm(x, gain.shape, gain, bias, eps)


def rms_norm(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * gain over the last dimension. Zhang & Sennrich 2019, eq. 4."""
    return F.rms_norm(x, gain.shape, gain, eps)


def add_norm(
    stream: Tensor,
    delta: Tensor,
    gain: Tensor,
    bias: Tensor | None,
    eps: float,
    kind: str,
    stream_scale: float,
) -> tuple[Tensor, Tensor]:
    """The junction in one pass: s = stream_scale * stream + delta, and its normalised copy. Both (..., D).

    `kind` is "layernorm" or "rmsnorm"; the latter takes no bias.
    """
    total = stream + delta if stream_scale == 1 else torch.add(delta, stream, alpha=stream_scale)
    if kind == "rmsnorm":
        return total, rms_norm(total, gain, eps)
    return total, layer_norm(total, gain, bias, eps)


def relu(x: Tensor) -> Tensor:
    """max(x, 0)."""
    return F.relu(x)


def gelu(x: Tensor) -> Tensor:
    """x Phi(x), with the exact normal CDF. Hendrycks & Gimpel 2016."""
    return F.gelu(x)


def gelu_tanh(x: Tensor) -> Tensor:
    """x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))) / 2: within 4.74e-4 of `gelu`. Hendrycks & Gimpel 2016."""
    return F.gelu(x, approximate="tanh")


def swiglu(gate_up: Tensor) -> Tensor:
    """SiLU(gate) * up, from one buffer (..., 2F) whose halves are [gate, up]. Shazeer 2020, eq. 6."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up
