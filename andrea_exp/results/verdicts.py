"""The rules that turn numbers into verdicts, written before any run. No records, no claims, no words by hand.

A rule looks at one regime (one learning rate, depth, budget, ...); `combined` judges over all of them.
"""

import math
import statistics
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from andrea_exp.results.stats import (
    ALPHA,
    LEAST_PAIRS,
    direction,
    equivalence_p,
    holm,
    one_side_always_diverged,
    paired_interval,
    paired_p,
)


class Verdict(StrEnum):
    supported = "supported"
    contradicted = "contradicted"
    equal = "equal within margin"
    depends = "depends on regime"
    inconclusive = "inconclusive"
    missing = "no runs yet"


@dataclass(frozen=True)
class Finding:
    """What one rule says of one regime, with the numbers behind it: an effect and its 95% interval from n seeds."""

    verdict: Verdict
    effect: float | None = None
    low: float | None = None
    high: float | None = None
    n: int = 0
    p: float | None = None  # of no effect, where the rule tests for one
    seeds_needed: int | None = None  # where more seeds would decide


def _found(gaps: Sequence[float], verdict: Verdict) -> Finding:
    finite = all(map(math.isfinite, gaps))
    effect = statistics.fmean(gaps) if finite else None  # where a run diverged there is no mean
    return Finding(verdict, effect, *paired_interval(gaps), len(gaps), paired_p(gaps))


def less(gaps: Sequence[float], margin: float) -> Finding:
    """The claim that left is below right.

    `gaps` are left - right, infinite where one side alone diverged, nan where both did.
    """
    if not gaps:
        return Finding(Verdict.missing)
    by_sign = {-1: Verdict.supported, 1: Verdict.contradicted, 0: Verdict.inconclusive}[direction(gaps)]
    if one_side_always_diverged(gaps):
        return _found(gaps, by_sign)
    if _below_alpha(equivalence_p(gaps, margin)):
        return _found(gaps, Verdict.equal)
    return _found(gaps, by_sign if _below_alpha(paired_p(gaps)) else Verdict.inconclusive)


def equal(gaps: Sequence[float], margin: float) -> Finding:
    """The claim that left and right differ by less than the margin; a large p is no support for it."""
    if not gaps:
        return Finding(Verdict.missing)
    found = replace(_found(gaps, Verdict.inconclusive), p=None)
    if _below_alpha(equivalence_p(gaps, margin)):
        return replace(found, verdict=Verdict.supported)
    outside = found.low is not None and found.high is not None and (found.low > margin or found.high < -margin)
    return replace(found, verdict=Verdict.contradicted) if outside or one_side_always_diverged(gaps) else found


def between(values: Sequence[float], least: float, most: float) -> Finding:
    """The claim that a mean lies between two bounds: its interval does, or lies outside."""
    if not values:
        return Finding(Verdict.missing)
    found = replace(_found(values, Verdict.inconclusive), p=None)
    if found.low is None or found.high is None:
        return found
    if least <= found.low and found.high <= most:
        return replace(found, verdict=Verdict.supported)
    outside = found.high < least or found.low > most
    return replace(found, verdict=Verdict.contradicted) if outside else found


def fails(left: Sequence[bool], right: Sequence[bool] | None = None) -> Finding:
    """The claim that left diverges, in more than half of its seeds, and right does not.

    The effect is the share of left's seeds that diverged. Left training is the claim's end; where both sides diverge,
    it is not what the claim names that decides.
    """
    if not left or right == []:
        return Finding(Verdict.missing)
    n = min(len(left), len(right)) if right is not None else len(left)
    share = sum(left) / len(left)
    if n < LEAST_PAIRS:
        verdict = Verdict.inconclusive
    elif share <= 0.5:
        verdict = Verdict.contradicted
    else:
        verdict = Verdict.inconclusive if right and sum(right) / len(right) > 0.5 else Verdict.supported
    return Finding(verdict, effect=share, n=n)


def trains(left: Sequence[bool]) -> Finding:
    """The claim that left does not diverge in more than half of its seeds."""
    found = fails(left)
    swap = {Verdict.supported: Verdict.contradicted, Verdict.contradicted: Verdict.supported}
    return replace(found, verdict=swap.get(found.verdict, found.verdict))


MOST_SEEDS = 1000


def with_seeds_needed(rule: Callable[[Sequence[float]], Finding], values: Sequence[float]) -> Finding:
    """What a rule says of values, and where it is undecided at how many seeds it would not be.

    That number supposes that mean and SD stay as they are, so it is as likely too small as too large. None where values
    are too few or not finite, or where not even `MOST_SEEDS` would do: then the effect lies at the bound itself.
    """
    found = rule(values)
    if found.verdict is not Verdict.inconclusive or found.low is None:
        return found
    sizes = range(len(values) + 1, MOST_SEEDS + 1)
    place = bisect_left(sizes, True, key=lambda n: rule(_alike(values, n)).verdict is not Verdict.inconclusive)
    return replace(found, seeds_needed=sizes[place] if place < len(sizes) else None)


def _alike(values: Sequence[float], n: int) -> list[float]:
    """`n` values of the same mean and SD."""
    mean, apart = statistics.fmean(values), statistics.stdev(values) * math.sqrt((n - 1) / (n - n % 2))
    return [mean - apart, mean + apart] * (n // 2) + [mean] * (n % 2)


def combined(regimes: Sequence[Finding], every: bool = False) -> Verdict:
    """One verdict over all regimes that have runs.

    It depends on the regime where one supports and another contradicts. Otherwise one clear regime decides, unless it
    is a test of an effect that is not significant after Holm's adjustment over the regimes. With `every`, and for
    equality, a verdict has to hold in all of them.
    """
    known = [f for f in regimes if f.verdict is not Verdict.missing]
    if not known:
        return Verdict.missing
    adjusted = holm([f.p for f in known])
    verdicts = {_adjusted(f, p) for f, p in zip(known, adjusted, strict=True)}
    if {Verdict.supported, Verdict.contradicted} <= verdicts:
        return Verdict.depends
    if len(verdicts) == 1:
        return verdicts.pop()
    decided = verdicts & {Verdict.supported, Verdict.contradicted}
    return decided.pop() if decided and not every else Verdict.inconclusive


def _adjusted(found: Finding, p: float | None) -> Verdict:
    decided = found.verdict in (Verdict.supported, Verdict.contradicted)
    return Verdict.inconclusive if decided and p is not None and p >= ALPHA else found.verdict


def _below_alpha(p: float | None) -> bool:
    return p is not None and p < ALPHA
