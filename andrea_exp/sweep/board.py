"""How a sweep stands, from the records alone: as data, as a live table, as a line."""

import statistics
import time
from collections import Counter
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from andrea_exp.index import Index
from andrea_exp.record import Status, last_metrics, run_folder
from andrea_exp.sweep.plan import Cell, Plan

SHORT = 8  # letters of a signature, enough to name a run among thousands
COLOUR = {
    Status.done: "green",
    Status.diverged: "magenta",
    Status.failed: "red",
    Status.interrupted: "yellow",
    Status.running: "cyan",
    Status.queued: "blue",
    Status.missing: "dim",
}


@dataclass(frozen=True)
class RunState:
    """One cell as its records show it now."""

    label: str
    signature: str
    status: Status
    step: int
    steps: int
    loss: float | None
    tokens_per_s: float | None
    seconds_left: float | None  # of a running run, at its present speed
    note: str


@dataclass(frozen=True)
class Board:
    name: str
    runs: list[RunState]
    waiting: int
    seconds_left: float | None
    slots: int

    @property
    def counts(self) -> Counter[Status]:
        return Counter(r.status for r in self.runs)

    def as_json(self) -> dict[str, Any]:
        counts = {str(s): n for s, n in self.counts.items()}
        return {**asdict(self), "counts": counts}


class Reader:
    """Reads boards one after another; a finished run is read once."""

    def __init__(self, records: Path, slots: int) -> None:
        self.records, self.slots = records, slots
        self._index = Index(records)
        self._finished: dict[str, RunState] = {}

    def read(self, plan: Plan) -> Board:
        cells = {cell.signature: cell for cell in reversed(plan.cells)}.values()  # a run once, as its first cell has it
        with self._index:
            runs = [self._state(cell) for cell in reversed(cells)]
        return Board(plan.name, runs, plan.waiting, _seconds_left(plan, runs, self.slots), self.slots)

    def _state(self, cell: Cell) -> RunState:
        if cell.signature in self._finished:
            return replace(self._finished[cell.signature], label=cell.label)
        (state, summary), steps = self._index.look(cell.signature), cell.config.train.steps
        under_way = state in (Status.running, Status.interrupted, Status.failed)
        row = last_metrics(run_folder(self.records, cell.signature)) if under_way else {}
        step, speed = int(row.get("step") or summary.get("steps", 0)), row.get("tokens_per_s")
        per_step = cell.config.train.batch_size * cell.config.model.seq_len
        found = RunState(
            label=cell.label,
            signature=cell.signature,
            status=state,
            step=step,
            steps=steps,
            loss=summary.get("val/loss") or row.get("train/loss", row.get("val/loss")),
            tokens_per_s=summary.get("tokens_per_s") or speed,
            seconds_left=(steps - step) * per_step / speed if state is Status.running and speed else None,
            note=_note(summary),
        )
        if state.finished:
            self._finished[cell.signature] = found
        return found


def _note(summary: dict[str, Any]) -> str:
    diverged = summary.get("diverged")
    if diverged:
        return f"{diverged['kind']} @{diverged['step']}"
    return summary.get("reason", "")


def _seconds_left(plan: Plan, runs: list[RunState], slots: int) -> float | None:
    """Tokens still to train over the speed of the runs seen so far, shared among the slots; those that wait, too."""
    speeds = [r.tokens_per_s for r in runs if r.tokens_per_s]
    if not speeds:
        return None
    cells = {cell.signature: cell for cell in (*plan.cells, *plan.guesses)}
    steps = {sig: cell.config.train.steps for sig, cell in cells.items()}
    steps |= {run.signature: run.steps - run.step for run in runs}
    for run in runs:
        if run.status.finished or run.status is Status.failed:
            del steps[run.signature]
    a_step = {sig: cells[sig].config.train.batch_size * cells[sig].config.model.seq_len for sig in steps}
    left = sum(n * a_step[sig] for sig, n in steps.items())
    return left / (statistics.median(speeds) * min(slots, max(1, len(steps))))


def clock(seconds: float | None) -> str:
    """Seconds as 0:07, 12:34 or 1:02:03."""
    if seconds is None:
        return "-:--"
    minutes, s = divmod(round(seconds), 60)
    hours, m = divmod(minutes, 60)
    return f"{hours}:{m:02d}:{s:02d}" if hours else f"{m}:{s:02d}"


def line(board: Board) -> str:
    """The board in one line, for logs."""
    counts = ", ".join(f"{board.counts[s]} {s}" for s in Status if board.counts[s])
    now = ", ".join(
        f"{r.label} {r.step}/{r.steps}" + (f" loss {r.loss:.3f}" if r.loss is not None else "")
        for r in board.runs
        if r.status is Status.running
    )
    if board.waiting:
        counts += f", {board.waiting} waiting for tuning"
    return f"{time.strftime('%H:%M:%S')} {board.name}: {counts}; {clock(board.seconds_left)} left" + (
        f"; now {now}" if now else ""
    )


def render(board: Board, most: int | None = None) -> RenderableType:
    """The board as a table of at most `most` runs: running and failed ones first, then the latest finished."""
    finished = sum(r.status.finished for r in board.runs)
    counts = Text(", ").join(Text(f"{board.counts[s]} {s}", COLOUR[s]) for s in Status if board.counts[s])
    if board.waiting:
        counts.append(f", {board.waiting} waiting for tuning", "dim")
    head = Table.grid(padding=(0, 1))
    head.add_row(
        Text(board.name, "bold"),
        ProgressBar(max(1, len(board.runs) + board.waiting), finished, width=16),
        counts,
        f"{clock(board.seconds_left)} left",
    )
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("run", overflow="fold", min_width=SHORT)
    table.add_column("cell", overflow="fold")
    table.add_column("status", overflow="fold")
    for title in ("step", "loss", "tokens/s", "left"):
        table.add_column(title, justify="right", overflow="fold", min_width=len(title))
    table.add_column("", overflow="fold")
    for run in _chosen(board.runs, most):
        table.add_row(
            run.signature[:SHORT],
            escape(run.label),
            Text(str(run.status), COLOUR[run.status]),
            f"{run.step}/{run.steps}",
            f"{run.loss:.3f}" if run.loss is not None else "",
            f"{run.tokens_per_s:,.0f}" if run.tokens_per_s else "",
            clock(run.seconds_left) if run.seconds_left is not None else "",
            escape(run.note),
        )
    rest = len(board.runs) - table.row_count
    return Group(head, table, *([Text(f"and {rest} more", "dim")] if rest > 0 else []))


def _chosen(runs: list[RunState], most: int | None) -> list[RunState]:
    if most is None or len(runs) <= most:
        return runs
    urgent = [r for r in runs if r.status in (Status.running, Status.failed, Status.interrupted)][:most]
    finished = [r for r in runs if r.status.finished]
    room = most - len(urgent)
    return urgent + (finished[-room:] if room else [])
