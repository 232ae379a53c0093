"""The model and its axes: properties that hold at every combination, and formulas written out by hand."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator
from enum import Enum
from fractions import Fraction
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from conftest import TINY, make
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from andrea_exp import config as config_module
from andrea_exp import data
from andrea_exp import rules as rules_module
from andrea_exp.config import (
    Activation,
    Init,
    ModelConfig,
    NormPlacement,
    NormType,
    Position,
    RunConfig,
    SweepConfig,
    from_dict,
    parse_ratio,
    round_width,
)
from andrea_exp.errors import UserError
from andrea_exp.model import GPT
from andrea_exp.model import init as init_module
from andrea_exp.model import residual as residual_module
from andrea_exp.model.attention import Rope
from andrea_exp.model.layers import Norm
from andrea_exp.rules import IDENTITY_SECTIONS, field_names, get, rules_of, signature
from andrea_exp.sweep.plan import plan_sweep

torch.set_num_threads(1)


def every(field: str, choices: type[Enum]) -> str:
    return f"model.{field}=" + ",".join(c.name for c in choices)


AXES = {"norm_placement": NormPlacement, "norm_type": NormType, "activation": Activation, "position": Position}
FOUR_BLOCKS = [*(t for t in TINY if "n_layers" not in t), "model.n_layers=4"]  # mix has a first quarter from 4 on


def named(models: list[ModelConfig]) -> dict[str, ModelConfig]:
    def name(m: ModelConfig) -> str:
        norm = m.norm_type.name if m.norm_type else "no_norm"
        return f"{m.norm_placement.name}-{norm}-{m.activation.name}-{m.position.name}"

    return {name(m): m for m in models}


def combinations(**fixed: str) -> dict[str, ModelConfig]:
    """Every combination of the choices that shape a block, under a name; a dead norm type is there once."""
    axes = [every(f, choices) for f, choices in AXES.items() if f not in fixed]
    words = [f"model.{field}={value}" for field, value in fixed.items()]
    return named([cell.config.model for cell in plan_sweep([*FOUR_BLOCKS, *axes, *words]).cells])


def covering() -> dict[str, ModelConfig]:
    """Every placement with every norm type, the other choices taking turns: each of them meets most of the others."""
    pairs = plan_sweep([*FOUR_BLOCKS, every("norm_placement", NormPlacement), every("norm_type", NormType)]).cells
    activations, positions = itertools.cycle(Activation), itertools.cycle(Position)
    turns = [
        dataclasses.replace(
            cell.config.model,
            activation=next(activations),
            position=(position := next(positions)),
            rope_theta=1e4 if position is Position.rope else None,
        )
        for cell in pairs
        for _ in range(3)
    ]
    return named(turns)


COMBINATIONS = covering()
at_every_combination = pytest.mark.parametrize("config", COMBINATIONS.values(), ids=COMBINATIONS.keys())


def tokens_of(config: ModelConfig, seed: int = 0) -> Tensor:
    """(2, T) random ids."""
    return torch.randint(config.vocab_size, (2, config.seq_len), generator=torch.Generator().manual_seed(seed))


def scattered(config: ModelConfig) -> GPT:
    """A float64 model whose gains and biases have left 1 and 0, so that a lost one would show."""
    model = GPT(config).double()
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter += 0.3 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    return model


# Causality and positions


@pytest.mark.parametrize("placement", [p.name for p in NormPlacement])
def test_a_token_reaches_its_own_and_later_logits_alone(placement: str) -> None:
    """At every combination of all axes."""
    models = combinations(norm_placement=placement)
    assert len(models) == (1 if placement == "none" else len(NormType)) * len(Activation) * len(Position)
    for config in models.values():
        check_causality(config)


OTHER_AXES = ("block_layout=parallel", "residual=false", "n_kv_heads=1", "d_head=6", "qk_norm=per_head", "qk_norm=full")


@pytest.mark.parametrize(
    "axis", [*OTHER_AXES, "branch_multiplier=inv_depth", "embedding_norm=true", "final_norm=false"]
)
def test_the_other_axes_are_causal_too(axis: str) -> None:
    check_causality(make(f"model.{axis}").model)


def check_causality(config: ModelConfig) -> None:
    """Row t changes the tokens from t on: its logits before t keep every bit, all others change."""
    T = config.seq_len
    tokens = tokens_of(config)[:1].expand(T, T)
    position = torch.arange(T)
    reached = position >= position[:, None]
    changed = torch.where(reached, (tokens + 100) % config.vocab_size, tokens)
    model = GPT(config)
    with torch.no_grad():
        same = (model(tokens) == model(changed)).all(-1)
    assert torch.equal(same, ~reached)


@at_every_combination
def test_a_shorter_text_has_the_same_logits(config: ModelConfig) -> None:
    model, tokens = scattered(config), tokens_of(config)
    with torch.no_grad():
        torch.testing.assert_close(model(tokens[:, :5]), model(tokens)[:, :5], rtol=0, atol=1e-12)


@at_every_combination
def test_float64_differs_from_float32_by_roundings(config: ModelConfig) -> None:
    single, tokens = GPT(config), tokens_of(config)
    double = GPT(config).double()
    with torch.no_grad():
        found = double(tokens)
        assert found.dtype == double.loss(tokens, tokens).dtype == torch.float64
        # Without norms a bilinear MLP's logits grow to 10 and more, and their roundings with them.
        atol = 1e-5 * max(1.0, found.abs().max().item())
        torch.testing.assert_close(single(tokens).double(), found, rtol=0, atol=atol)


@pytest.fixture
def _float64_by_default() -> Iterator[None]:
    """As in a run with precision 64-true."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.usefixtures("_float64_by_default")
