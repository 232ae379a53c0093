"""The source texts' claims against whatever runs there are: data in claims.yaml, rules in verdicts.py."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from andrea_exp.errors import UserError, did_you_mean
from andrea_exp.record import Status, read_metrics, run_folder
from andrea_exp.results import verdicts
from andrea_exp.results.contrast import gaps
from andrea_exp.results.fairness import fairness
from andrea_exp.results.layers import swap_ratio
from andrea_exp.results.load import SUMMARY, Run, last_mlp_gradient, plan_of, read_runs
from andrea_exp.results.stats import LEAST_PAIRS, Signs, log_log_slopes, signs
from andrea_exp.results.table import LEAST_RATES, LR
from andrea_exp.results.verdicts import Finding, Verdict, with_seeds_needed
from andrea_exp.sweep.plan import Plan, Values, column_title

DATA = Path(__file__).with_suffix(".yaml")
OF_LOSS = ("less", "equal")  # rules that compare tuned models
OF_DIVERGENCE = ("fails", "trains")  # rules whose effect is a share of seeds
EVERY = ("equal", "trains", "between")  # claims about all regimes


@dataclass
class Claim:
    """One entry of claims.yaml, which says what its fields mean."""

    id: str
    text: str
    source: str
    sweep: str | None = None
    rule: str = ""
    left: dict[str, Any] = field(default_factory=dict)
    right: dict[str, Any] = field(default_factory=dict)
    metric: str = "val_loss"
    margin: float | None = None
    bounds: list[float] = field(default_factory=list)
    slope_over: str | None = None
    kind: str | None = None  # of divergence, where only one counts


@dataclass(frozen=True)
class Regime:
    """A claim in one setting of everything that it leaves open."""

    where: str
    finding: Finding


@dataclass(frozen=True)
class Judged:
    """A claim and what its runs say."""

    claim: Claim
    verdict: Verdict
    regimes: list[Regime]
    remarks: list[str]
    signatures: list[str]

    @property
    def main(self) -> Finding:
        """The numbers of a claim with one regime; of several only their verdict is one."""
        return self.regimes[0].finding if len(self.regimes) == 1 else Finding(self.verdict)


def read_claims(path: Path = DATA) -> list[Claim]:
    """Raises UserError for an entry that no rule could judge."""
    merged = (OmegaConf.merge(OmegaConf.structured(Claim), entry) for entry in OmegaConf.load(path))
    claims: list[Claim] = [OmegaConf.to_object(c) for c in merged]  # type: ignore[misc]
    for claim in claims:
        _check(claim)
    return claims


def _check(claim: Claim) -> None:
    if claim.sweep is None:
        return
    needs = {"less": "right margin", "equal": "right margin", "fails": "", "trains": "", "between": "bounds"}
    if claim.rule not in needs:
        raise UserError(f"claim {claim.id}: rule={claim.rule}: no such rule; {did_you_mean(claim.rule, needs)}")
    for name in needs[claim.rule].split():
        if not getattr(claim, name):
            raise UserError(f"claim {claim.id}: rule {claim.rule} needs {name}")
    known = SUMMARY if claim.rule in OF_LOSS else METRICS
    if claim.metric not in known:
        near = did_you_mean(claim.metric, known)
        raise UserError(f"claim {claim.id}: metric={claim.metric}: unknown to rule {claim.rule}; {near}")
    if claim.right and set(claim.left) != set(claim.right):
        raise UserError(f"claim {claim.id}: left and right name different fields: {[*claim.left]}, {[*claim.right]}")
    if isinstance(claim.right.get("arm"), list):
        raise UserError(f"claim {claim.id}: right: arm={claim.right['arm']}: left may name several arms, right one")


def judge_all(overrides: Sequence[str] = (), claims: Sequence[Claim] | None = None) -> list[Judged]:
    """All claims, each against the records of its sweep. `overrides` are those that the sweeps ran with."""

    @cache
    def runs_of(sweep: str) -> tuple[Plan, Path, list[Run]]:
        plan, records = plan_of(sweep, overrides)
        return plan, records, read_runs(plan, records)

    def judged(claim: Claim) -> Judged:
        if claim.sweep is None:
            return Judged(claim, Verdict.missing, [], ["no sweep asks it yet"], [])
        return judge_or_tell(claim, *runs_of(claim.sweep))

    return [judged(claim) for claim in (read_claims() if claims is None else claims)]


def judge_or_tell(claim: Claim, plan: Plan, records: Path, runs: Sequence[Run]) -> Judged:
    """A claim's verdict; on a sweep that overrides have narrowed, why it has none."""
    try:
        return judge(claim, plan, records, runs)
    except UserError as error:
        return Judged(claim, Verdict.missing, [], [str(error)], [])


