"""Our model against models that others wrote: the same weights must give the same logits."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from conftest import make
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from andrea_exp.config import Activation, ModelConfig
from andrea_exp.model import GPT
from andrea_exp.model.gpt import Block

torch.set_num_threads(1)

GPT2_LIKE = (
    "model.d_model=32",
    "model.n_heads=4",
    "model.activation=gelu_tanh",
    "model.position=learned",
    "model.tied_head=true",
    "model.init=scaled",
)
LLAMA_LIKE = (
    "model.d_model=48",
    "model.n_heads=4",
    "model.expansion_ratio=8/3",
    "model.activation=swiglu",
    "model.norm_type=rmsnorm",
    "model.position=rope",
    "model.bias=false",
)
# Logits are of order 1, a float32 rounding is 6e-8 of its term, and a hundred or so add up on the way: an error of
# a few 1e-6 is due. The last test shows that near formulas (eps, erf for tanh, theta) lie 20 tolerances away or more.
TOLERANCE = 1e-5


def scattered(config: ModelConfig) -> GPT:
    """A model whose gains and biases have left 1 and 0, so that a lost one would show."""
    model = GPT(config, seed=1)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            size = 0.3 if parameter.ndim == 1 else 0.1
            parameter += size * torch.randn(parameter.shape, generator=generator)
    return model


def norms(model: GPT) -> Iterator[nn.Module]:
    """A pre-norm model's norms in the order of the stream, the final one last."""
    yield model.trunk.opening.read_norm
    for block in blocks(model):
        yield block.attn_junction.read_norm
        yield block.mlp_junction.read_norm


def blocks(model: GPT) -> list[Block]:
    return list(model.trunk.blocks)  # type: ignore[arg-type]


def as_gpt2(model: GPT, config: ModelConfig) -> GPT2LMHeadModel:
    """Transformers' GPT-2 with our weights; its Conv1D keeps matrices as (in, out)."""
    theirs = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=config.vocab_size,
            n_positions=config.seq_len,
            n_embd=config.d_model,
            n_layer=config.n_layers,
            n_head=config.n_heads,
            activation_function="gelu_new",
            layer_norm_epsilon=config.eps,
            bos_token_id=None,
            eos_token_id=None,
            attn_implementation="eager",
        )
    ).eval()
    state = {
        "transformer.wte.weight": model.token_embedding.weight,
        "lm_head.weight": model.token_embedding.weight,
        "transformer.wpe.weight": model.position_embedding.weight,
    }
    for i, block in enumerate(blocks(model)):
        linears = {
            "attn.c_attn": block.attn.qkv_proj,
            "attn.c_proj": block.attn.out_proj,
            "mlp.c_fc": block.mlp.up_proj,
            "mlp.c_proj": block.mlp.down_proj,
        }
        for name, linear in linears.items():
            state[f"transformer.h.{i}.{name}.weight"] = linear.weight.T
            state[f"transformer.h.{i}.{name}.bias"] = linear.bias
    names = [f"h.{i}.ln_{k}" for i in range(config.n_layers) for k in (1, 2)] + ["ln_f"]
    for name, norm in zip(names, norms(model), strict=True):
        state |= {f"transformer.{name}.weight": norm.gain, f"transformer.{name}.bias": norm.bias}
    theirs.load_state_dict(state)
    return theirs


def as_llama(model: GPT, config: ModelConfig) -> LlamaForCausalLM:
    """Transformers' Llama with our weights: query, key, value, gate and up as matrices of their own."""
    theirs = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.d_model,
            intermediate_size=config.d_ff,
            num_hidden_layers=config.n_layers,
            num_attention_heads=config.n_heads,
            max_position_embeddings=config.seq_len,
            rms_norm_eps=config.eps,
            rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
            tie_word_embeddings=False,
            attn_implementation="eager",
        )
    ).eval()
    state = {"model.embed_tokens.weight": model.token_embedding.weight, "lm_head.weight": model.head.weight}
    for i, block in enumerate(blocks(model)):
        q, k, v = block.attn.qkv_proj.weight.chunk(3)
        gate, up = block.mlp.gate_up_proj.weight.chunk(2)
        state |= {
            f"model.layers.{i}.self_attn.q_proj.weight": q,
            f"model.layers.{i}.self_attn.k_proj.weight": k,
            f"model.layers.{i}.self_attn.v_proj.weight": v,
            f"model.layers.{i}.self_attn.o_proj.weight": block.attn.out_proj.weight,
            f"model.layers.{i}.mlp.gate_proj.weight": gate,
            f"model.layers.{i}.mlp.up_proj.weight": up,
            f"model.layers.{i}.mlp.down_proj.weight": block.mlp.down_proj.weight,
        }
    layers = (f"layers.{i}" for i in range(config.n_layers))
    names = [f"{layer}.{n}" for layer in layers for n in ("input_layernorm", "post_attention_layernorm")]
    for name, norm in zip([*names, "norm"], norms(model), strict=True):
        state[f"model.{name}.weight"] = norm.gain
    theirs.load_state_dict(state)
    return theirs


ORACLES = {"gpt2": (GPT2_LIKE, as_gpt2), "llama": (LLAMA_LIKE, as_llama)}


def gap(ours: GPT, theirs: nn.Module, config: ModelConfig) -> float:
    """The largest difference of two models' logits on random tokens."""
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(config.vocab_size, (4, config.seq_len), generator=generator)
    with torch.no_grad():
        difference: Tensor = ours(tokens) - theirs(tokens).logits
    return difference.abs().max().item()


@pytest.mark.parametrize("name", ORACLES)
def test_logits_equal_those_of_transformers(name: str) -> None:
    overrides, convert = ORACLES[name]
    config = make(*overrides).model
    model = scattered(config)
    assert gap(model, convert(model, config), config) < TOLERANCE


@pytest.mark.parametrize("name", ORACLES)
def test_parameter_count_equals_transformers(name: str) -> None:
    overrides, convert = ORACLES[name]
    config = make(*overrides).model
    model = GPT(config)
    assert sum(p.numel() for p in model.parameters()) == sum(p.numel() for p in convert(model, config).parameters())


@pytest.mark.parametrize("name", ORACLES)
def test_gradients_equal_those_of_transformers(name: str) -> None:
    """The loss of next tokens, too, is theirs: gradients of the token embedding agree."""
    overrides, convert = ORACLES[name]
    config = make(*overrides).model
    ours = scattered(config)
    theirs = convert(ours, config)
    tokens = torch.randint(config.vocab_size, (4, config.seq_len), generator=torch.Generator().manual_seed(3))
    ours.loss(tokens[:, :-1], tokens[:, 1:]).backward()
    theirs(tokens, labels=tokens).loss.backward()
    found, expected = ours.token_embedding.weight.grad, theirs.get_input_embeddings().weight.grad
    assert (found - expected).norm() < 3e-6 * expected.norm()


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("gpt2", {"activation": Activation.gelu}),
        ("gpt2", {"eps": 1e-6}),
        ("llama", {"eps": 1e-6}),
        ("llama", {"rope_theta": 9e3}),
    ],
)
def test_tolerance_tells_near_formulas_apart(name: str, wrong: dict[str, Any]) -> None:
    overrides, convert = ORACLES[name]
    config = make(*overrides).model
    model = scattered(config)
    altered = GPT(dataclasses.replace(config, **wrong))
    altered.load_state_dict(model.state_dict())
    assert gap(altered, convert(model, config), config) > 20 * TOLERANCE
