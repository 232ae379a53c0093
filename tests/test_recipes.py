"""Recipes at a tiny size against the models of transformers: same weights, same features."""

import pytest
import torch
from conftest import make
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, stack_module_state, vmap
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from andrea_exp import ROOT, facts
from andrea_exp.config import ModelConfig
from andrea_exp.model import GPT

torch.set_num_threads(1)
RECIPES = sorted(path.stem for path in (ROOT / "conf" / "recipe").glob("*.yaml"))
SMALL = ("model.d_model=32", "model.n_layers=3", "model.n_heads=4", "model.seq_len=48", "model.vocab_size=null")
SIZES = {
    "olmo2": SMALL,
    "gemma2": (*SMALL, "model.n_kv_heads=2", "model.d_head=16"),
    "llama3_8b": (*SMALL, "model.n_kv_heads=2"),
    "t5": SMALL,
    "t5_v1_1": (*(s for s in SMALL if "d_model" not in s), "model.d_model=48"),
}
# As for GPT-2 and Llama: a few 1e-6 of rounding at logits of order 1.
TOLERANCE = 1e-5


def tiny(name: str) -> ModelConfig:
    return make(f"recipe={name}", *SIZES[name]).model


def scattered(config: ModelConfig) -> GPT:
    """A model whose gains have left their start, so that a lost one would show."""
    model = GPT(config, seed=1)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            size = 0.3 if parameter.ndim == 1 else 0.1
            parameter += size * torch.randn(parameter.shape, generator=generator)
    return model.eval()


def shared(config: ModelConfig) -> dict[str, object]:
    """What the configs of transformers name alike."""
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.d_model,
        "intermediate_size": config.d_ff,
        "num_hidden_layers": config.n_layers,
        "num_attention_heads": config.n_heads,
        "num_key_value_heads": config.n_kv_heads,
        "max_position_embeddings": config.seq_len,
        "rms_norm_eps": config.eps,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "attn_implementation": "eager",
        "pad_token_id": None,
    }


def matrices(model: GPT, layer: str) -> dict[str, Tensor]:
    """Attention and gated MLP matrices under the names that Llama and its heirs use; `layer` has a place for i."""
    state = {}
    for i, block in enumerate(model.trunk.blocks):
        q, k, v = block.attn.qkv_proj.weight.split(block.attn.widths)
        gate, up = block.mlp.gate_up_proj.weight.chunk(2)
        named = {"q_proj": q, "k_proj": k, "v_proj": v, "o_proj": block.attn.out_proj.weight}
        state |= {f"{layer.format(i)}.self_attn.{n}.weight": w for n, w in named.items()}
        named = {"gate_proj": gate, "up_proj": up, "down_proj": block.mlp.down_proj.weight}
        state |= {f"{layer.format(i)}.mlp.{n}.weight": w for n, w in named.items()}
    return state


def reading(model: GPT) -> list[Tensor]:
    """Gains of the norms that readings pass, in the stream's order, the final one last."""
    junctions = [j for b in model.trunk.blocks for j in (b.attn_junction, b.mlp_junction)]
    places = [model.trunk.opening, *junctions]
    return [place.read_norm.gain for place in places if place.read_norm is not None]


def as_llama3(model: GPT, config: ModelConfig) -> nn.Module:
    theirs = LlamaForCausalLM(LlamaConfig(**shared(config), tie_word_embeddings=False)).eval()
    state = matrices(model, "model.layers.{}")
    state |= {"model.embed_tokens.weight": model.token_embedding.weight, "lm_head.weight": model.head.weight}
    gains = iter(reading(model))
    for i in range(config.n_layers):
        for name in ("input_layernorm", "post_attention_layernorm"):
            state[f"model.layers.{i}.{name}.weight"] = next(gains)
    theirs.load_state_dict({**state, "model.norm.weight": next(gains)})
    return theirs