def test_rope_turns_pairs_by_the_position_times_their_frequency() -> None:
    """Su et al. 2021, eq. 34, in complex numbers."""
    x = torch.randn(1, 1, 9, 8, generator=torch.Generator().manual_seed(0))
    turned = Rope(9, 8, 100.0)(x)[0, 0]
    for t, i in itertools.product(range(9), range(4)):
        angle = t * 100.0 ** (-2 * i / 8)
        pair = complex(x[0, 0, t, i], x[0, 0, t, i + 4]) * complex(math.cos(angle), math.sin(angle))
        assert complex(turned[t, i], turned[t, i + 4]) == pytest.approx(pair, abs=1e-14)


def test_attention_equals_its_formula() -> None:
    """softmax(q k^T / sqrt(K)) v over the tokens so far, head by head; `logits` are the scores it uses."""
    config = make("model.n_heads=4").model
    attention = scattered(config).trunk.blocks[0].attn
    x = torch.randn(1, 6, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        q, k, v = attention.qkv_proj(x)[0].chunk(3, dim=-1)
        mixed = torch.zeros(6, 16, dtype=torch.float64)
        for head, t in itertools.product(range(4), range(6)):
            part = slice(4 * head, 4 * head + 4)
            scores = torch.tensor([float(q[t, part] @ k[s, part]) / 2 for s in range(t + 1)], dtype=torch.float64)
            mixed[t, part] = scores.softmax(0) @ v[: t + 1, part]
            torch.testing.assert_close(attention.logits(x)[0, head, t, : t + 1], scores)
        torch.testing.assert_close(attention(x)[0], attention.out_proj(mixed))


# Placements


def hand_norm(norm: Norm) -> Callable[[Tensor], Tensor]:
    """A norm's formula with its parameters."""

    def apply(x: Tensor) -> Tensor:
        gain = 1 + norm.gain if norm.norm_type is NormType.rmsnorm_1p else norm.gain
        if norm.norm_type is NormType.layernorm:
            x = x - x.mean(-1, keepdim=True)
        if norm.norm_type is NormType.dyt:
            scaled = gain * torch.tanh(norm.alpha * x)
        else:
            scaled = x / (x.square().mean(-1, keepdim=True) + norm.eps).sqrt() * gain
        return scaled if norm.bias is None else scaled + norm.bias

    return apply


Function = Callable[[Tensor], Tensor]


def pre(x: Tensor, sublayers: list[Function], norms: list[Function]) -> Tensor:
    *inner, final = norms
    for F, N in zip(sublayers, inner, strict=True):
        x = x + F(N(x))
    return final(x)


def post(x: Tensor, sublayers: list[Function], norms: list[Function]) -> Tensor:
    for F, N in zip(sublayers, norms, strict=True):
        x = N(x + F(x))
    return x


def peri(x: Tensor, sublayers: list[Function], norms: list[Function]) -> Tensor:
    read, *rest = norms
    for i, F in enumerate(sublayers):
        x = x + rest[2 * i](F(read(x)))
        read = rest[2 * i + 1]
    return read(x)


def reordered(x: Tensor, sublayers: list[Function], norms: list[Function]) -> Tensor:
    *inner, final = norms
    for F, N in zip(sublayers, inner, strict=True):
        x = x + N(F(x))
    return final(x)


def layer_scaled(x: Tensor, sublayers: list[Function], norms: list[Function]) -> Tensor:
    *inner, final = norms
    for i, (F, N) in enumerate(zip(sublayers, inner, strict=True)):
        x = x + F(N(x) / math.sqrt(i // 2 + 1))  # block l = 1, 2, ... has two sublayers
    return final(x)


def mix(x: Tensor, sublayers: list[Function], norms: list[Function]) -> Tensor:
    quarter = len(sublayers) // 4
    return pre(post(x, sublayers[:quarter], norms[:quarter]), sublayers[quarter:], norms[quarter:])


def deepnorm(x: Tensor, sublayers: list[Function], norms: list[Function]) -> Tensor:
    alpha = len(sublayers) ** 0.25  # (2L)^(1/4): two sublayers a block
    for F, N in zip(sublayers, norms, strict=True):
        x = N(alpha * x + F(x))
    return x


def none(x: Tensor, sublayers: list[Function], norms: list[Function]) -> Tensor:
    assert not norms
    for F in sublayers:
        x = x + F(x)
    return x


FORMULAS = {
    NormPlacement.pre: pre,
    NormPlacement.post: post,
    NormPlacement.peri: peri,
    NormPlacement.reordered: reordered,
    NormPlacement.deepnorm: deepnorm,
    NormPlacement.layer_scaled: layer_scaled,
    NormPlacement.mix: mix,
    NormPlacement.none: none,
}


@at_every_combination
def test_trunk_equals_its_placements_formula(config: ModelConfig) -> None:
    model = scattered(config)
    sublayers = [part for block in model.trunk.blocks for part in (block.attn, block.mlp)]
    norms = [hand_norm(m) for m in model.trunk.modules() if isinstance(m, Norm)]
    x = torch.randn(2, 8, config.d_model, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        # T5's bias is one more argument of every attention, zero here.
        expected = FORMULAS[config.norm_placement](x, sublayers, norms)
        torch.testing.assert_close(model.trunk(x), expected, rtol=1e-11, atol=1e-11)


def test_deepnorm_constants() -> None:
    """Wang et al. 2022, table 1, decoder alone: alpha = (2L)^(1/4), beta = (8L)^(-1/4)."""
    assert [residual_module.deepnorm_alpha(n) for n in (8, 128)] == pytest.approx([2, 4])
    assert [residual_module.deepnorm_beta(n) for n in (2, 32)] == pytest.approx([1 / 2, 1 / 4])


def test_deepnorm_without_its_constants_is_post(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(residual_module, "deepnorm_alpha", lambda _: 1.0)
    monkeypatch.setattr(init_module, "deepnorm_beta", lambda _: 1.0)
    one, other = (make(f"model.norm_placement={p}").model for p in ("post", "deepnorm"))
    tokens = tokens_of(one)
    assert torch.equal(GPT(one)(tokens), GPT(other)(tokens))


# Axes: no knob does nothing

DEEPER = ("model.reference_layers=8", "model.d_model=64", "model.seq_len=256")
# A field -> overrides that make it live, and one that changes it.
CHANGES: dict[str, tuple[tuple[str, ...], str]] = {
    "d_model": ((), "model.d_model=32"),
    "n_layers": ((), "model.n_layers=3"),
    "depth_mode": ((*DEEPER, "model.depth_mode=equal_parameters"), "model.depth_mode=equal_flops"),
    "reference_layers": ((*DEEPER, "model.depth_mode=equal_parameters"), "model.reference_layers=4"),
    "n_heads": ((), "model.n_heads=4"),
    "n_kv_heads": ((), "model.n_kv_heads=1"),
    "d_head": ((), "model.d_head=4"),
    "seq_len": ((), "model.seq_len=32"),
    "vocab_size": ((), "model.vocab_size=300"),
    "expansion_ratio": ((), "model.expansion_ratio=2"),
    "mlp_match": (("model.activation=swiglu",), "model.mlp_match=params"),
    "activation": ((), "model.activation=gelu"),
    "block_layout": ((), "model.block_layout=parallel"),
    "residual": ((), "model.residual=false"),
    "branch_multiplier": ((), "model.branch_multiplier=inv_depth"),
    "norm_placement": (("model.norm_placement=post",), "model.norm_placement=deepnorm"),
    "norm_type": (("model.bias=false",), "model.norm_type=rmsnorm"),
    "norm_bias": ((), "model.norm_bias=false"),
    "eps": ((), "model.eps=1e-6"),
    "final_norm": ((), "model.final_norm=false"),
    "qk_norm": ((), "model.qk_norm=full"),
    "attention_scale": ((), "model.attention_scale=one"),
    "embedding_scale": ((), "model.embedding_scale=sqrt_d_model"),
    "embedding_norm": ((), "model.embedding_norm=true"),
    "bias": ((), "model.bias=false"),
    "tied_head": ((), "model.tied_head=true"),
    "position": ((), "model.position=rope"),
    "rope_theta": (("model.position=rope",), "model.rope_theta=100"),
    "init": ((), "model.init=small"),
    "dropout": ((), "model.dropout=0.5"),
}
MODEL_FIELDS = [f.name for f in dataclasses.fields(ModelConfig)]


def replaced(overrides: tuple[str, ...], change: str) -> tuple[str, ...]:
    """Overrides with one more, which takes the place of another value of its field."""
    return (*(o for o in overrides if o.split("=")[0] != change.split("=")[0]), change)


def outcome(config: ModelConfig) -> tuple[int, list[float]]:
    """A model's parameter count and its output on fixed tokens."""
    model = GPT(config).double()
    with torch.no_grad():
        logits = model(torch.arange(2 * 8).view(2, 8))
    return sum(p.numel() for p in model.parameters()), logits.flatten().tolist()


@pytest.mark.parametrize("field", MODEL_FIELDS)
def test_every_field_changes_parameters_or_output(field: str) -> None:
    live, change = CHANGES[field]
    before, after = make(*live).model, make(*replaced(live, change)).model
    assert getattr(before, field) != getattr(after, field)
    assert outcome(before) != outcome(after)


def choices_of(field: dataclasses.Field) -> list[Enum]:
    kinds = [t for t in (field.type, *get_args(field.type)) if isinstance(t, type) and issubclass(t, Enum)]
    return list(kinds[0]) if kinds else []


# What a field's choices need to be told apart. Depth modes build one model at their reference depth.
CONTEXT = {"norm_placement": ("model.n_layers=4",), "mlp_match": ("model.activation=swiglu",)}
# One function with two names for its parameter: Gemma's checkpoints hold gain - 1.
SAME = {frozenset({"rmsnorm", "rmsnorm_1p"})}
TOLD_APART = [f for f in dataclasses.fields(ModelConfig) if choices_of(f) and f.name != "depth_mode"]


@pytest.mark.parametrize("field", TOLD_APART, ids=lambda f: f.name)
def test_no_two_choices_of_a_field_are_the_same_model(field: dataclasses.Field) -> None:
    context = ("model.bias=false", *CONTEXT.get(field.name, ()))
    outcomes = {c.name: outcome(make(f"model.{field.name}={c.name}", *context).model) for c in choices_of(field)}
    for one, other in itertools.combinations(outcomes, 2):
        assert (outcomes[one] == outcomes[other]) == (frozenset({one, other}) in SAME), (one, other)


OF_SLURM = {
    "partition": "long",
    "account": "physics",
    "time_min": 30,
    "warn_s": 60,
    "mem_gb": 8,
    "flags": "{qos: high}",
    "detach": "true",
    "gpus": 1,
}
# A conditional field -> what makes it dead, and a value of it; None where it always has a meaning.
DEAD: dict[str, tuple[str, str] | None] = {
    "data.corpus": None,
    "data.path": ("data.corpus=sotu", "data.path=/nowhere"),
    "data.subset": ("data.corpus=sotu", "data.subset=x"),
    "data.split": ("data.corpus=sotu", "data.split=train"),
    "data.text_field": ("data.corpus=sotu", "data.text_field=text"),
    "data.revision": ("data.corpus=sotu", f"data.revision={'0' * 40}"),
    "data.max_bytes": ("data.corpus=sotu", "data.max_bytes=9"),
    "data.tokenizer_path": ("data.tokenizer=bpe", "data.tokenizer_path=x.json"),
    "data.vocab_size": ("data.tokenizer=bytes", "data.vocab_size=300"),
    "model.vocab_size": None,
    "model.reference_layers": ("model.depth_mode=fixed_width", "model.reference_layers=8"),
    "model.n_kv_heads": None,
    "model.final_norm": None,
    "model.norm_type": ("model.norm_placement=none", "model.norm_type=rmsnorm"),
    "model.norm_bias": ("model.norm_type=rmsnorm", "model.norm_bias=true"),
    "model.eps": ("model.norm_type=dyt", "model.eps=1e-6"),
    "model.rope_theta": ("model.position=learned", "model.rope_theta=100"),
    "pool.runs_per_gpu": ("pool.kind=ray", "pool.runs_per_gpu=2"),
    **{
        f"pool.{field}": ("pool.kind=local", f"pool.{field}={value}")
        for field, value in {**OF_SLURM, "address": "auto"}.items()
    },
    "optim.min_lr_ratio": ("optim.schedule=constant", "optim.min_lr_ratio=0.5"),
    "optim.decay_fraction": ("optim.schedule=cosine", "optim.decay_fraction=0.5"),
}


@pytest.mark.parametrize("field", [rule.field for rule in rules_of(make())])
def test_a_dead_field_is_null_and_setting_it_raises(field: str) -> None:
    if (case := DEAD[field]) is None:
        assert get(make(), field) is not None
        return
    killer, value = case
    assert get(make(killer), field) is None
    with pytest.raises(UserError, match=f"{field}=.* has no meaning with {killer.split('=')[0]}"):
        make(killer, value)


@pytest.mark.parametrize(
    ("live", "field", "default"),
    [
        ("data.tokenizer=bpe", "data.vocab_size", 2048),
        ("data.tokenizer=bpe", "model.vocab_size", 2048),
        ("data.tokenizer=bytes", "model.vocab_size", 257),
        ("model.norm_placement=pre", "model.norm_type", NormType.layernorm),
        ("model.norm_placement=post", "model.eps", 1e-5),
        ("model.position=rope", "model.rope_theta", 1e4),
        ("optim.schedule=cosine", "optim.min_lr_ratio", 0.1),
        ("optim.schedule=wsd", "optim.decay_fraction", 0.2),
    ],
)
def test_a_live_field_gets_its_value(live: str, field: str, default: Any) -> None:
    assert get(make(live), field) == default


def test_a_field_that_an_arm_makes_meaningless_is_dropped() -> None:
    """Sweeping over placements may set a norm type: the arm without norms leaves it out."""
    cells = plan_sweep([*TINY, "model.norm_placement=pre,none", "model.norm_type=rmsnorm"]).cells
    assert [cell.config.model.norm_type for cell in cells] == [NormType.rmsnorm, None]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["model.d_model=18", "model.n_heads=4"], "model.d_model=18 is not divisible by model.n_heads=4; 3 heads"),
        (["model.d_model=18", "model.n_heads=6", "model.position=rope"], "even head size"),
        (["model.n_layers=0"], "model.n_layers=0: must be at least 1"),
        (["model.eps=0"], "model.eps=0.0: must be above 0"),
        (["model.vocab_size=256"], "model.vocab_size=256 is smaller than the tokenizer's 257"),
        (["model.expansion_ratio=0"], "not a positive ratio"),
        (["model.expansion_ratio=1/0"], "not a positive ratio"),
        (["model.expansion_ratio=four"], "not a positive ratio"),
        (["model.expansion_ratio=0.1"], "d_ff=1.6, which no whole width meets within 1%"),
        (["model.norm_placement=prae"], "did you mean pre"),
        (["model.norm_placment=pre"], "did you mean model.norm_placement"),
    ],
)
def test_what_cannot_be_built_is_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        make(*overrides)


# Weights


def logical(model: GPT) -> dict[str, Tensor]:
    """Every matrix by its name, the packed ones apart: name.query, name.key, name.value; name.gate, name.up."""
    parts = {"qkv_proj.weight": ("query", "key", "value"), "gate_up_proj.weight": ("gate", "up")}
    found = {}
    for name, parameter in model.named_parameters():
        if parameter.ndim < 2:
            continue
        for packed, names in parts.items():
            if name.endswith(packed):
                pieces = parameter.detach().chunk(len(names))
                found |= {name.replace(packed, n): p for n, p in zip(names, pieces, strict=True)}
                break
        else:
            found[name.replace("up_proj.weight", "up")] = parameter.detach()
    return found


def test_the_same_seed_gives_the_same_bits_and_another_other_weights() -> None:
    config = make().model
    one, again, other = (logical(GPT(config, seed)) for seed in (3, 3, 4))
    assert all(torch.equal(one[name], again[name]) for name in one)
    assert not any(torch.equal(one[name], other[name]) for name in one)


def test_weights_do_not_depend_on_the_global_generator() -> None:
    config = make().model
    torch.manual_seed(1)
    one = logical(GPT(config))
    torch.manual_seed(2)
    assert all(torch.equal(weight, one[name]) for name, weight in logical(GPT(config)).items())


def test_no_two_matrices_start_alike() -> None:
    """Noise is a function of the name: no matrix is another's copy, packed or not."""
    matrices = [
        m.flatten()[:64] for m in logical(GPT(make("model.activation=swiglu", "model.init=normal").model)).values()
    ]
    assert not any(torch.equal(a, b) for a, b in itertools.combinations(matrices, 2))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("model.norm_placement=pre", "model.norm_placement=post"),
        ("model.norm_placement=pre", "model.norm_placement=none"),
        ("model.norm_type=layernorm", "model.norm_type=rmsnorm"),
        ("model.activation=relu", "model.activation=gelu_tanh"),
        ("model.activation=gelu", "model.activation=swiglu"),
        ("model.position=learned", "model.position=rope"),
        ("model.tied_head=false", "model.tied_head=true"),
        ("model.bias=true", "model.bias=false"),
        ("model.n_layers=2", "model.n_layers=3"),
    ],
)
def test_arms_share_the_matrices_they_have_in_common(one: str, other: str) -> None:
    first, second = (logical(GPT(make(o).model, seed=5)) for o in (one, other))
    shared = first.keys() & second.keys()
    assert len(shared) >= len(first) - 1  # all but a head or a table of positions
    assert all(torch.equal(first[name], second[name]) for name in shared)


