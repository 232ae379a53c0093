"""Breaks sweeps in every way we know, and counts what is lost: `python tests/reliability.py` prints the table.

A run is lost if, after the same command was repeated, it is missing or differs in one bit from an undisturbed one.
The suite runs the same at a smaller scale (test_faults.py).
"""

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import astuple, dataclass
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).parent))
from conftest import Ended, Sweep, write_corpus

from andrea_exp.record import Status, read_json

HERE = Path(__file__).parent
KINDS = ("raise", "exit", "exit without a word", "segv", "memory", "SIGKILL", "SIGTERM", "SIGUSR2", "SIGINT", "clock")
STEPS = 120
WORDS = ("checkpoint.every_s=0", "log.validate_every=30", "log.diagnose_every=40")


@dataclass
class Result:
    """What a campaign did: `lost` of `runs` after `faults` faults; `twice` counts runs trained again for nothing."""

    name: str
    faults: int = 0
    runs: int = 0
    lost: int = 0
    twice: int = 0


class Bench:
    """A corpus, and the undisturbed sweep that all others are compared with."""

    def __init__(self, root: Path, seeds: int) -> None:
        self.root, self.seeds = root, ",".join(map(str, range(seeds)))
        self.corpus = write_corpus(root / "text")
        self.undisturbed = self.sweep("undisturbed")
        self.undisturbed.run()

    def sweep(self, name: str, *words: str) -> Sweep:
        folder = self.root / name
        folder.mkdir()
        return Sweep(folder, self.corpus, self.seeds, *WORDS, *words, steps=STEPS)

    def judge(self, name: str, sweep: Sweep, faults: int) -> Result:
        """Compares every run, and the table, with the undisturbed sweep's."""
        expected = self.undisturbed.ended()
        found = [Ended.of(run) if status_is_final(run) else None for run in sweep.runs]
        lost = sum(a != b for a, b in zip(expected, found, strict=True))
        assert lost or sweep.table() == self.undisturbed.table(), f"{name}: the runs agree, the tables do not"
        twice = sum(_lines(run) != len(e.rows) for run, e in zip(sweep.runs, expected, strict=True))
        return Result(name, faults, len(sweep.runs), lost, twice)


def status_is_final(run: Path) -> bool:
    return (read_json(run / "summary.json") or {}).get("status") in (Status.done, Status.diverged)


def _lines(run: Path) -> int:
    return len((run / "metrics.jsonl").read_text().splitlines())


@contextmanager
def faults(bench: Bench, name: str, by_seed: dict[int, str], once: bool) -> Iterator[Path]:
    """Within it the runs of commands meet faults, as tests/faults/sitecustomize.py says."""
    marks = bench.root / f"{name} marks"
    marks.mkdir()
    told = {"FAULTS": ",".join(f"{s}:{k}" for s, k in by_seed.items()), "PYTHONPATH": str(HERE / "faults")}
    if once:
        told["FAULT_ONCE"] = str(marks)
    before = {key: os.environ.get(key) for key in told}
    told["PYTHONPATH"] += os.pathsep + (before["PYTHONPATH"] or "")
    os.environ.update(told)
    try:
        yield marks
    finally:
        for key, value in before.items():
            os.environ.pop(key) if value is None else os.environ.update({key: value})


def within_runs(bench: Bench) -> Result:
    """Each kind of fault once inside a run; the pool tries again, and one command is enough."""
    sweep = bench.sweep("within runs")
    by_seed = {i: KINDS[i % len(KINDS)] for i in range(len(sweep.runs))}
    with faults(bench, "within", by_seed, once=True) as marks:
        sweep.run()
        return bench.judge("inside runs: " + ", ".join(KINDS), sweep, len(list(marks.iterdir())))


def kills(bench: Bench, name: str, times: int, victims: Callable[[psutil.Process], list[psutil.Process]]) -> Result:
    """Kills -9 processes of sweeps at random moments and gives the command again until each is done."""
    chance, total = random.Random(name), Result(name)
    while total.faults < times:
        sweep = bench.sweep(f"{name}, after {total.runs} runs")
        done = _killed_until_done(sweep, times - total.faults, chance, victims)
        found = bench.judge(name, sweep, done)
        total = Result(name, *(a + b for a, b in zip(astuple(total)[1:], astuple(found)[1:], strict=True)))
    return total


