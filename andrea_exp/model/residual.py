"""The junction: what happens between two sublayers, for every norm placement, side by side.

After each sublayer F the branch output `delta` = F(read) meets the residual `stream`; the junction gives the
new stream and what the next sublayer reads, both (B, T, D). N is a norm, L the number of blocks, l a block's
number from 1. A placement says at which of three places the norms stand, and what is scaled:

| placement    | formula            | branch | stream | read | scaled                    | source                |
|--------------|--------------------|--------|--------|------|---------------------------|-----------------------|
| pre          | x + F(N(x))        |        |        | N    |                           | GPT-2, Llama          |
| post         | N(x + F(x))        |        | N      |      |                           | Vaswani 2017          |
| peri         | x + N(F(N(x)))     | N      |        | N    |                           | Gemma 2, Kim 2025     |
| reordered    | x + N(F(x))        | N      |        |      |                           | OLMo 2                |
| deepnorm     | N(a x + F(x))      |        | N      |      | stream by a = (2L)^(1/4)  | Wang 2022, table 1    |
| layer_scaled | x + F(N(x)/sqrt l) |        |        | N    | reading by 1/sqrt(l)      | Sun 2025, eq. 4       |
| none         | x + F(x)           |        |        |      |                           | control               |

`mix` is post in the first quarter of the blocks and pre in the rest (Li 2024). With residual=false the x terms go.
After the last sublayer the reading's norm is the final norm.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from andrea_exp.config import BranchMultiplier, ModelConfig, NormPlacement
from andrea_exp.model.layers import Norm


@dataclass(frozen=True)
class Places:
    """Where the norms of a placement stand."""

    branch: bool = False  # on what a branch gives, before it is added
    stream: bool = False  # on the sum, which is the stream from there on
    read: bool = False  # on what the next branch reads, and on nothing else


PLACES = {
    NormPlacement.pre: Places(read=True),
    NormPlacement.post: Places(stream=True),
    NormPlacement.peri: Places(branch=True, read=True),
    NormPlacement.reordered: Places(branch=True),
    NormPlacement.deepnorm: Places(stream=True),
    NormPlacement.layer_scaled: Places(read=True),
    NormPlacement.none: Places(),
}


def placement_of(config: ModelConfig, block: int) -> NormPlacement:
    """The placement of one block, counted from 0: only `mix` has two."""
    if config.norm_placement is not NormPlacement.mix:
        return config.norm_placement
    return NormPlacement.post if block < config.n_layers // 4 else NormPlacement.pre


def deepnorm_alpha(n_layers: int) -> float:
    """Weight of the stream for a decoder alone. Wang et al. 2022, table 1."""
    return (2 * n_layers) ** 0.25


def deepnorm_beta(n_layers: int) -> float:
    """Factor on the init of MLP, value and output matrices for a decoder alone. Wang et al. 2022, table 1."""
    return (8 * n_layers) ** -0.25


class Opening(nn.Module):
    """What the first sublayer reads of the embedding. Block 1 reads at full scale under every placement."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.read_norm = Norm(config) if PLACES[placement_of(config, 0)].read else None

    def forward(self, x: Tensor) -> Tensor:
        return x if self.read_norm is None else self.read_norm(x)


class Junction(nn.Module):
    """Closes a sublayer of block `closed` and opens one of block `opened`, or ends the trunk (None)."""

    def __init__(self, config: ModelConfig, closed: int, opened: int | None) -> None:
        super().__init__()
        places = PLACES[placement_of(config, closed)]
        reads = config.final_norm if opened is None else PLACES[placement_of(config, opened)].read
        self.branch_norm = Norm(config) if places.branch else None
        self.stream_norm = Norm(config) if places.stream else None
        self.read_norm = Norm(config) if reads else None
        self.residual = config.residual
        deep = config.norm_placement is NormPlacement.deepnorm
        self.stream_scale = deepnorm_alpha(config.n_layers) if deep else 1.0
        scaled = config.norm_placement is NormPlacement.layer_scaled and opened is not None
        self.read_scale = 1 / math.sqrt(opened + 1) if scaled and opened is not None else 1.0
        self.multiplier: float | nn.Parameter = _multiplier(config)

    def forward(self, stream: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
        """(B, T, D) stream and branch output -> new stream and next reading. One of two fused ops where it can be."""
        if self.branch_norm is not None and self.residual and self._added_whole():
            total = self.branch_norm.added_to(stream, delta)
            return total, self.read(total)
        return self.meet(stream, self.correction(delta))

    def meet(self, stream: Tensor, added: Tensor) -> tuple[Tensor, Tensor]:
        """What `forward` gives for a correction as it is added."""
        if not self.residual:
            total = added if self.stream_norm is None else self.stream_norm(added)
            return total, self.read(total)
        if self.stream_norm is not None:
            _, total = self.stream_norm.of_sum(stream, added, self.stream_scale)
            return total, self.read(total)
        if self.read_norm is not None:
            return self.read_norm.of_sum(stream, added, out_scale=self.read_scale)
        total = stream + added
        return total, total

    def correction(self, delta: Tensor) -> Tensor:
        """What a branch's output amounts to where it meets the stream."""
        normed = delta if self.branch_norm is None else self.branch_norm(delta)
        return normed if self._added_whole() else self.multiplier * normed

    def _added_whole(self) -> bool:
        return isinstance(self.multiplier, float) and self.multiplier == 1

    def read(self, total: Tensor) -> Tensor:
        """What the next sublayer, or the head, reads of a stream."""
        if self.read_norm is None:
            return total
        read = self.read_norm(total)
        return read if self.read_scale == 1 else read * self.read_scale


def _multiplier(config: ModelConfig) -> float | nn.Parameter:
    """The weight of a branch: learned from 0 (ReZero, Bachlechner 2020), or fixed by depth."""
    if config.branch_multiplier is BranchMultiplier.rezero:
        return nn.Parameter(torch.zeros(()))
    L = config.n_layers
    return {
        BranchMultiplier.one: 1.0,
        BranchMultiplier.inv_sqrt_depth: L**-0.5,
        BranchMultiplier.inv_depth: 1 / L,
    }[config.branch_multiplier]