def test_deepnorm_shares_pre_norms_matrices_up_to_beta() -> None:
    pre_norm, deep = (logical(GPT(make(f"model.norm_placement={p}").model)) for p in ("pre", "deepnorm"))
    beta = (8 * 2) ** -0.25
    for name, weight in deep.items():
        scaled = name.endswith(("value", "out_proj.weight", "mlp.up", "down_proj.weight"))
        torch.testing.assert_close(weight, pre_norm[name] * (beta if scaled else 1), rtol=1e-6, atol=0)


def role_of(name: str) -> str:
    """query, key, value, out_proj, gate, up, down_proj, head, token_embedding or position_embedding."""
    return name.removesuffix(".weight").split(".")[-1]


def expected_std(config: ModelConfig, role: str) -> float:
    """The inits as the literature has them: GPT-2 for scaled, Glorot & Bengio, Nguyen & Salazar."""
    D, F, V = config.d_model, config.d_ff, config.vocab_size
    if role.endswith("embedding"):
        return 0.02
    ends = {"gate": (D, F), "up": (D, F), "down_proj": (F, D), "head": (D, V)}.get(role, (D, D))
    std = {
        Init.normal: 0.02,
        Init.scaled: 0.02 / math.sqrt(2 * config.n_layers) if role in ("out_proj", "down_proj") else 0.02,
        Init.xavier: math.sqrt(2 / sum(ends)),
        Init.small: math.sqrt(2 / (5 * D)),
    }[config.init]
    scaled_down = config.norm_placement is NormPlacement.deepnorm and role not in ("query", "key", "head")
    return std * (8 * config.n_layers) ** -0.25 if scaled_down else std


