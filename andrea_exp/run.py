"""One run, top to bottom: recorded config -> data -> model -> Trainer -> summary.

`execute` is the one job that every pool carries: it takes a run's folder and nothing else that matters.
"""

import logging
import math
import os
import statistics
import sys
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import torch
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.pytorch.utilities.exceptions import SIGTERMException

from andrea_exp import accounting, checkpoint, data, ops, stop
from andrea_exp.config import Device, RunConfig, as_dict
from andrea_exp.lit import LitGPT
from andrea_exp.model import GPT
from andrea_exp.record import (
    HELD_ELSEWHERE,
    INTERRUPTED,
    Held,
    Lease,
    Status,
    go_back,
    load_config,
    provenance,
    read_json,
    read_metrics,
    write_json,
)
from andrea_exp.watch import Watch

STUCK = 0.99  # of the training unigram model's loss
SPIKE_SD = 7.0
SPIKE_WINDOW = 100


def execute(folder: Path, corpus: Path, threads: int, rank: int = 0) -> None:
    """Runs the config recorded in `folder` on the prepared `corpus`, from its last checkpoint where there is one.

    Of a distributed run's ranks the first one alone writes. Returns once the run is done or diverged, or raises;
    ends the process with INTERRUPTED where a signal asked to stop (a checkpoint is left), with HELD_ELSEWHERE
    where another process has the run.
    """
    _own_output(folder / "log.txt")
    stop.listen()
    if rank:
        _attempt(folder, corpus, threads, rank, None)
        return
    try:
        with Lease(folder) as lease:
            ended = read_json(folder / "summary.json") or {}
            if ended.get("status") in (Status.done, Status.diverged):  # by another pool, while this process started
                return
            try:
                _attempt(folder, corpus, threads, rank, lease)
            except Exception:
                told = traceback.format_exc()
                (folder / "traceback.txt").write_text(told)
                write_json(folder / "summary.json", {"status": str(Status.failed), "reason": told.splitlines()[-1]})
                raise
    except Held:
        sys.exit(HELD_ELSEWHERE)


def _attempt(folder: Path, corpus: Path, threads: int, rank: int, lease: Lease | None) -> None:
    """From the last checkpoint, or from the start, to a summary."""
    resumed = checkpoint.newest(folder)
    # The number of threads changes bits, so a run keeps the one that it began with.
    torch.set_num_threads(resumed["threads"] if resumed else threads)
    if rank == 0:
        go_back(folder, resumed["metrics_bytes"] if resumed else 0)
    try:
        summary = train(folder, corpus, rank, resumed, lease)
    except SIGTERMException:  # Lightning's answer to a signal that came before the first step
        summary = None
    if summary is None:
        sys.exit(INTERRUPTED)
    if rank == 0:
        write_json(folder / "summary.json", summary)
        checkpoint.clear(folder, load_config(folder).checkpoint.keep)


def train(
    folder: Path,
    corpus: Path,
    rank: int = 0,
    resumed: checkpoint.State | None = None,
    lease: Lease | None = None,
) -> dict[str, Any] | None:
    """Trains one run and returns its summary, empty in ranks after the first; None where it was asked to stop."""
    config, started = load_config(folder), time.time()
    prepared = data.load(corpus)
    float64 = config.train.precision.name == "64-true"
    if float64:
        torch.set_default_dtype(torch.float64)
    ran = ops.use(config.ops.impl.name, resolve_device(config.train.device), float64)
    model = GPT(config.model, config.seed)
    model.trunk.recompute = config.train.recompute
    if resumed:
        model.load_state_dict(resumed["model"])
    if config.train.compile:
        model.trunk.compile(fullgraph=True)
    start = resumed["step"] if resumed else 0
    lit = LitGPT(config, model, prepared, start)
    watch = Watch(config, folder if rank == 0 else None, resumed["watch"] if resumed else None)
    keeper = checkpoint.Keeper(config, folder, watch, lease, resumed)
    trainer = _trainer(config, [watch, keeper], config.train.steps - start)
    if rank == 0:
        found = _provenance(folder, config, corpus.name, start, trainer.strategy.root_device, ran)
        write_json(folder / "provenance.json", found)
    if watch.view:
        watch.view.begin(_flat(config), started, read_metrics(folder))
    if config.train.steps:
        trainer.fit(lit, train_dataloaders=range((config.train.steps - start) * config.train.accumulate))
    else:
        lit.to(trainer.strategy.root_device)
        watch.prepare(lit, trainer.precision_plugin)
        watch.measure_untrained(lit)
    if watch.writer is None:
        return None if keeper.interrupted else {}
    watch.writer.close()
    if keeper.interrupted:
        if watch.view:
            watch.view.close(time.time(), succeeded=False)
        return None
    return _summary(folder, config, watch, model, started)


def _summary(folder: Path, config: RunConfig, watch: Watch, model: GPT, started: float) -> dict[str, Any]:
    summary = summarise(config, read_metrics(folder), watch.unigram, watch.non_finite_step)
    summary["parameters"] = sum(p.numel() for p in model.parameters())
    summary["weights"] = checkpoint.finish(folder, model, config.checkpoint.keep)
    if watch.view:
        watch.view.close(time.time(), summary["status"] == Status.done)
    # What a table must not mix: read again from where the run has it, as the last attempt wrote it.
    made = read_json(folder / "provenance.json") or {}
    summary["machine"] = {
        "device": made["device"]["name"],
        "torch": made["versions"]["torch"],
        "ops": made["ops"],
        "numerics_version": made["numerics_version"],
    }
    times = {
        "start": started,
        "first_step": watch.first_step_at,
        "end": time.time(),
        "training_s": watch.training_s,
    }
    return {**summary, "times": times, "threads": torch.get_num_threads()}


