"""`andrea-exp trace`: its numbers against the model's own and formulas by hand, its words against odd input."""

import itertools
import json
import math
from pathlib import Path

import pytest
import torch
from conftest import make
from torch import Tensor

from andrea_exp.checkpoint import finish
from andrea_exp.cli import main
from andrea_exp.config import Keep, NormPlacement, RunConfig
from andrea_exp.data.tokenizer import BPE, Bytes, escaped, ids_of
from andrea_exp.diagnostics import diagnose, junctions_of, tapped
from andrea_exp.errors import UserError
from andrea_exp.model import GPT
from andrea_exp.record import open_run
from andrea_exp.trace import Trace, streams_by_depth, trace

OTHERS = (
    *("tied_head=true", "block_layout=parallel", "position=t5", "n_kv_heads=1", "norm_type=dyt", "residual=false"),
    *("final_norm=false", "qk_norm=full", "branch_multiplier=inv_sqrt_depth", "activation=relu"),
)
VARIETIES = [*(f"norm_placement={p.name}" for p in NormPlacement), *OTHERS]
at_every_variety = pytest.mark.parametrize("variety", VARIETIES)


def model_of(*words: str) -> GPT:
    """A float64 model of four blocks whose gains and biases have left 1 and 0."""
    model = GPT(make("model.n_layers=4", *(f"model.{word}" for word in words)).model).double().eval()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim < 2:
                parameter += 0.3 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    return model


def text(length: int = 12) -> Tensor:
    return torch.randint(256, (1, length), generator=torch.Generator().manual_seed(0))


ATTENTIONS = ("position=learned", "position=rope", "position=t5", "n_kv_heads=1", "qk_norm=full")


@at_every_variety
def test_the_last_reading_is_the_models_own(variety: str):
    """Probabilities and losses at the last depth are those of the model's logits, to the last bit."""
    model, tokens = model_of(variety), text()
    with torch.no_grad():
        logs = model(tokens)[0].log_softmax(-1)
    for position in range(12):
        last = trace(model, tokens, position).readings[-1]
        best = logs[position].topk(3)
        assert [g.token for g in last.guesses] == best.indices.tolist()
        assert [g.probability for g in last.guesses] == best.values.exp().tolist()
        expected = -logs[position, tokens[0, position + 1]].item() if position < 11 else None
        assert last.next_loss == expected


@at_every_variety
def test_stream_and_correction_make_the_next_stream(variety: str):
    """The law of cosines over every junction, from the reported sizes alone."""
    model, tokens = model_of(variety), text()
    found = trace(model, tokens, 7)
    junctions = [junction for block in model.trunk.blocks for _, junction in junctions_of(block)]
    nexts = [c.stream for c in found.crossings[1:]] + [found.readings[-1].stream]
    for crossing, junction, after in zip(found.crossings, junctions, nexts, strict=True):
        s = junction.stream_scale * crossing.stream * junction.residual
        c = crossing.correction
        total = math.sqrt(s**2 + c**2 + 2 * s * c * crossing.cosine)
        by_place = {n.place: n for n in crossing.norms}
        assert set(by_place) == {
            place
            for place, norm in {
                "branch": junction.branch_norm,
                "sum": junction.stream_norm,
                "read": junction.read_norm,
            }.items()
            if norm is not None
        }
        if "sum" in by_place:
            assert by_place["sum"].before == pytest.approx(total, rel=1e-5)
            total = by_place["sum"].after
        assert after == pytest.approx(total, rel=1e-5)
        if "branch" in by_place and variety != "branch_multiplier=inv_sqrt_depth":
            assert by_place["branch"].after == pytest.approx(c, rel=1e-5)


