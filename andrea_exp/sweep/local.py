"""The local pool: each run in a process of its own, forked from a server that has torch imported already."""

import multiprocessing
import os
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import connection, forkserver
from multiprocessing.process import BaseProcess

from andrea_exp.config import PoolConfig
from andrea_exp.record import HELD_ELSEWHERE, INTERRUPTED, Status, status
from andrea_exp.sweep.pool import FailedFast, Job, Stopped, Tries, patience, told

TICK_S = 1.0
STOP_S = 10.0
Slot = Mapping[str, str]  # what a run's environment gets: its GPUs


@dataclass(frozen=True)
class Running:
    """A started job: one process a rank, in one slot."""

    job: Job
    slot: Slot
    processes: list[BaseProcess]

    def exitcode(self) -> int | None:
        """None while it runs; then 0, or INTERRUPTED; a failing rank's code, which ends the others.

        A rank that was asked to stop may be gone while the first one still saves for all.
        """
        codes = [p.exitcode for p in self.processes]
        bad = next((code for code in codes if code not in (None, 0, INTERRUPTED)), None)
        if bad is not None:
            self.kill()
            return bad
        return None if None in codes else max(codes)  # type: ignore[type-var]

    def ask_to_stop(self) -> None:
        for process in self.processes:
            process.terminate()

    def wait(self) -> None:
        """Until a process ends, or a tick has passed."""
        connection.wait([p.sentinel for p in self.processes if p.is_alive()], timeout=TICK_S)

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
            process.join(STOP_S)


def warm_up() -> None:
    """Starts the fork server, which imports torch while the caller goes on."""
    multiprocessing.set_forkserver_preload(["andrea_exp.sweep.preload"])
    forkserver.ensure_running()


def run_jobs(
    jobs: Iterable[Job],
    slots: Sequence[Slot],
    pool: PoolConfig,
    tick: Callable[[], None],
    announce: Callable[[str], None] = print,
) -> None:
    """Runs every job, one in each slot, calling `tick` about once a second; failures are left in the records.

    Raises Stopped after a request to stop, FailedFast where the pool wants that; on KeyboardInterrupt, which a
    second request raises, and on any other exception the runs are killed.
    """
    waiting, free, tries = deque(jobs), deque(slots), Tries(pool)
    active: list[Running] = []
    with patience(announce) as asked:
        try:
            while active or (waiting and not asked and not tries.given_up):
                ending = asked or tries.given_up
                while free and not ending and (job := take(waiting)):
                    active.append(start(job, free.popleft()))
                if ending:
                    _ask(active)
                tick()
                _wait(active)
                for run, code in [(run, code) for run in active if (code := run.exitcode()) is not None]:
                    active.remove(run)
                    free.append(run.slot)
                    held = code == HELD_ELSEWHERE
                    if held or (not ending and tries.again(run.job.folder, told(code))):
                        waiting.append(run.job)
            tick()
        except BaseException:
            for run in active:
                run.kill()
            raise
    if asked:
        raise Stopped(asked[0])
    if tries.given_up:
        raise FailedFast


def take(waiting: deque[Job]) -> Job | None:
    """The first job that no other process holds; a job that another pool has done meanwhile is dropped."""
    for _ in range(len(waiting)):
        job = waiting.popleft()
        state = status(job.folder)
        if state is Status.running:
            waiting.append(job)
        elif not state.finished:
            return job
    return None


def start(job: Job, slot: Slot) -> Running:
    """Starts a job's processes; `warm_up` must have been called."""
    context, port = multiprocessing.get_context("forkserver"), _free_port() if job.ranks > 1 else 0
    ranks = range(job.ranks)
    processes = [context.Process(target=_run, args=(job, r, port, slot), name=f"{job.folder.name}-{r}") for r in ranks]
    for process in processes:
        process.start()
    return Running(job, slot, list(processes))


def _ask(active: list[Running]) -> None:
    """Asks each run to stop; again at every tick, since a process may not listen yet when it is first told."""
    for run in active:
        run.ask_to_stop()


def _wait(active: list[Running]) -> None:
    if active:
        connection.wait([p.sentinel for run in active for p in run.processes if p.is_alive()], timeout=TICK_S)
    else:
        time.sleep(TICK_S)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _run(job: Job, rank: int, port: int, slot: Slot) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the pool, which decides
    signal.signal(
        signal.SIGHUP, signal.SIG_IGN
    )  # a terminal that closes ends the pool, and its runs go on to their end
    os.environ.update(slot)
    sys.argv[:] = job.command or sys.argv
    if job.ranks > 1:
        place = {"LOCAL_RANK": rank, "NODE_RANK": 0, "WORLD_SIZE": job.ranks, "MASTER_PORT": port}
        os.environ.update({name: str(value) for name, value in place.items()}, MASTER_ADDR="127.0.0.1")
    from andrea_exp.run import execute

    execute(job.folder, job.corpus, job.threads, rank)
