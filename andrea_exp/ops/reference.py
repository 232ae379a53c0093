"""Every op's definition in plain torch: the documentation, the CPU path, and the oracle of fast kernels.

Shapes: (..., D) for norms, (..., F) for activations, (..., 2F) for gates; any float dtype, results in the
input's dtype.
"""

import torch
from torch import Tensor
from torch.nn import functional as F


def layer_norm(x: Tensor, gain: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """(x - mean) / sqrt(var + eps) * gain + bias over the last dimension. Ba et al. 2016, eq. 4."""
    return F.layer_norm(x, x.shape[-1:], gain, bias, eps)


def rms_norm(x: Tensor, gain: Tensor | None, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * gain over the last dimension. Zhang & Sennrich 2019, eq. 4."""
    return F.rms_norm(x, x.shape[-1:], gain, eps)


def dyt(x: Tensor, alpha: Tensor, gain: Tensor, bias: Tensor | None) -> Tensor:
    """gain * tanh(alpha x) + bias, alpha a learned scalar: no statistics. Zhu et al. 2025, eq. 3."""
    squashed = gain * torch.tanh(alpha * x)
    return squashed if bias is None else squashed + bias


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
    """The junction in one pass: s = stream_scale * stream + delta, and out_scale * norm(s). All (..., D).

    `kind` is "layernorm" or "rmsnorm"; the latter takes no bias. `stream_scale` is DeepNorm's alpha, `out_scale`
    layer-scaled norm's 1/sqrt(l).
    """
    total = stream + delta if stream_scale == 1 else torch.add(delta, stream, alpha=stream_scale)
    normed = _norm(total, gain, bias, eps, kind)
    return total, normed if out_scale == 1 else normed * out_scale


def norm_add(stream: Tensor, delta: Tensor, gain: Tensor | None, bias: Tensor | None, eps: float, kind: str) -> Tensor:
    """stream + the normalised delta, in one pass. Both (..., D)."""
    return stream + _norm(delta, gain, bias, eps, kind)


def _norm(x: Tensor, gain: Tensor | None, bias: Tensor | None, eps: float, kind: str) -> Tensor:
    return rms_norm(x, gain, eps) if kind == "rmsnorm" else layer_norm(x, gain, bias, eps)


def relu(x: Tensor) -> Tensor:
    """max(x, 0)."""
    return F.relu(x)


def gelu(x: Tensor) -> Tensor:
    """x Phi(x), with the exact normal CDF. Hendrycks & Gimpel 2016."""
    return F.gelu(x)


def gelu_tanh(x: Tensor) -> Tensor:
    """x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))) / 2: within 4.74e-4 of `gelu`. Hendrycks & Gimpel 2016."""
    return F.gelu(x, approximate="tanh")


def silu(x: Tensor) -> Tensor:
    """x sigmoid(x). Hendrycks & Gimpel 2016; Ramachandran et al. 2017 (Swish)."""
    return F.silu(x)


def relu2(x: Tensor) -> Tensor:
    """max(x, 0)^2. So et al. 2021."""
    return F.relu(x).square()


def identity(x: Tensor) -> Tensor:
    """x: a linear MLP, as a control."""
    return x


# Gates: phi(gate) * up from one buffer whose halves are [gate, up]. Shazeer 2020, eqs. 5 and 6.


def glu(gate_up: Tensor) -> Tensor:
    """sigmoid(gate) * up. Dauphin et al. 2017."""
    gate, up = gate_up.chunk(2, dim=-1)
    return torch.sigmoid(gate) * up


def bilinear(gate_up: Tensor) -> Tensor:
    """gate * up."""
    gate, up = gate_up.chunk(2, dim=-1)
    return gate * up


def reglu(gate_up: Tensor) -> Tensor:
    """max(gate, 0) * up."""
    gate, up = gate_up.chunk(2, dim=-1)
    return relu(gate) * up


def geglu(gate_up: Tensor) -> Tensor:
    """gate Phi(gate) * up."""
    gate, up = gate_up.chunk(2, dim=-1)
    return gelu(gate) * up


def geglu_tanh(gate_up: Tensor) -> Tensor:
    """`geglu` with GELU in its tanh form."""
    gate, up = gate_up.chunk(2, dim=-1)
    return gelu_tanh(gate) * up


def swiglu(gate_up: Tensor) -> Tensor:
    """gate sigmoid(gate) * up."""
    gate, up = gate_up.chunk(2, dim=-1)
    return silu(gate) * up
