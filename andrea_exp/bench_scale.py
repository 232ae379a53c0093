"""What 10,000 runs cost before and after they ran: the plan, and how they stand. And that neither grows faster."""

import json
import resource
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console

from andrea_exp.bench import show
from andrea_exp.record import run_folder, write_json
from andrea_exp.sweep.board import Reader
from andrea_exp.sweep.plan import Plan, plan_sweep

SIZES = (2_500, 10_000)
SUMMARY = {
    "status": "done",
    "diverged": None,
    "steps": 300,
    "tokens": 307_200,
    "val/loss": 2.5,
    "val/bits_per_byte": 3.6,
    "tokens_per_s": 2e4,
    "times": {"start": 0.0, "first_step": 0.3, "end": 15.0, "training_s": 14.0},
    **{f"number {i}": i / 7 for i in range(16)},
}


def bench_scale(as_json: bool) -> int:
    """Plans many cells, pretends that all have run, and reads how they stand: cold, warm, without the index."""
    console = Console(stderr=as_json)
    found: dict[str, Any] = {}
    with console.status("benchmarking: about a minute"):
        for size in SIZES:
            with tempfile.TemporaryDirectory() as folder:
                found |= {f"{name}, {size:,} runs": value for name, value in _measure(size, Path(folder)).items()}
    small, large = SIZES
    for name in ("plan, s", "status warm, s"):
        ratio = found[f"{name}, {large:,} runs"] / found[f"{name}, {small:,} runs"]
        found[f"{name}: growth over that of the runs"] = ratio * small / large
    found["peak memory, MB"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(json.dumps(found, indent=2)) if as_json else console.print(show(found))
    return 0


def _measure(size: int, records: Path) -> dict[str, float]:
    plan, planning = _timed(lambda: _plan(size))
    for cell in plan.cells:
        folder = run_folder(records, cell.signature)
        folder.mkdir(parents=True)
        write_json(folder / "summary.json", SUMMARY, durable=False)
    _, cold = _timed(lambda: Reader(records, 2).read(plan))
    _, warm = _timed(lambda: Reader(records, 2).read(plan))
    return {"plan, s": planning, "status without an index, s": cold, "status warm, s": warm}


def _plan(size: int) -> Plan:
    rates = ",".join(f"{i}e-4" for i in range(1, 11))
    seeds = ",".join(map(str, range(size // 50)))
    return plan_sweep(["model.norm_placement=pre,post,peri,none,reordered", f"optim.lr={rates}", f"seed={seeds}"])


def _timed(work: Callable[[], Any]) -> tuple[Any, float]:
    began = time.perf_counter()
    return work(), time.perf_counter() - began
