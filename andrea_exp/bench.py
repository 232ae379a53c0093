"""What the harness costs: the same model trained by a bare torch loop and by a recorded run, in turns.

Times on one machine wander, so only ratios inside one call mean anything; nothing else should be running.
"""

import json
import multiprocessing
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import torch
from rich.console import Console
from rich.table import Table

from andrea_exp import accounting, data
from andrea_exp.config import RunConfig
from andrea_exp.data.batches import train_batch
from andrea_exp.model import GPT
from andrea_exp.record import open_run, read_json
from andrea_exp.sweep.local import run_jobs, warm_up
from andrea_exp.sweep.plan import plan_sweep
from andrea_exp.sweep.pool import Job

# The size at which nanoGPT's loop was measured: 255 ms a step, 8,040 tokens/s on one thread.
NANOGPT_SIZE = (
    *("model.n_layers=6", "model.d_model=128", "model.n_heads=4", "model.seq_len=128", "train.batch_size=16"),
    *("model.init=scaled", "model.tied_head=true", "train.steps=60", "log.validate_every=60", "log.diagnose_every=60"),
)
ROUNDS = 3
MANY_RUNS, MANY_STEPS = 12, 100


def bench_train(overrides: Sequence[str], as_json: bool) -> int:
    """Measures speed against a bare loop, start-up, many runs at once, memory; prints a table or JSON."""
    console = Console(stderr=as_json)
    with tempfile.TemporaryDirectory() as folder, console.status("benchmarking: about two minutes"):
        root = Path(folder)
        warm_up()
        size = plan_sweep([*NANOGPT_SIZE, *overrides]).cells[0].config
        _harness(_with_steps(size, 1), root)  # the fork server has imported everything once this returns
        rounds = [(_bare(size, root), _harness(size, root, seed)) for seed in range(1, ROUNDS + 1)]
        found = {**_speed(size, rounds), **_start(root), **_many(root)}
    if as_json:
        print(json.dumps(found, indent=2))
    else:
        console.print(show(found))
    return 0


def _speed(config: RunConfig, rounds: list[tuple[float, dict[str, float]]]) -> dict[str, Any]:
    tokens = config.train.batch_size * config.model.seq_len
    bare, harness = (median(r) for r in ([b for b, _ in rounds], [h["step_s"] for _, h in rounds]))
    peak = _matmul_flops()
    return {
        "bare ms a step": 1e3 * bare,
        "harness ms a step": 1e3 * harness,
        "harness / bare, median of rounds": median(h["step_s"] / b for b, h in rounds),
        "harness tokens/s": tokens / harness,
        "share of this thread's matmul peak": accounting.flops_per_token(config.model) * tokens / harness / peak,
        "peak memory of a run, MB": max(h["memory_mb"] for _, h in rounds),
    }


def _start(root: Path) -> dict[str, Any]:
    """From the pool's decision to the first training step, the untrained model's validation included."""
    demo = _with_steps(plan_sweep([]).cells[0].config, 1)
    starts = [_harness(demo, root, seed)["start_s"] for seed in range(1, ROUNDS + 1)]
    return {"decision to first step at the demo's size, s": median(starts)}


def _with_steps(config: RunConfig, steps: int) -> RunConfig:
    return replace(config, train=replace(config.train, steps=steps))


def _bare(config: RunConfig, root: Path) -> float:
    """Seconds a step of a plain loop: forward, backward, clip, AdamW; nothing watched or written."""
    torch.set_num_threads(1)
    prepared = data.load(data.prepare(config.data, root / "corpora", config.model.seq_len))
    model = GPT(config.model, config.seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.optim.lr, fused=True)

    def step(index: int) -> None:
        ids = train_batch(prepared, 0, index, 0, config.train.batch_size, config.model.seq_len)
        model.loss(torch.from_numpy(ids[0]), torch.from_numpy(ids[1])).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    step(0)
    started = time.perf_counter()
    for index in range(1, config.train.steps + 1):
        step(index)
    return (time.perf_counter() - started) / config.train.steps


def _harness(config: RunConfig, root: Path, seed: int = 0) -> dict[str, float]:
    """The same steps as a recorded run with all default diagnostics, in a process of its own."""
    job = _job(replace(config, seed=seed), root)
    decided = time.time()
    run_jobs([job], [{}], config.pool, lambda: None)
    summary = read_json(job.folder / "summary.json") or {}
    times = summary["times"]
    return {
        "step_s": times["training_s"] / config.train.steps,
        "start_s": times["first_step"] - decided,
        "memory_mb": summary["memory_mb"],
    }


def _job(config: RunConfig, root: Path) -> Job:
    corpus = data.prepare(config.data, root / "corpora", config.model.seq_len)
    return Job(open_run(root, config, corpus.name), corpus, 1)


def _many(root: Path) -> dict[str, Any]:
    """Twelve short runs of the demo's pre-norm cell, two at once, beside twelve bare loops, two at once."""
    seeds = ",".join(str(s) for s in range(MANY_RUNS))
    plan = plan_sweep([f"seed={seeds}", f"train.steps={MANY_STEPS}"])
    started = time.perf_counter()
    with multiprocessing.get_context("forkserver").Pool(2) as pool:
        pool.starmap(_bare, [(cell.config, root) for cell in plan.cells], chunksize=1)
    bare = time.perf_counter() - started
    jobs = [_job(cell.config, root) for cell in plan.cells]
    before, started = psutil.cpu_times(), time.perf_counter()
    run_jobs(jobs, [{}, {}], plan.cells[0].config.pool, lambda: None)
    seconds, after = time.perf_counter() - started, psutil.cpu_times()
    busy = sum(getattr(after, k) - getattr(before, k) for k in ("user", "system"))
    name = f"{MANY_RUNS} runs of {MANY_STEPS} steps, two at once"
    return {
        f"{name}: bare loops, s": bare,
        f"{name}: harness, s": seconds,
        f"{name}: harness / bare": seconds / bare,
        "cores busy": busy / (seconds * min(2, psutil.cpu_count() or 1)),
    }


def _matmul_flops() -> float:
    a = torch.randn(512, 512)
    a @ a
    started = time.perf_counter()
    for _ in range(20):
        a @ a
    return 20 * 2 * 512**3 / (time.perf_counter() - started)


def show(found: dict[str, Any]) -> Table:
    table = Table("measure", "value", box=None)
    table.columns[1].justify = "right"
    for name, value in found.items():
        table.add_row(name, f"{value:,.3f}" if value < 100 else f"{value:,.0f}")
    return table