@pytest.mark.parametrize("placement", ["pre", "deepnorm"])
@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
@pytest.mark.parametrize("init", [i.name for i in Init])
def test_measured_standard_deviations(init: str, activation: str, placement: str) -> None:
    """A standard deviation of n values is known to 1/sqrt(2n); five times that leaves out no honest matrix."""
    wide = ("model.d_model=128", "model.seq_len=128", f"model.init={init}", f"model.activation={activation}")
    config = make(*wide, f"model.norm_placement={placement}").model
    for name, weight in logical(GPT(config)).items():
        n, std = weight.numel(), expected_std(config, role_of(name))
        assert weight.std().item() == pytest.approx(std, rel=5 / math.sqrt(2 * n)), name
        assert abs(weight.mean().item()) < 5 * std / math.sqrt(n), name


@at_every_combination
def test_biases_start_at_0_and_gains_at_1(config: ModelConfig) -> None:
    start = 0 if config.norm_type is NormType.rmsnorm_1p else 1
    for name, parameter in GPT(config).named_parameters():
        if parameter.ndim == 1:
            assert parameter.eq(start if name.endswith("gain") else 0).all(), name


# Widths and signatures


@given(st.fractions(min_value=Fraction(1, 10), max_value=20000, max_denominator=1000))
@settings(deadline=None)
def test_round_width(exact: Fraction) -> None:
    """A multiple of the largest of 8, 4, 2, 1 that has one within 1%, and of its multiples the nearest."""

    def near(multiple: int) -> list[int]:
        below = math.floor(exact / multiple) * multiple
        return [w for w in (below, below + multiple) if w and abs(w - exact) <= exact / 100]

    multiple = next((m for m in (8, 4, 2, 1) if near(m)), None)
    if multiple is None:
        with pytest.raises(UserError, match="no whole width meets within 1%"):
            round_width(exact)
    else:
        assert abs(round_width(exact) - exact) == min(abs(w - exact) for w in near(multiple))
        assert round_width(exact) % multiple == 0


