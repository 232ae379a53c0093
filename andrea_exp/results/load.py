"""What is recorded of a sweep's runs. Which runs those are follows from planning it again."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from andrea_exp.compose import compose, sweep_words
from andrea_exp.index import Index, Summary
from andrea_exp.record import Status
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
    """A sweep's plan and its records folder, from the same words that ran it, as `sweep_words` has them."""
    words = sweep_words(name, overrides)
    records = Path(compose(words).records)
    return plan_sweep(words, choose_tuned(records)), records


def read_runs(plan: Plan, records: Path) -> list[Run]:
    """What is recorded of each planned cell, in the plan's order."""
    with Index(records) as index:
        return [Run(cell, *index.look(cell.signature)) for cell in plan.cells]


def last_mlp_gradient(row: Mapping[str, float]) -> float | None:
    """The gradient norm of the last block's MLP in a logged row; None where it has none, or one that is not finite."""
    names = [name for name in row if name.startswith("grad_norm/block_") and name.endswith("/mlp")]
    return row[max(names)] if names else None
