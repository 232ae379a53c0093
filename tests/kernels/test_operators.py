"""The operators in torch's machinery: opcheck, torch.compile, autocast, checkpointing, no second derivative."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from oracle import DEVICE, EPS, noise
from torch import Tensor, nn
from torch.library import opcheck
from torch.utils.checkpoint import checkpoint
from training import model_config

from andrea_exp import ops
from andrea_exp.config import Activation, Init, NormPlacement, NormType
from andrea_exp.model import GPT
from andrea_exp.ops import fast

k = fast.kernels


@pytest.fixture(autouse=True)
def triton() -> Iterator[dict[str, str]]:
    yield ops.use("triton", DEVICE)
    ops.use("reference")


def leaf(*shape: int, seed: int = 0) -> Tensor:
    return noise(*shape, seed=seed).requires_grad_()


def calls() -> dict[str, tuple[Any, tuple[Any, ...]]]:
    x, up, gain, bias = leaf(2, 3, 8), leaf(2, 3, 8, seed=1), leaf(8, seed=2), leaf(8, seed=3)
    half = noise(2, 3, 8, dtype=torch.bfloat16).requires_grad_()
    return {
        "activation": (k.activation, (x, "gelu")),
        "activation_backward": (k.activation_backward, (up.detach(), x.detach(), "silu")),
        "gate": (k.gate, (x, "silu")),
        "gate_backward": (k.gate_backward, (noise(2, 3, 4), x.detach(), "silu")),
        "norm": (k.norm, (x, gain, bias, EPS, "layernorm")),
        "norm, no parameters": (k.norm, (x, None, None, EPS, "rmsnorm")),
        "add_norm": (k.add_norm, (x, up, gain, bias, EPS, "layernorm", 1.5, 0.5)),
        "add_norm, mixed": (k.add_norm, (half, up, gain, None, EPS, "rmsnorm", 1.0, 1.0)),
        "norm_add": (k.norm_add, (x, up, gain, None, EPS, "rmsnorm")),
        "norm_add, mixed": (k.norm_add, (half, up, gain, None, EPS, "rmsnorm")),
        "norm_backward": (
            k.norm_backward,
            (*(t.detach() for t in (x, up, x, gain)), noise(2, 6).abs(), True, torch.float32, torch.bfloat16, 1.5, 0.5),
        ),
        "norm_backward, no parameters": (
            k.norm_backward,
            (x.detach(), None, x.detach(), None, noise(1, 6).abs(), False, torch.float32, None, 1.0, 1.0),
        ),
    }


@pytest.mark.parametrize("name", calls())
def test_opcheck(name: str) -> None:
    """Schema, autograd registration, fake tensors, and tracing with unknown sizes."""
    operator, arguments = calls()[name]
    found = opcheck(operator.default, arguments)
    assert set(found.values()) == {"SUCCESS"}


def chain(x: Tensor, gain: Tensor, bias: Tensor) -> Tensor:
    """Every operator, and norms that share their parameters one after another."""
    total, read = ops.add_norm(x, ops.layer_norm(x, gain, bias, EPS), gain, bias, EPS, "layernorm", 1.5, 0.5)
    total = ops.norm_add(total, ops.rms_norm(read, gain, EPS), gain, bias, EPS, "layernorm")
    return ops.swiglu(ops.gelu(ops.layer_norm(total, gain, bias, EPS)))


def gradients(function: Callable[..., Tensor], rows: int) -> list[Tensor]:
    leaves = [leaf(rows, 4, 20), leaf(20, seed=1), leaf(20, seed=2)]
    y = function(*leaves)
    return [y.detach(), *torch.autograd.grad(y.square().sum(), leaves)]


def test_compiled_equals_eager_without_a_graph_break() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(chain, fullgraph=True)
    for rows in (3, 5, 2):
        for ours, eager in zip(gradients(compiled, rows), gradients(chain, rows), strict=True):
            torch.testing.assert_close(ours, eager)
    for ours, exact in zip(gradients(compiled, 3), _by_definition(3), strict=True):
        torch.testing.assert_close(ours, exact, rtol=1e-4, atol=1e-4)


def _by_definition(rows: int) -> list[Tensor]:
    with ops.definitions():
        return gradients(chain, rows)


def tiny(norm_type: NormType = NormType.layernorm) -> tuple[nn.Module, Tensor]:
    bias = True if norm_type is NormType.layernorm else None
    choices = {"norm_placement": NormPlacement.peri, "activation": Activation.swiglu, "init": Init.xavier}
    config = model_config(16, 2, 2, 16, vocab_size=257, tied_head=False, norm_type=norm_type, norm_bias=bias, **choices)
    tokens = torch.randint(0, 257, (2, config.seq_len), generator=torch.Generator().manual_seed(0))
    return GPT(config).to(DEVICE), tokens.to(DEVICE)


def losses_and_gradients(model: nn.Module, tokens: Tensor) -> list[Tensor]:
    loss = model.loss(tokens, tokens.roll(1, 1))
    return [loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))]


def test_a_compiled_trunk_equals_the_eager_one() -> None:
    torch._dynamo.reset()
    model, tokens = tiny()
    eager = losses_and_gradients(model, tokens)
    model.trunk.compile(fullgraph=True)
    for ours, theirs in zip(losses_and_gradients(model, tokens), eager, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_checkpointed_blocks_give_the_same_gradients() -> None:
    model, tokens = tiny()
    plain = losses_and_gradients(model, tokens)
    model.trunk.recompute = True
    assert all(torch.equal(a, b) for a, b in zip(losses_and_gradients(model, tokens), plain, strict=True))
    x = leaf(3, 4, 20)
    again = torch.autograd.grad(checkpoint(chain, x, leaf(20, seed=1), leaf(20), use_reentrant=False).sum(), x)
    once = torch.autograd.grad(chain(x, leaf(20, seed=1), leaf(20)).sum(), x)
    assert torch.equal(again[0], once[0])


@pytest.mark.parametrize("norm_type", [NormType.layernorm, NormType.rmsnorm])
def test_autocast_mixes_dtypes_as_the_definition_does(norm_type: NormType) -> None:
    """A bfloat16 branch meets a float32 stream: loss and gradients within bfloat16's grain of float32's own."""
    model, tokens = tiny(norm_type)
    exact = losses_and_gradients(model, tokens)
    with torch.autocast(DEVICE, torch.bfloat16):
        ours = losses_and_gradients(model, tokens)
        with ops.definitions():
            theirs = losses_and_gradients(model, tokens)
    for mine, other, truth in zip(ours, theirs, exact, strict=True):
        assert mine.dtype == other.dtype
        grain = torch.finfo(torch.bfloat16).eps * truth.norm()
        assert (mine - truth).norm() <= 2 * (other - truth).norm() + grain


def test_a_second_derivative_is_refused() -> None:
    for name, (operator, arguments) in calls().items():
        if "backward" not in name:
            outputs = operator(*arguments)
            y = outputs if isinstance(outputs, Tensor) else outputs[-2]
            leaves = [t for t in arguments if isinstance(t, Tensor)]
            slopes = torch.autograd.grad(y.square().sum(), leaves, create_graph=True)
            with pytest.raises(NotImplementedError, match="second derivative"):
                sum(s.square().sum() for s in slopes).backward()


def test_what_ran_is_told_for_every_op(triton: dict[str, str]) -> None:
    assert {name for name, impl in triton.items() if impl == "reference"} == {"identity", "dyt"}
    assert {name for name, impl in triton.items() if impl == "triton"} == set(fast.OPS)
    assert set(ops.use("reference").values()) == {"reference"}
