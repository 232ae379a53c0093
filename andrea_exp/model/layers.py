"""The small parts: norms and MLPs. Shapes: B batch, T time, D d_model, F d_ff."""

import torch
from torch import Tensor, nn

from andrea_exp import ops
from andrea_exp.config import ModelConfig, NormType

DYT_ALPHA = 0.5  # Zhu et al. 2025, section 4


class Norm(nn.Module):
    """Parameters of one norm over the last dimension, and its fused forms with an addition.

    layernorm: gain, and bias where `norm_bias`; rmsnorm: gain; rmsnorm_1p: 1 + gain, as Gemma stores it;
    dyt: alpha, gain, and bias where `norm_bias`.
    """

    def __init__(self, config: ModelConfig, size: int | None = None) -> None:
        super().__init__()
        assert config.norm_type is not None
        size = size or config.d_model
        self.norm_type, self.eps = config.norm_type, config.eps or 0.0
        self.kind = "layernorm" if self.norm_type is NormType.layernorm else "rmsnorm"
        self.gain = nn.Parameter((torch.zeros if self.norm_type is NormType.rmsnorm_1p else torch.ones)(size))
        self.bias = nn.Parameter(torch.zeros(size)) if config.norm_bias else None
        self.alpha = nn.Parameter(torch.tensor(DYT_ALPHA)) if self.norm_type is NormType.dyt else None

    @property
    def factor(self) -> Tensor:
        return 1 + self.gain if self.norm_type is NormType.rmsnorm_1p else self.gain

    def forward(self, x: Tensor) -> Tensor:  # (..., size) -> (..., size)
        if self.alpha is not None:
            return ops.dyt(x, self.alpha, self.gain, self.bias)
        if self.kind == "rmsnorm":
            return ops.rms_norm(x, self.factor, self.eps)
        return ops.layer_norm(x, self.gain, self.bias, self.eps)

    def of_sum(
        self, stream: Tensor, delta: Tensor, stream_scale: float = 1, out_scale: float = 1
    ) -> tuple[Tensor, Tensor]:
        """(s, out_scale * N(s)) of s = stream_scale * stream + delta."""
        if self.alpha is not None:
            total = torch.add(delta, stream, alpha=stream_scale)
            return total, self(total) * out_scale
        return ops.add_norm(stream, delta, self.factor, self.bias, self.eps, self.kind, stream_scale, out_scale)

    def added_to(self, stream: Tensor, delta: Tensor) -> Tensor:
        """stream + N(delta)."""
        if self.alpha is not None:
            return stream + self(delta)
        return ops.norm_add(stream, delta, self.factor, self.bias, self.eps, self.kind)


class MLP(nn.Module):
    """down(phi(up(x))), or gated: down(phi(gate(x)) * up(x)), with gate and up in one matrix of 2F rows."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        D, F = config.d_model, config.d_ff
        self.activation = getattr(ops, config.activation.name)
        self.gated = config.gated
        if self.gated:
            self.gate_up_proj = nn.Linear(D, 2 * F, bias=config.bias)
        else:
            self.up_proj = nn.Linear(D, F, bias=config.bias)
        self.down_proj = nn.Linear(F, D, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:  # (B, T, D) -> (B, T, D)
        up = self.gate_up_proj if self.gated else self.up_proj
        return self.down_proj(self.activation(up(x)))