def as_olmo2(model: GPT, config: ModelConfig) -> nn.Module:
    theirs = Olmo2ForCausalLM(Olmo2Config(**shared(config), tie_word_embeddings=False)).eval()
    state = matrices(model, "model.layers.{}")
    state |= {"model.embed_tokens.weight": model.token_embedding.weight, "lm_head.weight": model.head.weight}
    for i, block in enumerate(model.trunk.blocks):
        layer = f"model.layers.{i}"
        state[f"{layer}.self_attn.q_norm.weight"] = block.attn.query_norm.gain
        state[f"{layer}.self_attn.k_norm.weight"] = block.attn.key_norm.gain
        state[f"{layer}.post_attention_layernorm.weight"] = block.attn_junction.branch_norm.gain
        state[f"{layer}.post_feedforward_layernorm.weight"] = block.mlp_junction.branch_norm.gain
    (final,) = reading(model)
    theirs.load_state_dict({**state, "model.norm.weight": final})
    return theirs


def as_gemma2(model: GPT, config: ModelConfig) -> nn.Module:
    """Soft caps off, every layer with full attention."""
    theirs = Gemma2ForCausalLM(
        Gemma2Config(
            **shared(config),
            head_dim=config.d_head,
            query_pre_attn_scalar=config.d_head,
            hidden_activation="gelu_pytorch_tanh",
            attn_logit_softcapping=None,
            final_logit_softcapping=None,
            layer_types=["full_attention"] * config.n_layers,
            tie_word_embeddings=True,
        )
    ).eval()
    embedding = model.token_embedding.weight
    state = matrices(model, "model.layers.{}")
    state |= {"model.embed_tokens.weight": embedding, "lm_head.weight": embedding}
    gains = iter(reading(model))
    for i, block in enumerate(model.trunk.blocks):
        layer = f"model.layers.{i}"
        state[f"{layer}.input_layernorm.weight"] = next(gains)
        state[f"{layer}.post_attention_layernorm.weight"] = block.attn_junction.branch_norm.gain
        state[f"{layer}.pre_feedforward_layernorm.weight"] = next(gains)
        state[f"{layer}.post_feedforward_layernorm.weight"] = block.mlp_junction.branch_norm.gain
    theirs.load_state_dict({**state, "model.norm.weight": next(gains)})
    return theirs


