"""Reading speed: 2,000 runs' logged values as one frame, and their table; and tbparse on the event files of the same.

Files are read soon after they were written, so that the disk plays no part; each side has processes of its own, and
imports are not counted.
"""

import importlib
import importlib.util
import json
import multiprocessing
import random
import resource
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console

from andrea_exp.bench import show
from andrea_exp.bench_scale import SUMMARY
from andrea_exp.record import MetricsWriter, run_folder, write_json
from andrea_exp.results.frames import metrics_frame
from andrea_exp.results.table import ablation_table
from andrea_exp.sweep.plan import Plan, plan_sweep
from andrea_exp.tensorboard_view import View

RUNS, STEPS = 2_000, 200
METRICS = ("train/loss", "lr", "tokens", "grad_norm/total", "clip/coef")
SUBSETS = (50, 100)  # runs that tbparse reads; its time for all of them is scaled from these
ROUNDS = 3


def bench_read(as_json: bool) -> int:
    """Writes runs as the trainer writes them, and reads them: cold, again, and with tbparse where it is installed."""
    console = Console(stderr=as_json)
    has_peer = importlib.util.find_spec("tbparse") is not None
    with tempfile.TemporaryDirectory() as folder, console.status("writing 2,000 runs and reading them: half a minute"):
        records = Path(folder)
        _write(records)
        found = _alone(_ours, records)
        if has_peer:
            found |= _against(records, found["frame again, s"])
    if not has_peer:
        told = "tbparse is not installed, so nothing is compared: pip install 'andrea-exp[peers]'"
        console.print(told, markup=False, soft_wrap=True)
    print(json.dumps(found, indent=2)) if as_json else console.print(show(found))
    return 0


def _plan() -> Plan:
    rates = ",".join(f"{i}e-4" for i in range(1, 11))
    seeds = ",".join(map(str, range(RUNS // 50)))
    return plan_sweep(["model.norm_placement=pre,post,peri,none,reordered", f"optim.lr={rates}", f"seed={seeds}"])


def _write(records: Path) -> None:
    for number, cell in enumerate(_plan().cells):
        folder = run_folder(records, cell.signature)
        folder.mkdir(parents=True)
        writer = MetricsWriter(folder)
        view = View(folder) if number < max(SUBSETS) else None
        for row in _rows(number):
            writer.write(row)
            if view:
                view.write(row)
        writer.close()
        if view:
            view.close(time.time(), succeeded=True)
        write_json(folder / "summary.json", {**SUMMARY, "val/loss": 2 + number / RUNS}, durable=False)


def _rows(seed: int) -> Iterator[dict[str, float]]:
    draw = random.Random(seed).random
    for step in range(1, STEPS + 1):
        yield {"step": step, **{name: draw() for name in METRICS}, "time": time.time()}


def _alone(work: Callable[..., dict[str, float]], *arguments: Any) -> dict[str, float]:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(work, arguments)


def _ours(records: Path) -> dict[str, float]:
    plan = _plan()
    rounds = [_read(plan, records) for _ in range(1 + ROUNDS)]
    again = [median(times) for times in zip(*rounds[1:], strict=True)]
    found: dict[str, float] = {"runs": len(plan.cells), "values": len(plan.cells) * STEPS * len(METRICS)}
    for when, (frame, table) in (("cold", rounds[0]), ("again", again)):
        found |= {f"frame {when}, s": frame, f"table {when}, s": table, f"both {when}, s": frame + table}
    return {**found, "peak memory, MB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}


def _read(plan: Plan, records: Path) -> tuple[float, float]:
    """Seconds for the frame and for the table."""
    frame, reading = _timed(lambda: metrics_frame(plan, records))
    assert len(frame) == len(plan.cells) * STEPS * len(METRICS)
    return reading, _timed(lambda: ablation_table(plan, records))[1]


def _against(records: Path, ours: float) -> dict[str, float]:
    """tbparse over two subsets, the larger scaled to all runs; their ratio says whether that is right."""
    small, large = (_alone(_tbparse, records, size)["s"] for size in SUBSETS)
    scaled = large * RUNS / SUBSETS[1]
    return {
        f"tbparse, {SUBSETS[0]} runs, s": small,
        f"tbparse, {SUBSETS[1]} runs, s": large,
        "tbparse: growth over that of the runs (1: linear)": large / small * SUBSETS[0] / SUBSETS[1],
        f"tbparse, scaled to {RUNS:,} runs, s": scaled,
        "tbparse scaled / frame again": scaled / ours,
    }


def _tbparse(records: Path, size: int) -> dict[str, float]:
    reader = importlib.import_module("tbparse").SummaryReader
    with tempfile.TemporaryDirectory() as folder:
        for cell in _plan().cells[:size]:
            shutil.copytree(run_folder(records, cell.signature) / "tensorboard", Path(folder) / cell.slug)
        # Only what makes the same frame: every scalar, and which run it is of.
        words: dict[str, Any] = {"event_types": {"scalars"}, "extra_columns": {"dir_name"}}
        rounds = [_timed(lambda: reader(folder, **words).scalars) for _ in range(ROUNDS)]
    assert all(len(frame) == size * STEPS * len(METRICS) for frame, _ in rounds)
    return {"s": median(seconds for _, seconds in rounds)}


def _timed(work: Callable[[], Any]) -> tuple[Any, float]:
    began = time.perf_counter()
    return work(), time.perf_counter() - began