def test_a_ratio_is_exact() -> None:
    assert parse_ratio("8/3") == Fraction(8, 3)
    assert make("model.d_model=48", "model.expansion_ratio=8/3").model.d_ff == 128
    assert parse_ratio("2.6875") * 16 == make("model.expansion_ratio=2.6875").model.d_ff == 43
    assert parse_ratio("0.1") == Fraction(1, 10)


@pytest.mark.parametrize("ratio", ["4.0", "8/2", "4.02"])
def test_ratios_that_build_the_same_width_are_one_run(ratio: str) -> None:
    one, other = make("model.expansion_ratio=4"), make(f"model.expansion_ratio={ratio}")
    assert signature(one, "data") == signature(other, "data")


BASE = ("optim.schedule=wsd", "model.position=rope", "data.tokenizer=bpe", "data.vocab_size=300")
# A field -> overrides that change it, on top of BASE. TEXT stands for a file of another corpus.
IDENTITY = {
    **{f"model.{name}": (f"{change}",) for name, (_, change) in CHANGES.items()},
    "model.vocab_size": ("model.vocab_size=301",),
    "model.depth_mode": ("model.depth_mode=equal_parameters", "model.reference_layers=8"),
    "model.reference_layers": ("model.depth_mode=equal_parameters", "model.reference_layers=8"),
    "model.mlp_match": ("model.activation=swiglu", "model.mlp_match=params"),
    "model.position": ("model.position=learned",),
    "data.corpus": ("data.corpus=files", "data.path=TEXT"),
    "data.path": ("data.path=TEXT",),
    **{
        f"data.{field}": ("data.corpus=huggingface", "data.path=FOLDER", *change)
        for field, change in {
            "subset": ("data.subset=x",),
            "split": ("data.split=test",),
            "text_field": ("data.text_field=body",),
            "max_bytes": ("data.max_bytes=9",),
        }.items()
    },
    "data.revision": ("data.corpus=huggingface", "data.path=a/b", f"data.revision={'0' * 40}"),
    "data.mix": ("data.mix={a: {corpus: sotu}, b: {path: TEXT}}",),
    "data.tokenizer_path": ("data.tokenizer=file", "data.tokenizer_path=TEXT"),
    "data.tokenizer": ("data.tokenizer=bytes", "data.vocab_size=null", "model.vocab_size=300"),
    "data.vocab_size": ("data.vocab_size=299", "model.vocab_size=300"),
    "data.val_fraction": ("data.val_fraction=0.1",),
    "data.val_windows": ("data.val_windows=9",),
    "optim.lr": ("optim.lr=1e-3",),
    "optim.beta1": ("optim.beta1=0.8",),
    "optim.beta2": ("optim.beta2=0.99",),
    "optim.eps": ("optim.eps=1e-7",),
    "optim.weight_decay": ("optim.weight_decay=0",),
    "optim.clip": ("optim.clip=null",),
    "optim.schedule": ("optim.schedule=cosine",),
    "optim.warmup_steps": ("optim.warmup_steps=1",),
    "optim.min_lr_ratio": ("optim.min_lr_ratio=0",),
    "optim.decay_fraction": ("optim.decay_fraction=0.5",),
    "train.steps": ("train.steps=7",),
    "train.batch_size": ("train.batch_size=8",),
    "train.accumulate": ("train.accumulate=2",),
    "train.ranks": ("train.ranks=2",),
    "train.compile": ("train.compile=true",),
    "train.recompute": ("train.recompute=true",),
    "train.deterministic": ("train.deterministic=true",),
    "train.precision": ("train.precision=64-true",),
    "train.device": ("train.device=auto",),
    "log.every": ("log.every=2",),
    "log.validate_every": ("log.validate_every=2",),
    "log.diagnose_every": ("log.diagnose_every=0",),
    "ops.impl": ("ops.impl=reference",),
    "seed": ("seed=1",),
}
# How and where a run happens; `sweep` is the question that it belongs to.
CIRCUMSTANCES = {
    "pool.kind": ("pool.kind=ray",),
    "pool.threads": ("pool.threads=2",),
    "pool.slots": ("pool.slots=3",),
    "pool.runs_per_gpu": ("pool.runs_per_gpu=2",),
    "pool.retries": ("pool.retries=5",),
    "pool.fail_fast": ("pool.fail_fast=true",),
    **{f"pool.{field}": ("pool.kind=slurm", f"pool.{field}={value}") for field, value in OF_SLURM.items()},
    "pool.address": ("pool.kind=ray", "pool.address=auto"),
    "checkpoint.every_s": ("checkpoint.every_s=5",),
    "checkpoint.keep": ("checkpoint.keep=all",),
    "records": ("records=elsewhere",),
    "tensorboard": ("tensorboard=false",),
    **{f"sweep.{field.name}": None for field in dataclasses.fields(SweepConfig)},
}


