"""What a sweep will cost before anything runs: cells by arm, parameters, FLOPs, tokens, disk, time."""

import statistics
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from andrea_exp import accounting
from andrea_exp.config import Keep, RunConfig
from andrea_exp.index import Index
from andrea_exp.record import Status
from andrea_exp.sweep.board import clock
from andrea_exp.sweep.plan import Cell, Plan

WEIGHT_BYTES = 4
# Bytes of a logged value in metrics.jsonl and in the event file together: 168 kB for 61 rows of 37 values.
LOGGED_BYTES = 75
# Of what a matrix product of 512 x 512 reaches on one thread: runs of the demo's size reached 28.8 of 77 GFLOP/s, with
# other work on the machine.
SHARE_OF_MATMUL = 0.4
START_S = 0.3  # a forked process up to its first step


@dataclass(frozen=True)
class Row:
    """One arm's runs. FLOPs, tokens and seconds are of those that are left."""

    arm: str
    purpose: str
    runs: int
    done: int
    parameters: int  # of the largest
    flops: float
    tokens: int


@dataclass(frozen=True)
class Forecast:
    name: str
    rows: list[Row]
    waiting: int  # runs whose tuned values are not known yet, in the rows with a first guess
    slots: int
    flops_per_s: float  # of one run
    speed_from: str
    seconds: float
    disk_bytes: int

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def forecast(plan: Plan, index: Index, slots: int) -> Forecast:
    """Counts what is left of a plan; each signature once, where the first cell names it."""
    cells = {c.signature: c for c in reversed([*plan.cells, *plan.guesses])}
    looks = {sig: index.look(sig) for sig in cells}
    left = {sig for sig, (state, _) in looks.items() if not state.finished}
    speed, speed_from = _speed([summary for state, summary in looks.values() if state is Status.done], index)
    rows = [
        _row(arm, purpose, [c for c in cells.values() if (c.arm, c.purpose) == (arm, purpose)], left)
        for purpose in ("tune", "report")
        for arm in plan.arms
    ]
    flops = sum(row.flops for row in rows)
    at_once = max(1, min(slots, len(left)))
    return Forecast(
        name=plan.name,
        rows=[row for row in rows if row.runs],
        waiting=plan.waiting,
        slots=slots,
        flops_per_s=speed,
        speed_from=speed_from,
        seconds=(flops / speed + START_S * len(left)) / at_once,
        disk_bytes=_disk([cells[sig].config for sig in left], at_once),
    )


def _row(arm: str, purpose: str, cells: Sequence[Cell], left: set[str]) -> Row:
    undone, models = [c for c in cells if c.signature in left], [c.config.model for c in cells]
    return Row(
        arm=arm,
        purpose=purpose,
        runs=len(cells),
        done=len(cells) - len(undone),
        parameters=sum(accounting.parameters(max(models, key=accounting.about_parameters)).values()) if models else 0,
        flops=float(sum(accounting.flops_per_token(c.config.model) * _work(c.config) for c in undone)),
        tokens=sum(_tokens(c.config) for c in undone),
    )


def _tokens(config: RunConfig) -> int:
    return config.train.steps * config.train.batch_size * config.model.seq_len


def _work(config: RunConfig) -> float:
    """Tokens of training that a run's work is worth; of one that is only looked at, that of looking once.

    Of trained runs the measured speed has their looks in it. A validation is a forward pass, a third of a step.
    """
    return _tokens(config) or (config.data.val_windows / 3 + accounting.DIAGNOSIS_WINDOWS) * config.model.seq_len


def _speed(own: Sequence[dict[str, Any]], index: Index) -> tuple[float, str]:
    """FLOP/s of one run: of this sweep's ended runs, of any in these records, or guessed from a matrix product."""
    for found, whose in ((own, "of this sweep"), (index.summaries(), "in these records")):
        if speeds := _measured(found):
            return statistics.median(speeds), f"measured on {len(speeds)} runs {whose}"
    return SHARE_OF_MATMUL * _matmul_flops(), "estimated from a matrix product, until runs tell"


def _measured(summaries: Iterable[dict[str, Any]]) -> list[float]:
    """FLOP/s over a run's whole time, validation and all; of resumed ones the time is not known."""
    times = [(s, s["times"]["end"] - s["times"]["start"]) for s in summaries if s.get("tokens") and "times" in s]
    return [s["tokens"] * s["flops_per_token"] / seconds for s, seconds in times if seconds > s["times"]["training_s"]]


def _matmul_flops() -> float:
    a = np.random.default_rng(0).standard_normal((512, 512)).astype(np.float32)
    seconds = []
    for _ in range(5):
        # Processor time, because the library may use all cores where a run has one.
        began = time.process_time()
        a @ a
        seconds.append(time.process_time() - began)
    return 2 * 512**3 / statistics.median(seconds)


def _disk(configs: Sequence[RunConfig], at_once: int) -> int:
    """Bytes that runs will leave, and the checkpoints of those that are under way at once."""
    sizes = [WEIGHT_BYTES * accounting.about_parameters(c.model) for c in configs]
    kept = sum(size for size, c in zip(sizes, configs, strict=True) if c.checkpoint.keep is not Keep.none)
    checkpoints = 2 * 3 * max(sizes, default=0) * at_once  # two kept, of weights and two moments
    rows = sum((c.train.steps // c.log.every + 1) * (3 * c.model.n_layers + 13) for c in configs)
    return kept + checkpoints + LOGGED_BYTES * rows


def human(number: float, unit: str = "") -> str:
    """1234567 as 1.23 M."""
    for letter in ("", "k", "M", "G", "T", "P", "E"):
        if number < 1000 or letter == "E":
            return f"{number:.3g} {letter}{unit}".strip()
        number /= 1000
    raise AssertionError


def render(found: Forecast) -> RenderableType:
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
    for title in ("arm", "role", "runs", "done", "parameters", "FLOPs left", "tokens left"):
        table.add_column(title, justify="left" if title in ("arm", "role") else "right")
    for row in found.rows:
        counts = (str(row.runs), str(row.done), f"{row.parameters:,}", human(row.flops), human(row.tokens))
        table.add_row(Text(row.arm), row.purpose, *counts)
    runs, done = (sum(getattr(row, name) for row in found.rows) for name in ("runs", "done"))
    lines = [
        f"{runs - done} of {runs} runs are left; about {clock(found.seconds)} with {found.slots} at once",
        f"{human(found.flops_per_s, 'FLOP/s')} a run, {found.speed_from}",
        f"disk: about {human(found.disk_bytes, 'B')}",
    ]
    if found.waiting:
        lines.append(f"{found.waiting} of them wait for tuning runs to choose their values, counted at a first guess")
    return Group(Text(f"{found.name}", "bold"), table, *map(Text, lines))
