"""A run's folder: files that no crash can spoil, and the only thing that results are read from.

records/runs/<signature>/
    config.json      the resolved config            identity.json    what the signature hashes
    metrics.jsonl    one line a logged step         summary.json     how it ended, by rename
    provenance.json  where it ran, with what        lease.json       who runs it now; touched as a heartbeat
    log.txt          what the process printed       traceback.txt    where it failed
    checkpoints/     what it can go on from         weights.pt       the model as it ended
    queued.json      a cluster's job that waits to run it
    layers.json      what its blocks are worth, where that was measured
    tensorboard/     a view of metrics.jsonl
"""

import functools
import glob
import json
import math
import os
import platform
import secrets
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from enum import StrEnum
from importlib import metadata
from pathlib import Path
from typing import Any, BinaryIO

import orjson
import psutil

from andrea_exp import NUMERICS_VERSION, ROOT
from andrea_exp.config import RunConfig, as_dict, from_dict
from andrea_exp.errors import UserError, did_you_mean
from andrea_exp.rules import identity, signature

HEARTBEAT_S = 5.0
STALE_S = 120.0  # longer than a network file system caches a file's time
# Taking a lease takes milliseconds. Should a process be frozen within it and write its lease later, then the one that
# it takes the run from finds its own gone, and leaves.
GUARD_STALE_S = 10.0
# Exit codes of a run's process, besides 0 (done or diverged) and 1 (failed).
HELD_ELSEWHERE = 75  # another process has the run
INTERRUPTED = 76  # asked to stop, and a checkpoint is left
LAYERS = "layers.json"  # written by `andrea-exp specialise`
QUEUED = "queued.json"  # which job of a cluster's queue will run a folder
ENVIRONMENT = (
    "CUDA_VISIBLE_DEVICES",
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "SLURM_JOB_ID",
    "TRITON_INTERPRET",
)
PACKAGES = ("torch", "lightning", "hydra-core", "omegaconf", "numpy", "tokenizers", "andrea-exp")
KERNEL_PACKAGES = ("triton", "cuda-core", "nvidia-cuda-nvrtc")  # recorded where they are installed


class Status(StrEnum):
    done = "done"
    diverged = "diverged"
    failed = "failed"
    interrupted = "interrupted"
    running = "running"
    queued = "queued"
    missing = "missing"

    @property
    def finished(self) -> bool:
        """Whether there is nothing left to run: a diverged run is a result."""
        return self in (Status.done, Status.diverged)


def run_folder(records: Path, sig: str) -> Path:
    return records / "runs" / sig


def write_json(path: Path, value: Any, compact: bool = False, durable: bool = True) -> None:
    """Whole or not at all: written under a temporary name, flushed, renamed.

    What can be made again need not be `durable`, which costs milliseconds: a power cut may empty it.
    """
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}")  # two containers may have one pid
    try:
        with partial.open("w") as file:
            file.write(json.dumps(value, indent=None if compact else 2) + "\n")
            if durable:
                file.flush()
                os.fsync(file.fileno())
        partial.rename(path)
    except OSError:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        raise


