"""Tuning: the value with the lowest mean validation loss over the tuning seeds, per row and column."""

import json
import statistics
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from andrea_exp.index import Index
from andrea_exp.record import Status
from andrea_exp.sweep.plan import Cell, Chooser, Values


def choose_tuned(records: Path) -> Chooser:
    """A chooser that reads the tuning runs' summaries; it answers None until they have all ended.

    A value ranks behind all with fewer diverged seeds.
    """

    index = Index(records)

    def choose(tuning: Sequence[Cell]) -> Values | None:
        losses: dict[str, list[float | None]] = defaultdict(list)
        for cell in tuning:
            state, summary = index.look(cell.signature)
            if not state.finished:
                return None
            # Bits a byte rank like nats a token, and across tokenizers too.
            losses[json.dumps(cell.tuned)].append(summary["val/bits_per_byte"] if state is Status.done else None)
        return json.loads(min(losses, key=lambda values: _rank(losses[values])))

    return choose


def _rank(losses: list[float | None]) -> tuple[int, float]:
    """How many seeds diverged, then the mean of the others."""
    known = [loss for loss in losses if loss is not None]
    return len(losses) - len(known), statistics.fmean(known) if known else 0.0
