"""Published tables beside ours: differences to the same baseline, in nats, on their own scale. Data: published.yaml."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from omegaconf import OmegaConf

from andrea_exp.results.table import AblationTable

DATA = Path(__file__).with_suffix(".yaml")
TO_NATS: dict[str, Callable[[float], float]] = {"nats": float, "perplexity": math.log}
CAVEAT = "published models have another size, text and objective: their scale is not ours, only signs and order compare"


@dataclass
class Published:
    """One published table, or one size of it; published.yaml says what its fields mean."""

    name: str
    source: str
    unit: str
    values: dict[str, float]
    sd: dict[str, float] = field(default_factory=dict)
    sweep: str | None = None


@dataclass(frozen=True)
class Row:
    """One arm's difference to the baseline; from `low` to `high` is our 95% interval, or theirs of one SD each way."""

    arm: str
    table: str | None  # None: ours
    difference: float
    low: float | None = None
    high: float | None = None


def read_published(path: Path = DATA) -> list[Published]:
    entries = (OmegaConf.merge(OmegaConf.structured(Published), entry) for entry in OmegaConf.load(path))
    return [OmegaConf.to_object(entry) for entry in entries]  # type: ignore[misc]


def of_sweep(name: str) -> list[Published]:
    """The tables that can stand beside a sweep's."""
    return [table for table in read_published() if table.sweep == name]


def rows(table: AblationTable, published: Sequence[Published]) -> list[Row]:
    """Ours and theirs, arm by arm; our arms that a table lacks, and its own that we lack, are left out.

    Of a sweep with several columns ours are those of the first.
    """
    cells = [table.cell(arm, table.columns[0]) for arm in table.arms]
    ours = [Row(c.arm, None, c.difference, c.ci_low, c.ci_high) for c in cells if c.difference is not None]
    theirs = [row for other in published for row in _differences(other, table.baseline) if row.arm in table.arms]
    return ours + theirs


def _differences(table: Published, baseline: str) -> list[Row]:
    convert = TO_NATS[table.unit]
    found = []
    for arm, value in table.values.items():
        if arm != baseline:
            difference = convert(value) - convert(table.values[baseline])
            known = arm in table.sd and baseline in table.sd
            spread = math.hypot(table.sd[arm], table.sd[baseline]) if known else None
            ends = (None, None) if spread is None else (difference - spread, difference + spread)
            found.append(Row(arm, table.name, difference, *ends))
    return found


def grid(table: AblationTable, published: Sequence[Published]) -> tuple[list[str], list[list[str]]]:
    """Headings and one row an arm: ours, then each published table."""
    found = {(row.arm, row.table): row for row in rows(table, published)}
    arms = [arm for arm in table.arms if any((arm, p.name) in found for p in published)]
    names = [None, *(p.name for p in published)]
    head = ["arm", f"ours, to {table.baseline}", *(p.name for p in published)]
    return head, [[arm, *(_text(found.get((arm, name))) for name in names)] for arm in arms]


def _text(row: Row | None) -> str:
    if row is None:
        return "–"
    if row.low is None or row.high is None:
        return f"{row.difference:+.3f}"
    if row.table is None:
        return f"{row.difference:+.3f} [{row.low:+.3f}, {row.high:+.3f}]"
    return f"{row.difference:+.3f} ± {row.high - row.difference:.3f}"


def notes(published: Sequence[Published]) -> list[str]:
    return [
        f"differences in nats a token; ours [95% CI], published ± SD where known; {CAVEAT}",
        *(f"{p.name}: {p.source}" for p in published),
    ]