def finite(value: Any) -> Any:
    """A value as JSON can have it: NaN and infinity become null."""
    if isinstance(value, dict):
        return {name: finite(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_json(path: Path) -> dict[str, Any] | None:
    """The content of a record, or None where there is none yet or a broken disk has left half of one."""
    try:
        return json.loads(path.read_text())
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None


def open_run(records: Path, config: RunConfig, fingerprint: str) -> Path:
    """The folder of a run, made if new. Raises UserError where the stored identity of a hit is another."""
    folder = run_folder(records, signature(config, fingerprint))
    folder.mkdir(parents=True, exist_ok=True)
    stored = read_json(folder / "identity.json")
    if stored is None:
        write_json(folder / "identity.json", identity(config, fingerprint), durable=False)
    elif stored != identity(config, fingerprint):
        raise UserError(f"{folder}: holds another run of the same signature; move it away")
    write_json(folder / "config.json", as_dict(config), durable=False)
    return folder


def find_run(records: Path, word: str) -> Path:
    """The folder of the run that a signature, the beginning of one, or a name under records/tensorboard/ means.

    Raises UserError for none, and for several, such as a name that two sweeps have.
    """
    runs = records / "runs"
    found = sorted(p for p in runs.glob(f"{glob.escape(word)}*") if p.is_dir()) if word else []
    if len(found) > 1 and runs / word not in found:
        raise UserError(f"{word}: {len(found)} runs in {records}/ begin so; give more of the signature")
    if runs / word in found or len(found) == 1:
        return runs / word if runs / word in found else found[0]
    links = [link for link in sorted(records.glob("tensorboard/*/*")) if link.is_symlink()]
    named = {runs / link.readlink().parent.name for link in links if link.name == word}
    there = [folder for folder in named if folder.is_dir()]  # others have been forgotten
    if len(there) > 1:
        raise UserError(f"{word}: the name of {len(there)} runs: {', '.join(sorted(p.name for p in there))}")
    if there:
        return there[0]
    names = [*(link.name for link in links), *(p.name for p in runs.glob("*"))]
    raise UserError(f"{word}: no such run in {records}/; {did_you_mean(word, names)}")


def require_writable(records: Path) -> None:
    """Raises UserError unless a records folder can be written, or made where it is not there yet."""
    nearest = next(p for p in (records.absolute(), *records.absolute().parents) if p.exists())
    if not nearest.is_dir():
        raise UserError(f"records={records}: cannot write there ({nearest} is a file)")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise UserError(f"records={records}: cannot write there (no permission in {nearest})")


def load_config(folder: Path) -> RunConfig:
    return from_dict(json.loads((folder / "config.json").read_text()))


def status(folder: Path) -> Status:
    """How a run stands, from its files alone."""
    if lease_holder(folder) is not None:
        return Status.running
    summary = read_json(folder / "summary.json") or {}
    if summary.get("status") in (Status.done, Status.diverged):
        return Status(summary["status"])
    if (folder / QUEUED).exists():
        return Status.queued
    if summary.get("status") in set(Status):
        return Status(summary["status"])
    return Status.interrupted if (folder / "metrics.jsonl").exists() else Status.missing


def read_metrics(folder: Path) -> list[dict[str, float]]:
    """All logged steps in order; a line torn by a crash is left out, the last value of a step wins."""
    try:
        lines = (folder / "metrics.jsonl").read_bytes().splitlines()
    except FileNotFoundError:
        return []
    rows = {row["step"]: row for row in _rows(lines)}
    return [rows[step] for step in sorted(rows)]


def _rows(lines: list[bytes]) -> Iterator[dict[str, float]]:
    try:
        yield from orjson.loads(b"[%b]" % b",".join(lines))  # several times faster than line by line
    except orjson.JSONDecodeError:
        for line in lines:
            with suppress(ValueError):
                yield json.loads(line)  # which also takes NaN and Infinity, as another writer may have left them


def last_metrics(folder: Path) -> dict[str, float]:
    """The newest whole line, read from the end of the file; empty where there is none."""
    with suppress(FileNotFoundError), (folder / "metrics.jsonl").open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - (1 << 16)))
        for line in reversed(file.read().splitlines()):
            with suppress(json.JSONDecodeError):
                return json.loads(line)
    return {}


class Held(BlockingIOError):
    """A living process has the run."""


def _time_at(folder: Path) -> float:
    """The time by the clock that stamps a folder's files."""
    probe = folder / f".clock.{secrets.token_hex(4)}"
    probe.touch()
    try:
        return probe.stat().st_mtime
    finally:
        probe.unlink()


@contextmanager
def _guard(path: Path) -> Iterator[float]:
    """Makes looking at a lease and taking it one act, and yields the time by the file server's clock.

    Raises Held where another is at it.
    """
    with suppress(FileNotFoundError):
        made = path.stat().st_mtime
        if abs(_time_at(path.parent) - made) > GUARD_STALE_S:  # its maker was killed within the act
            path.unlink(missing_ok=True)
    try:
        path.open("x").close()
    except FileExistsError as error:
        raise Held(f"{path}: held") from error
    try:
        yield path.stat().st_mtime
    finally:
        path.unlink(missing_ok=True)