@pytest.mark.parametrize(("name", "convert"), [("llama3_8b", as_llama3), ("olmo2", as_olmo2), ("gemma2", as_gemma2)])
def test_logits_equal_those_of_transformers(name: str, convert) -> None:
    config = tiny(name)
    model = scattered(config)
    tokens = torch.randint(config.vocab_size, (4, config.seq_len), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        ours, theirs = model(tokens), convert(model, config)(tokens).logits
    assert (ours - theirs).abs().max() < TOLERANCE * theirs.abs().max().clamp(min=1)


def t5_decoder(model: GPT, config: ModelConfig) -> nn.Module:
    """T5's decoder with our weights; its cross-attention adds nothing, since its output matrix is 0."""
    theirs = T5ForConditionalGeneration(
        T5Config(
            vocab_size=config.vocab_size,
            d_model=config.d_model,
            d_kv=config.d_head,
            d_ff=config.d_ff,
            num_layers=config.n_layers,
            num_decoder_layers=config.n_layers,
            num_heads=config.n_heads,
            layer_norm_epsilon=config.eps,
            feed_forward_proj="gated-gelu" if config.gated else "relu",
        )
    ).decoder.eval()
    state = dict(theirs.state_dict())
    gains = iter(reading(model))
    for i, block in enumerate(model.trunk.blocks):
        q, k, v = block.attn.qkv_proj.weight.split(block.attn.widths)
        for name, weight in {"q": q, "k": k, "v": v, "o": block.attn.out_proj.weight}.items():
            state[f"block.{i}.layer.0.SelfAttention.{name}.weight"] = weight
        state[f"block.{i}.layer.1.EncDecAttention.o.weight"] = torch.zeros_like(block.attn.out_proj.weight)
        names = ("wi_0", "wi_1") if config.gated else ("wi",)
        packed = block.mlp.gate_up_proj if config.gated else block.mlp.up_proj
        for name, weight in zip(names, packed.weight.chunk(len(names)), strict=True):
            state[f"block.{i}.layer.2.DenseReluDense.{name}.weight"] = weight
        state[f"block.{i}.layer.2.DenseReluDense.wo.weight"] = block.mlp.down_proj.weight
        state[f"block.{i}.layer.0.layer_norm.weight"] = next(gains)
        state[f"block.{i}.layer.2.layer_norm.weight"] = next(gains)
    state["final_layer_norm.weight"] = next(gains)
    state["embed_tokens.weight"] = model.token_embedding.weight
    state["block.0.layer.0.SelfAttention.relative_attention_bias.weight"] = model.relative_bias.table.weight
    theirs.load_state_dict(state)
    return theirs


@pytest.mark.parametrize("name", ["t5", "t5_v1_1"])
def test_features_equal_those_of_t5s_decoder(name: str) -> None:
    """200 tokens, so that distances reach every bucket, the shared last one too."""
    config = make(f"recipe={name}", *(s for s in SIZES[name] if "seq_len" not in s), "model.seq_len=200").model
    model = scattered(config)
    tokens = torch.randint(config.vocab_size, (2, 200), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        ours = model.trunk(model.embed(tokens), model.relative_bias(200))
        nothing = torch.zeros(2, 1, config.d_model)
        theirs = t5_decoder(model, config)(input_ids=tokens, encoder_hidden_states=nothing).last_hidden_state
    assert (ours - theirs).abs().max() < 2 * TOLERANCE


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_keeps_its_block_at_another_size(name: str) -> None:
    """The words in a recipe's own header build a model that differs from it in size alone."""
    header = (ROOT / "conf" / "recipe" / f"{name}.yaml").read_text()
    words = next(line for line in header.splitlines() if line.startswith("# At another size: ")).split(": ")[1].split()
    published, small = facts.recipe(name), make(*words, "model.seq_len=16").model
    sizes = {"d_model", "n_layers", "n_heads", "n_kv_heads", "d_head", "seq_len", "vocab_size"}
    kept = {k for k in vars(published) if k not in sizes}
    assert {k: getattr(small, k) for k in kept} == {k: getattr(published, k) for k in kept}
    tokens = torch.zeros(1, 16, dtype=torch.long)
    assert torch.isfinite(GPT(small).loss(tokens, tokens))


@pytest.mark.parametrize("name", RECIPES)
def test_replicas_under_vmap_equal_their_own(name: str) -> None:
    """Losses and gradients of stacked models in one call: what packing small runs on one GPU rests on."""
    words = ("model.d_model=24", "model.n_layers=4", "model.n_heads=4", "model.n_kv_heads=2", "model.d_head=6")
    config = make(f"recipe={name}", *words, "model.vocab_size=null", "model.seq_len=8").model
    replicas = [GPT(config, seed).double() for seed in range(3)]
    tokens, targets = torch.randint(config.vocab_size, (2, 3, 2, 8), generator=torch.Generator().manual_seed(4))
    weights, buffers = stack_module_state(replicas)

    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = GPT(config).double()

        def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
            return self.model.loss(tokens, targets)

    skeleton = Loss()

    def loss_of(weights, buffers, tokens, targets) -> Tensor:
        state = {f"model.{k}": v for k, v in {**weights, **buffers}.items()}
        return functional_call(skeleton, state, (tokens, targets))

    gradients, losses = vmap(grad_and_value(loss_of))(weights, buffers, tokens, targets)
    for i, replica in enumerate(replicas):
        loss = replica.loss(tokens[i], targets[i])
        torch.testing.assert_close(losses[i], loss)
        own = torch.autograd.grad(loss, list(replica.parameters()))
        for (key, _), gradient in zip(replica.named_parameters(), own, strict=True):
            torch.testing.assert_close(gradients[key][i], gradient)
