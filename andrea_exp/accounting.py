"""Counts from a config alone: parameters and FLOPs, exact, on the meta device."""

import torch

from andrea_exp.config import ModelConfig
from andrea_exp.model import GPT


def parameters(config: ModelConfig) -> int:
    """Number of trainable values, a tied head counted once."""
    with torch.device("meta"):
        return sum(p.numel() for p in GPT(config).parameters())


def flops_per_token(config: ModelConfig) -> int:
    """Matrix FLOPs of one training token, forward and backward (3 x forward), causal attention counted in full.

    A multiply-add is 2 FLOPs; norms and activations are left out, as in Chowdhery et al. 2022, appendix B.
    """
    assert config.vocab_size is not None
    D, F, L, T = config.d_model, config.d_ff, config.n_layers, config.seq_len
    mlp = (3 if config.gated else 2) * D * F
    projections = 4 * D * D
    attention = 2 * T * D
    return 6 * (L * (mlp + projections + attention) + D * config.vocab_size)
