"""The ablation table: one object from the roles and the runs; formats.py has the ways to write it.

Protocol: diverged runs are counted, never averaged; differences to the baseline are paired seed by seed, with
an unadjusted 95% t interval and a Holm-adjusted p from three seeds on; whatever is not there, or not fair, is said.
"""

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from andrea_exp.config import formula
from andrea_exp.record import Status
from andrea_exp.results.contrast import Contrast, Place, by_place, contrast, gaps, place
from andrea_exp.results.fairness import Mark, fairness, planned_tokens
from andrea_exp.results.load import Run, read_runs
from andrea_exp.results.stats import LEAST_PAIRS, Signs, holm, lr_sensitivity, median_with_diverged, signs
from andrea_exp.rules import get
from andrea_exp.sweep.plan import Plan, Values

LR = "optim.lr"
LEAST_RATES = 5  # tuned over, for a claim


@dataclass(frozen=True)
class TableCell:
    """One arm in one column: its seeds in numbers. None is what there is not, or what the protocol does not give."""

    arm: str
    column: Values
    tuned: Values
    planned: int
    done: int
    diverged: int
    kinds: str  # of divergence: "stuck", "non-finite, stuck"
    unfinished: int
    loss_mean: float | None  # in the table's metric, over the seeds, where all of them are done
    loss_sd: float | None
    loss_median: float | None  # with diverged seeds as +inf
    diverged_at: float | None  # median of where diverged seeds ended, of those that ended in a number
    loss_stderr: float | None  # of one run's validation, over its windows: apart from the spread of seeds; nats a token
    bits_per_byte: float | None
    difference: float | None  # to the baseline, each at its own tuned value, paired by seed
    ci_low: float | None  # 95% t interval, unadjusted
    ci_high: float | None
    p: float | None  # paired t test, two-sided
    p_holm: float | None  # adjusted over the arms of the column
    pairs: int
    shared_difference: float | None  # both at the baseline's tuned value, over the tuning seeds
    shared_pairs: int
    lr_sensitivity: float | None  # nats a token, over the tuning runs
    grad_norm_median: float | None  # diverged runs included, while their gradients are finite
    grad_norm_max: float | None
    grad_norm_first_block: float | None  # at the last step, median over seeds
    grad_norm_last_block: float | None
    tokens_per_s: float | None
    parameters: int | None
    tokens: int  # that a whole run trains on
    flops: float | None  # of a whole run
    signatures: list[str]
    tuning_signatures: list[str]


@dataclass(frozen=True)
class AblationTable:
    name: str
    question: str
    baseline: str
    metric: str  # "val_loss", or "bits_per_byte" where tokens differ between runs
    arms: dict[str, dict[str, Any]]  # arm -> what it is: its overrides, its placement's formula
    columns: list[Values]
    cells: list[TableCell]
    signs: dict[str, Signs]  # arm -> of its difference, over columns and tuned values
    marks: list[Mark]  # what is not fair
    notes: list[str]

    @cached_property
    def _places(self) -> dict[tuple[str, str], TableCell]:
        return {(cell.arm, repr(cell.column)): cell for cell in self.cells}

    def cell(self, arm: str, column: Values) -> TableCell:
        return self._places[arm, repr(column)]

    def _repr_markdown_(self) -> str:
        """How a notebook shows it."""
        from andrea_exp.results.formats import to_markdown

        return to_markdown(self)


def ablation_table(plan: Plan, records: Path) -> AblationTable:
    """The table of a plan with whatever runs exist."""
    return table_of(plan, read_runs(plan, records))


def table_of(plan: Plan, runs: Sequence[Run]) -> AblationTable:
    metric = "bits_per_byte" if _texts_differ(plan) else "val_loss"
    reported = by_place((r for r in runs if r.cell.purpose == "report"), tuned=False)
    tuning = by_place((r for r in runs if r.cell.purpose == "tune"), tuned=False)
    cells = {
        (c.arm, repr(c.column)): c for column in plan.columns for c in _column(plan, column, reported, tuning, metric)
    }
    return AblationTable(
        name=plan.name,
        question=plan.spec.question,
        baseline=plan.spec.baseline,
        metric=metric,
        arms=_arms(plan),
        columns=plan.columns,
        cells=[cells[arm, repr(column)] for arm in plan.arms for column in plan.columns],
        signs=_signs(plan, runs, metric),
        marks=fairness(plan, runs),
        notes=_notes(plan, runs),
    )


