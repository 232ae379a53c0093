"""What a block is worth, against models whose truth is planted, and the claim that is judged by it."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Sweep, make
from torch import Tensor

from andrea_exp.cli import main
from andrea_exp.config import NormPlacement
from andrea_exp.diagnostics import blocks_of, junctions_of
from andrea_exp.model import GPT
from andrea_exp.record import LAYERS, Status, read_metrics
from andrea_exp.results import claims, layers
from andrea_exp.results.load import Run
from andrea_exp.results.verdicts import Verdict
from andrea_exp.specialise import measure, own_parameters, swapped
from andrea_exp.sweep.plan import plan_sweep

EVERY = [f"norm_placement={p.name}" for p in NormPlacement]
VARIETIES = (*EVERY, "block_layout=parallel")
at_every_placement = pytest.mark.parametrize("variety", VARIETIES)
# Layer-scaled norm reads each depth at another scale, so that two of its blocks cannot be the same.
where_blocks_can_be_alike = pytest.mark.parametrize("variety", [v for v in VARIETIES if "layer_scaled" not in v])


def model_of(*words: str) -> GPT:
    """A float64 model of four blocks whose every number has left its start."""
    model = GPT(make("model.n_layers=4", *(f"model.{word}" for word in words)).model).double().eval()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.3 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    return model


def batches() -> list[tuple[Tensor, Tensor]]:
    ids = torch.randint(256, (5, 17), generator=torch.Generator().manual_seed(0))
    return list(zip(ids[:, :-1].split(2), ids[:, 1:].split(2), strict=True))


def loss_of(model: GPT) -> float:
    with torch.no_grad():
        return torch.cat([model.loss(x, y, reduction="none") for x, y in batches()]).mean().item()


def copy_block(model: GPT, source: int, target: int) -> None:
    with torch.no_grad():
        for name, parameter in own_parameters(model, target).items():
            parameter.copy_(own_parameters(model, source)[name])


@at_every_placement
def test_a_block_that_does_nothing_is_worth_nothing(variety: str):
    """Its output projections and, where it has one, the norm on its branch are 0."""
    model = model_of(variety)
    block = blocks_of(model)[2]
    with torch.no_grad():
        for layer in (block.attn.out_proj, block.mlp.down_proj):
            layer.weight.zero_()
            layer.bias.zero_()
        for _, junction in junctions_of(block):
            if junction.branch_norm is not None:
                junction.branch_norm.bias.zero_()
    found = measure(model, batches())
    assert found["loss"] == loss_of(model)
    assert found["skipped"][2] == pytest.approx(found["loss"], abs=1e-12)
    assert abs(found["skipped"][1] - found["loss"]) > 1e-3
    assert found["without"]["attn"][2] == found["without"]["mlp"][2] == pytest.approx(found["loss"], abs=1e-12)


@where_blocks_can_be_alike
def test_identical_neighbours_change_places_for_nothing(variety: str):
    model = model_of(variety)
    copy_block(model, 1, 2)
    found = measure(model, batches())
    if variety != "norm_placement=mix":
        assert abs(found["swapped"][0] - found["loss"]) > 1e-4
    assert found["swapped"][1] == pytest.approx(found["loss"], abs=1e-12)
    assert abs(found["swapped"][2] - found["loss"]) > 1e-4


@at_every_placement
def test_swapping_is_a_model_built_in_the_other_order(variety: str):
    """And undone afterwards, to the last bit."""
    model, other = model_of(variety), model_of(variety)
    copied = {name: p.clone() for name, p in own_parameters(model, 1).items()}
    copy_block(other, 2, 1)
    with torch.no_grad():
        for name, parameter in own_parameters(other, 2).items():
            parameter.copy_(copied[name])
    before = {name: p.clone() for name, p in model.state_dict().items()}
    with swapped(model, 1):
        assert loss_of(model) == loss_of(other)
    assert all(torch.equal(before[name], p) for name, p in model.state_dict().items())


@at_every_placement
def test_every_number_of_the_trunk_but_the_final_norm_is_one_blocks(variety: str):
    model = model_of(variety)
    own = [id(p) for index in range(4) for p in own_parameters(model, index).values()]
    norm = blocks_of(model)[-1].mlp_junction.read_norm
    final = {id(p) for p in norm.parameters()} if norm is not None else set()
    assert len(own) == len(set(own))
    assert set(own) | final == {id(p) for p in model.trunk.parameters()}
    assert not set(own) & final


def test_a_block_takes_the_norm_along_that_it_reads_through():
    """Pre-norm by hand, the middle two blocks in the other order."""
    model = model_of("norm_placement=pre")
    blocks = blocks_of(model)
    first = [model.trunk.opening.read_norm, *(block.mlp_junction.read_norm for block in blocks)]
    swaps = measure(model, batches())["swapped"]

    def by_hand(tokens: Tensor) -> Tensor:
        x = model.embed(tokens)
        for index in (0, 2, 1, 3):
            x = x + blocks[index].attn(first[index](x))
            x = x + blocks[index].mlp(blocks[index].attn_junction.read_norm(x))
        return model.read_out(first[-1](x))

    model.forward = by_hand
    assert swaps[1] == pytest.approx(loss_of(model), rel=1e-12)


def test_blocks_of_two_kinds_have_no_swap():
    found = measure(model_of("norm_placement=mix"), batches())
    assert [v is None for v in found["swapped"]] == [True, False, False]


@pytest.mark.parametrize("placement", ["pre", "post", "deepnorm", "none"])
def test_skipping_is_the_formula_without_the_branch(placement: str):
    """By hand: pre and none leave the stream as it is, post and DeepNorm still norm it, twice."""
    model = model_of(f"norm_placement={placement}")
    found = measure(model, batches())["skipped"]
    for index, block in enumerate(blocks_of(model)):

        def skip(stream: Tensor, read: Tensor, bias: Tensor | None, block: Any = block) -> tuple[Tensor, Tensor]:
            for _, junction in junctions_of(block):
                if junction.stream_norm is not None:
                    stream = junction.stream_norm(junction.stream_scale * stream)
            return stream, block.mlp_junction.read(stream)

        forward, block.forward = block.forward, skip
        assert found[index] == pytest.approx(loss_of(model), rel=1e-12)
        block.forward = forward


@at_every_placement
def test_the_last_reading_is_the_whole_model(variety: str):
    model = model_of(variety)
    found = measure(model, batches())
    assert len(found["lens"]) == 5
    assert found["lens"][-1] == pytest.approx(found["loss"], rel=1e-12)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_without_a_residual_nothing_can_be_skipped():
    found = measure(model_of("residual=false"), batches())
    assert found["skipped"] is None
    assert found["without"] == {"attn": None, "mlp": None}
    assert len(found["swapped"]) == 3


# Records


def test_increases_are_over_the_whole_models_loss():
    found = {
        "loss": 2.0,
        "skipped": [5.0, 2.5],
        "without": {"attn": [3.0, None], "mlp": None},
        "swapped": [2.25],
        "lens": [9.0, 4.0, 2.0],
    }
    assert layers.increases(found) == {
        "skip": [3.0, 0.5],
        "attn": [1.0, None],
        "mlp": [None, None],
        "swap": [0.25, None],
        "lens": [2.0, 0.0],
    }


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory, corpus_path: Path) -> Sweep:
    """Two trained runs."""
    made = Sweep(tmp_path_factory.mktemp("sweep"), corpus_path, "0,1", "model.n_layers=3", steps=6)
    made.run()
    return made


def specialise(sweep: Sweep, *words: str) -> int:
    return main(["specialise", *sweep.words, *words])


def test_the_command_measures_what_is_missing(
    sweep: Sweep, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(sweep.folder)
    assert specialise(sweep, "--json", "--figure", "layers.svg") == 0
    first = json.loads(capsys.readouterr().out)
    assert (sweep.folder / "layers.svg").read_text().startswith("<?xml")
    for run, row in zip(sweep.runs, first, strict=True):
        found = json.loads((run / LAYERS).read_text())
        # The run's own validation, recorded while it trained.
        assert found["loss"] == pytest.approx(read_metrics(run)[-1]["val/loss"], rel=1e-6)
        assert row["swap_ratio"] == pytest.approx(math.exp(sum(found["swapped"]) / 2 - found["loss"]))
    times = [(run / LAYERS).stat().st_mtime_ns for run in sweep.runs]
    assert specialise(sweep) == 0
    out = capsys.readouterr().out
    assert [(run / LAYERS).stat().st_mtime_ns for run in sweep.runs] == times
    assert "seed=1" in out

    (sweep.runs[0] / LAYERS).write_text("{torn")
    assert specialise(sweep, "--json") == 0
    assert json.loads(capsys.readouterr().out) == first
    weights = (sweep.runs[1] / "weights.pt").read_bytes()
    (sweep.runs[1] / "weights.pt").unlink()
    (sweep.runs[1] / LAYERS).unlink()
    assert specialise(sweep, "--json") == 0
    captured = capsys.readouterr()
    assert len(json.loads(captured.out)) == 1
    assert "left out" in captured.err
    assert "no weights.pt" in captured.err
    (sweep.runs[1] / "weights.pt").write_bytes(weights)
    frame = layers.layers_frame(sweep.plan, sweep.folder / "records")
    assert frame["block"].tolist() == [0, 1, 2]


def test_nothing_finished_is_refused(empty_folder: Path, corpus_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["specialise", "seed=0", f"data.path={corpus_path}"]) == 2
    assert "no finished runs" in capsys.readouterr().err


# The claim


def planted(folder: Path, increases: dict[str, float]) -> list[Run]:
    """All runs of the sweep as done, a pair of neighbours costing what is planted for its arm (all but the first)."""
    runs = []
    for cell in plan_sweep(["sweeps=specialise"]).cells:
        cost = increases[cell.arm] * (1 + 0.01 * cell.repeat["seed"])
        run = folder / "runs" / cell.signature
        run.mkdir(parents=True)
        blocks = cell.config.model.n_layers
        swaps = [9.0, *[2 + cost] * (blocks - 2)]
        found = {"loss": 2.0, "skipped": [3.0] * blocks, "without": {}, "swapped": swaps, "lens": [2.0] * (blocks + 1)}
        (run / LAYERS).write_text(json.dumps(found))
        runs.append(Run(cell, Status.done, {}))
    return runs


@pytest.mark.parametrize(
    ("pre", "post", "verdict"),
    [
        (0.3, 0.2, Verdict.supported),
        (0.001, 0.002, Verdict.contradicted),
        (-0.1, -0.2, Verdict.contradicted),  # neighbours that do better in each other's place
        (0.3, 0.001, Verdict.depends),
    ],
)
def test_the_verdict_is_that_of_the_median_swap(pre: float, post: float, verdict: Verdict, tmp_path: Path):
    (claim,) = [c for c in claims.read_claims() if c.id == "specialise"]
    runs = planted(tmp_path, {"pre": pre, "post": post, "untrained": 0.0})
    judged = claims.judge(claim, plan_sweep(["sweeps=specialise"]), tmp_path, runs)
    assert judged.verdict is verdict
    by_arm = {regime.where: regime.finding for regime in judged.regimes}
    assert by_arm["pre"].effect == pytest.approx(math.exp(pre * 1.035))  # the mean of seeds 0 to 7
    assert by_arm["pre"].n == 8


def test_runs_that_are_not_measured_give_no_verdict(tmp_path: Path):
    (claim,) = [c for c in claims.read_claims() if c.id == "specialise"]
    runs = planted(tmp_path, {"pre": 1, "post": 1, "untrained": 0})
    for run in runs:
        (tmp_path / "runs" / run.cell.signature / LAYERS).unlink()
    assert claims.judge(claim, plan_sweep(["sweeps=specialise"]), tmp_path, runs).verdict is Verdict.inconclusive
