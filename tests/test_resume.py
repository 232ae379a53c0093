"""Resume: a run that was interrupted or killed ends bit for bit as one that was not."""

import errno
import functools
import itertools
import json
import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Ended, make
from tensorboard.backend.event_processing import event_accumulator

from andrea_exp import checkpoint, data, stop
from andrea_exp.config import Keep
from andrea_exp.lit import LitGPT
from andrea_exp.model import GPT
from andrea_exp.record import (
    INTERRUPTED,
    Status,
    go_back,
    load_config,
    open_run,
    process_mark,
    read_json,
    read_metrics,
    status,
    write_json,
)
from andrea_exp.run import train
from andrea_exp.sweep.local import run_jobs, warm_up
from andrea_exp.sweep.pool import Job, Stopped

torch.set_num_threads(1)
# Steps, and a checkpoint after each.
LONGER = ("train.steps=20", "checkpoint.every_s=0")

VARIANTS = {
    "plain": (),
    "accumulated": ("train.accumulate=2",),
    "in mid-schedule": ("optim.schedule=wsd", "optim.warmup_steps=6", "optim.decay_fraction=0.5"),
    "bf16": ("train.precision=bf16-mixed",),
    "float64": ("train.precision=64-true",),
    "dropout": ("model.dropout=0.1",),
    "logged every 7 steps": ("log.every=7", "optim.clip=0.3", "train.accumulate=2", "log.validate_every=5"),
    "tied": ("model.tied_head=true", "model.activation=swiglu", "model.norm_placement=post"),
}


@pytest.fixture(autouse=True)
def _default_dtype() -> Iterator[None]:
    yield
    torch.set_default_dtype(torch.float32)


def open_(root: Path, prepared: data.Prepared, *overrides: str) -> Path:
    return open_run(root, make(*overrides), prepared.folder.name)


def whole(root: Path, prepared: data.Prepared, *overrides: str) -> Ended:
    """The undisturbed run, in this process."""
    folder = open_(root, prepared, *overrides)
    write_json(folder / "summary.json", train(folder, prepared.folder))
    return Ended.of(folder)


def in_parts(folder: Path, prepared: data.Prepared, stops: list[int], monkeypatch: pytest.MonkeyPatch) -> Ended:
    """The same run, asked to stop after each of some steps and taken up again."""
    for last in [*stops, None]:
        resumed = checkpoint.newest(folder)
        go_back(folder, resumed["metrics_bytes"] if resumed else 0)
        torch.set_default_dtype(torch.float32)
        step = LitGPT.training_step

        def counted(self: LitGPT, *words: Any, last: int | None = last, step: Any = step) -> Any:
            if last is not None and self.step + 1 >= last:
                stop._heard.add(signal.SIGUSR2)
            return step(self, *words)

        with monkeypatch.context() as patch:
            patch.setattr(stop, "_heard", set())
            patch.setattr(LitGPT, "training_step", counted)
            summary = train(folder, prepared.folder, resumed=resumed)
        if last is not None:
            assert summary is None
            assert (checkpoint.newest(folder) or {})["step"] == last
            assert status(folder) is Status.interrupted
    write_json(folder / "summary.json", summary)
    return Ended.of(folder)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_run_in_parts_ends_bit_for_bit_as_one_in_one_piece(
    variant: str, tmp_path: Path, prepared: data.Prepared, monkeypatch: pytest.MonkeyPatch
) -> None:
    overrides = ("train.steps=20", *VARIANTS[variant])
    straight = whole(tmp_path / "whole", prepared, *overrides)
    folder = open_(tmp_path / "parts", prepared, *overrides)
    assert in_parts(folder, prepared, [1, 8, 9, 19], monkeypatch) == straight
    assert straight.summary["weights"]
    steps = [a["from_step"] for a in json.loads((folder / "provenance.json").read_text())["attempts"]]
    assert steps == [0, 1, 8, 9, 19]


