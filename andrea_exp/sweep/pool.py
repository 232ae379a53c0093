"""The local pool: each run in a process of its own, forked from a server that has torch imported already."""

import multiprocessing
import os
import signal
import socket
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
    threads: int  # of each rank
    ranks: int = 1


@dataclass(frozen=True)
class Running:
    """A started job: one process a rank."""

    job: Job
    processes: list[BaseProcess]

    def exitcode(self) -> int | None:
        """None while it runs; 0 once all ranks are through; the first failing rank's code ends the others."""
        codes = [p.exitcode for p in self.processes]
        bad = next((code for code in codes if code), None)
        if bad is not None:
            self.kill()
        return bad if bad is not None else None if None in codes else 0

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
            process.join(STOP_S)


def slots_of(pool: PoolConfig, ranks: int = 1) -> int:
    """Runs at once: as asked for, or as many as the cores that this process may use allow."""
    return pool.slots or max(1, len(os.sched_getaffinity(0)) // (pool.threads * ranks))


def warm_up() -> None:
    """Starts the fork server, which imports torch while the caller goes on."""
    multiprocessing.set_forkserver_preload(["andrea_exp.sweep.preload"])
    forkserver.ensure_running()


def run_jobs(jobs: Iterable[Job], slots: int, tick: Callable[[], None]) -> None:
    """Runs every job, `slots` at once, calling `tick` about once a second; failures are left in the records.

    On KeyboardInterrupt running jobs are stopped and marked interrupted, and the exception goes on.
    """
    waiting = deque(jobs)
    active: list[Running] = []
    try:
        while waiting or active:
            while len(active) < slots and (job := _take(waiting)):
                active.append(_start(job))
            tick()
            if active:
                connection.wait([p.sentinel for run in active for p in run.processes if p.is_alive()], timeout=TICK_S)
            else:
                time.sleep(TICK_S)
            ended = [(run, code) for run in active if (code := run.exitcode()) is not None]
            for run, code in ended:
                active.remove(run)
                if code == HELD_ELSEWHERE:
                    waiting.append(run.job)
                else:
                    _bury(run.job.folder, code)
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


def _start(job: Job) -> Running:
    context, port = multiprocessing.get_context("forkserver"), _free_port() if job.ranks > 1 else 0
    ranks = range(job.ranks)
    processes = [context.Process(target=_run, args=(job, r, port), name=f"{job.folder.name}-{r}") for r in ranks]
    for process in processes:
        process.start()
    return Running(job, list(processes))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _run(job: Job, rank: int, port: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the pool, which decides
    if job.ranks > 1:
        place = {"LOCAL_RANK": rank, "NODE_RANK": 0, "WORLD_SIZE": job.ranks, "MASTER_PORT": port}
        os.environ.update({name: str(value) for name, value in place.items()}, MASTER_ADDR="127.0.0.1")
    from andrea_exp.run import execute

    execute(job.folder, job.corpus, job.threads, rank)


def _bury(folder: Path, exitcode: int | None, instead: Status = Status.failed) -> None:
    """Writes the summary that a killed process could not write."""
    if lease_holder(folder) is None:
        (folder / "lease.json").unlink(missing_ok=True)
    if exitcode and "status" not in (read_json(folder / "summary.json") or {}):
        how = f"killed by {signal.Signals(-exitcode).name}" if exitcode < 0 else f"exit code {exitcode}"
        write_json(folder / "summary.json", {"status": str(instead), "reason": how})


def _stop(active: list[Running]) -> None:
    for run in active:
        run.kill()
        _bury(run.job.folder, -signal.SIGKILL, Status.interrupted)