@functools.cache
def base() -> RunConfig:
    return make(*BASE)


def signature_of(config: RunConfig) -> str:
    return signature(config, data.fingerprint(config.data))


def changed(field: str, overrides: tuple[str, ...], text: Path) -> RunConfig:
    words = BASE
    for override in overrides:
        words = replaced(words, override.replace("TEXT", str(text)).replace("FOLDER", str(text.parent)))
    config = make(*words)
    assert get(config, field) != get(base(), field)
    return config


@pytest.mark.parametrize("field", [n for n in field_names() if n.split(".")[0] in IDENTITY_SECTIONS])
def test_every_field_of_what_a_run_computes_changes_its_signature(field: str, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("some words\n")
    config = changed(field, IDENTITY[field], text)
    assert signature_of(config) != signature_of(base())


@pytest.mark.parametrize("field", [n for n in field_names() if n.split(".")[0] not in IDENTITY_SECTIONS])
def test_circumstances_leave_the_signature_alone(field: str, tmp_path: Path) -> None:
    if (overrides := CIRCUMSTANCES[field]) is not None:
        assert signature_of(changed(field, overrides, tmp_path)) == signature_of(base())


def test_the_numerics_version_is_part_of_the_signature(monkeypatch: pytest.MonkeyPatch) -> None:
    before = signature(make(), "data")
    monkeypatch.setattr(rules_module, "NUMERICS_VERSION", 0)
    assert signature(make(), "data") != before


@pytest.mark.parametrize("overrides", [(), BASE, ("model.norm_placement=none", "model.expansion_ratio=8/2")])
def test_a_recorded_config_comes_back_equal(overrides: tuple[str, ...]) -> None:
    config = make(*overrides)
    assert from_dict(config_module.as_dict(config)) == config
