"""The junction: what happens between two sublayers, for every norm placement, side by side.

After each sublayer F the branch output `delta` = F(read) meets the residual `stream`; the junction gives the
new stream and what the next sublayer reads, both (B, T, D). N is LayerNorm or RMSNorm, L the number of blocks.

| placement | formula        | junction                             | opening    | source             |
|-----------|----------------|--------------------------------------|------------|--------------------|
| pre       | x + F(N(x))    | s = x + delta; stream s, reads N(s)  | reads N(x) | GPT-2              |
| post      | N(x + F(x))    | n = N(x + delta); stream n, reads n  | reads x    | Vaswani 2017       |
| deepnorm  | N(a x + F(x))  | n = N(a x + delta), a = (2L)^(1/4)   | reads x    | Wang 2022, table 1 |
| none      | x + F(x)       | s = x + delta; stream s, reads s     | reads x    | control            |

Under `pre` the last junction's norm is the final norm; under `post` and `deepnorm` every norm closes a sublayer.
"""

from torch import Tensor, nn

from andrea_exp.config import ModelConfig, NormPlacement
from andrea_exp.model.layers import Norm


def deepnorm_alpha(n_layers: int) -> float:
    """Weight of the stream for a decoder alone. Wang et al. 2022, table 1."""
    return (2 * n_layers) ** 0.25


def deepnorm_beta(n_layers: int) -> float:
    """Factor on the init of MLP, value and output matrices for a decoder alone. Wang et al. 2022, table 1."""
    return (8 * n_layers) ** -0.25


class Pre(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.norm = Norm(config)

    def forward(self, stream: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
        return self.norm.add(stream, delta)


class Post(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.norm = Norm(config)

    def forward(self, stream: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
        _, normed = self.norm.add(stream, delta)
        return normed, normed


class DeepNorm(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.norm = Norm(config)
        self.alpha = deepnorm_alpha(config.n_layers)

    def forward(self, stream: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
        _, normed = self.norm.add(stream, delta, stream_scale=self.alpha)
        return normed, normed


class Plain(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()

    def forward(self, stream: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
        total = stream + delta
        return total, total


JUNCTION: dict[NormPlacement, type[nn.Module]] = {
    NormPlacement.pre: Pre,
    NormPlacement.post: Post,
    NormPlacement.deepnorm: DeepNorm,
    NormPlacement.none: Plain,
}


def opening(config: ModelConfig) -> nn.Module:
    """What turns the embedding into the first sublayer's reading."""
    return Norm(config) if config.norm_placement is NormPlacement.pre else nn.Identity()
