"""Records into tidy pandas frames."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from andrea_exp.record import read_metrics, run_folder
from andrea_exp.results.claims import judge_all, read_claims
from andrea_exp.results.claims_view import row as claim_row
from andrea_exp.results.load import SUMMARY, Run, plan_of, read_runs
from andrea_exp.sweep.plan import Cell, Plan

CLAIM = ("text", "sweep", "verdict", "effect", "ci_low", "ci_high", "n", "remarks")


def load_runs(name: str, overrides: Sequence[str] = ()) -> pd.DataFrame:
    """One row a planned cell, run or not: its roles, its status, and the numbers of its summary.

    Columns: arm, one a field of `across`, `tune` and `repeat`, purpose, label, signature, status, diverged (kind
    or missing), diverged_step, then `SUMMARY`. Rows in = rows out: a cell without a run has status "missing".
    """
    return runs_frame(*plan_of(name, overrides))


def load_metrics(name: str, overrides: Sequence[str] = ()) -> pd.DataFrame:
    """Every logged value of a sweep's reported runs, long: label, arm, roles, step, metric, value."""
    return metrics_frame(*plan_of(name, overrides))


def load_claims(name: str | None = None, overrides: Sequence[str] = ()) -> pd.DataFrame:
    """The claims that a sweep is to decide, of all sweeps without a name, and their verdicts: one row a claim.

    Index: the claim's name. Columns: claim, sweep, verdict, effect, ci_low, ci_high (95%; missing where a claim has
    several regimes), n (seeds in each regime), remarks.
    """
    asked = [claim for claim in read_claims() if name in (None, claim.sweep)]
    rows = [{**row, "remarks": "; ".join(row["remarks"])} for row in map(claim_row, judge_all(overrides, asked))]
    frame = pd.DataFrame(rows, columns=["id", *CLAIM]).set_index("id").rename(columns={"text": "claim"})
    return frame.astype(dict.fromkeys(("effect", "ci_low", "ci_high"), "float64"))


def runs_frame(plan: Plan, records: Path) -> pd.DataFrame:
    frame = pd.DataFrame([_run_row(run) for run in read_runs(plan, records)])
    numbers = list(SUMMARY)
    frame[numbers] = frame[numbers].astype("float64")
    return frame


def metrics_frame(plan: Plan, records: Path) -> pd.DataFrame:
    logged = _Logged()
    reported = [cell for cell in plan.cells if cell.purpose == "report"]
    lengths = [logged.add(read_metrics(run_folder(records, cell.signature))) for cell in reported]
    placed = pd.DataFrame(
        [roles(cell) for cell, length in zip(reported, lengths, strict=True) if length],
        columns=list(roles(plan.cells[0])),
    )
    frame = placed.loc[placed.index.repeat([length for length in lengths if length])].reset_index(drop=True)
    return frame.assign(**logged.columns())


class _Logged:
    """Rows of metrics on their way into a long frame, many times faster than by one dict a value.

    Few rows differ in the names of their values, so that a name is found once for all rows of the same names.
    """

    def __init__(self) -> None:
        self._kinds: dict[tuple[str, ...], tuple[int, list[str]]] = {}  # a row's names -> its kind, those that count
        self._steps: list[float] = []  # one a row
        self._kind: list[int] = []  # one a row
        self._values: list[float | None] = []

    def add(self, rows: Iterable[dict[str, float]]) -> int:
        """Takes a run's rows, and returns how many values they have."""
        before = len(self._values)
        for row in rows:
            kind, names = self._kinds.get(key := tuple(row)) or self._new(key)
            self._steps.append(row["step"])
            self._kind.append(kind)
            self._values += map(row.__getitem__, names)
        return len(self._values) - before

    def _new(self, names: tuple[str, ...]) -> tuple[int, list[str]]:
        kept = [name for name in names if name not in ("step", "time")]
        self._kinds[names] = len(self._kinds), kept
        return self._kinds[names]

    def columns(self) -> dict[str, Any]:
        """Step, metric and value, one entry a value; null, a non-finite value, becomes NaN."""
        kind = np.array(self._kind, dtype=int)
        names = [name for _, kept in self._kinds.values() for name in kept]
        sizes = np.array([len(kept) for _, kept in self._kinds.values()], dtype=int)
        counts = sizes[kind]
        starts = (np.cumsum(sizes) - sizes)[kind]
        within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        return {
            "step": np.repeat(np.array(self._steps, dtype="int64"), counts),
            "metric": pd.array(names, dtype="str").take(np.repeat(starts, counts) + within),
            "value": np.array(self._values, dtype="float64"),
        }


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
