"""Runs against runs: grouped once, paired by what they repeat, their difference in numbers."""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from andrea_exp.record import Status
from andrea_exp.results.load import Run
from andrea_exp.results.stats import paired_interval, paired_p
from andrea_exp.sweep.plan import Values

Place = tuple[str, str, str]  # an arm, its column and its tuned values as text


@dataclass(frozen=True)
class Contrast:
    """The mean paired difference of two sides, in the metric's unit; all None where a run of either side diverged."""

    difference: float | None = None
    ci_low: float | None = None  # 95% t interval, not adjusted for the number of arms
    ci_high: float | None = None
    p: float | None = None  # two-sided paired t test, not adjusted
    pairs: int = 0


def place(arm: str, column: Values, tuned: Values) -> Place:
    return arm, repr(column), repr(tuned)


def by_place(runs: Iterable[Run], tuned: bool) -> dict[Place, list[Run]]:
    """Runs by where they stand, in one pass: with their tuned values, or whatever those are."""
    found: dict[Place, list[Run]] = defaultdict(list)
    for run in runs:
        found[place(run.cell.arm, run.cell.column, run.cell.tuned if tuned else {})].append(run)
    return dict(found)


def gaps(left: Sequence[Run], right: Sequence[Run], metric: str) -> list[float]:
    """left - right for each seed that has ended on both sides.

    +inf where the left one alone diverged, -inf where the right one alone did, nan where both did.
    """
    others = {repr(run.cell.repeat): _score(run, metric) for run in right}
    pairs = [(_score(run, metric), others.get(repr(run.cell.repeat))) for run in left]
    return [a - b for a, b in pairs if a is not None and b is not None]


def _score(run: Run, metric: str) -> float | None:
    """What a run ended at; None while it has not."""
    return math.inf if run.status is Status.diverged else run.number(metric) if run.status is Status.done else None


def contrast(left: Sequence[Run], right: Sequence[Run], metric: str) -> Contrast:
    if any(run.status is Status.diverged for run in (*left, *right)):
        return Contrast()
    found = gaps(left, right, metric)
    if not found:
        return Contrast()
    return Contrast(sum(found) / len(found), *paired_interval(found), paired_p(found), len(found))
