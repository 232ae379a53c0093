"""The Slurm pool: job arrays through submitit, each task the same "run this recorded config" as on one machine.

What a job is doing is read from the queue and from the run's records, never waited for through accounting, which
a cluster may lack. A warning before preemption or the time limit (USR2) ends in a checkpoint and a requeue.
"""

import os
import re
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from andrea_exp.config import Device, PoolConfig
from andrea_exp.errors import UserError
from andrea_exp.record import INTERRUPTED, QUEUED, lease_holder, read_json, status, write_json
from andrea_exp.sweep.pool import Detached, FailedFast, Job, Tries

POLL_S = 5.0
# States of a job that will run no more; anything else in the queue is waiting, running or on its way to either.
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "OUT_OF_MEMORY", "BOOT_FAIL", "DEADLINE")


@dataclass(frozen=True)
class Task:
    """What a Slurm job executes, once a rank. Pickled by submitit."""

    job: Job

    def __call__(self) -> None:
        """Ends like the run: an exception, and so a failed job, where that fails."""
        from andrea_exp import stop
        from andrea_exp.run import execute

        sys.argv[:] = self.job.command or sys.argv
        rank = int(os.environ.get("SLURM_PROCID", "0"))
        if self.job.ranks > 1:
            os.environ.update(_place(rank, self.job.ranks))
        try:
            execute(self.job.folder, self.job.corpus, self.job.threads, rank)
        except SystemExit as ended:
            if ended.code == INTERRUPTED:
                if rank == 0 and _worth_requeueing(stop.heard()):
                    _requeue()
                os._exit(0)  # a value returned would make submitit take the run for done
            raise

    def checkpoint(self) -> Any:
        """submitit's answer to a signal that comes before ours is set: the same again."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self)


def run_jobs(
    jobs: Iterable[Job], pool: PoolConfig, tick: Callable[[], None], announce: Callable[[str], None] = print
) -> None:
    """Submits every job that is not in the queue yet, and watches until all have ended.

    Raises Detached at once where the pool wants that, FailedFast as the local pool does. Ctrl-C leaves the jobs
    to the cluster: the same command finds them again.
    """
    tries = Tries(pool)
    waiting = [job for job in jobs if not status(job.folder).finished]
    _require_slurm()
    submitted = _adopt(waiting)
    if submitted:
        announce(f"{len(submitted)} of these runs are in the queue already")
    while True:
        rest = [job for job in waiting if job.folder not in submitted]
        submitted |= _submit(rest, pool, others=bool(submitted))
        if pool.detach:
            raise Detached(len(submitted))
        tick()
        time.sleep(POLL_S)
        queue = _queue()
        for job in [job for job in waiting if job.folder in submitted]:
            state = queue.get(submitted[job.folder], "gone") if queue is not None else "unknown"
            if not _has_ended(state) or lease_holder(job.folder):
                continue
            del submitted[job.folder]
            (job.folder / QUEUED).unlink(missing_ok=True)
            cancelled = state.startswith("CANCELLED")  # somebody's wish, where a crash is nobody's
            if cancelled or not tries.again(job.folder, f"Slurm job {state.lower()}"):
                waiting.remove(job)
        if tries.given_up:
            _cancel(submitted.values())
            raise FailedFast
        if not waiting:
            tick()
            return


def forget_gone(folders: Iterable[Path]) -> None:
    """Clears the mark of a queued run from those that the queue does not know any more."""
    marked = {f: found["job"] for f in folders if (found := read_json(f / QUEUED))}
    queue = _queue() if marked else None
    for folder, job_id in marked.items():
        if queue is not None and _has_ended(queue.get(job_id, "gone")):
            (folder / QUEUED).unlink(missing_ok=True)


def _adopt(jobs: Sequence[Job]) -> dict[Path, str]:
    """The jobs that an earlier command submitted and that are still in the queue."""
    forget_gone(job.folder for job in jobs)
    return {job.folder: found["job"] for job in jobs if (found := read_json(job.folder / QUEUED))}


def _submit(jobs: Sequence[Job], pool: PoolConfig, others: bool) -> dict[Path, str]:
    """Hands jobs to Slurm in arrays of what the cluster takes; what it refuses for now is left for later.

    Raises UserError where it refuses the first one, and none of `others` is there to wait for.
    """
    from submitit.core.utils import FailedJobError

    submitted: dict[Path, str] = {}
    for alike in _alike(jobs):
        size = _largest_array()
        for chunk in (alike[i : i + size] for i in range(0, len(alike), size)):
            try:
                executor = _executor(chunk[0], len(chunk), pool)
                with executor.batch():
                    made = [executor.submit(Task(job)) for job in chunk]
            except FailedJobError as error:
                if not submitted and not others:
                    raise UserError(f"pool=slurm: {str(error).strip().splitlines()[-1]}") from error
                return submitted
            for job, its in zip(chunk, made, strict=True):
                write_json(job.folder / QUEUED, {"pool": "slurm", "job": its.job_id, "time": time.time()})
                submitted[job.folder] = its.job_id
    return submitted


def _executor(job: Job, count: int, pool: PoolConfig) -> Any:
    import submitit

    # Of requeues after a warning submitit counts all that come late in the time limit; ours have made progress.
    home = job.folder.parent.parent / "slurm"
    executor = submitit.AutoExecutor(folder=home / "%j", cluster="slurm", slurm_max_num_timeout=10**6)
    wanted = {
        "name": "andrea-exp",
        "slurm_partition": pool.partition,
        "slurm_account": pool.account,
        "timeout_min": pool.time_min,
        "mem_gb": pool.mem_gb,
        "cpus_per_task": job.threads,
        "tasks_per_node": job.ranks,
        "gpus_per_node": pool.gpus if pool.gpus is not None else (job.ranks if job.device is Device.cuda else None),
        "slurm_signal_delay_s": pool.warn_s,
        "slurm_array_parallelism": pool.slots or count,
        "slurm_additional_parameters": {"requeue": True, **(pool.flags or {})},
        "stderr_to_stdout": True,
    }
    executor.update_parameters(**{name: value for name, value in wanted.items() if value is not None})
    return executor


def _alike(jobs: Sequence[Job]) -> Iterator[list[Job]]:
    """Jobs that may share an array, since they need the same of a node."""
    groups: dict[Any, list[Job]] = defaultdict(list)
    for job in jobs:
        groups[job.threads, job.ranks, job.device].append(job)
    yield from groups.values()


def _place(rank: int, ranks: int) -> dict[str, str]:
    """What Lightning's plain environment reads, of a run on one node."""
    port = 20000 + int(os.environ["SLURM_JOB_ID"]) % 10000
    local = os.environ["SLURM_LOCALID"]
    place = {"LOCAL_RANK": local, "NODE_RANK": "0", "WORLD_SIZE": str(ranks)}
    return {**place, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


def _worth_requeueing(heard: set[int]) -> bool:
    """After a warning, yes; after SIGTERM only while Slurm still calls the job running, as in a preemption's grace.

    Requeueing brings back to life what somebody cancelled.
    """
    if signal.SIGTERM not in heard:
        return True
    return _ask("squeue", "-h", "-o", "%T", "-j", _own_id()) == "RUNNING"


def _requeue() -> None:
    # Slurm signals every process of a job, this command's too.
    shielded = 'trap "" TERM CONT USR2; exec scontrol requeue "$0"'
    subprocess.run(["sh", "-c", shielded, _own_id()], check=False)


def _own_id() -> str:
    """As the queue shows it; an array's number alone would name all of its tasks."""
    array = os.environ.get("SLURM_ARRAY_JOB_ID")
    return f"{array}_{os.environ['SLURM_ARRAY_TASK_ID']}" if array else os.environ["SLURM_JOB_ID"]


def _require_slurm() -> None:
    try:
        import submitit  # noqa: F401
    except ImportError as error:
        raise UserError("pool=slurm needs: pip install 'andrea-exp[slurm]'") from error
    if _ask("scontrol", "ping") is None:
        raise UserError("pool=slurm: no Slurm controller answers here (scontrol ping)")


def _largest_array() -> int:
    found = re.search(r"^MaxArraySize\s*=\s*(\d+)", _ask("scontrol", "show", "config") or "", re.MULTILINE)
    return max(1, int(found.group(1))) if found else 1000


def _queue() -> dict[str, str] | None:
    """State by job, as the queue shows this user's, just ended ones too; None where it does not answer."""
    told = _ask("squeue", "--me", "-h", "-r", "-t", "all", "-o", "%i|%T")
    return None if told is None else dict(line.split("|") for line in told.splitlines())


def _has_ended(state: str) -> bool:
    return state == "gone" or state.startswith(ENDED)


def _cancel(job_ids: Iterable[str]) -> None:
    _ask("scancel", *job_ids)


def _ask(*command: str) -> str | None:
    """What one of Slurm's commands prints; None where it fails or is not there."""
    with suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.strip()
    return None
