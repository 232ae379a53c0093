"""Faults of the whole sweep: what tests/reliability.py does at length, and what a user may change under its feet."""

import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import reliability
from conftest import TINY, Sweep, andrea, wait_until
from reliability import Bench, Result

from andrea_exp.record import Status, read_json, read_metrics
from andrea_exp.results import load_runs

as_root = pytest.mark.skipif(os.getuid() != 0, reason="only root may mount a small disk")


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(tmp_path_factory.mktemp("bench"), seeds=4)


CAMPAIGNS: dict[str, Callable[[Bench], Result]] = {
    "kills of a run": lambda b: reliability.kills(b, "kill -9 of a run", 3, reliability.a_run),
    "kills of the pool": lambda b: reliability.kills(b, "kill -9 of the pool", 2, reliability.the_pool),
    "kills of both": lambda b: reliability.kills(b, "kill -9 of pool and runs", 4, reliability.everything),
    "Ctrl-C": lambda b: reliability.stops(b, signal.SIGINT),
    "SIGTERM": lambda b: reliability.stops(b, signal.SIGTERM),
    "two pools": reliability.two_pools,
}


@pytest.mark.slow
@pytest.mark.parametrize("campaign", CAMPAIGNS)
def test_nothing_is_lost_and_nothing_done_twice(campaign: str, bench: Bench) -> None:
    result = CAMPAIGNS[campaign](bench)
    assert result.faults
    assert (result.lost, result.twice) == (0, 0)


@as_root
@pytest.mark.slow
@pytest.mark.parametrize("campaign", [reliability.full_disk, reliability.read_only])
def test_a_disk_that_takes_nothing_more_loses_nothing(campaign: Callable[[Bench], Result], bench: Bench) -> None:
    assert campaign(bench).lost == 0


@pytest.mark.slow
def test_every_kind_of_fault_inside_a_run_is_mended_by_the_same_command(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    wide = Bench(tmp_path_factory.mktemp("wide"), seeds=len(reliability.KINDS))
    result = reliability.within_runs(wide)
    assert result.faults == len(reliability.KINDS)
    assert (result.lost, result.twice) == (0, 0)


@pytest.mark.slow
def test_runs_that_fail_every_time_each_say_why_at_once_and_the_others_are_done(bench: Bench) -> None:
    sweep = bench.sweep("always", "pool.slots=1")
    with reliability.faults(bench, "always", {0: "raise", 1: "exit", 2: "segv"}, once=False):
        process = sweep.start()
        wait_until(lambda: (sweep.runs[0] / "traceback.txt").exists())
        assert process.poll() is None  # the first traceback is there long before the end
        out, _ = process.communicate(timeout=300)
    assert process.returncode == 1, out
    assert sweep.statuses()[:3] == [Status.failed] * 3
    assert sweep.statuses()[3].finished
    reasons = [(read_json(run / "summary.json") or {})["reason"] for run in sweep.runs[:3]]
    assert "a fault on purpose" in reasons[0]
    assert reasons[1:] == ["exit code 3 without a result", "killed by SIGSEGV"]
    assert [len((read_json(run / "provenance.json") or {})["attempts"]) for run in sweep.runs] == [2, 2, 2, 1]
    assert all(f"runs/{run.name}/" in out for run in sweep.runs[:3])

    retried = andrea("retry", *sweep.words, cwd=sweep.folder)  # without the faults
    assert "3 runs to do" in retried.stdout
    assert bench.judge("retried", sweep, 3).lost == 0


@pytest.mark.slow
def test_launched_cells_are_frozen_when_their_sweep_file_changes(bench: Bench, tmp_path: Path) -> None:
    """The file is edited in mid-sweep: what was planned runs as planned, and the next command has the new cells."""
    (tmp_path / "sweeps").mkdir()
    file = tmp_path / "sweeps" / "mine.yaml"
    text = (
        "# @package _global_\nsweep:\n  question: q\n  baseline: a\n  compare: {a: {optim.lr: 1e-3}}\n"
        "  across: {}\n  tune: {}\n  repeat: {seed: [0, 1, 2]}\n"
    )
    file.write_text(text)
    words = [*(t for t in TINY if "steps" not in t), "train.steps=300", f"data.path={bench.corpus}", "pool.slots=1"]
    sweep = Sweep(tmp_path, bench.corpus, "0,1,2", "optim.lr=1e-3", "pool.slots=1", steps=300)
    sweep.words = ["mine", *words]
    process = sweep.start()
    wait_until(lambda: len(read_metrics(sweep.runs[0])) > 2)
    file.write_text(text.replace("1e-3", "1e-2"))
    out, _ = process.communicate(timeout=300)
    assert process.returncode == 0, out
    assert all(s.finished for s in sweep.statuses())
    assert len(list((tmp_path / "records" / "runs").iterdir())) == 3
    planned = json.loads(andrea("plan", "mine", *words, "--json", cwd=tmp_path).stdout)
    assert [(row["runs"], row["done"]) for row in planned["rows"]] == [(3, 0)]


def test_a_text_that_changes_under_finished_runs_makes_other_runs(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = tmp_path / "text"
    shutil.copytree(bench.corpus, text)
    words = ["seed=0,1", *TINY, f"data.path={text}"]
    andrea("sweep", *words, cwd=tmp_path)
    monkeypatch.chdir(tmp_path)
    assert load_runs(words[0], words[1:])["status"].isin(["done", "diverged"]).all()
    (text / "doc00.txt").write_text((text / "doc00.txt").read_text() + "one more word\n")
    assert set(load_runs(words[0], words[1:])["status"]) == {"missing"}
    assert len(list((tmp_path / "records" / "runs").iterdir())) == 2  # the old ones stay as they are