def test_tensorboard_shows_each_step_once(
    tmp_path: Path, prepared: data.Prepared, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = open_(tmp_path, prepared, "train.steps=20")
    in_parts(folder, prepared, [3, 11], monkeypatch)
    (event_file,) = (folder / "tensorboard").iterdir()
    view = event_accumulator.EventAccumulator(str(event_file), size_guidance={"scalars": 0}).Reload()
    rows = read_metrics(folder)
    shown = view.Scalars("train/loss")
    assert [e.step for e in shown] == list(range(1, 21))
    assert [e.value for e in shown] == [pytest.approx(r["train/loss"]) for r in rows[1:]]
    assert [e.wall_time for e in shown] == [r["time"] for r in rows[1:]]
    assert "time" not in view.Tags()["scalars"]


# Checkpoints on disk


@pytest.fixture
def checkpointed(tmp_path: Path, prepared: data.Prepared, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run that was stopped at step 12 of 20, with a checkpoint after each step: the folder."""
    folder = open_(tmp_path, prepared, *LONGER)
    monkeypatch.setattr(stop, "_heard", set())
    step = LitGPT.training_step

    def counted(self: LitGPT, *words: Any) -> Any:
        if self.step + 1 == 12:
            stop._heard.add(signal.SIGTERM)
        return step(self, *words)

    with monkeypatch.context() as patch:
        patch.setattr(LitGPT, "training_step", counted)
        assert train(folder, prepared.folder) is None
    stop._heard.clear()
    return folder


def files(folder: Path) -> list[Path]:
    return sorted((folder / "checkpoints").iterdir())


def step_of(folder: Path) -> int | None:
    state = checkpoint.newest(folder)
    return state and state["step"]


def test_two_checkpoints_are_kept_while_a_run_is_under_way(checkpointed: Path) -> None:
    assert [int(p.name.split("-")[0]) for p in files(checkpointed)] == [11, 12]
    assert step_of(checkpointed) == 12


def test_a_checkpoint_holds_plain_containers_and_tensors(checkpointed: Path) -> None:
    def walk(value: Any) -> Iterator[Any]:
        if isinstance(value, dict):
            yield from (leaf for v in value.values() for leaf in walk(v))
        elif isinstance(value, (list, tuple)):
            yield from (leaf for v in value for leaf in walk(v))
        else:
            yield value

    state = torch.load(files(checkpointed)[-1], weights_only=True)
    assert {type(leaf) for leaf in walk(dict(state))} <= {torch.Tensor, int, float, str, bool, type(None)}


@pytest.mark.parametrize("damage", ["truncated", "empty", "one bit", "foreign"])
def test_a_spoilt_checkpoint_is_passed_over(damage: str, checkpointed: Path) -> None:
    for path, expected in zip(files(checkpointed)[::-1], (11, None), strict=True):
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        spoilt = {"truncated": content[: len(content) // 2], "empty": b"", "one bit": content, "foreign": b"x" * 999}
        path.write_bytes(spoilt[damage])
        assert step_of(checkpointed) == expected


def test_a_checkpoint_whose_rows_are_lost_is_passed_over(checkpointed: Path) -> None:
    """After a power cut the metrics may be shorter than what a checkpoint relies on."""
    rows = (checkpointed / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (checkpointed / "metrics.jsonl").write_bytes(b"".join(rows[:-1]) + rows[-1][:10])
    assert step_of(checkpointed) == 11


def test_a_checkpoint_that_cannot_be_read_now_is_kept(checkpointed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file server that stumbles must not cost a run its checkpoints: start over would delete them."""
    digest, bad = checkpoint._digest, files(checkpointed)[-1:]

    def stumbles(path: Path) -> str:
        if path in bad:
            raise OSError(errno.ESTALE, "stale file handle", str(path))
        return digest(path)

    monkeypatch.setattr(checkpoint, "_digest", stumbles)
    assert step_of(checkpointed) == 11
    bad[:] = files(checkpointed)
    with pytest.raises(OSError, match="stale"):
        checkpoint.newest(checkpointed)


def test_the_row_after_a_resume_counts_the_time_before_it(checkpointed: Path, prepared: data.Prepared) -> None:
    state = checkpoint.newest(checkpointed)
    assert state is not None
    assert 0 <= state["watch"]["interval_s"] < 60
    state["watch"]["interval_s"] = 1000.0
    train(checkpointed, prepared.folder, 0, state)
    (row,) = [row for row in read_metrics(checkpointed) if row["step"] == 13]
    config = load_config(checkpointed)
    assert row["tokens_per_s"] == pytest.approx(config.train.batch_size * config.model.seq_len / 1000, rel=0.1)


def test_a_half_written_checkpoint_is_none(checkpointed: Path) -> None:
    (checkpointed / "checkpoints" / ".partial").write_bytes(b"half")
    assert step_of(checkpointed) == 12


def test_after_spoilt_checkpoints_the_run_still_ends_as_it_would_have(
    checkpointed: Path, tmp_path: Path, prepared: data.Prepared, monkeypatch: pytest.MonkeyPatch
) -> None:
    straight = whole(tmp_path / "whole", prepared, *LONGER)
    for path in files(checkpointed):
        path.write_bytes(path.read_bytes()[:100])
    with (checkpointed / "metrics.jsonl").open("a") as file:
        file.write('{"step": 13, "tr')  # torn by the crash
    assert in_parts(checkpointed, prepared, [], monkeypatch) == straight


@pytest.mark.parametrize("keep", [k.name for k in Keep])
def test_what_is_kept_of_an_ended_run_follows_the_rule(keep: str, tmp_path: Path, prepared: data.Prepared) -> None:
    warm_up()
    folder = open_(tmp_path, prepared, "checkpoint.every_s=0", f"checkpoint.keep={keep}")
    run_jobs([Job(folder, prepared.folder, 1)], [{}], make().pool, lambda: None)
    assert status(folder).finished
    assert (folder / "weights.pt").exists() == (keep != "none")
    assert (folder / "checkpoints").exists() == (keep == "all")
    if keep == "all":
        assert [int(p.name.split("-")[0]) for p in files(folder)] == [1, 2, 3, 4, 5]
    if keep != "none":
        GPT(make().model, seed=0).load_state_dict(torch.load(folder / "weights.pt", weights_only=True))


# Signals and kills, in processes of their own


def start(folder: Path, prepared: data.Prepared, threads: int = 1) -> Any:
    from multiprocessing import get_context

    from andrea_exp.run import execute

    warm_up()
    process = get_context("forkserver").Process(target=execute, args=(folder, prepared.folder, threads))
    process.start()
    return process


def wait_for_step(folder: Path, step: int) -> None:
    end = time.monotonic() + 60
    while time.monotonic() < end:
        rows = read_metrics(folder)
        if rows and rows[-1]["step"] >= step:
            return
        time.sleep(0.005)
    raise AssertionError(f"step {step} never came: {(folder / 'log.txt').read_text()}")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR2])
