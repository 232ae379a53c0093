"""Counts from a config alone."""

from andrea_exp.config import ModelConfig


def trunk_matrices(config: ModelConfig) -> int:
    """Values in the weight matrices of all blocks: what depth modes hold equal."""
    D, A, KV = config.d_model, config.d_attention, config.d_key_value
    attention = D * (A + 2 * KV) + A * D
    mlp = (3 if config.gated else 2) * D * config.d_ff
    return config.n_layers * (attention + mlp)


def flops_per_token(config: ModelConfig) -> int:
    """Matrix FLOPs of one training token, forward and backward (3 x forward), causal attention counted in full.

    A multiply-add is 2 FLOPs; norms and activations are left out, as in Chowdhery et al. 2022, appendix B.
    """
    assert config.vocab_size is not None
    scores_and_mix = 2 * config.seq_len * config.d_attention * config.n_layers
    return 6 * (trunk_matrices(config) + scores_and_mix + config.d_model * config.vocab_size)
