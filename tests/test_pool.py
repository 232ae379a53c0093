"""The pool under faults: whatever happens to one run, the others end, and the records say what happened."""

import dataclasses
import errno
import json
import multiprocessing
import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from conftest import Sweep, living, living_pid, make, wait_until

from andrea_exp import data, run
from andrea_exp.record import (
    HELD_ELSEWHERE,
    INTERRUPTED,
    Status,
    open_run,
    process_mark,
    read_json,
    read_metrics,
    run_folder,
    status,
    write_json,
)
from andrea_exp.run import execute
from andrea_exp.sweep.local import Running, run_jobs, warm_up
from andrea_exp.sweep.pool import FailedFast, Job
from andrea_exp.sweep.slots import gpus, slots_of

ENDLESS = ("train.steps=1000000", "log.validate_every=1000000", "log.diagnose_every=0")


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> Path:
    warm_up()
    return tmp_path_factory.mktemp("records")


def make_job(records: Path, prepared: data.Prepared, *overrides: str, threads: int = 1) -> Job:
    folder = open_run(records, make(*overrides), prepared.folder.name)
    return Job(folder, prepared.folder, threads)


def hold(folder: Path) -> None:
    """This living process takes a run's lease."""
    write_json(folder / "lease.json", process_mark(os.getpid()))


@pytest.fixture(scope="module")
def jobs(records: Path, prepared: data.Prepared) -> dict[str, Job]:
    """One pool's work: jobs with every kind of fault, and what became of them."""
    made = {
        "killed": make_job(records, prepared, "seed=1", *ENDLESS),
        "raising": make_job(records, prepared, "seed=2"),
        "unstartable": make_job(records, prepared, "seed=3"),
        "held": make_job(records, prepared, "seed=4"),
        "finished": make_job(records, prepared, "seed=5"),
        "fine": make_job(records, prepared, "seed=6"),
        "threaded": make_job(records, prepared, "seed=7", threads=2),
    }
    made["raising"] = Job(made["raising"].folder, records / "no such corpus", 1)
    (made["unstartable"].folder / "log.txt").mkdir()
    hold(made["held"].folder)
    write_json(made["finished"].folder / "summary.json", {"status": "done", "mark": "of another pool"})

    def tick() -> None:
        if read_metrics(made["killed"].folder) and (lease := read_json(made["killed"].folder / "lease.json")):
            with suppress(ProcessLookupError):  # gone since the last tick, and not buried yet
                os.kill(lease["pid"], signal.SIGKILL)
        if status(made["threaded"].folder).finished:
            (made["held"].folder / "lease.json").unlink(missing_ok=True)

    run_jobs(made.values(), [{}, {}], make("pool.retries=0").pool, tick)
    return made


def summary(job: Job) -> dict[str, Any]:
    return json.loads((job.folder / "summary.json").read_text())


@pytest.mark.parametrize("name", ["fine", "threaded", "held"])
def test_a_sound_run_ends_beside_failing_ones(name: str, jobs: dict[str, Job]):
    assert status(jobs[name].folder).finished
    assert summary(jobs[name])["steps"] == 6
    assert "val/loss" in read_metrics(jobs[name].folder)[-1]


def test_a_killed_run_has_failed_and_says_by_which_signal(jobs: dict[str, Job]):
    assert status(jobs["killed"].folder) is Status.failed
    assert "SIGKILL" in summary(jobs["killed"])["reason"]
    assert read_metrics(jobs["killed"].folder)  # it was under way


def test_a_raising_run_has_failed_and_leaves_its_traceback(jobs: dict[str, Job]):
    assert status(jobs["raising"].folder) is Status.failed
    text = (jobs["raising"].folder / "traceback.txt").read_text()
    assert text.startswith("Traceback")
    assert "no such corpus" in text
    assert "no such corpus" in summary(jobs["raising"])["reason"]


def test_a_run_that_dies_before_it_can_write_a_summary_has_failed(jobs: dict[str, Job]):
    assert status(jobs["unstartable"].folder) is Status.failed
    assert "exit code 1" in summary(jobs["unstartable"])["reason"]


