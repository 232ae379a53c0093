"""The local pool: each run in a process of its own, forked from a server that has torch imported already."""

import multiprocessing
import os
import signal
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from multiprocessing import connection, forkserver
from multiprocessing.process import BaseProcess
from pathlib import Path

from andrea_exp.config import PoolConfig
from andrea_exp.record import Status, lease_holder, read_json, status, write_json

TICK_S = 1.0
STOP_S = 10.0
HELD_ELSEWHERE = 75  # exit code of a process that found its run in another's hands


@dataclass(frozen=True)
class Job:
    """All that a pool carries to wherever a run happens."""

    folder: Path
    corpus: Path
    threads: int


def slots_of(pool: PoolConfig) -> int:
    """Runs at once: as asked for, or as many as the cores that this process may use allow."""
    return pool.slots or max(1, len(os.sched_getaffinity(0)) // pool.threads)


def warm_up() -> None:
    """Starts the fork server, which imports torch while the caller goes on."""
    multiprocessing.set_forkserver_preload(["andrea_exp.sweep.preload"])
    forkserver.ensure_running()


def run_jobs(jobs: Iterable[Job], slots: int, tick: Callable[[], None]) -> None:
    """Runs every job, `slots` at once, calling `tick` about once a second; failures are left in the records.

    On KeyboardInterrupt running jobs are stopped and marked interrupted, and the exception goes on.
    """
    waiting = deque(jobs)
    active: dict[BaseProcess, Job] = {}
    try:
        while waiting or active:
            while len(active) < slots and (job := _take(waiting)):
                active[_start(job)] = job
            tick()
            if active:
                connection.wait([p.sentinel for p in active], timeout=TICK_S)
            else:
                time.sleep(TICK_S)
            for process in [p for p in active if p.exitcode is not None]:
                job = active.pop(process)
                if process.exitcode == HELD_ELSEWHERE:
                    waiting.append(job)
                else:
                    _bury(job.folder, process.exitcode)
        tick()
    except BaseException:
        _stop(active)
        raise


def _take(waiting: deque[Job]) -> Job | None:
    """The first job that no other process holds; a job that another pool has done meanwhile is dropped."""
    for _ in range(len(waiting)):
        job = waiting.popleft()
        state = status(job.folder)
        if state is Status.running:
            waiting.append(job)
        elif not state.finished:
            return job
    return None


def _start(job: Job) -> BaseProcess:
    process = multiprocessing.get_context("forkserver").Process(target=_run, args=(job,), name=job.folder.name)
    process.start()
    return process


def _run(job: Job) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the pool, which decides
    from andrea_exp.run import execute

    execute(job.folder, job.corpus, job.threads)


def _bury(folder: Path, exitcode: int | None, instead: Status = Status.failed) -> None:
    """Writes the summary that a killed process could not write."""
    if lease_holder(folder) is None:
        (folder / "lease.json").unlink(missing_ok=True)
    if exitcode and read_json(folder / "summary.json") is None:
        how = f"killed by {signal.Signals(-exitcode).name}" if exitcode < 0 else f"exit code {exitcode}"
        write_json(folder / "summary.json", {"status": str(instead), "reason": how})


def _stop(active: dict[BaseProcess, Job]) -> None:
    for process in active:
        process.kill()
    for process, job in active.items():
        process.join(STOP_S)
        _bury(job.folder, process.exitcode, Status.interrupted)
