"""Records into tidy pandas frames. Which runs belong to a sweep follows from planning it again."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from andrea_exp.compose import compose
from andrea_exp.index import Index, Summary
from andrea_exp.record import Status, read_metrics, run_folder
from andrea_exp.results.choose import choose_tuned
from andrea_exp.sweep.plan import Cell, Plan, plan_sweep

SUMMARY = {
    "val_loss": "val/loss",
    "val_loss_stderr": "val/loss_stderr",
    "val_loss_start": "val/loss_start",
    "bits_per_byte": "val/bits_per_byte",
    "train_loss": "train/loss",
    "unigram_loss": "unigram_loss",
    "grad_norm_median": "grad_norm/median",
    "grad_norm_max": "grad_norm/max",
    "grad_norm_first_block": "grad_norm/first_block",
    "grad_norm_last_block": "grad_norm/last_block",
    "clip_fraction": "clip/fraction",
    "spikes": "spikes",
    "steps": "steps",
    "tokens": "tokens",
    "tokens_per_s": "tokens_per_s",
    "memory_mb": "memory_mb",
    "parameters": "parameters",
    "flops_per_token": "flops_per_token",
    "threads": "threads",
}


@dataclass(frozen=True)
class Run:
    """A planned cell and what is recorded of it."""

    cell: Cell
    status: Status
    summary: Summary

    def number(self, column: str) -> float | None:
        """A number of `SUMMARY`; None where the run has none, also because an older version did not write it."""
        return self.summary.get(SUMMARY[column])


def plan_of(name: str, overrides: Sequence[str] = ()) -> tuple[Plan, Path]:
    """A sweep's plan and its records folder, from the same words that ran it.

    `name` is a file in sweeps/, or itself an override where there is no sweep file ("seed=0,1").
    """
    words = [name if "=" in name else f"sweeps={name}", *overrides]
    records = Path(compose(words).records)
    return plan_sweep(words, choose_tuned(records)), records


def load_runs(name: str, overrides: Sequence[str] = ()) -> pd.DataFrame:
    """One row a planned cell, run or not: its roles, its status, and the numbers of its summary.

    Columns: arm, one a field of `across`, `tune` and `repeat`, purpose, label, signature, status, diverged (kind
    or missing), diverged_step, then `SUMMARY`. Rows in = rows out: a cell without a run has status "missing".
    """
    return runs_frame(*plan_of(name, overrides))


def load_metrics(name: str, overrides: Sequence[str] = ()) -> pd.DataFrame:
    """Every logged value of a sweep's reported runs, long: label, arm, roles, step, metric, value."""
    return metrics_frame(*plan_of(name, overrides))


def read_runs(plan: Plan, records: Path) -> list[Run]:
    """What is recorded of each planned cell, in the plan's order."""
    with Index(records) as index:
        return [Run(cell, *index.look(cell.signature)) for cell in plan.cells]


def runs_frame(plan: Plan, records: Path) -> pd.DataFrame:
    frame = pd.DataFrame([_run_row(run) for run in read_runs(plan, records)])
    numbers = list(SUMMARY)
    frame[numbers] = frame[numbers].astype("float64")
    return frame


def metrics_frame(plan: Plan, records: Path, prefixes: Sequence[str] = ("",)) -> pd.DataFrame:
    """Long frame of the metrics whose names start with one of `prefixes`."""
    rows = [
        {**_roles(cell), "step": int(row["step"]), "metric": metric, "value": value}
        for cell in plan.cells
        if cell.purpose == "report"
        for row in read_metrics(run_folder(records, cell.signature))
        for metric, value in row.items()
        if metric not in ("step", "time") and metric.startswith(tuple(prefixes))
    ]
    columns = [*_roles(plan.cells[0]), "step", "metric", "value"]
    frame = pd.DataFrame(rows, columns=columns)
    frame["value"] = frame["value"].astype("float64")  # null, a non-finite value, becomes NaN
    return frame


def by_place(plan: Plan, frame: pd.DataFrame) -> dict[tuple[str, int], pd.DataFrame]:
    """A frame's rows by arm and number of column, in one pass; only places that have rows."""
    number = {repr(column): i for i, column in enumerate(plan.columns)}
    column_of = {cell.label: number[repr(cell.column)] for cell in plan.cells}
    places = frame.groupby(["arm", frame["label"].map(column_of).rename("place")], sort=False)
    return {(str(arm), int(place)): rows for (arm, place), rows in places}


def _roles(cell: Cell) -> dict[str, Any]:
    return {"label": cell.label, "arm": cell.arm, **cell.column, **cell.tuned, **cell.repeat}


def _run_row(run: Run) -> dict[str, Any]:
    diverged = run.summary.get("diverged") or {}
    return {
        **_roles(run.cell),
        "purpose": run.cell.purpose,
        "signature": run.cell.signature,
        "status": str(run.status),
        "diverged": diverged.get("kind"),
        "diverged_step": diverged.get("step"),
        **{column: run.number(column) for column in SUMMARY},
    }
