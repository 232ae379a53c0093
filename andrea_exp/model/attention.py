"""Causal self-attention and positions. Shapes: B batch, T time, D d_model, H heads, K d_head."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from andrea_exp.config import ModelConfig, Position


class Rope(nn.Module):
    """Rotary positions: pair (x_i, x_{i+K/2}) turns by the angle t theta^(-2i/K). Su et al. 2021, eq. 34."""

    def __init__(self, seq_len: int, d_head: int, theta: float) -> None:
        super().__init__()
        frequency = theta ** (-torch.arange(0, d_head, 2, dtype=torch.float64) / d_head)
        self.cos: Tensor
        self.sin: Tensor
        angle = torch.outer(torch.arange(seq_len, dtype=torch.float64), frequency).repeat(1, 2)  # (T, K)
        dtype = torch.get_default_dtype()
        self.register_buffer("cos", angle.cos().to(dtype), persistent=False)
        self.register_buffer("sin", angle.sin().to(dtype), persistent=False)

    def forward(self, x: Tensor) -> Tensor:  # (B, H, T, K) -> (B, H, T, K)
        T = x.shape[-2]
        first, second = x.chunk(2, dim=-1)
        turned = torch.cat((-second, first), dim=-1)
        return x * self.cos[:T].to(x.dtype) + turned * self.sin[:T].to(x.dtype)


class Attention(nn.Module):
    """softmax(q k^T / sqrt(K)) v over the tokens so far. Vaswani et al. 2017, eq. 1."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        D = config.d_model
        self.n_heads = config.n_heads
        self.qkv_proj = nn.Linear(D, 3 * D, bias=config.bias)
        self.out_proj = nn.Linear(D, D, bias=config.bias)
        self.rope: Rope | None = None
        if config.position is Position.rope:
            assert config.rope_theta is not None
            self.rope = Rope(config.seq_len, config.d_head, config.rope_theta)

    def heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value, (B, H, T, K) each, positions applied."""
        B, T, D = x.shape
        q, k, v = self.qkv_proj(x).view(B, T, 3, self.n_heads, D // self.n_heads).permute(2, 0, 3, 1, 4).unbind()
        return (q, k, v) if self.rope is None else (self.rope(q), self.rope(k), v)

    def forward(self, x: Tensor) -> Tensor:  # (B, T, D) -> (B, T, D)
        q, k, v = self.heads(x)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out_proj(mixed.transpose(1, 2).reshape(x.shape))

    def logits(self, x: Tensor) -> Tensor:
        """(B, H, T, T) scores before the softmax, -inf on later tokens: the fast path keeps none."""
        q, k, _ = self.heads(x)
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=x.device).triu(1)
        return scores.masked_fill(later, -math.inf)