Grouped = Mapping[Place, list[Run]]


def _column(plan: Plan, column: Values, reported: Grouped, tuning: Grouped, metric: str) -> Iterator[TableCell]:
    """The cells of one column: the baseline is there once, and Holm's family is the column's arms."""
    own = {arm: reported.get(place(arm, column, {}), []) for arm in plan.arms}
    tried = {arm: tuning.get(place(arm, column, {}), []) for arm in plan.arms}
    against = {arm: plan.spec.baseline for arm in plan.arms if arm != plan.spec.baseline}
    found = {arm: contrast(own[arm], own[base], metric) for arm, base in against.items()}
    adjusted = dict(zip(found, holm([c.p for c in found.values()]), strict=True))
    for arm in plan.arms:
        base = against.get(arm)
        shared = _at_shared(own[base], tried[arm], tried[base], metric) if base else Contrast()
        yield TableCell(
            arm=arm,
            column=column,
            planned=math.prod(len(v) for v in plan.spec.repeat.values()),
            **_losses(own[arm], metric),
            **vars(found.get(arm, Contrast())),
            p_holm=adjusted.get(arm),
            shared_difference=shared.difference,
            shared_pairs=shared.pairs,
            lr_sensitivity=_sensitivity(tried[arm], _chosen(own[arm])),
            **_sizes(own[arm] or tried[arm]),
            signatures=[run.cell.signature for run in own[arm]],
            tuning_signatures=[run.cell.signature for run in tried[arm]],
        )


def _losses(runs: Sequence[Run], metric: str) -> dict[str, Any]:
    done = [run for run in runs if run.status is Status.done]
    diverged = [run for run in runs if run.status is Status.diverged]
    losses = _numbers(done, metric)
    clean = [] if diverged else done
    return {
        "tuned": _chosen(runs),
        "done": len(done),
        "diverged": len(diverged),
        "kinds": ", ".join(sorted({run.summary["diverged"]["kind"] for run in diverged})),
        "unfinished": len(runs) - len(done) - len(diverged),
        "loss_mean": _mean(clean, metric),
        "loss_sd": statistics.stdev(losses) if clean and len(losses) > 1 else None,
        "loss_median": median_with_diverged(losses, len(diverged)),
        "diverged_at": _median(diverged, metric),
        "loss_stderr": _mean(clean, "val_loss_stderr"),
        "bits_per_byte": _mean(clean, "bits_per_byte"),
        "grad_norm_median": _mean(runs, "grad_norm_median"),
        "grad_norm_max": max(_numbers(runs, "grad_norm_max"), default=None),
        "grad_norm_first_block": _median(runs, "grad_norm_first_block"),
        "grad_norm_last_block": _median(runs, "grad_norm_last_block"),
        "tokens_per_s": _mean(runs, "tokens_per_s"),
    }


def _sizes(runs: Sequence[Run]) -> dict[str, Any]:
    """What a whole run of a cell costs; its runs differ in seeds, and in tuned values, alone."""
    tokens = planned_tokens(runs[0].cell.config)
    parameters = max(_numbers(runs, "parameters"), default=None)
    flops = max(_numbers(runs, "flops_per_token"), default=None)
    return {
        "tokens": tokens,
        "parameters": None if parameters is None else int(parameters),
        "flops": None if flops is None else flops * tokens,
    }


def _chosen(runs: Sequence[Run]) -> Values:
    """The tuned values of reported runs; none while the tuning is not done."""
    return runs[0].cell.tuned if runs else {}


def _at_shared(base: Sequence[Run], tried: Sequence[Run], tried_base: Sequence[Run], metric: str) -> Contrast:
    """Arm against baseline where both have the baseline's tuned values, over the tuning seeds."""
    chosen = _chosen(base)
    own, others = ([run for run in side if chosen and run.cell.tuned == chosen] for side in (tried, tried_base))
    return contrast(own, others, metric)


def _sensitivity(tried: Sequence[Run], chosen: Values) -> float | None:
    """Over the learning rates that were tried with the other chosen values."""
    rates: dict[Any, list[tuple[float | None, float]]] = defaultdict(list)
    for run in tried:
        start = run.number("val_loss_start")
        if LR in chosen and {**run.cell.tuned, LR: chosen[LR]} == chosen and start is not None:
            rates[run.cell.tuned[LR]].append((run.number("val_loss"), start))
    return lr_sensitivity(rates)


