"""Records into tidy pandas frames."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from andrea_exp.record import read_metrics, run_folder
from andrea_exp.results.load import SUMMARY, Run, plan_of, read_runs
from andrea_exp.sweep.plan import Cell, Plan


def load_runs(name: str, overrides: Sequence[str] = ()) -> pd.DataFrame:
    """One row a planned cell, run or not: its roles, its status, and the numbers of its summary.

    Columns: arm, one a field of `across`, `tune` and `repeat`, purpose, label, signature, status, diverged (kind
    or missing), diverged_step, then `SUMMARY`. Rows in = rows out: a cell without a run has status "missing".
    """
    return runs_frame(*plan_of(name, overrides))


def load_metrics(name: str, overrides: Sequence[str] = ()) -> pd.DataFrame:
    """Every logged value of a sweep's reported runs, long: label, arm, roles, step, metric, value."""
    return metrics_frame(*plan_of(name, overrides))


def runs_frame(plan: Plan, records: Path) -> pd.DataFrame:
    frame = pd.DataFrame([_run_row(run) for run in read_runs(plan, records)])
    numbers = list(SUMMARY)
    frame[numbers] = frame[numbers].astype("float64")
    return frame


def metrics_frame(plan: Plan, records: Path, prefixes: Sequence[str] = ("",)) -> pd.DataFrame:
    """Long frame of the metrics whose names start with one of `prefixes`."""
    rows = [
        {**roles(cell), "step": int(row["step"]), "metric": metric, "value": value}
        for cell in plan.cells
        if cell.purpose == "report"
        for row in read_metrics(run_folder(records, cell.signature))
        for metric, value in row.items()
        if metric not in ("step", "time") and metric.startswith(tuple(prefixes))
    ]
    columns = [*roles(plan.cells[0]), "step", "metric", "value"]
    frame = pd.DataFrame(rows, columns=columns)
    frame["value"] = frame["value"].astype("float64")  # null, a non-finite value, becomes NaN
    return frame


def frames_by_place(plan: Plan, frame: pd.DataFrame) -> dict[tuple[str, int], pd.DataFrame]:
    """A frame's rows by arm and number of column, in one pass; only places that have rows."""
    number = {repr(column): i for i, column in enumerate(plan.columns)}
    column_of = {cell.label: number[repr(cell.column)] for cell in plan.cells}
    places = frame.groupby(["arm", frame["label"].map(column_of).rename("place")], sort=False)
    return {(str(arm), int(place)): rows for (arm, place), rows in places}


def roles(cell: Cell) -> dict[str, Any]:
    """Where a cell stands in its sweep."""
    return {"label": cell.label, "arm": cell.arm, **cell.column, **cell.tuned, **cell.repeat}


def _run_row(run: Run) -> dict[str, Any]:
    diverged = run.summary.get("diverged") or {}
    return {
        **roles(run.cell),
        "purpose": run.cell.purpose,
        "signature": run.cell.signature,
        "status": str(run.status),
        "diverged": diverged.get("kind"),
        "diverged_step": diverged.get("step"),
        **{column: run.number(column) for column in SUMMARY},
    }
