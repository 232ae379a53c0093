"""Counts from a config alone."""

from andrea_exp.config import ModelConfig


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
