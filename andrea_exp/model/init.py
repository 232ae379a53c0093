"""Initial weights: each matrix is standard normal noise, a function of (seed, name), times a standard deviation.

So two arms of a sweep start from the same numbers wherever they have a matrix in common, and an init or a
placement only rescales them. Biases start at 0, gains at 1.
"""

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from andrea_exp.config import Init, ModelConfig, NormPlacement
from andrea_exp.model.attention import Attention
from andrea_exp.model.layers import MLP
from andrea_exp.model.residual import deepnorm_beta

# What DeepNorm scales down, and what `scaled` divides by sqrt(2L). Query and key keep their size.
DEEPNORM_SCALED = frozenset({"value", "attn_out", "gate", "up", "down"})
OUTPUT_PROJECTIONS = frozenset({"attn_out", "down"})


@dataclass(frozen=True)
class Matrix:
    """A logical matrix: query, key and value are three, though one parameter holds them."""

    name: str
    role: str
    weight: Tensor  # (fan_out, fan_in), a view into its parameter


def initialise(model: nn.Module, config: ModelConfig, seed: int) -> None:
    """Writes every matrix and bias of a model in place."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.zero_()
        for matrix in matrices(model):
            generator = torch.Generator().manual_seed(_seed_of(seed, matrix.name))
            noise = torch.randn(matrix.weight.shape, generator=generator, dtype=torch.float32)
            matrix.weight.copy_(noise * std(config, matrix.role, *matrix.weight.shape))


def std(config: ModelConfig, role: str, fan_out: int, fan_in: int) -> float:
    """Standard deviation of a matrix: the four inits side by side."""
    if role == "embedding":
        return 0.02
    L = config.n_layers
    scale = {
        Init.normal: 0.02,
        Init.scaled: 0.02 / math.sqrt(2 * L) if role in OUTPUT_PROJECTIONS else 0.02,  # GPT-2
        Init.xavier: math.sqrt(2 / (fan_in + fan_out)),  # Glorot & Bengio 2010, eq. 12
        Init.small: math.sqrt(2 / (5 * config.d_model)),  # Nguyen & Salazar 2019
    }[config.init]
    if config.norm_placement is NormPlacement.deepnorm and role in DEEPNORM_SCALED:
        scale *= deepnorm_beta(L)
    return scale


def matrices(model: nn.Module) -> Iterator[Matrix]:
    """Every matrix of a model, under a name that does not depend on how parameters are packed."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding):
            yield Matrix(name, "embedding", module.weight)
        elif isinstance(module, Attention):
            parts = module.qkv_proj.weight.split(module.widths)
            for role, part in zip(("query", "key", "value"), parts, strict=True):
                yield Matrix(f"{name}.{role}", role, part)
            yield Matrix(f"{name}.out", "attn_out", module.out_proj.weight)
        elif isinstance(module, MLP):
            roles = ("gate", "up") if module.gated else ("up",)
            packed = module.gate_up_proj if module.gated else module.up_proj
            for role, part in zip(roles, packed.weight.chunk(len(roles)), strict=True):
                yield Matrix(f"{name}.{role}", role, part)
            yield Matrix(f"{name}.down", "down", module.down_proj.weight)
        elif name == "head":
            assert isinstance(module, nn.Linear)
            yield Matrix(name, "head", module.weight)


def _seed_of(seed: int, name: str) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:8]) >> 1