def test_a_signal_saves_at_the_steps_end_and_the_run_goes_on_from_there(
    number: signal.Signals, tmp_path: Path, prepared: data.Prepared
) -> None:
    words = ("train.steps=300", "checkpoint.every_s=1000", "log.validate_every=100", "log.diagnose_every=0")
    straight = whole(tmp_path / "whole", prepared, *words)
    folder = open_(tmp_path / "parts", prepared, *words)
    process = start(folder, prepared)
    wait_for_step(folder, 20)
    os.kill(process.pid, number)
    os.kill(process.pid, number)  # twice is once
    process.join(60)
    assert process.exitcode == INTERRUPTED
    assert status(folder) is Status.interrupted
    reached = read_metrics(folder)[-1]["step"]
    assert 20 <= reached < 300
    assert step_of(folder) == reached
    again = start(folder, prepared, threads=2)  # a resumed run keeps the threads that it began with
    again.join(120)
    assert again.exitcode == 0
    assert Ended.of(folder) == straight
    assert straight.summary["threads"] == 1
    assert len(read_json(folder / "provenance.json")["attempts"]) == 2


def killed_often(folder: Path, prepared: data.Prepared, kills: int, chance: random.Random) -> int:
    """Starts a run again and again and kills each process at a random moment; how many kills it took until the end."""
    done = 0
    while not status(folder).finished:
        process = start(folder, prepared)
        if done < kills:
            process.join(chance.uniform(0.0, 0.4))
            if process.is_alive():
                process.kill()
                done += 1
        process.join(120)
    return done