class Lease:
    """The right to run one folder: a file made exclusively, touched while its process lives.

    Use as a context manager; entering raises Held where a living process holds it.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / "lease.json"
        self._file: BinaryIO | None = None
        self._inode = 0
        self._stop = threading.Event()

    def __enter__(self) -> "Lease":
        with _guard(self.path.with_name(".lease.guard")) as now:
            if lease_holder(self.path.parent, now) is not None:
                raise Held(f"{self.path}: held")
            write_json(self.path, {**process_mark(os.getpid()), "since": time.time()})
            self._file = self.path.open("rb")  # as long as it is open, no other file gets its inode's number
            self._inode = os.fstat(self._file.fileno()).st_ino
        threading.Thread(target=self._beat, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        if self.held():
            self.path.unlink(missing_ok=True)
        if self._file:
            self._file.close()

    def held(self) -> bool:
        """False once another has taken over, as happens to a process that was frozen for long."""
        with suppress(FileNotFoundError):
            return self.path.stat().st_ino == self._inode
        return False

    def _beat(self) -> None:
        while not self._stop.wait(HEARTBEAT_S):
            with suppress(OSError):
                if self.held():
                    os.utime(self.path)


def lease_holder(folder: Path, now: float | None = None) -> dict[str, Any] | None:
    """The living process that runs a folder, or None: on this machine by its pid, elsewhere by its heartbeat.

    `now` is the time by the clock that stamps the heartbeat; without it, this machine's.
    """
    path = folder / "lease.json"
    holder = read_json(path)
    if holder is None or not {"host", "machine", "pid", "started"} <= holder.keys():
        return None
    if holder["machine"] == _machine():
        return holder if _started(holder["pid"]) == holder["started"] is not None else None
    with suppress(FileNotFoundError):
        # A clock that was set back must not keep a dead process's lease alive, so either way is stale.
        if abs((now or time.time()) - path.stat().st_mtime) < STALE_S:
            return holder
    return None


def process_mark(pid: int) -> dict[str, Any]:
    """What names a process of this machine, among all that ever ran on any."""
    return {"host": socket.gethostname(), "machine": _machine(), "pid": pid, "started": _started(pid)}


@functools.cache
def _machine() -> str:
    """Where a pid means something: this boot of this machine, and the container in it."""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    return socket.gethostname()


def _started(pid: int) -> str | None:
    """When a living process began, by a clock that nobody can set; None for one that is gone.

    With it a pid names one process for ever: a later one may get the number.
    """
    try:
        process = psutil.Process(pid)
        if process.status() == psutil.STATUS_ZOMBIE:
            return None
        with suppress(OSError):
            # Field 22 of proc(5)'s stat, in ticks since boot; the name before it may hold spaces and brackets.
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
        return str(process.create_time())
    except psutil.NoSuchProcess:
        return None


class MetricsWriter:
    """Appends one JSON line a logged step; NaN and infinity are written as JSON has none: null."""

    def __init__(self, folder: Path) -> None:
        self._file = (folder / "metrics.jsonl").open("a", buffering=1)

    def write(self, row: dict[str, float]) -> None:
        self._file.write(json.dumps(finite(row), separators=(",", ":")) + "\n")

    def sync(self) -> None:
        """Brings all rows to the disk; what comes later may rely on them."""
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def metrics_bytes(folder: Path) -> int:
    try:
        return (folder / "metrics.jsonl").stat().st_size
    except FileNotFoundError:
        return 0


def go_back(folder: Path, metrics_size: int) -> None:
    """Takes a folder back to where its metrics had a given size; at 0 nothing is left of an attempt."""
    for name in ("summary.json", "traceback.txt"):
        (folder / name).unlink(missing_ok=True)
    shutil.rmtree(folder / "tensorboard", ignore_errors=True)  # written anew, so that no step is there twice
    if metrics_size:
        os.truncate(folder / "metrics.jsonl", metrics_size)
        return
    (folder / "metrics.jsonl").unlink(missing_ok=True)
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)


def provenance(folder: Path, config: RunConfig, fingerprint: str, from_step: int, **found: Any) -> dict[str, Any]:
    """Where a run happened and with what. Of the environment only an allow-list: never secrets.

    `attempts` lists where each part of a run happened that was taken up again.
    """
    earlier = (read_json(folder / "provenance.json") or {}).get("attempts", [])
    now = {
        "time": time.time(),
        "host": socket.gethostname(),
        "from_step": from_step,
        "torch": metadata.version("torch"),
    }
    return {
        "attempts": [*earlier, now],
        "git": _git(),
        "versions": {"python": platform.python_version(), **_versions()},
        "host": socket.gethostname(),
        "platform": platform.platform(),
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
        "environment": {name: os.environ[name] for name in ENVIRONMENT if name in os.environ},
        "numerics_version": NUMERICS_VERSION,
        "seed": config.seed,
        "data_fingerprint": fingerprint,
        **found,
    }


def _versions() -> dict[str, str]:
    found = {p: metadata.version(p) for p in PACKAGES}
    for package in KERNEL_PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found


def _git() -> dict[str, Any] | None:
    """Commit and dirty flag of the checkout that the code runs from; None for an installed wheel."""
    if not (ROOT / ".git").exists():
        return None

    def git(*words: str) -> str:
        done = subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True, check=True)
        return done.stdout.strip()

    try:
        return {"commit": git("rev-parse", "HEAD"), "dirty": bool(git("status", "--porcelain", "-uno"))}
    except (OSError, subprocess.CalledProcessError):
        return None
