"""What tests share: tiny configs, a small corpus on disk, the command line as a user calls it."""

import csv
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from andrea_exp import data
from andrea_exp.config import RunConfig
from andrea_exp.record import Status, read_json, read_metrics, run_folder, status
from andrea_exp.sweep.plan import plan_sweep

# Forked runs and the parallel suite share two cores: one thread each, and no fight.
os.environ.setdefault("OMP_NUM_THREADS", "1")

TINY = (
    "model.d_model=16",
    "model.n_layers=2",
    "model.n_heads=2",
    "model.seq_len=16",
    "train.batch_size=4",
    "train.steps=6",
    "train.device=cpu",
    "log.validate_every=3",
    "log.diagnose_every=3",
    "data.val_windows=8",
)
# What a run may measure otherwise when it is run again.
FLEETING = ("time", "tokens_per_s", "memory_mb", "mfu")


def make(*overrides: str) -> RunConfig:
    """The resolved config of a tiny run; later words win over the tiny defaults."""
    given = {o.split("=")[0] for o in overrides}
    return plan_sweep([*(t for t in TINY if t.split("=")[0] not in given), *overrides]).cells[0].config


@pytest.fixture(scope="session")
def corpus_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of small text files with some structure to learn."""
    return write_corpus(tmp_path_factory.mktemp("corpus") / "text")


def write_corpus(folder: Path) -> Path:
    folder.mkdir()
    words = ["stream", "norm", "block", "branch", "residual", "gate", "depth", "width", "the", "of", "and"]
    for document in range(24):
        picks = (words[(i * i + 3 * i * document + document) % len(words)] for i in range(400))
        (folder / f"doc{document:02d}.txt").write_text(" ".join(picks) + ".\n")
    return folder


@pytest.fixture(scope="session")
def prepared(corpus_path: Path, tmp_path_factory: pytest.TempPathFactory) -> data.Prepared:
    """The small corpus as byte tokens."""
    config = make(f"data.path={corpus_path}")
    return data.load(data.prepare(config.data, tmp_path_factory.mktemp("corpora"), config.model.seq_len))


@pytest.fixture
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder of a test that writes records and sweep files."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def andrea(*words: str, cwd: Path, check: int | None = 0, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    """Runs `andrea-exp WORDS` in a folder; fails the test unless the exit code is `check`."""
    done = subprocess.run(
        [sys.executable, "-m", "andrea_exp.cli", *words], cwd=cwd, capture_output=True, text=True, timeout=timeout
    )
    if check is not None:
        assert done.returncode == check, f"{words}: exit {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done


HIDE = """
import sys
from importlib.machinery import PathFinder

class Finder(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        hidden = name.partition(".")[0] in {modules}
        return None if hidden else super().find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(PathFinder)] = Finder
"""


def without(folder: Path, *modules: str) -> dict[str, str]:
    """The environment of processes, and of theirs, where `modules` are not installed and there is no GPU."""
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(HIDE.format(modules=modules))
    path = f"{folder}:{Path(__file__).parents[1]}"
    return os.environ | {"PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""}


@dataclass
class Ended:
    """What a run leaves, but for times, speeds and memory."""

    rows: list[dict[str, Any]]
    summary: dict[str, Any]

    @classmethod
    def of(cls, folder: Path) -> "Ended":
        rows = [{k: v for k, v in row.items() if k not in FLEETING} for row in read_metrics(folder)]
        summary = json.loads((folder / "summary.json").read_text())
        return cls(rows, {k: v for k, v in summary.items() if k not in (*FLEETING, "times")})


class Sweep:
    """An ad-hoc sweep over seeds in a folder, as a command."""

    def __init__(self, folder: Path, corpus: Path, seeds: str, *words: str, steps: int) -> None:
        given = {"train.steps", *(w.split("=")[0] for w in words)}
        tiny = [t for t in TINY if t.split("=")[0] not in given]
        self.words = [f"seed={seeds}", *tiny, f"train.steps={steps}", f"data.path={corpus}", *words]
        self.folder, self.plan = folder, plan_sweep(self.words)
        self.runs = [run_folder(folder / "records", c.signature) for c in self.plan.cells]

    def start(self) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "andrea_exp.cli", "sweep", *self.words]
        pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        return subprocess.Popen(command, cwd=self.folder, text=True, start_new_session=True, **pipes)

    def run(self, check: int = 0, timeout: float = 300) -> str:
        """Runs it to its end and returns what it printed; fails the test unless the exit code is `check`."""
        process = self.start()
        out, _ = process.communicate(timeout=timeout)
        assert process.returncode == check, out
        return out

    def table(self) -> list[dict[str, str]]:
        """The table's rows without speeds."""
        path = self.folder / "records" / "tables" / "adhoc" / "table.csv"
        return [{k: v for k, v in row.items() if k != "tokens_per_s"} for row in csv.DictReader(path.open())]

    def ended(self) -> list[Ended]:
        return [Ended.of(run) for run in self.runs]

    def pid(self, number: int) -> int:
        """Of the process that holds a run now; waits until there is one and it has logged something."""
        run = self.runs[number]
        wait_until(lambda: (run / "lease.json").exists() and len(read_metrics(run)) > 2)
        return (read_json(run / "lease.json") or {})["pid"]

    def statuses(self) -> list[Status]:
        return [status(run) for run in self.runs]

    def written(self) -> list[int]:
        return [(run / "summary.json").stat().st_mtime_ns for run in self.runs]


def living(process: psutil.Process) -> bool:
    """Whether a process still runs; one that has ended and was never collected does not."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def living_pid(pid: int) -> bool:
    return psutil.pid_exists(pid) and living(psutil.Process(pid))


def wait_until(condition: Callable[[], Any], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.01)