def judge(claim: Claim, plan: Plan, records: Path, runs: Sequence[Run]) -> Judged:
    """One claim against a sweep's runs. Raises UserError where the sweep has no such arm or column."""
    for side in (claim.left, claim.right):
        _check_side(claim, side, plan)
    untuned = [Run(cell, Status.missing, {}) for cell in plan.guesses]  # their regimes are open too
    reported = [*(run for run in runs if run.cell.purpose == "report"), *untuned]
    left = _by_regime(claim, claim.left, reported)
    right = _by_regime(claim, claim.right, reported)
    regimes = [
        Regime(", ".join(filter(None, where)), _finding(claim, own, right.get(("", where[1]), []), records))
        for where, own in left.items()
    ]
    verdict = verdicts.combined([r.finding for r in regimes], every=claim.rule in EVERY)
    remarks, tried = _remarks(claim, plan, runs), _signs(claim, runs)
    asked = [run for side in (left, right) for found in side.values() for run in found]
    ended = [run for run in asked if run.status.finished]
    if len(ended) < len(asked):
        remarks.append(("runs", f"{len(ended)} of {len(asked)} runs have ended"))
    if tried.cells:
        remarks.append(("signs", f"left below right in {tried.below}/{tried.cells} of the settings tried"))
    if verdict is not Verdict.missing and tried.flips:
        verdict = Verdict.depends
    if verdict is not Verdict.missing and any(remark in BLOCKING for remark, _ in remarks):
        verdict = Verdict.inconclusive
    elif verdict is Verdict.inconclusive:
        remarks += [("seeds", told) for told in _what_it_takes(claim, regimes)]
    told = [text for _, text in remarks] if verdict is not Verdict.missing else []
    return Judged(claim, verdict, regimes, told, list(dict.fromkeys(run.cell.signature for run in ended)))


def _what_it_takes(claim: Claim, regimes: Sequence[Regime]) -> Iterator[str]:
    """To decide a claim that nothing but its numbers leaves undecided: all of its regimes, or one where one does."""
    undecided = [r.finding for r in regimes if r.finding.verdict is Verdict.inconclusive]
    needs = [found.seeds_needed or math.inf for found in undecided]
    if any(found.n < LEAST_PAIRS for found in undecided):
        yield f"a verdict takes {LEAST_PAIRS} seeds or more"
    elif undecided and math.isinf(n := max(needs) if claim.rule in EVERY else min(needs)):
        yield "more seeds alone would not decide it"
    elif undecided:
        yield f"about {n} seeds would decide it, if effect and spread stay as they are"


def _signs(claim: Claim, runs: Sequence[Run]) -> Signs:
    """Of a difference at every tuned value that was tried, both sides at the same one: a verdict may depend on it."""
    tried: dict[str, list[Run]] = {}
    for run in runs:
        if run.cell.purpose == "tune" and claim.rule in OF_LOSS:
            tried.setdefault(repr(run.cell.tuned), []).append(run)
    regimes = []
    for at in tried.values():
        left, right = _by_regime(claim, claim.left, at), _by_regime(claim, claim.right, at)
        regimes += [gaps(own, right.get(("", where[1]), []), claim.metric) for where, own in left.items()]
    return signs(regimes)


def _check_side(claim: Claim, side: Values, plan: Plan) -> None:
    where = f"claim {claim.id}: sweep {claim.sweep}"
    for key, wanted in side.items():
        known = plan.arms if key == "arm" else plan.spec.across.get(key)
        if known is None:
            raise UserError(f"{where} has no column {key}; {did_you_mean(key, plan.spec.across)}")
        for value in _several(wanted):
            if value not in known:
                raise UserError(f"{where} has no {key}={value}; {did_you_mean(value, map(str, known))}")


def _several(wanted: Any) -> list[Any]:
    return wanted if isinstance(wanted, list) else [wanted]


def _by_regime(claim: Claim, side: Values, runs: Sequence[Run]) -> dict[tuple[str, str], list[Run]]:
    """A side's runs by (arm, columns) where the claim leaves those open: it names several arms, or not that column.

    With a slope, its field is no regime: the slope goes over it.
    """
    closed = {k for s in (claim.left, claim.right) for k, v in s.items() if not isinstance(v, list)}
    found: dict[tuple[str, str], list[Run]] = {}
    for run in runs:
        stands = {"arm": run.cell.arm, **run.cell.column}
        if side and all(stands[key] in _several(wanted) for key, wanted in side.items()):
            arm = run.cell.arm if isinstance(side["arm"], list) else ""
            open_ = {k: v for k, v in run.cell.column.items() if k not in closed | {claim.slope_over}}
            found.setdefault((arm, column_title(open_)), []).append(run)
    return found