def _trainer(config: RunConfig, callbacks: list[L.Callback], steps: int) -> L.Trainer:
    warnings.filterwarnings("ignore", module="lightning")
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    return L.Trainer(
        accelerator=resolve_device(config.train.device),
        devices=config.train.ranks,
        strategy="ddp" if config.train.ranks > 1 else "auto",
        deterministic=config.train.deterministic,
        precision=config.train.precision.name,  # type: ignore[arg-type]
        max_steps=steps,
        accumulate_grad_batches=config.train.accumulate,
        callbacks=callbacks,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        # A pool starts all processes of a run; Lightning's own launcher would run the command line again.
        plugins=[LightningEnvironment()],
    )


def resolve_device(requested: Device) -> str:
    if requested is Device.auto:
        return "cuda" if torch.cuda.is_available() else "cpu"
    return requested.name


def summarise(
    config: RunConfig, rows: list[dict[str, Any]], unigram: float, non_finite_step: int | None
) -> dict[str, Any]:
    """How a run ended, from its metrics: a status, and the numbers that tables are made of."""
    validated = [r for r in rows if "val/loss" in r]
    first, last = validated[0], validated[-1]
    # An untrained model has not had its chance to learn: only a loss that is no number counts against it.
    bar = unigram if rows[-1]["step"] else math.inf
    divergence = _divergence(first["val/loss"], last["val/loss"], bar, rows[-1]["step"], non_finite_step)
    trained = [r for r in rows if "train/loss" in r]
    measured = trained or rows  # an untrained model has the gradients of step 0 alone
    norms = [r["grad_norm/total"] for r in measured if r.get("grad_norm/total") is not None]
    first_block, last_block = _outer_block_norms(measured)
    ended = last if divergence is None or divergence["kind"] != "non-finite" else {}
    return {
        "status": str(Status.done if divergence is None else Status.diverged),
        "diverged": divergence,
        "steps": rows[-1]["step"],
        "tokens": rows[-1]["tokens"],
        "val/loss": ended.get("val/loss"),
        "val/loss_stderr": ended.get("val/loss_stderr"),
        "val/bits_per_byte": ended.get("val/bits_per_byte"),
        "val/loss_start": first["val/loss"],
        "unigram_loss": unigram,
        "train/loss": trained[-1]["train/loss"] if trained else None,
        "grad_norm/median": statistics.median(norms) if norms else None,
        "grad_norm/max": max(norms, default=None),
        "grad_norm/first_block": first_block,
        "grad_norm/last_block": last_block,
        "clip/fraction": _mean([r["clip/fraction"] for r in trained if "clip/fraction" in r]),
        "spikes": spikes([r["train/loss"] for r in trained if r["train/loss"] is not None]),
        "tokens_per_s": statistics.median(r["tokens_per_s"] for r in trained) if trained else None,
        "memory_mb": max((r["memory_mb"] for r in trained), default=None),
        "flops_per_token": accounting.flops_per_token(config.model),
    }


def _outer_block_norms(rows: list[dict[str, Any]]) -> tuple[float | None, float | None]:
    """Gradient norms of the first and the last block, before clipping, in the last row that has them finite."""
    for row in reversed(rows):
        parts = [(name.split("/")[1], value) for name, value in row.items() if name.startswith("grad_norm/block_")]
        if parts and all(value is not None for _, value in parts):
            ends = min(block for block, _ in parts), max(block for block, _ in parts)
            first, last = (math.hypot(*(v for block, v in parts if block == end)) for end in ends)
            return first, last
    return None, None


def _divergence(
    start: float | None, end: float | None, unigram: float, last_step: int, non_finite_step: int | None
) -> dict[str, Any] | None:
    """Why a run counts as diverged, or None. The three kinds of the protocol, worst first."""
    if non_finite_step is not None or end is None:
        return {"kind": "non-finite", "step": non_finite_step or last_step}
    if start is not None and end > start:
        return {"kind": "above start", "step": last_step}
    if end > STUCK * unigram:
        return {"kind": "stuck", "step": last_step}
    return None


def spikes(losses: list[float]) -> int:
    """How many losses lie 7 standard deviations or more above the mean of the hundred before them."""
    count = 0
    for i in range(SPIKE_WINDOW, len(losses)):
        before = losses[i - SPIKE_WINDOW : i]
        count += losses[i] > statistics.fmean(before) + SPIKE_SD * statistics.pstdev(before)
    return count


def _mean(values: list[float]) -> float | None:
    return statistics.fmean(values) if values else None


def _flat(config: RunConfig) -> dict[str, Any]:
    sections = as_dict(config)
    names = ("model", "data", "optim", "train")
    return {f"{s}.{k}": v for s in names for k, v in sections[s].items()} | {"seed": config.seed}


def _provenance(
    folder: Path, config: RunConfig, fingerprint: str, start: int, device: torch.device, ran: dict[str, str]
) -> dict[str, Any]:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else _cpu_name()
    return provenance(
        folder,
        config,
        fingerprint,
        start,
        device={"type": device.type, "name": name},
        threads=torch.get_num_threads(),
        tf32=torch.backends.cuda.matmul.allow_tf32,
        ops=ran,
    )


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return "cpu"
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), "cpu")


def _own_output(path: Path) -> None:
    """Everything the process prints, from C too, goes to the run's own log."""
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
        os.dup2(log, stream.fileno())
    os.close(log)
