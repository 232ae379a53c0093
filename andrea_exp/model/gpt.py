"""The decoder-only transformer, from token ids to logits. B batch, T time, D d_model, V vocab."""

import torch
from torch import Tensor, nn

from andrea_exp.config import ModelConfig, Position
from andrea_exp.model.attention import Attention
from andrea_exp.model.init import initialise
from andrea_exp.model.layers import MLP
from andrea_exp.model.residual import JUNCTION, opening


class Block(nn.Module):
    """Attention and MLP, each with the junction that follows it."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        junction = JUNCTION[config.norm_placement]
        self.attn = Attention(config)
        self.attn_junction = junction(config)
        self.mlp = MLP(config)
        self.mlp_junction = junction(config)

    def forward(self, stream: Tensor, read: Tensor) -> tuple[Tensor, Tensor]:
        stream, read = self.attn_junction(stream, self.attn(read))
        return self.mlp_junction(stream, self.mlp(read))


class Trunk(nn.Module):
    """The pure-tensor middle: (B, T, D) embeddings to (B, T, D) features."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.opening = opening(config)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layers))

    def forward(self, x: Tensor) -> Tensor:
        stream, read = x, self.opening(x)
        for block in self.blocks:
            stream, read = block(stream, read)
        return read


class GPT(nn.Module):
    """Embedding, trunk, head. `config` must be resolved: every live field has its value."""

    def __init__(self, config: ModelConfig, seed: int = 0) -> None:
        super().__init__()
        assert config.vocab_size is not None
        D, V = config.d_model, config.vocab_size
        self.token_embedding = nn.Embedding(V, D)
        self.position_embedding = None
        if config.position is Position.learned:
            self.position_embedding = nn.Embedding(config.seq_len, D)
        self.trunk = Trunk(config)
        self.head = None if config.tied_head else nn.Linear(D, V, bias=False)
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
        initialise(self, config, seed)

    def forward(self, tokens: Tensor) -> Tensor:  # (B, T) ids -> (B, T, V) logits
        x = self.token_embedding(tokens)
        if self.position_embedding is not None:
            x = x + self.position_embedding.weight[: tokens.shape[1]]
        head = self.token_embedding.weight if self.head is None else self.head.weight
        return nn.functional.linear(self.trunk(x), head)

    def loss(self, tokens: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
        """Cross-entropy in nats a token; `reduction="none"` gives (B, T). Logits are taken in float32 or wider."""
        logits = self(tokens)
        wide = logits if logits.dtype == torch.float64 else logits.float()
        losses = nn.functional.cross_entropy(wide.flatten(0, 1), targets.flatten(), reduction=reduction)
        return losses if reduction == "mean" else losses.view(targets.shape)
