"""Training at scale, as far as a CPU shows it: ranks, compiled trunks, recomputed blocks, untrained runs, presets."""

import json
from pathlib import Path

import pytest
import torch
from conftest import TINY, andrea, make

from andrea_exp import accounting, data
from andrea_exp.config import Precision
from andrea_exp.model import GPT
from andrea_exp.record import open_run, read_metrics, run_folder, status
from andrea_exp.results import load_metrics
from andrea_exp.run import train
from andrea_exp.sweep.plan import plan_sweep

FLEETING = ("time", "tokens_per_s", "memory_mb")


@pytest.fixture
def _fresh_compiler() -> None:
    """As in a run's own process: dynamo counts how often it has compiled one function, over all of its models."""
    torch._dynamo.reset()


def values_by_arm(frame):
    frame = frame[~frame["metric"].isin(FLEETING)]
    return frame.pivot_table(index=["metric", "step"], columns="arm", values="value")


def test_two_ranks_train_as_one_process_does(tmp_path: Path, corpus_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The same global batch, in a multirun through the pool: every logged value agrees to float64's rounding."""
    words = [*(t for t in TINY if "batch_size" not in t), f"data.path={corpus_path}", "train.precision=64-true"]
    words += ["train.batch_size=8", "train.accumulate=2", "optim.clip=0.5", "train.ranks=1,2"]
    andrea("train", "-m", *words, cwd=tmp_path)
    monkeypatch.chdir(tmp_path)
    plan = plan_sweep(words)
    assert [status(run_folder(Path("records"), c.signature)).finished for c in plan.cells] == [True, True]
    pair = values_by_arm(load_metrics("train.ranks=1,2", words[:-1]))
    assert len(pair) > 100
    assert (pair["ranks=1"] - pair["ranks=2"]).abs().max() < 1e-12
    doubled = [json.loads(line)["step"] for line in _metrics_file(plan.cells[1].signature).read_text().splitlines()]
    assert doubled == sorted(set(doubled))  # one rank alone writes


def _metrics_file(signature: str) -> Path:
    return run_folder(Path("records"), signature) / "metrics.jsonl"


def test_recomputed_blocks_give_the_same_bits(tmp_path: Path, prepared: data.Prepared):
    rows = []
    for recompute in ("false", "true"):
        folder = open_run(tmp_path, make(f"train.recompute={recompute}"), prepared.folder.name)
        train(folder, prepared.folder)
        rows.append([{k: v for k, v in row.items() if k not in FLEETING} for row in read_metrics(folder)])
    assert rows[0] == rows[1]


def test_recomputed_blocks_keep_fewer_activations():
    """Saved for the backward pass: the blocks' inputs alone, not what they compute."""
    config = make("model.n_layers=6").model
    kept = []
    for recompute in (False, True):
        model, total = GPT(config), 0
        model.trunk.recompute = recompute

        def count(tensor: torch.Tensor) -> torch.Tensor:
            nonlocal total
            total += tensor.numel()
            return tensor

        ids = torch.zeros(4, 16, dtype=torch.long)
        with torch.autograd.graph.saved_tensors_hooks(count, lambda t: t):
            model.loss(ids, ids)
        kept.append(total)
    assert kept[1] < kept[0] / 3


@pytest.mark.slow
@pytest.mark.usefixtures("_fresh_compiler")
@pytest.mark.parametrize("placement", ["pre", "post", "peri", "reordered", "deepnorm", "layer_scaled", "mix", "none"])
def test_a_compiled_trunk_is_one_graph_with_the_same_loss_and_gradients(placement: str):
    config = make(f"model.norm_placement={placement}", "model.n_layers=4").model
    plain, compiled = GPT(config), GPT(config)
    compiled.trunk.compile(fullgraph=True)  # raises at the first graph break
    tokens, targets = torch.randint(257, (2, 4, 16), generator=torch.Generator().manual_seed(0))
    losses = [model.loss(tokens, targets) for model in (plain, compiled)]
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-5, atol=1e-6)
    gradients = [
        torch.autograd.grad(loss, list(m.parameters())) for loss, m in zip(losses, (plain, compiled), strict=True)
    ]
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
@pytest.mark.usefixtures("_fresh_compiler")
def test_a_compiled_run_is_diagnosed_like_a_plain_one(tmp_path: Path, prepared: data.Prepared):
    rows = []
    for compiled in ("false", "true"):
        folder = open_run(tmp_path, make(f"train.compile={compiled}"), prepared.folder.name)
        train(folder, prepared.folder)
        rows.append(read_metrics(folder))
    for plain, fast in zip(*rows, strict=True):
        assert plain.keys() == fast.keys()
        for name in plain.keys() - set(FLEETING):
            assert fast[name] == pytest.approx(plain[name], rel=2e-3, abs=1e-5), name


def test_an_untrained_run_measures_and_is_done(tmp_path: Path, prepared: data.Prepared):
    folder = open_run(tmp_path, make("train.steps=0", "model.n_layers=12"), prepared.folder.name)
    summary = train(folder, prepared.folder)
    assert (summary["status"], summary["steps"]) == ("done", 0)
    (row,) = read_metrics(folder)
    assert row["val/loss"] == summary["val/loss"]
    assert {f"grad_norm/block_{i:02d}/mlp" for i in range(12)} <= row.keys()
    assert {f"stream/rms/block_{i:02d}" for i in range(12)} <= row.keys()


def test_mfu_is_measured_against_known_peaks_alone():
    assert accounting.peak_flops("NVIDIA H200", Precision["bf16-mixed"]) == 989e12
    assert accounting.peak_flops("NVIDIA A100-SXM4-80GB", Precision["32-true"]) == 19.5e12
    assert accounting.peak_flops("NVIDIA H200", Precision["64-true"]) is None
    assert accounting.peak_flops("", Precision["32-true"]) is None


def test_scales_bring_sizes_and_keep_a_recipes_block():
    llama, gpt = (plan_sweep([f"recipe={r}", "scale=demo"]).cells[0].config.model for r in ("llama3_8b", "gpt2"))
    assert (llama.d_model, llama.n_layers, llama.vocab_size) == (48, 8, 257)
    assert (llama.activation.name, llama.position.name) == ("swiglu", "rope")
    assert gpt.init.name == "scaled"
    andrea_120m = plan_sweep(["recipe=andrea_120m", "scale=h200"]).cells[0].config
    assert (andrea_120m.model.d_model, andrea_120m.data.vocab_size) == (768, 8449)
    assert andrea_120m.train.compile


def test_the_demo_scale_is_the_default():
    plain, demo = (plan_sweep(words).cells[0].signature for words in ([], ["scale=demo"]))
    assert plain == demo
