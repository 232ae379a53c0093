"""Sweeps whose records are written by hand: nothing is trained."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from conftest import TINY

from andrea_exp import accounting
from andrea_exp.record import MetricsWriter, run_folder, write_json
from andrea_exp.results import plan_of
from andrea_exp.results.table import AblationTable, TableCell, ablation_table
from andrea_exp.sweep.plan import Cell, Plan

ARMS = {p: {"model.norm_placement": p} for p in ("pre", "post", "none")}
RECORDS = Path("records")
WORDS = [*TINY, "data.corpus=sotu"]


def plan(compare: dict[str, Any] = ARMS, **roles: Any) -> Plan:
    """The plan of a sweep file with these roles, planned anew from whatever records there are."""
    spec = {"question": "Does it?", "baseline": next(iter(compare)), "compare": compare}
    spec |= {"across": {}, "tune": {}, "repeat": {"seed": [0, 1, 2]}, **roles}
    Path("sweeps").mkdir(exist_ok=True)
    Path("sweeps/tiny.yaml").write_text(f"# @package _global_\n{json.dumps({'sweep': spec})}\n")
    swept = {key for arm in compare.values() for key in arm} | set(spec["across"])
    return plan_of("tiny", [word for word in WORDS if word.split("=")[0] not in swept])[0]


def record(cell: Cell, outcome: float | str, **more: Any) -> None:
    """A run's summary as the trainer writes it: done with a loss, diverged in a way, or another status."""
    folder = run_folder(RECORDS, cell.signature)
    folder.mkdir(parents=True, exist_ok=True)
    summary: dict[str, Any] = {"parameters": 1234, "grad_norm/median": 1.5, "grad_norm/max": 2.5, "threads": 1}
    if isinstance(outcome, float):
        summary |= {"status": "done", "diverged": None, "val/loss": outcome, "val/bits_per_byte": outcome / 2}
    elif outcome in ("stuck", "above start", "non-finite"):
        loss = None if outcome == "non-finite" else 3.2
        summary |= {"status": "diverged", "diverged": {"kind": outcome, "step": 6}, "val/loss": loss}
    else:
        summary = {"status": outcome, "reason": "by hand"}
    write_json(folder / "summary.json", {**summary, **more})


def record_arms(planned: Plan, outcomes: dict[str, list[float | str | None]]) -> AblationTable:
    """Records outcomes arm by arm, in the order of the plan's cells (None: no run), and returns the table."""
    for arm, results in outcomes.items():
        for cell, outcome in zip((c for c in planned.cells if c.arm == arm), results, strict=True):
            if outcome is not None:
                record(cell, outcome)
    return ablation_table(planned, RECORDS)


def write_metrics(planned: Plan, steps: int = 6, dies_at: int | None = None) -> None:
    """Metrics of every reported run as the trainer logs them; arm `none` has null from a step on."""
    for cell in planned.cells:
        folder = run_folder(RECORDS, cell.signature)
        folder.mkdir(parents=True, exist_ok=True)
        writer = MetricsWriter(folder)
        writer.write({"step": 0, "val/loss": 3.0, "grad_norm/block_00/mlp": 1.0})
        for step in range(1, steps + 1):
            dead = cell.arm == "none" and dies_at is not None and step >= dies_at
            value = math.nan if dead else 1.0 / step + cell.config.seed
            blocks = {f"grad_norm/block_{b:02d}/mlp": value for b in range(2)}
            writer.write({"step": step, "train/loss": value, "grad_norm/total": value, **blocks})
        writer.close()


def only(table: AblationTable, arm: str) -> TableCell:
    (cell,) = (c for c in table.cells if c.arm == arm)
    return cell


def strict(text: str) -> Any:
    """Parses JSON and refuses NaN and Infinity, which JSON does not have."""

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} in JSON")

    return json.loads(text, parse_constant=refuse)


def diagnosis(blocks: int, size: float = 1.0) -> dict[str, float]:
    """What a diagnosed row has of each block."""
    found = {"stream/rms/final": size * math.sqrt(blocks)}
    for b in range(blocks):
        found |= {f"stream/rms/block_{b:02d}": size * math.sqrt(b), f"stream/token_cosine/block_{b:02d}": b / blocks}
        found |= {f"branch/ratio/block_{b:02d}/{branch}": 0.1 * size for branch in ("attn", "mlp")}
    return found


def gradients(blocks: int, size: float = 1.0) -> dict[str, float]:
    return {f"grad_norm/block_{b:02d}/{part}": size * (b + 1) for b in range(blocks) for part in ("attn", "mlp")}


def log(cell: Cell, loss: Callable[[int], float] = lambda step: 4 / step, size: float = 1.0, steps: int = 6) -> None:
    """A run's metrics as the trainer logs them, with a diagnosis at both ends."""
    folder = run_folder(RECORDS, cell.signature)
    folder.mkdir(parents=True, exist_ok=True)
    blocks, writer = cell.config.model.n_layers, MetricsWriter(folder)
    writer.write({"step": 0, "val/loss": 6.0, **gradients(blocks, size), **diagnosis(blocks, size)})
    for step in range(1, min(steps, cell.config.train.steps) + 1):
        end = diagnosis(blocks, 3 * size) if step == cell.config.train.steps else {}
        writer.write({"step": step, "train/loss": loss(step), **gradients(blocks, size / step), **end})
    writer.close()


def filled(name: str, *words: str) -> Plan:
    """A committed sweep with records of all its runs: some of post-norm's at high rates are stuck."""
    for purpose in ("tune", "report"):
        planned = plan_of(name, words)[0]
        for cell in planned.cells:
            if cell.purpose == purpose:
                model, optim = cell.config.model, cell.config.optim
                sizes = {"parameters": accounting.about_parameters(model)}
                sizes["flops_per_token"] = accounting.flops_per_token(model)
                hard = optim.lr >= 1e-2 or (model.n_layers >= 12 and not optim.warmup_steps)
                stuck = hard and model.norm_placement.name in ("post", "none") and cell.config.seed % 2
                away = abs(math.log10(optim.lr / 3e-3))
                record(cell, "stuck" if stuck else 2 + 0.1 * away + 0.01 * cell.config.seed, **sizes)
                log(cell, size=1 + 0.1 * cell.config.seed, steps=cell.config.train.steps)
    return planned
