"""Is a comparison fair? What differs between arms besides the factor that they compare, as marks for a table.

A field counts as the compared factor of an arm if it is the only one that its sweep file sets otherwise than the
baseline's. What differs and is not that gets a mark, never a silent number.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from andrea_exp.config import QKNorm, RunConfig, plain
from andrea_exp.results.load import Run
from andrea_exp.rules import default_final_norm, get
from andrea_exp.sweep.plan import Cell, Plan, Values, column_title

PARAMETERS_WITHIN = 0.01
TRAINING = (
    "optim.lr",
    "optim.beta1",
    "optim.beta2",
    "optim.weight_decay",
    "optim.clip",
    "optim.schedule",
    "optim.warmup_steps",
    "train.batch_size",
    "train.precision",
)
# What a run's machine did to its numbers; mixed in one table, it marks the whole.
MACHINE = {
    "threads": "numbers of threads",
    "numerics_version": "numerics versions",
    "torch": "versions of torch",
    "device": "devices",
    "ops": "implementations of the ops",
}


@dataclass(frozen=True)
class Mark:
    """One check that did not hold."""

    check: str
    reason: str
    arms: dict[str, str]  # what is different in each marked arm; none where it is the table as a whole

    @property
    def sentence(self) -> str:
        found = ", ".join(f"{arm} ({what})" if what else arm for arm, what in self.arms.items())
        return f"{self.reason}: {found}" if found else self.reason


def fairness(plan: Plan, runs: Sequence[Run]) -> list[Mark]:
    """All marks of a table, none where the comparison is fair."""
    pairs = list(_beside_the_baseline(plan))
    counts = {(run.cell.arm, repr(run.cell.column)): n for run in runs if (n := run.number("parameters"))}
    checks = {
        "parameters": ("parameters differ from the baseline's by more than 1%", _parameters(pairs, counts)),
        "tokens": ("another number of training tokens than the baseline", _tokens(pairs)),
        "text": ("another text or tokenizer than the baseline", _text(pairs)),
        "init": ("another init than the baseline, beside what is compared", _fields(plan, pairs, ("model.init",))),
        "norms": ("a norm more or less than the baseline, beside what is compared", _norms(plan, pairs)),
        "training": ("trained otherwise than the baseline, beside what is compared", _fields(plan, pairs, TRAINING)),
        "grid": ("tuned over another grid than the baseline", _grids(plan)),
        "edge": ("the tuned value is at the edge of its grid, the best may lie beyond", _edges(plan)),
    }
    marks = [Mark(check, reason, arms) for check, (reason, arms) in checks.items() if arms]
    return marks + [Mark(key, f"runs with different {what} are mixed", {}) for key, what in _mixed(runs)]


Pair = tuple[Cell, Cell]  # of an arm and of the baseline, in one column


def _beside_the_baseline(plan: Plan) -> Iterable[Pair]:
    """One cell for each arm and column, with the baseline's in that column.

    Where something is tuned it is the first tuning run of each, so that both have the same value.
    """
    first: dict[tuple[str, str], Cell] = {}
    for cell in [*plan.cells, *plan.guesses]:
        first.setdefault((cell.arm, repr(cell.column)), cell)
    for (arm, column), cell in first.items():
        if arm != plan.spec.baseline:
            yield cell, first[plan.spec.baseline, column]


def _worst(pairs: Iterable[Pair], describe: Callable[[Cell, Cell], str]) -> dict[str, str]:
    """Arm -> what is different, said once for all columns in which it is alike."""
    found: dict[str, dict[str, None]] = defaultdict(dict)
    for cell, base in pairs:
        if text := describe(cell, base):
            found[cell.arm][text] = None
    return {arm: "; ".join(texts) for arm, texts in found.items()}


def _parameters(pairs: list[Pair], counts: dict[tuple[str, str], float]) -> dict[str, str]:
    def off(cell: Cell, base: Cell) -> str:
        count, other = (counts.get((c.arm, repr(c.column))) for c in (cell, base))
        if not count or not other or abs(count - other) <= PARAMETERS_WITHIN * other:
            return ""
        return f"{count / other - 1:+.1%}"

    return _worst(pairs, off)


def planned_tokens(config: RunConfig) -> int:
    """Tokens that a whole run trains on."""
    return config.train.steps * config.train.batch_size * config.model.seq_len


def _tokens(pairs: list[Pair]) -> dict[str, str]:
    def off(cell: Cell, base: Cell) -> str:
        count, other = planned_tokens(cell.config), planned_tokens(base.config)
        return "" if count == other else f"{count:,} for {other:,}"

    return _worst(pairs, off)


def _text(pairs: list[Pair]) -> dict[str, str]:
    return _worst(pairs, lambda cell, base: "" if cell.fingerprint == base.fingerprint else cell.fingerprint[:8])


def _factor(plan: Plan, arm: str) -> str | None:
    """The one field in which an arm was set otherwise than the baseline; None where there are several."""
    one, other = plan.spec.compare[arm], plan.spec.compare[plan.spec.baseline]
    differ = [key for key in {**one, **other} if key not in one or key not in other or one[key] != other[key]]
    return differ[0] if len(differ) == 1 else None


def _fields(plan: Plan, pairs: list[Pair], fields: Sequence[str]) -> dict[str, str]:
    """Arms in which one of `fields` differs from the baseline's and is not the compared factor."""

    def off(cell: Cell, base: Cell) -> str:
        beside = [f for f in fields if f != _factor(plan, cell.arm)]
        found = ((f, get(cell.config, f)) for f in beside if get(cell.config, f) != get(base.config, f))
        return column_title({f: plain(value) for f, value in found})

    return _worst(pairs, off)


