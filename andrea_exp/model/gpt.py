"""The decoder-only transformer, from token ids to logits. B batch, T time, D d_model, V vocab."""

import math

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from andrea_exp.config import BlockLayout, EmbeddingScale, ModelConfig, Position
from andrea_exp.model.attention import Attention, RelativeBias, sinusoids
from andrea_exp.model.init import initialise
from andrea_exp.model.layers import MLP, Norm
from andrea_exp.model.residual import Junction, Opening


class Block(nn.Module):
    """Attention and MLP. Sequential: each meets the stream at a junction of its own; parallel: their sum at one."""

    def __init__(self, config: ModelConfig, index: int) -> None:
        super().__init__()
        following = index + 1 if index + 1 < config.n_layers else None
        sequential = config.block_layout is BlockLayout.sequential
        self.attn = Attention(config)
        self.attn_junction = Junction(config, index, index) if sequential else None
        self.mlp = MLP(config)
        self.mlp_junction = Junction(config, index, following)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, stream: Tensor, read: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        delta = self.dropout(self.attn(read, bias))
        if self.attn_junction is None:
            return self.mlp_junction(stream, delta + self.dropout(self.mlp(read)))
        stream, read = self.attn_junction(stream, delta)
        return self.mlp_junction(stream, self.dropout(self.mlp(read)))


class Trunk(nn.Module):
    """The pure-tensor middle: (B, T, D) embeddings to (B, T, D) features."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.opening = Opening(config)
        self.blocks = nn.ModuleList(Block(config, index) for index in range(config.n_layers))
        self.recompute = False  # blocks in the backward pass, instead of keeping their activations

    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        stream, read = x, self.opening(x)
        for block in self.blocks:
            if self.recompute and self.training:
                stream, read = checkpoint(block, stream, read, bias, use_reentrant=False)
            else:
                stream, read = block(stream, read, bias)
        return read


class GPT(nn.Module):
    """Embedding, trunk, head. `config` must be resolved: every live field has its value."""

    def __init__(self, config: ModelConfig, seed: int = 0) -> None:
        super().__init__()
        assert config.vocab_size is not None
        D, V = config.d_model, config.vocab_size
        self.token_embedding = nn.Embedding(V, D)
        self.embedding_scale = math.sqrt(D) if config.embedding_scale is EmbeddingScale.sqrt_d_model else 1.0
        learned, t5 = config.position is Position.learned, config.position is Position.t5
        self.position_embedding = nn.Embedding(config.seq_len, D) if learned else None
        self.relative_bias = RelativeBias(config.n_heads, config.seq_len) if t5 else None
        self.sinusoids: Tensor | None
        waves = sinusoids(config.seq_len, D) if config.position is Position.sinusoidal else None
        self.register_buffer("sinusoids", waves, persistent=False)
        self.embedding_norm = Norm(config) if config.embedding_norm else None
        self.dropout = nn.Dropout(config.dropout)
        self.trunk = Trunk(config)
        self.head = None if config.tied_head else nn.Linear(D, V, bias=False)
        if not self.token_embedding.weight.is_meta:
            initialise(self, config, seed)

    def embed(self, tokens: Tensor) -> Tensor:  # (B, T) ids -> (B, T, D)
        T = tokens.shape[1]
        x = self.token_embedding(tokens)
        if self.embedding_scale != 1:
            x = x * self.embedding_scale
        if self.position_embedding is not None:
            x = x + self.position_embedding.weight[:T]
        if self.sinusoids is not None:
            x = x + self.sinusoids[:T]
        if self.embedding_norm is not None:
            x = self.embedding_norm(x)
        return self.dropout(x)

    def forward(self, tokens: Tensor) -> Tensor:  # (B, T) ids -> (B, T, V) logits
        bias = None if self.relative_bias is None else self.relative_bias(tokens.shape[1])
        return self.read_out(self.trunk(self.embed(tokens), bias))

    def read_out(self, features: Tensor) -> Tensor:  # (..., D) -> (..., V) logits
        head = self.token_embedding.weight if self.head is None else self.head.weight
        return nn.functional.linear(features, head)

    def loss(self, tokens: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
        """Cross-entropy in nats a token; `reduction="none"` gives (B, T). Logits are taken in float32 or wider."""
        logits = self(tokens)
        wide = logits if logits.dtype == torch.float64 else logits.float()
        losses = nn.functional.cross_entropy(wide.flatten(0, 1), targets.flatten(), reduction=reduction)
        return losses if reduction == "mean" else losses.view(targets.shape)