def kill_at_random(root: Path, prepared: data.Prepared, kills: int, seed: int) -> int:
    words = ("train.steps=150", "checkpoint.every_s=0", "log.validate_every=30", "log.diagnose_every=50")
    straight = whole(root / "whole", prepared, *words)
    folder = open_(root / "killed", prepared, *words)
    done = killed_often(folder, prepared, kills, random.Random(seed))
    assert Ended.of(folder) == straight
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    assert len(lines) == len(straight.rows)  # each step once, no torn line
    return done


def test_a_run_killed_at_random_moments_ends_bit_for_bit_the_same(tmp_path: Path, prepared: data.Prepared) -> None:
    assert kill_at_random(tmp_path, prepared, kills=6, seed=0) >= 3


@pytest.mark.slow
def test_a_run_killed_at_50_random_moments_ends_bit_for_bit_the_same(tmp_path: Path, prepared: data.Prepared) -> None:
    # A fast machine ends a run before its last kill: as many runs as it takes.
    runs = (kill_at_random(tmp_path / str(seed), prepared, kills=17, seed=seed) for seed in range(20))
    assert any(kills >= 50 for kills in itertools.accumulate(runs))


@pytest.mark.slow
def test_a_distributed_run_stops_at_one_step_and_ends_bit_for_bit_the_same(
    tmp_path: Path, prepared: data.Prepared
) -> None:
    words = ("train.ranks=2", "train.accumulate=2", "train.steps=500", "log.every=7", "checkpoint.every_s=1000")
    warm_up()
    straight, parts = (open_(tmp_path / name, prepared, *words) for name in ("whole", "parts"))
    run_jobs([Job(straight, prepared.folder, 1, ranks=2)], [{}], make().pool, lambda: None)

    def stop_at(step: int, told: list[int]) -> None:
        rows = read_metrics(parts)
        if rows and rows[-1]["step"] >= step and not told:
            told.append(step)
            os.kill(os.getpid(), signal.SIGTERM)

    for step in (7, 150):
        tick = functools.partial(stop_at, step, [])
        with pytest.raises(Stopped):
            run_jobs([Job(parts, prepared.folder, 1, ranks=2)], [{}], make().pool, tick)
        assert status(parts) is Status.interrupted
        assert (step_of(parts) or 0) >= step
    run_jobs([Job(parts, prepared.folder, 1, ranks=2)], [{}], make().pool, lambda: None)
    assert Ended.of(parts) == Ended.of(straight)


def test_a_process_that_lost_its_lease_writes_no_checkpoint_and_no_summary(
    tmp_path: Path, prepared: data.Prepared
) -> None:
    folder = open_(tmp_path, prepared, "train.steps=100000", "checkpoint.every_s=0", "log.diagnose_every=0")
    process = start(folder, prepared)
    wait_for_step(folder, 5)
    os.kill(process.pid, signal.SIGSTOP)  # as a suspended machine does
    write_json(folder / "lease.json", process_mark(os.getpid()))  # and after two minutes another takes over
    before = files(folder)
    os.kill(process.pid, signal.SIGCONT)
    process.join(30)
    assert process.exitcode == 75
    assert not (folder / "summary.json").exists()
    assert len(set(files(folder)) - set(before)) <= 1  # the one that was being written when it was frozen
    assert (read_json(folder / "lease.json") or {})["pid"] == os.getpid()
