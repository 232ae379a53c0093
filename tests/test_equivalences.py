"""Variants that must coincide where their formulas do."""

import math
from dataclasses import replace

import pytest
import torch
from conftest import make
from torch import Tensor

from andrea_exp import ops
from andrea_exp.config import MLPMatch
from andrea_exp.model import GPT
from andrea_exp.rules import signature

torch.set_num_threads(1)


def logits(model: GPT) -> Tensor:
    with torch.no_grad():
        return model(torch.arange(12).view(1, 12))


def test_layer_scaled_with_one_layer_is_pre():
    """Both of block 1's readings are divided by sqrt(1), and the final norm's is never scaled."""
    pre, scaled = (make(f"model.norm_placement={p}", "model.n_layers=1").model for p in ("pre", "layer_scaled"))
    assert torch.equal(logits(GPT(pre)), logits(GPT(scaled)))


def test_layer_scaled_divides_each_blocks_reading_by_the_root_of_its_number():
    model = GPT(make("model.norm_placement=layer_scaled", "model.n_layers=4").model)
    read = [[j.read_scale for j in (b.attn_junction, b.mlp_junction)] for b in model.trunk.blocks]
    s = [1 / math.sqrt(block) for block in (1, 2, 3, 4)]
    assert read == [[s[0], s[1]], [s[1], s[2]], [s[2], s[3]], [s[3], 1.0]]


def test_bilinear_is_glu_with_the_identity():
    x = torch.randn(5, 12, dtype=torch.float64)
    gate, up = x.chunk(2, dim=-1)
    assert torch.equal(ops.bilinear(x), ops.identity(gate) * up)


@pytest.mark.parametrize("norm_type", ["rmsnorm", "layernorm"])
def test_peri_ignores_the_size_of_its_output_projections(norm_type: str):
    """Its second norm divides the size away, up to eps."""
    config = make("model.norm_placement=peri", f"model.norm_type={norm_type}", "model.eps=1e-12").model
    model, louder = GPT(config).double(), GPT(config).double()
    with torch.no_grad():
        for block in louder.trunk.blocks:
            for projection in (block.attn.out_proj, block.mlp.down_proj):
                projection.weight *= 7
                projection.bias *= 7
    assert (logits(model) - logits(louder)).abs().max() < 1e-8


def test_mix_is_post_in_its_first_quarter_and_pre_after_it():
    """Eight blocks of mix against two of post, then six of pre with the same weights."""
    mix = GPT(make("model.norm_placement=mix", "model.n_layers=8").model).double()
    x = mix.embed(torch.arange(12).view(1, 12))
    with torch.no_grad():
        for index, block in enumerate(mix.trunk.blocks):
            for sublayer, junction in ((block.attn, block.attn_junction), (block.mlp, block.mlp_junction)):
                if index < 2:
                    x = junction.stream_norm(x + sublayer(x))
                else:
                    x = x + sublayer(_norm_before(mix, index, sublayer is block.attn)(x))
        expected = mix.trunk.blocks[-1].mlp_junction.read_norm(x)
        torch.testing.assert_close(mix.trunk(mix.embed(torch.arange(12).view(1, 12))), expected)


def _norm_before(model: GPT, index: int, is_attention: bool):
    """The norm whose output a pre-norm sublayer reads: it belongs to the junction before."""
    blocks = model.trunk.blocks
    return (blocks[index - 1].mlp_junction if is_attention else blocks[index].attn_junction).read_norm


def test_parallel_adds_both_branches_of_one_reading():
    model = GPT(make("model.block_layout=parallel").model).double()
    x = model.embed(torch.arange(12).view(1, 12))
    read = model.trunk.opening(x)
    for block in model.trunk.blocks:
        x = x + block.attn(read) + block.mlp(read)
        read = block.mlp_junction.read_norm(x)
    torch.testing.assert_close(model.trunk(model.embed(torch.arange(12).view(1, 12))), read)


@pytest.mark.parametrize("placement", ["pre", "post", "peri", "reordered", "none"])
def test_without_residual_the_embedding_reaches_the_end_through_branches_alone(placement: str):
    """Branches that give nothing leave nothing, whatever the tokens."""
    model = GPT(make(f"model.norm_placement={placement}", "model.residual=false").model)
    with torch.no_grad():
        for block in model.trunk.blocks:
            block.mlp.down_proj.weight.zero_()
    assert torch.equal(logits(model)[0, 0], logits(model)[0, 7])


def test_rezero_starts_as_the_identity():
    """With its learned weights at 0 every block passes the stream on."""
    model = GPT(make("model.branch_multiplier=rezero", "model.norm_placement=none").model)
    tokens = torch.arange(12).view(1, 12)
    assert torch.equal(model.trunk(model.embed(tokens)), model.embed(tokens))


@pytest.mark.parametrize(("multiplier", "weight"), [("inv_sqrt_depth", 0.5), ("inv_depth", 0.25)])
def test_multipliers_weigh_what_a_branch_adds(multiplier: str, weight: float):
    words = ("model.norm_placement=none", "model.n_layers=4")
    weighed = GPT(make(*words, f"model.branch_multiplier={multiplier}").model).double()
    plain = GPT(make(*words).model).double()
    with torch.no_grad():
        for block in plain.trunk.blocks:
            for projection in (block.attn.out_proj, block.mlp.down_proj):
                projection.weight *= weight
                projection.bias *= weight
    torch.testing.assert_close(logits(weighed), logits(plain))


def test_a_matched_gate_at_4_is_an_unmatched_one_at_8_thirds():
    """One width, so one run."""
    matched = make("model.activation=swiglu", "model.mlp_match=params", "model.d_model=48")
    plain = make("model.activation=swiglu", "model.expansion_ratio=8/3", "model.d_model=48")
    assert matched.model.d_ff == plain.model.d_ff == 128
    assert signature(matched, "data") == signature(plain, "data")


def test_matching_leaves_ungated_widths_alone():
    config = make("model.activation=gelu").model
    assert replace(config, mlp_match=MLPMatch.params).d_ff == config.d_ff


def test_rmsnorm_1p_starts_as_rmsnorm():
    plain, plus = (make(f"model.norm_type={t}").model for t in ("rmsnorm", "rmsnorm_1p"))
    assert torch.equal(logits(GPT(plain)), logits(GPT(plus)))


def test_dropout_is_off_outside_training_and_on_within():
    config = make("model.dropout=0.5").model
    model, plain = GPT(config), GPT(replace(config, dropout=0.0))
    assert torch.equal(logits(model.eval()), logits(plain))
    assert not torch.equal(logits(model.train()), logits(plain))