@pytest.mark.parametrize("placement", ["pre", "peri", "reordered", "layer_scaled", "none"])
def test_the_final_stream_is_the_embedding_and_all_corrections(placement: str):
    model, tokens = model_of(f"norm_placement={placement}"), text()
    with torch.no_grad(), tapped(model) as taps:
        model(tokens)
        junctions = [junction for block in model.trunk.blocks for _, junction in junctions_of(block)]
        added = [j.correction(delta) for j, delta in zip(junctions, taps.deltas, strict=True)]
        streams = list(streams_by_depth(model, taps).values())
    torch.testing.assert_close(streams[-1], model.embed(tokens) + sum(added), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(streams[2], model.embed(tokens) + sum(added[:4]), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("variety", ATTENTIONS)
def test_the_reported_weight_is_one_of_those_that_mix_the_values(variety: str):
    """Weights by hand, head by head, give the attention's own output; the largest is where the head looks."""
    model, tokens = model_of(variety), text()
    found = trace(model, tokens, 9)
    with torch.no_grad(), tapped(model) as taps:
        model(tokens)
        reads = list(taps.attention)
        for block, (read, bias), looking in zip(model.trunk.blocks, reads, found.looking, strict=True):
            q, k, v = (part[0] for part in block.attn.heads(read))
            mixed = torch.zeros(12, 16, dtype=torch.float64)
            for head, t in itertools.product(range(2), range(12)):
                scores = k[head, : t + 1] @ q[head, t] / math.sqrt(8)
                weights = (scores if bias is None else scores + bias[head, t, : t + 1]).softmax(0)
                mixed[t, 8 * head : 8 * head + 8] = weights @ v[head, : t + 1]
                if t == 9:
                    assert looking.heads[head].position == int(weights.argmax())
                    assert looking.heads[head].weight == pytest.approx(weights.max().item(), rel=1e-5)
            torch.testing.assert_close(block.attn.out_proj(mixed), block.attn(read, bias)[0])


@at_every_variety
def test_it_agrees_with_the_diagnosis_of_the_same_tokens(variety: str):
    model, tokens = model_of(variety), text()
    found, known = trace(model, tokens, 5), diagnose(model, tokens, tokens)
    for crossing in found.crossings:
        name = f"branch/ratio/{crossing.block}/{crossing.branch}"
        assert crossing.ratio_of_text == pytest.approx(known[name], rel=1e-6)
    for looking, hidden in zip(found.looking, found.hidden, strict=True):
        entropy = sum(h.entropy for h in looking.heads) / len(looking.heads)
        assert entropy == pytest.approx(known[f"attention/entropy/{looking.block}"], rel=1e-5)
        assert abs(hidden.loudest) == pytest.approx(known[f"activation/max_abs/{hidden.block}"], rel=1e-6)
        if variety == "activation=relu":
            assert hidden.dead / hidden.units == pytest.approx(known[f"activation/dead/{hidden.block}"])
    one = tokens[:, :1]
    alone, known = trace(model, one, 0), diagnose(model, one, one)
    sizes = {c.block: c.stream for c in reversed(alone.crossings)}
    assert sizes == pytest.approx({block: known[f"stream/rms/{block}"] for block in sizes}, rel=1e-6)


def test_dead_and_loud_units_are_found():
    model, tokens = model_of("activation=relu"), text()
    with torch.no_grad():
        model.trunk.blocks[2].mlp.up_proj.bias[:5] = -1e6
        model.trunk.blocks[2].mlp.up_proj.bias[9] = 1e3
    before, after = trace(model_of("activation=relu"), tokens, 0).hidden[2], trace(model, tokens, 0).hidden[2]
    assert after.unit == 9
    assert after.loudest == pytest.approx(1e3, rel=0.1)
    assert before.dead < after.dead <= before.dead + 5


def test_tracing_leaves_the_model_alone():
    model, tokens = model_of(), text()
    assert trace(model, tokens, 3) == trace(model, tokens, 3)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


# The command


def finished(config: RunConfig, dtype: torch.dtype = torch.float32) -> Path:
    """A run's folder with its weights, as far as a trace looks at it."""
    folder = open_run(Path("records"), config, "data")
    finish(folder, GPT(config.model, config.seed).to(dtype), Keep.final)
    return folder


def traced(capsys: pytest.CaptureFixture[str], *words: str) -> dict:
    assert main(["trace", *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["trace", *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


@pytest.mark.parametrize("words", [(f"model.{v}",) for v in VARIETIES] + [("train.precision=bf16-mixed",)], ids=str)
def test_any_finished_run_can_be_traced(words: tuple[str, ...], empty_folder: Path, capsys: pytest.CaptureFixture[str]):
    config = make("model.n_layers=4", *words)
    folder = finished(config)
    found = traced(capsys, folder.name[:6], "a norm")
    expected = trace(GPT(config.model, config.seed).eval(), torch.tensor([list(b"a norm")]), 5)
    assert found["readings"][-1]["guesses"][0]["token"] == expected.readings[-1].guesses[0].token
    assert [c["ratio"] for c in found["crossings"]] == [c.ratio for c in expected.crossings]
    assert main(["trace", folder.name, "a norm", "--token", "0"]) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 100
    assert "…" not in out


def test_a_runs_readable_name_comes_before_an_override(empty_folder: Path, capsys: pytest.CaptureFixture[str]):
    folder = finished(make("seed=1"))
    assert traced(capsys, "seed=1", "abc")["notes"] == ["untrained weights"]
    link = Path("records/tensorboard/adhoc/seed=1")
    link.parent.mkdir(parents=True)
    link.symlink_to(Path("../../runs") / folder.name / "tensorboard")
    assert folder.name in traced(capsys, "seed=1", "abc")["model"]


def test_many_heads_and_blocks_fit_a_page_and_a_figure(empty_folder: Path, capsys: pytest.CaptureFixture[str]):
    words = ["model.n_layers=101", "a norm", "model.n_heads=16", "model.d_model=32"]
    for name in ("t.svg", "t.png"):
        assert main(["trace", *words, "--figure", name]) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 100
    assert all(out.count(f" head {head} ") == 2 for head in range(16))
    assert "<svg" in Path("t.svg").read_text()
    assert Path("t.png").read_bytes().startswith(b"\x89PNG")


def test_float64_weights_are_traced_as_such(empty_folder: Path, capsys: pytest.CaptureFixture[str]):
    """Positions too: computed in float32, rope would change the seventh digit."""
    config = make("train.precision=64-true", "model.position=rope")
    torch.set_default_dtype(torch.float64)
    try:
        model = GPT(config.model, config.seed).eval()
    finally:
        torch.set_default_dtype(torch.float32)
    folder = open_run(Path("records"), config, "data")
    finish(folder, model, Keep.final)
    tokens = torch.tensor([list(b"a norm")])
    with torch.no_grad():
        logs = model(tokens)[0, 3].log_softmax(-1)
    assert traced(capsys, folder.name, "a norm", "--token", "3")["readings"][-1]["next_loss"] == -logs[ord("r")].item()
    assert torch.get_default_dtype() is torch.float32


def test_a_fresh_model_is_traced_from_its_seed(empty_folder: Path, capsys: pytest.CaptureFixture[str]):
    one, same, other = (traced(capsys, "model.n_layers=2", "abc", f"seed={s}")["readings"] for s in (1, 1, 2))
    assert one == same != other
    assert len(one) == 3
    assert len(traced(capsys, "gpt2", "abc", "scale=demo")["readings"]) == 9


def test_a_long_text_loses_its_beginning_and_says_so(empty_folder: Path, capsys: pytest.CaptureFixture[str]):
    folder = finished(make())
    words = "0123456789" * 3
    found = traced(capsys, folder.name, words, "--token", "0")
    assert "".join(t["text"] for t in found["tokens"]) == words[-16:]
    assert found["notes"] == ["the text has 30 tokens, the window 16: its first 14 are left out"]
    assert traced(capsys, folder.name, words[-16:], "--token", "-16") == found | {"notes": []}


def test_odd_tokens_are_escaped(empty_folder: Path, capsys: pytest.CaptureFixture[str]):
    folder = finished(make())
    found = traced(capsys, folder.name, "a\n\\é\x00")
    assert [t["text"] for t in found["tokens"]] == ["a", "\\n", "\\\\", "\\xc3", "\\xa9", "\\x00"]
    assert escaped("é 漢".encode()) == "é 漢"


def test_a_byte_level_vocabulary_is_spelled_byte_for_byte():
    bpe = BPE.train(["the stream and the norm, é and ü and é " * 20], 300)
    for sample in ("the stream é", "\n\t\\ü", "漢"):
        ids = ids_of(bpe, sample)
        spelled = "".join(map(bpe.spelled, ids)).encode("latin-1", "backslashreplace").decode("unicode_escape")
        assert spelled.encode("latin-1") == sample.encode() or spelled == sample
    assert bpe.spelled(bpe.end_of_text) == "<|endoftext|>"
    assert (bpe.spelled(10**6), Bytes().spelled(256), Bytes().spelled(300)) == ("#1000000", "<|endoftext|>", "#300")


def test_what_a_tokenizer_cannot_write_is_named():
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    inner = Tokenizer(models.BPE({"a": 0, "b": 1, "Ġ": 2}, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(["<|endoftext|>"])
    known = BPE(inner)
    assert ids_of(known, "ab a") == [0, 1, 2, 0]
    with pytest.raises(UserError, match="no tokens for 'c', 'é'"):
        ids_of(known, "acé")
    with pytest.raises(UserError, match="not UTF-8"):
        ids_of(Bytes(), "a\udcff")


def test_bad_input_is_one_line(empty_folder: Path, capsys: pytest.CaptureFixture[str]):
    folder = finished(make())
    assert "text is empty" in refused(capsys, folder.name, "")
    assert "use -3 to 2" in refused(capsys, folder.name, "abc", "--token", "3")
    assert "use -3 to 2" in refused(capsys, folder.name, "abc", "--token", "-4")
    assert ".png or .svg" in refused(capsys, folder.name, "abc", "--figure", "x.gif")
    assert "more memory than is free" in refused(capsys, "palm_540b", "abc")
    other = make("model.d_model=32")
    finished(other).joinpath("weights.pt").write_bytes((folder / "weights.pt").read_bytes())
    assert "not this run's weights" in refused(capsys, open_run(Path("records"), other, "data").name, "abc")
    (folder / "weights.pt").write_bytes(b"PK torn")
    assert "not this run's weights" in refused(capsys, folder.name, "abc")
    (folder / "weights.pt").unlink()
    assert "no weights.pt" in refused(capsys, folder.name, "abc")


def test_numbers_that_are_none_are_null(empty_folder: Path, capsys: pytest.CaptureFixture[str]):
    config = make()
    model = GPT(config.model)
    with torch.no_grad():
        model.trunk.blocks[0].mlp.up_proj.weight[0, 0] = math.nan
    folder = open_run(Path("records"), config, "data")
    finish(folder, model, Keep.final)
    found = traced(capsys, folder.name, "abc", "--figure", "nan.png")
    assert found["readings"][-1]["stream"] is None
    assert main(["trace", folder.name, "abc"]) == 0


def test_one_token_is_enough():
    found: Trace = trace(model_of(), text(1), 0)
    assert [h.weight for row in found.looking for h in row.heads] == [1.0] * 8
    assert found.readings[0].next_loss is None