def _killed_until_done(
    sweep: Sweep, times: int, chance: random.Random, victims: Callable[[psutil.Process], list[psutil.Process]]
) -> int:
    done = 0
    while True:
        process = sweep.start()
        while done < times and process.poll() is None:
            time.sleep(chance.uniform(0.2, 3.0))
            if process.poll() is None:
                done += sum(map(_kill, victims(psutil.Process(process.pid))))
        process.communicate(timeout=300)
        if process.returncode == 0:
            return done


def _kill(process: psutil.Process) -> bool:
    try:
        process.kill()
    except psutil.NoSuchProcess:
        return False
    return True


def _runs_of(pool: psutil.Process) -> list[psutil.Process]:
    """The processes of runs: forked from the fork server, which is a child of the pool."""
    with suppress(psutil.NoSuchProcess):
        return [p for p in pool.children(recursive=True) if p.ppid() != pool.pid]
    return []


def a_run(pool: psutil.Process) -> list[psutil.Process]:
    return random.sample(found, 1) if (found := _runs_of(pool)) else []


def the_pool(pool: psutil.Process) -> list[psutil.Process]:
    return [pool]


def everything(pool: psutil.Process) -> list[psutil.Process]:
    return [pool, *pool.children(recursive=True)]


def two_pools(bench: Bench) -> Result:
    """The same command twice at the same moment."""
    sweep = bench.sweep("two pools")
    pools = [sweep.start(), sweep.start()]
    outs = [pool.communicate(timeout=300)[0] for pool in pools]
    assert [pool.returncode for pool in pools] == [0, 0], outs
    result = bench.judge("two pools on one sweep", sweep, 1)
    result.twice = sum(len(json.loads((run / "provenance.json").read_text())["attempts"]) - 1 for run in sweep.runs)
    return result


@contextmanager
def small_disk(folder: Path, size: str) -> Iterator[None]:
    """A file system of its own in memory; needs root."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


def remount(folder: Path, option: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{option}", folder], check=True)


def full_disk(bench: Bench) -> Result:
    """The disk fills in mid-sweep; once there is room, the same command goes on."""
    sweep = bench.sweep("full disk", "checkpoint.keep=final")
    with small_disk(sweep.folder, "1m"):
        out = sweep.run(check=1)
        assert "No space left" in out, out
        assert "Traceback" not in out, out
        remount(sweep.folder, "size=100m")
        sweep.run()
        return bench.judge("disk full", sweep, 1)


def read_only(bench: Bench) -> Result:
    """The folder is read-only when the sweep is to go on, and later is not."""
    sweep = bench.sweep("read-only")
    with small_disk(sweep.folder, "100m"):
        process = sweep.start()
        sweep.pid(0)
        os.killpg(process.pid, signal.SIGINT)
        process.communicate(timeout=300)
        remount(sweep.folder, "ro")
        out = sweep.run(check=2)
        assert "cannot write there" in out, out
        remount(sweep.folder, "rw")
        sweep.run()
        return bench.judge("folder read-only", sweep, 2)


def stops(bench: Bench, number: signal.Signals) -> Result:
    """A request to stop, to the pool and all its processes as a terminal sends it; then the same command."""
    sweep = bench.sweep(number.name)
    process = sweep.start()
    sweep.pid(0)
    os.killpg(process.pid, number)
    out, _ = process.communicate(timeout=300)
    assert process.returncode == 128 + number, out
    sweep.run()
    return bench.judge(f"{number.name} to the whole sweep", sweep, 1)


def campaign(bench: Bench, times: int) -> Iterator[Result]:
    yield within_runs(bench)
    yield kills(bench, "kill -9 of a run", times, a_run)
    yield kills(bench, "kill -9 of the pool", max(2, times // 3), the_pool)
    yield kills(bench, "kill -9 of pool and runs", times, everything)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR2):
        yield stops(bench, number)
    yield two_pools(bench)
    if os.getuid() == 0:
        yield full_disk(bench)
        yield read_only(bench)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=50, help="how many processes each campaign kills (50)")
    times = parser.parse_args().times
    root = Path(tempfile.mkdtemp(prefix="reliability-"))
    results = []
    for result in campaign(Bench(root, seeds=len(KINDS)), times):
        results.append(result)
        print(f"| {result.name} | {result.faults} | {result.runs} | {result.lost} | {result.twice} |", flush=True)
    total = [sum(getattr(r, name) for r in results) for name in ("faults", "runs", "lost", "twice")]
    print("| **all** | " + " | ".join(map(str, total)) + " |")
    shutil.rmtree(root)
    sys.exit(1 if total[2] or total[3] else 0)


if __name__ == "__main__":
    main()