def _numbers(runs: Iterable[Run], column: str) -> list[float]:
    return [value for run in runs if (value := run.number(column)) is not None]


def _mean(runs: Iterable[Run], column: str) -> float | None:
    values = _numbers(runs, column)
    return statistics.fmean(values) if values else None


def _median(runs: Iterable[Run], column: str) -> float | None:
    values = _numbers(runs, column)
    return statistics.median(values) if values else None


def _arms(plan: Plan) -> dict[str, dict[str, Any]]:
    formulas: dict[str, set[str]] = {arm: set() for arm in plan.arms}
    for cell in plan.cells:
        formulas[cell.arm].add(formula(cell.config.model))
    return {
        arm: {"overrides": plan.spec.compare[arm], "formula": found.pop() if len(found) == 1 else ""}
        for arm, found in formulas.items()
    }


def _signs(plan: Plan, runs: Sequence[Run], metric: str) -> dict[str, Signs]:
    """Of each arm's difference to the baseline, at every tuned value that was tried, or else in every column."""
    purpose = "tune" if plan.spec.tune else "report"
    found = by_place((run for run in runs if run.cell.purpose == purpose), tuned=True)
    regimes: dict[str, list[list[float]]] = {arm: [] for arm in plan.arms if arm != plan.spec.baseline}
    for (arm, column, tuned), own in found.items():
        if arm in regimes:
            base = found.get((plan.spec.baseline, column, tuned), [])
            regimes[arm].append(gaps(own, base, metric))
    return {arm: signs(cells) for arm, cells in regimes.items()}


def _notes(plan: Plan, runs: Sequence[Run]) -> list[str]:
    found = {k: {get(c.config, k) for c in plan.cells} for k in ("model.init", LR, "train.steps")}
    alike = {k: values.pop() for k, values in found.items() if len(values) == 1}
    notes = ["all runs: " + ", ".join(f"{k}={getattr(v, 'name', v)}" for k, v in alike.items())] if alike else []
    if LR in alike:
        notes.append("one learning rate for all arms: a description of these runs, no claim about tuned models")
    elif len(rates := plan.spec.tune.get(LR, [])) in range(1, LEAST_RATES):
        notes.append(f"learning rates tuned over {len(rates)} values: a demonstration; a claim takes {LEAST_RATES}")
    if _texts_differ(plan):
        notes.append("arms read different texts or tokens: losses are in bits a byte")
    notes += _same_runs(plan)
    if plan.waiting:
        notes.append(f"{plan.waiting} runs wait for the tuning runs to choose their values")
    reported = [run.status for run in runs if run.cell.purpose == "report"]
    unfinished = Counter(str(run.status) for run in runs if not run.status.finished)
    if not all(status.finished for status in reported):
        notes.append("not in yet: " + ", ".join(f"{n} {s}" for s, n in unfinished.most_common()))
    if math.prod(map(len, plan.spec.repeat.values())) < LEAST_PAIRS:
        notes.append(f"fewer than {LEAST_PAIRS} seeds: no interval")
    if Status.diverged in reported:
        notes.append(
            "k/n diverged: counted, never averaged, infinite in the median; stuck = no better than 0.99 of the unigram "
            "model's loss"
        )
    ended = [run for run in runs if run.cell.purpose == "report" and run.status.finished]
    if ended and all((run.summary.get("diverged") or {}).get("kind") == "stuck" for run in ended):
        notes.append("all runs are stuck: perhaps they were too short to leave the unigram model's loss (train.steps)")
    return notes


def _texts_differ(plan: Plan) -> bool:
    """Whether arms of one column have different data: nats a token compare nothing across tokenizers."""
    texts: dict[str, set[str]] = defaultdict(set)
    for cell in plan.cells:
        texts[repr(cell.column)].add(cell.fingerprint)
    return any(len(found) > 1 for found in texts.values())


def _same_runs(plan: Plan) -> list[str]:
    """Arms that are one and the same run in some column."""
    arms_of: dict[str, dict[str, None]] = {}
    for cell in plan.cells:
        arms_of.setdefault(cell.signature, {})[cell.arm] = None
    same = dict.fromkeys(" and ".join(arms) for arms in arms_of.values() if len(arms) > 1)
    return [f"{arms} are the same runs" + (" in some columns" if plan.spec.across else "") for arms in same]
