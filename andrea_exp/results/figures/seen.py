"""What a plan's runs left, each file read once however many figures show it."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd

from andrea_exp.record import Status, read_metrics, run_folder
from andrea_exp.results.load import Run, read_runs
from andrea_exp.results.table import AblationTable, table_of
from andrea_exp.sweep.plan import Plan

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Trace:
    """What a reported run logged: its loss at every step, and whole rows of its ends."""

    run: Run
    loss: pd.Series  # training loss by step, where it is finite; nats a token
    untrained: Row  # of step 0, with a batch of its own
    first: Row  # of the first logged step; untrained models have step 0 alone
    last: Row  # of the last planned step; empty where a run did not get there

    @classmethod
    def of(cls, run: Run, rows: list[dict[str, Any]]) -> "Trace":
        trained = [row for row in rows if row["step"] > 0]
        by_step = {row["step"]: row for row in rows}
        losses = {row["step"]: row["train/loss"] for row in trained if finite(row.get("train/loss"))}
        untrained = by_step.get(0, {})
        return cls(
            run,
            pd.Series(losses, dtype="float64"),
            untrained,
            trained[0] if trained else untrained,
            by_step.get(run.cell.config.train.steps, {}),
        )

    @property
    def done(self) -> bool:
        return self.run.status is Status.done

    @property
    def diverged(self) -> bool:
        return self.run.status is Status.diverged


class Seen:
    """A plan and its records as all of its figures see them."""

    def __init__(self, plan: Plan, records: Path) -> None:
        self.plan, self.records = plan, records

    @cached_property
    def runs(self) -> list[Run]:
        return read_runs(self.plan, self.records)

    @cached_property
    def table(self) -> AblationTable:
        return table_of(self.plan, self.runs)

    @cached_property
    def reported(self) -> list[Run]:
        return [run for run in self.runs if run.cell.purpose == "report"]

    @cached_property
    def traces(self) -> list[Trace]:
        """Of the reported runs that have logged anything."""
        read = ((run, read_metrics(run_folder(self.records, run.cell.signature))) for run in self.reported)
        return [Trace.of(run, rows) for run, rows in read if rows]


def finite(value: float | None) -> bool:
    return value is not None and math.isfinite(value)
