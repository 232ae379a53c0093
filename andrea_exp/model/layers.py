"""The small parts: norms and MLPs. Shapes: B batch, T time, D d_model, F d_ff."""

import torch
from torch import Tensor, nn

from andrea_exp import ops
from andrea_exp.config import Activation, ModelConfig, NormType

ACTIVATIONS = {
    Activation.relu: ops.relu,
    Activation.gelu: ops.gelu,
    Activation.gelu_tanh: ops.gelu_tanh,
    Activation.swiglu: ops.swiglu,
}


class Norm(nn.Module):
    """Parameters of one LayerNorm (gain, and bias where the model has biases) or RMSNorm (gain alone)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        assert config.norm_type is not None
        assert config.eps is not None
        self.kind, self.eps = config.norm_type.name, config.eps
        self.gain = nn.Parameter(torch.ones(config.d_model))
        has_bias = config.norm_type is NormType.layernorm and config.bias
        self.bias = nn.Parameter(torch.zeros(config.d_model)) if has_bias else None

    def forward(self, x: Tensor) -> Tensor:  # (..., D) -> (..., D)
        if self.kind == "rmsnorm":
            return ops.rms_norm(x, self.gain, self.eps)
        return ops.layer_norm(x, self.gain, self.bias, self.eps)

    def add(self, stream: Tensor, delta: Tensor, stream_scale: float = 1) -> tuple[Tensor, Tensor]:
        """(stream_scale * stream + delta, its normalised copy)."""
        return ops.add_norm(stream, delta, self.gain, self.bias, self.eps, self.kind, stream_scale)


class MLP(nn.Module):
    """down(phi(up(x))), or gated: down(phi(gate(x)) * up(x)), with gate and up in one matrix of 2F rows."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        D, F = config.d_model, config.d_ff
        self.activation = ACTIVATIONS[config.activation]
        if config.gated:
            self.gate_up_proj = nn.Linear(D, 2 * F, bias=config.bias)
        else:
            self.up_proj = nn.Linear(D, F, bias=config.bias)
        self.down_proj = nn.Linear(F, D, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:  # (B, T, D) -> (B, T, D)
        up = self.gate_up_proj if hasattr(self, "gate_up_proj") else self.up_proj
        return self.down_proj(self.activation(up(x)))