def test_a_run_that_was_killed_goes_on_in_the_same_pool(records: Path, prepared: data.Prepared):
    job = make_job(records, prepared, "seed=12", "train.steps=400", "log.diagnose_every=0")
    killed: list[int] = []

    def tick() -> None:
        if not killed and len(read_metrics(job.folder)) > 5 and (lease := read_json(job.folder / "lease.json")):
            killed.append(lease["pid"])
            os.kill(lease["pid"], signal.SIGKILL)

    run_jobs([job], [{}], make("pool.retries=1").pool, tick)
    assert len(killed) == 1
    assert summary(job)["steps"] == 400
    assert [row["step"] for row in read_metrics(job.folder)] == list(range(401))


def test_a_pool_that_is_to_fail_fast_starts_nothing_after_a_failure(records: Path, prepared: data.Prepared):
    doomed = Job(make_job(records, prepared, "seed=13").folder, records / "no such corpus", 1)
    later = make_job(records, prepared, "seed=14")
    with pytest.raises(FailedFast):
        run_jobs([doomed, later], [{}], make("pool.fail_fast=true", "pool.retries=0").pool, lambda: None)
    assert status(doomed.folder) is Status.failed
    assert status(later.folder) is Status.missing


def test_a_second_request_to_stop_ends_runs_that_do_not_answer(records: Path, prepared: data.Prepared):
    endless = make_job(records, prepared, "seed=15", *ENDLESS)
    told: list[str] = []

    def tick() -> None:
        if read_metrics(endless.folder):
            os.kill(json.loads((endless.folder / "lease.json").read_text())["pid"], signal.SIGSTOP)
            os.kill(os.getpid(), signal.SIGINT)

    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        run_jobs([endless], [{}], make().pool, tick, told.append)
    assert told == ["stopping: each run finishes its step and saves; once more ends them at once"]
    assert status(endless.folder) is Status.interrupted
    assert not living_pid(pid_of(endless))
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.parametrize("ranks", [1, 2])
def test_each_gpu_slot_has_gpus_of_its_own(
    ranks: int, tmp_path: Path, prepared: data.Prepared, monkeypatch: pytest.MonkeyPatch
):
    """Four jobs on a machine that pretends to have GPUs 0 to 3, of which this process may use 1, 2 and 3."""
    fake = tmp_path / "nvidia-smi"
    fake.write_text("#!/bin/sh\nprintf '0\\n1\\n2\\n3\\n'\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,2,3")
    configs = [make(f"seed={seed}", "train.device=auto", f"train.ranks={ranks}") for seed in range(4)]
    found = slots_of(configs)
    assert found == ([{"CUDA_VISIBLE_DEVICES": g} for g in "123"] if ranks == 1 else [{"CUDA_VISIBLE_DEVICES": "1,2"}])
    jobs = [Job(open_run(tmp_path, c, prepared.folder.name), prepared.folder, 1, ranks) for c in configs]
    run_jobs(jobs, found, configs[0].pool, lambda: None)
    seen = [json.loads((j.folder / "provenance.json").read_text())["environment"]["CUDA_VISIBLE_DEVICES"] for j in jobs]
    assert sorted(set(seen)) == sorted({slot["CUDA_VISIBLE_DEVICES"] for slot in found})
    shared = dataclasses.replace(configs[0].pool, runs_per_gpu=2)
    assert len(slots_of([dataclasses.replace(c, pool=shared) for c in configs])) == 2 * len(found)
    on_cpu = [make("train.device=cpu", "pool.threads=1")]
    assert all(slot == {} for slot in slots_of(on_cpu))


