"""How a machine is shared among runs: how many at once, with how many threads or which GPU each."""

import functools
import itertools
import os
import shutil
import subprocess
from collections.abc import Sequence

import psutil

from andrea_exp import accounting
from andrea_exp.config import Device, RunConfig
from andrea_exp.errors import UserError

# A process with torch and lightning in it, forked from a server that shares most of its pages (measured: LOG.md).
BASE_BYTES = 400 * 2**20


def cores() -> int:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@functools.cache
def _memory() -> int:
    return psutil.virtual_memory().total


def gpus() -> list[str]:
    """Names for CUDA_VISIBLE_DEVICES of the GPUs that this process may use; empty without any.

    Asked of nvidia-smi, because a look through torch takes seconds and memory on each GPU.
    """
    if shutil.which("nvidia-smi") is None:
        return []
    query = ["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"]
    found = subprocess.run(query, capture_output=True, text=True, check=False)
    indices = found.stdout.split() if found.returncode == 0 else []
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None or not indices:
        return indices
    # CUDA takes names up to the first that is none, such as -1.
    return list(
        itertools.takewhile(lambda name: name and not name.startswith("-"), visible.replace(" ", "").split(","))
    )


def threads_of(config: RunConfig) -> int:
    """Threads of each rank: as asked for, or 1 unless memory holds fewer runs than there are cores.

    Many runs of one thread do more together than few of many: see LOG.md for the measurement. It depends on the
    model and the machine alone, never on how many runs are left, so all seeds of a cell get the same.
    """
    if config.pool.threads:
        return config.pool.threads
    fit = _memory() // (run_bytes(config) * config.train.ranks)
    return max(1, cores() // max(1, fit * config.train.ranks))


def run_bytes(config: RunConfig) -> int:
    """About what a rank needs: weights, gradients, two moments, activations of a micro-batch, the process."""
    t = config.train
    tokens = t.batch_size // (t.accumulate * t.ranks) * config.model.seq_len
    return (
        BASE_BYTES
        + 16 * accounting.about_parameters(config.model)
        + tokens * accounting.about_activations(config.model)
    )


def on_gpu(config: RunConfig, found: Sequence[str]) -> bool:
    return config.train.device is Device.cuda or (config.train.device is Device.auto and bool(found))


def slots_of(configs: Sequence[RunConfig]) -> list[dict[str, str]]:
    """One environment for each run at once. A run on GPUs gets as many of its own as it has ranks."""
    pool, ranks, found = configs[0].pool, max(c.train.ranks for c in configs), gpus()
    if found and any(on_gpu(c, found) for c in configs):
        groups = [",".join(found[i : i + ranks]) for i in range(0, len(found) - ranks + 1, ranks)]
        if not groups:
            raise UserError(f"train.ranks={ranks}: this machine has {len(found)} GPUs")
        shared = [{"CUDA_VISIBLE_DEVICES": group} for _ in range(pool.runs_per_gpu or 1) for group in groups]
        return shared[: pool.slots]
    threads = max(threads_of(c) for c in configs)
    return [{} for _ in range(pool.slots or max(1, cores() // (threads * ranks)))]