def _norms(plan: Plan, pairs: list[Pair]) -> dict[str, str]:
    def off(cell: Cell, base: Cell) -> str:
        here, there = _extra_norms(cell.config), _extra_norms(base.config)
        differ = [f for f in here if here[f] != there[f] and f != _factor(plan, cell.arm)]
        return column_title({f: here[f] for f in differ})

    return _worst(pairs, off)


def _extra_norms(config: RunConfig) -> Values:
    """Norms that no placement brings: after the embedding, on queries and keys, a final one beyond its own."""
    m = config.model
    final = "as placed" if m.final_norm == default_final_norm(config) else m.final_norm
    qk = None if m.qk_norm is QKNorm.none else m.qk_norm.name
    return {"model.embedding_norm": m.embedding_norm, "model.qk_norm": qk, "model.final_norm": final}


def _grids(plan: Plan) -> dict[str, str]:
    tried: dict[str, set[str]] = {arm: set() for arm in plan.arms}
    for cell in plan.cells:
        if cell.purpose == "tune":
            tried[cell.arm].add(repr(cell.tuned))
    return {arm: "" for arm, grid in tried.items() if grid != tried[plan.spec.baseline]}


def _edges(plan: Plan) -> dict[str, str]:
    """Arms with a chosen value at an end of its grid: the least or the largest, or where it is no number the first
    or the last."""
    ends = {key: _ends(values) for key, values in plan.spec.tune.items() if len(values) > 1}
    found: dict[str, dict[str, None]] = defaultdict(dict)
    for cell in plan.cells:
        at = {k: v for k, v in cell.tuned.items() if cell.purpose == "report" and v in ends.get(k, ())}
        if at:
            where = f" at {column_title(cell.column)}" if cell.column else ""
            found[cell.arm][f"{column_title(at)}{where}"] = None
    return {arm: "; ".join(texts) for arm, texts in found.items()}


def _ends(values: list[Any]) -> tuple[Any, Any]:
    numbers = all(isinstance(v, (int, float)) for v in values)
    return (min(values), max(values)) if numbers else (values[0], values[-1])


def _mixed(runs: Sequence[Run]) -> Iterable[tuple[str, str]]:
    """Of `MACHINE`, what is not the same in all ended runs that recorded it."""
    told = [{**run.summary, **run.summary.get("machine", {})} for run in runs if run.status.finished]
    for key, what in MACHINE.items():
        if len({repr(run[key]) for run in told if run.get(key) is not None}) > 1:
            yield key, what