def test_devices_behind_one_that_is_none_do_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    fake = tmp_path / "nvidia-smi"
    fake.write_text("#!/bin/sh\nprintf '0\n1\n'\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    for visible, there in {"-1": [], "": [], "1, 0": ["1", "0"], "1,-1,0": ["1"]}.items():
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert gpus() == there


def test_an_error_that_looks_like_a_held_lease_is_a_failure(
    records: Path, prepared: data.Prepared, monkeypatch: pytest.MonkeyPatch
):
    """EAGAIN, as of a fork at the limit of processes, is a BlockingIOError too."""
    job = make_job(records, prepared, "seed=12")

    def no_fork(*_: Any) -> None:
        raise BlockingIOError(errno.EAGAIN, "no more processes")

    monkeypatch.setattr(run, "_own_output", lambda _: None)
    monkeypatch.setattr(run.stop, "listen", lambda: None)
    monkeypatch.setattr(run, "train", no_fork)
    with pytest.raises(BlockingIOError):
        execute(job.folder, prepared.folder, 1)
    assert status(job.folder) is Status.failed


def test_a_run_that_another_pool_has_done_is_left_alone(jobs: dict[str, Job]):
    assert summary(jobs["finished"]) == {"status": "done", "mark": "of another pool"}


def test_no_lease_is_left(jobs: dict[str, Job]):
    assert [name for name, job in jobs.items() if (job.folder / "lease.json").exists()] == []


def pid_of(job: Job) -> int:
    """The process that trained a run: TensorBoard writes it into the name of its event file."""
    (event_file,) = (job.folder / "tensorboard").iterdir()
    return int(event_file.name.split(".")[-2])


def test_each_run_has_a_process_of_its_own(jobs: dict[str, Job]):
    pids = [pid_of(jobs[name]) for name in ("killed", "fine", "threaded", "held")]
    assert len({*pids, os.getpid()}) == 5
    assert not any(psutil.pid_exists(pid) and living(psutil.Process(pid)) for pid in pids)


def test_the_threads_a_run_was_given_are_recorded(jobs: dict[str, Job]):
    for name, threads in (("fine", 1), ("threaded", 2)):
        recorded = json.loads((jobs[name].folder / "provenance.json").read_text())
        assert summary(jobs[name])["threads"] == recorded["threads"] == threads


def exit_code(job: Job) -> int | None:
    process = multiprocessing.get_context("forkserver").Process(target=execute, args=(job.folder, job.corpus, 1))
    process.start()
    process.join(60)
    return process.exitcode


def test_a_process_that_comes_late_leaves_a_finished_run_alone(records: Path, prepared: data.Prepared):
    # Between a pool's look at a run and its process's first act another pool may have run it to its end.
    job = make_job(records, prepared, "seed=8")
    write_json(job.folder / "summary.json", {"status": "done", "mark": "of another pool"})
    assert exit_code(job) in (0, HELD_ELSEWHERE)
    assert summary(job) == {"status": "done", "mark": "of another pool"}


def test_a_process_that_finds_its_run_held_touches_nothing(records: Path, prepared: data.Prepared):
    job = make_job(records, prepared, "seed=9")
    (job.folder / "metrics.jsonl").write_text('{"step":1}\n')
    hold(job.folder)
    assert exit_code(job) == HELD_ELSEWHERE
    assert (job.folder / "metrics.jsonl").read_text() == '{"step":1}\n'
    assert (json.loads((job.folder / "lease.json").read_text()))["pid"] == os.getpid()


def test_an_error_in_the_display_stops_the_runs_and_goes_on(records: Path, prepared: data.Prepared):
    endless = make_job(records, prepared, "seed=10", *ENDLESS)

    def tick() -> None:
        if read_metrics(endless.folder):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_jobs([endless, make_job(records, prepared, "seed=11")], [{}], make().pool, tick)
    assert status(endless.folder) is Status.interrupted
    assert not living_pid(pid_of(endless))
    assert status(run_folder(records, open_run(records, make("seed=11"), prepared.folder.name).name)) is Status.missing


# The same through the command line


@pytest.mark.slow
def test_a_sweep_with_failed_runs_ends_with_1_says_where_to_look_and_completes_them_later(
    corpus_path: Path, tmp_path: Path
):
    sweep = Sweep(tmp_path, corpus_path, "0,1,2", "pool.retries=0", steps=200)
    killed, raising, _ = sweep.runs
    raising.mkdir(parents=True)
    (raising / "tensorboard").write_text("a file where the run wants a folder")
    process = sweep.start()
    wait_until(lambda: (killed / "lease.json").exists() and read_metrics(killed))
    os.kill(json.loads((killed / "lease.json").read_text())["pid"], signal.SIGKILL)
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 1, out
    assert [s.finished for s in sweep.statuses()] == [False, False, True]
    assert f"runs/{killed.name}/log.txt" in out
    assert f"runs/{raising.name}/traceback.txt" in out
    assert "SIGKILL" in json.loads((killed / "summary.json").read_text())["reason"]

    before = sweep.written()
    (raising / "tensorboard").unlink()
    again = sweep.start()
    out, _ = again.communicate(timeout=120)
    assert again.returncode == 0, out
    assert all(s.finished for s in sweep.statuses())
    assert [new == old for new, old in zip(sweep.written(), before, strict=True)] == [False, False, True]
    assert not (raising / "traceback.txt").exists()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR2])