def _finding(claim: Claim, left: Sequence[Run], right: Sequence[Run], records: Path) -> Finding:
    found = _by_rule(claim, left, right, records)
    sides = (left, right) if claim.right else (left,)
    if found.verdict is Verdict.missing and all(any(run.status.finished for run in side) for side in sides):
        return replace(found, verdict=Verdict.inconclusive)  # runs without a number: all diverged, or not measured
    return found


def _by_rule(claim: Claim, left: Sequence[Run], right: Sequence[Run], records: Path) -> Finding:
    if claim.rule == "fails":
        return verdicts.fails(_diverged(left, claim.kind), _diverged(right, claim.kind) if claim.right else None)
    if claim.rule == "trains":
        return verdicts.trains(_diverged(left, claim.kind))
    if claim.rule == "between":
        return _between(claim, left, records)
    assert claim.margin is not None
    rule = partial(verdicts.less if claim.rule == "less" else verdicts.equal, margin=claim.margin)
    return with_seeds_needed(rule, gaps(left, right, claim.metric))


def _diverged(runs: Sequence[Run], kind: str | None) -> list[bool]:
    return [
        run.status is Status.diverged and kind in (None, run.summary["diverged"]["kind"])
        for run in runs
        if run.status.finished
    ]


def _between(claim: Claim, runs: Sequence[Run], records: Path) -> Finding:
    """Ratios and norms span decades: their interval is that of the logarithm.

    Undecided where a run has no such number: those that have one are the ones that went well.
    """
    measure, (least, most) = METRICS[claim.metric], claim.bounds
    ended = [(run, measure(run, records)) for run in runs if run.status.finished]
    above_0 = [(run, value) for run, value in ended if value is not None and value > 0]
    if len(above_0) < len(ended):
        return Finding(Verdict.inconclusive, n=len(above_0))
    if claim.slope_over:
        slopes = log_log_slopes(_curves(above_0, claim.slope_over))
        return with_seeds_needed(partial(verdicts.between, least=least, most=most), slopes)
    rule = partial(verdicts.between, least=math.log(least) if least > 0 else -math.inf, most=math.log(most))
    found = with_seeds_needed(rule, [math.log(value) for _, value in above_0])
    effect, low, high = (None if v is None else math.exp(v) for v in (found.effect, found.low, found.high))
    return replace(found, effect=effect, low=low, high=high)


def _curves(values: Sequence[tuple[Run, float]], key: str) -> Iterable[list[tuple[float, float]]]:
    """A curve over a field for each seed."""
    by_seed: dict[str, list[tuple[float, float]]] = {}
    for run, value in values:
        by_seed.setdefault(repr(run.cell.repeat), []).append((run.cell.column[key], value))
    return by_seed.values()


# Half a sweep decides nothing: the seeds that came first would. The others are the protocol's for tuned models.
BLOCKING = ("runs", "rates", "edge")


def _remarks(claim: Claim, plan: Plan, runs: Sequence[Run]) -> list[tuple[str, str]]:
    """What limits a claim about losses: too few learning rates, and marks of the arms that it compares."""
    if claim.rule not in OF_LOSS:
        return []
    rates = len(plan.spec.tune.get(LR, []))
    few = [("rates", f"learning rates tuned over {rates} values, a claim takes {LEAST_RATES}")] * (rates < LEAST_RATES)
    arms = {arm for side in (claim.left, claim.right) for arm in _several(side["arm"])}
    marks = [m for m in fairness(plan, runs) if arms & set(m.arms) or not m.arms]
    return few + [(mark.check, mark.sentence) for mark in marks]


def _logged(prefix: str, join: Callable[[list[float]], float]) -> Callable[[Run, Path], float | None]:
    """A metric of a run's last row: what `join` makes of all values whose names begin with `prefix`."""

    def measure(run: Run, records: Path) -> float | None:
        rows = read_metrics(run_folder(records, run.cell.signature))
        last = rows[-1] if rows else {}
        values = [v for name, v in sorted(last.items()) if name.startswith(prefix) and v is not None]
        return join(values) if values else None

    return measure


def _first_over_last(run: Run, _: Path) -> float | None:
    first, last = run.number("grad_norm_first_block"), run.number("grad_norm_last_block")
    return None if first is None or not last else first / last


def _last_mlp(run: Run, records: Path) -> float | None:
    rows = read_metrics(run_folder(records, run.cell.signature))
    return last_mlp_gradient(rows[-1]) if rows else None


def _summary(column: str) -> Callable[[Run, Path], float | None]:
    return lambda run, _: run.number(column)


METRICS: dict[str, Callable[[Run, Path], float | None]] = {
    **{column: _summary(column) for column in SUMMARY},
    "first_over_last_block": _first_over_last,
    "last_mlp_gradient": _last_mlp,
    "branch_ratio": _logged("branch/ratio/", lambda values: sum(values) / len(values)),
    "swap_ratio": swap_ratio,
    "stream_rms": _logged("stream/rms/final", lambda values: values[0]),
}
