"""The Ray pool: one task a run, in a worker of its own that starts the run's processes as the local pool does."""

import logging
import os
import signal
import socket
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from andrea_exp.config import Device, PoolConfig
from andrea_exp.errors import UserError
from andrea_exp.record import HELD_ELSEWHERE, INTERRUPTED, status
from andrea_exp.sweep import local
from andrea_exp.sweep.pool import FailedFast, Job, Stopped, Tries, patience, told

ANSWER_S = 5.0


def carry(job: Job, gpus: float) -> int:
    """Runs one job to its end, in processes of its own, and returns its exit code: what a Ray task executes.

    Ray's cancel is a SIGINT to the worker: the run is asked to stop, and saves.
    """
    asked: list[int] = []
    signal.signal(signal.SIGINT, lambda number, _: asked.append(number))
    local.warm_up()
    run = local.start(job, {} if gpus else {"CUDA_VISIBLE_DEVICES": ""})
    while (code := run.exitcode()) is None:
        if asked:
            run.ask_to_stop()
        run.wait()
    return code


def run_jobs(
    jobs: Iterable[Job], pool: PoolConfig, tick: Callable[[], None], announce: Callable[[str], None] = print
) -> None:
    """Runs every job as a Ray task; raises Stopped and FailedFast as the local pool does."""
    ray = _connect(pool.address)
    tries, waiting = Tries(pool), deque(job for job in jobs if not status(job.folder).finished)
    active: dict[Any, Job] = {}
    task = ray.remote(max_calls=1, max_retries=0)(carry)  # a worker a run; what is tried again is ours to count
    most = pool.slots or len(waiting)
    try:
        there = ray.cluster_resources()
        needs = {job.folder: _needs(job, pool, bool(there.get("GPU"))) for job in waiting}
        _require_resources(needs.values(), there)
        with patience(announce) as asked:
            while active or (waiting and not asked and not tries.given_up):
                ending = asked or tries.given_up
                while waiting and len(active) < most and not ending:
                    if (job := local.take(waiting)) is None:
                        break
                    needed = needs[job.folder]
                    active[task.options(**needed).remote(job, needed["num_gpus"])] = job
                if ending:
                    for ref in active:
                        ray.cancel(ref, force=False)
                tick()
                if not active:  # all that is left is held elsewhere, and for nothing Ray does not wait
                    time.sleep(local.TICK_S * bool(waiting))
                    continue
                ended, _ = ray.wait(list(active), num_returns=len(active), timeout=local.TICK_S)
                for ref in ended:
                    job = active.pop(ref)
                    code, how = _outcome(ray, ref)
                    held = code == HELD_ELSEWHERE
                    if held or (not ending and tries.again(job.folder, how)):
                        waiting.append(job)
            tick()
    finally:
        ray.shutdown()
    if asked:
        raise Stopped(asked[0])
    if tries.given_up:
        raise FailedFast


def _outcome(ray: Any, ref: Any) -> tuple[int, str]:
    """A task's exit code, and in words how it ended."""
    gone = ray.exceptions
    try:
        code = ray.get(ref)
        return code, told(code)
    except gone.TaskCancelledError:  # before RayTaskError, which a running task's is too
        return INTERRUPTED, "cancelled"
    except (gone.WorkerCrashedError, gone.NodeDiedError, gone.OutOfMemoryError) as error:
        return 1, f"Ray: {type(error).__name__}"
    except gone.RayTaskError as error:
        return 1, f"Ray: {error.cause!r}"


def _needs(job: Job, pool: PoolConfig, any_gpus: bool) -> dict[str, float]:
    wanted = job.device is Device.cuda or (job.device is Device.auto and any_gpus)
    gpus = pool.gpus if pool.gpus is not None else job.ranks * wanted
    return {"num_cpus": job.threads * job.ranks, "num_gpus": gpus}


def _require_resources(needs: Iterable[dict[str, float]], there: dict[str, float]) -> None:
    """Ray lets a task that the cluster cannot hold wait for ever. Raises UserError."""
    for needed in needs:
        for name, key in (("CPU", "num_cpus"), ("GPU", "num_gpus")):
            if needed[key] > there.get(name, 0):
                raise UserError(f"pool=ray: a run needs {needed[key]:g} {name}, the cluster has {there.get(name, 0):g}")


def _connect(address: str | None) -> Any:
    """The ray package, connected. Raises UserError where it is missing or nobody answers at the address."""
    _answering(address)
    # A token that an earlier Ray left makes a cluster started later ask for it, which a client does only if told.
    if address and (Path.home() / ".ray" / "auth_token").exists():
        os.environ.setdefault("RAY_AUTH_MODE", "token")
    os.environ.setdefault("RAY_worker_niceness", "0")
    try:
        import ray
    except ImportError as error:
        raise UserError("pool=ray needs: pip install 'andrea-exp[ray]'") from error
    # Ray refuses most options together with an address, at any value.
    own: dict[str, Any] = {} if address else {"include_dashboard": False}
    try:
        ray.init(address=address or "local", log_to_driver=False, logging_level=logging.ERROR, **own)
    except (ConnectionError, ValueError) as error:
        raise UserError(f"pool.address={address}: {str(error).strip().splitlines()[0]}") from error
    return ray


def _answering(address: str | None) -> None:
    """Ray itself waits a minute and more for a cluster that is not there."""
    host, _, port = (address or "").rpartition(":")
    if host and port.isdecimal() and "//" not in host:
        with suppress(OSError), socket.create_connection((host, int(port)), ANSWER_S):
            return
        raise UserError(f"pool.address={address}: nobody answers there")