def test_a_signal_to_all_leaves_interrupted_runs_and_no_process_and_the_next_command_goes_on(
    number: signal.Signals, corpus_path: Path, tmp_path: Path
):
    """Ctrl-C, `timeout`, a batch system: they signal the whole group, fork server and runs too."""
    sweep = Sweep(tmp_path, corpus_path, "0,1,2,3", steps=400)
    process = sweep.start()
    wait_until(lambda: sum(len(read_metrics(run)) > 2 for run in sweep.runs) >= 2)
    family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    os.killpg(process.pid, number)
    out, _ = process.communicate(timeout=60)
    saved = sorted(sweep.statuses())  # once the command has ended nobody may be left who saves
    assert process.returncode == 128 + number, out
    assert "Traceback" not in out
    assert len(family) >= 4  # the command, the fork server, two runs
    wait_until(lambda: not any(map(living, family)), seconds=20)
    assert saved == ["interrupted", "interrupted", "missing", "missing"]
    assert len([run for run in sweep.runs if list(run.glob("checkpoints/*.pt"))]) == 2

    again = sweep.start()
    out, _ = again.communicate(timeout=120)
    assert again.returncode == 0, out
    assert all(s.finished for s in sweep.statuses())
    assert [len(read_metrics(run)) for run in sweep.runs] == [401] * 4


def test_a_broken_summary_does_not_keep_a_run_from_running(records: Path, prepared: data.Prepared):
    """A file that lost its status is no result: to the pool's eye the run is not finished, nor is it to its process."""
    job = make_job(records, prepared, "seed=10")
    (job.folder / "summary.json").write_text('{"steps": 6}\n')
    run_jobs([job], [{}], make().pool, lambda: None)
    assert status(job.folder).finished
    assert summary(job)["steps"] == 6


@dataclasses.dataclass
class Rank:
    """A process as the pool sees it."""

    exitcode: int | None
    killed: bool = False

    def kill(self) -> None:
        self.killed = True

    def join(self, _: float) -> None:
        pass


@pytest.mark.parametrize(
    ("codes", "code", "killed"),
    [
        ((None, INTERRUPTED), None, False),  # the first rank still saves for all
        ((INTERRUPTED, INTERRUPTED), INTERRUPTED, False),
        ((0, 0), 0, False),
        ((None, 0), None, False),
        ((None, 1), 1, True),
        ((HELD_ELSEWHERE, None), HELD_ELSEWHERE, True),
        ((None, -signal.SIGSEGV), -signal.SIGSEGV, True),
    ],
)
def test_a_failing_rank_ends_the_others_and_one_that_was_asked_to_stop_does_not(
    codes: tuple[int | None, ...], code: int | None, killed: bool, tmp_path: Path
):
    ranks = [Rank(c) for c in codes]
    assert Running(Job(tmp_path, tmp_path, 1, len(ranks)), {}, ranks).exitcode() == code
    assert [r.killed for r in ranks] == [killed] * len(ranks)
