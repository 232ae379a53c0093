"""Causal self-attention and positions. B batch, T time, D d_model, H heads, G key/value heads, K d_head."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from andrea_exp.config import AttentionScale, ModelConfig, Position, QKNorm
from andrea_exp.model.layers import Norm


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


class RelativeBias(nn.Module):
    """T5's learned bias on scores by distance, one table for all layers. Raffel et al. 2020, section 2.1.

    Distances below 16 have a bucket each; up to 128 they share 16 more, logarithmically; all beyond share the last.
    """

    BUCKETS, EXACT, FARTHEST = 32, 16, 128

    def __init__(self, n_heads: int, seq_len: int) -> None:
        super().__init__()
        self.table = nn.Embedding(self.BUCKETS, n_heads)
        distance = (torch.arange(seq_len)[:, None] - torch.arange(seq_len)).clamp(min=0)
        self.bucket: Tensor
        self.register_buffer("bucket", self._bucket(distance), persistent=False)  # (T, T)

    def _bucket(self, distance: Tensor) -> Tensor:
        ratio = (distance.clamp(min=1).float() / self.EXACT).log() / math.log(self.FARTHEST / self.EXACT)
        far = self.EXACT + (ratio * (self.BUCKETS - self.EXACT)).long()
        return torch.where(distance < self.EXACT, distance, far.clamp(max=self.BUCKETS - 1))

    def forward(self, T: int) -> Tensor:  # -> (H, T, T)
        return self.table(self.bucket[:T, :T]).permute(2, 0, 1)


def sinusoids(seq_len: int, d_model: int) -> Tensor:
    """(T, D): sin and cos of t 10000^(-2i/D), interleaved. Vaswani et al. 2017, section 3.5."""
    frequency = 1e4 ** (-torch.arange(0, d_model, 2, dtype=torch.float64) / d_model)
    angle = torch.outer(torch.arange(seq_len, dtype=torch.float64), frequency)
    return torch.stack((angle.sin(), angle.cos()), dim=-1).flatten(1).to(torch.get_default_dtype())


class Attention(nn.Module):
    """softmax(scale q k^T + bias) v over the tokens so far. Vaswani et al. 2017, eq. 1."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        assert config.d_head is not None
        assert config.n_kv_heads is not None
        A, KV = config.d_attention, config.d_key_value
        self.d_head, self.group = config.d_head, config.n_heads // config.n_kv_heads
        self.widths = (A, KV, KV)
        self.scale = 1.0 if config.attention_scale is AttentionScale.one else config.d_head**-0.5
        self.dropout = config.dropout
        self.qkv_proj = nn.Linear(config.d_model, A + 2 * KV, bias=config.bias)
        self.out_proj = nn.Linear(A, config.d_model, bias=config.bias)
        # Over each head (Gemma 3, Qwen 3), or over all heads at once before they part (OLMo 2).
        self.full_norm = config.qk_norm is QKNorm.full
        sizes = {QKNorm.none: None, QKNorm.per_head: (config.d_head,) * 2, QKNorm.full: (A, KV)}[config.qk_norm]
        self.query_norm = Norm(config, sizes[0]) if sizes else None
        self.key_norm = Norm(config, sizes[1]) if sizes else None
        self.rope: Rope | None = None
        if config.position is Position.rope:
            assert config.rope_theta is not None
            self.rope = Rope(config.seq_len, config.d_head, config.rope_theta)

    def heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value, (B, H, T, K) each: normed, with positions, keys and values shared out to all heads."""
        q, k, v = self.qkv_proj(x).split(self.widths, dim=-1)
        if self.full_norm:
            q, k = self._norm_query_key(q, k)
        q, k, v = (part.unflatten(-1, (-1, self.d_head)).transpose(1, 2) for part in (q, k, v))
        if not self.full_norm:
            q, k = self._norm_query_key(q, k)
        if self.rope is not None:
            q, k = self.rope(q), self.rope(k)
        if self.group > 1:
            k, v = (part.repeat_interleave(self.group, dim=1) for part in (k, v))
        return q, k, v

    def _norm_query_key(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        if self.query_norm is None or self.key_norm is None:
            return q, k
        return self.query_norm(q), self.key_norm(k)

    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:  # (B, T, D), (H, T, T) -> (B, T, D)
        q, k, v = self.heads(x)
        mask = None if bias is None else bias.to(q.dtype) + _later(x)
        rate = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, dropout_p=rate, scale=self.scale
        )
        return self.out_proj(mixed.transpose(1, 2).flatten(2))

    def logits(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """(B, H, T, T) scores before the softmax, -inf on later tokens: the fast path keeps none."""
        q, k, _ = self.heads(x)
        scores = q @ k.transpose(-2, -1) * self.scale
        return (scores if bias is None else scores + bias) + _later(x)


def _later(x: Tensor) -> Tensor:
    """(T, T): -inf on tokens that a token must not see, 0 elsewhere."""
    T = x.shape[1]
    return torch.full((T, T), -math.inf, dtype=x.dtype, device=x.device).triu(1)
