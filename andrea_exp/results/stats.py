"""The protocol's statistics on plain numbers: no runs, no tables.

`gaps` are paired differences, one a seed, in whatever unit they came in. Each function is tested against simulated
data of known truth: tests/test_stats.py.
"""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from scipy.special import stdtr, stdtrit  # scipy.stats has the same and takes a second to import

LEAST_PAIRS = 3  # below: no interval, no p
CONFIDENCE = 0.95
ALPHA = 0.05


@dataclass(frozen=True)
class _Sample:
    mean: float
    error: float  # standard error of the mean
    freedom: int

    def above(self, bound: float) -> float:
        """One-sided p of "the true mean is at most `bound`", by the t test."""
        if self.error == 0:  # two arms that are one run
            return float(self.mean <= bound)
        return float(stdtr(self.freedom, (bound - self.mean) / self.error))

    def below(self, bound: float) -> float:
        return _Sample(-self.mean, self.error, self.freedom).above(-bound)


def _sample(gaps: Sequence[float]) -> _Sample | None:
    """None where there are too few gaps, or one that is not finite, for a t test."""
    n = len(gaps)
    if n < LEAST_PAIRS or not all(map(math.isfinite, gaps)):
        return None
    error = 0.0 if min(gaps) == max(gaps) else statistics.stdev(gaps) / math.sqrt(n)
    return _Sample(statistics.fmean(gaps), error, n - 1)


@lru_cache
def _quantile(level: float, freedom: int) -> float:
    return float(stdtrit(freedom, level))


def paired_interval(gaps: Sequence[float], confidence: float = CONFIDENCE) -> tuple[float | None, float | None]:
    """Student's interval of the mean gap; (None, None) below three pairs."""
    sample = _sample(gaps)
    if sample is None:
        return None, None
    half = _quantile((1 + confidence) / 2, sample.freedom) * sample.error
    return sample.mean - half, sample.mean + half


def paired_p(gaps: Sequence[float]) -> float | None:
    """Two-sided p of "no difference", by the paired t test; None below three pairs."""
    sample = _sample(gaps)
    return None if sample is None else min(1.0, 2 * min(sample.above(0), sample.below(0)))


def equivalence_p(gaps: Sequence[float], margin: float) -> float | None:
    """p of "the true difference is `margin` or more, up or down": two one-sided t tests (Schuirmann 1987).

    Small means equal within the margin; it is below 5% just where the 90% interval lies inside the margin.
    """
    if not margin > 0:
        raise ValueError(f"margin={margin}: must be above 0")
    sample = _sample(gaps)
    return None if sample is None else max(sample.above(-margin), sample.below(margin))


def holm(ps: Sequence[float | None]) -> list[float | None]:
    """Holm's step-down adjusted p values (1979), in the order given; a None is no test and stays None."""
    known = sorted((p, place) for place, p in enumerate(ps) if p is not None)
    adjusted: list[float | None] = [None] * len(ps)
    largest = 0.0
    for done, (p, place) in enumerate(known):
        largest = max(largest, min(1.0, (len(known) - done) * p))
        adjusted[place] = largest
    return adjusted


def lr_sensitivity(runs: Mapping[float, Sequence[tuple[float | None, float]]]) -> float | None:
    """Mean over the learning rates of min(loss, loss at start), less the best of them (Wortsman 2023).

    `runs` has (final loss, loss at start) for each seed at each rate; a final loss that is no number counts as its
    start. A rate's value is the mean over its seeds. None for fewer than two rates, which have no spread to show.
    """
    if len(runs) < 2 or not all(runs.values()):
        return None
    means = [statistics.fmean(_capped(*run) for run in seeds) for seeds in runs.values()]
    return statistics.fmean(means) - min(means)


def _capped(loss: float | None, start: float) -> float:
    return start if loss is None or not math.isfinite(loss) else min(loss, start)


def log_log_slopes(curves: Iterable[Sequence[tuple[float, float]]]) -> list[float]:
    """The least-squares slope of log y over log x of each curve, (x, y) above 0, that has two points or more."""
    logs = [[(math.log(x), math.log(y)) for x, y in curve] for curve in curves if len(curve) > 1]
    return [statistics.linear_regression(*zip(*points, strict=True)).slope for points in logs]


def median_with_diverged(losses: Sequence[float], diverged: int) -> float | None:
    """Median in which each diverged run counts as +inf; None where that is the median, or nothing is there."""
    values = [*losses, *[math.inf] * diverged]
    middle = statistics.median(values) if values else math.inf
    return middle if math.isfinite(middle) else None


@dataclass(frozen=True)
class Signs:
    """In how many regimes (cells of learning rate, depth, budget, ...) a difference points down or up.

    `clearly` counts those that seeds do not explain: Holm over all regimes at 5%, or one side diverged in every pair
    of three or more while the other did not.
    """

    below: int
    above: int
    clearly_below: int
    clearly_above: int

    @property
    def cells(self) -> int:
        return self.below + self.above

    @property
    def flips(self) -> bool:
        """Whether the sign is clear in one regime and clearly the other way in another."""
        return self.clearly_below > 0 and self.clearly_above > 0

    def holds(self, sign: float) -> float | None:
        """The fraction of regimes that point as `sign` does."""
        return (self.below if sign < 0 else self.above) / self.cells if self.cells else None


def signs(regimes: Sequence[Sequence[float]]) -> Signs:
    """The signs of each regime's gaps. +inf is a pair whose first run alone diverged, -inf its second alone, nan both.

    A regime without gaps, or whose gaps are 0, has no sign and is not counted.
    """
    adjusted = holm([paired_p(gaps) for gaps in regimes])
    found = [(direction(gaps), p, gaps) for gaps, p in zip(regimes, adjusted, strict=True)]
    clear = [way for way, p, gaps in found if (p is not None and p < ALPHA) or one_side_always_diverged(gaps)]
    ways = [way for way, _, _ in found]
    return Signs(ways.count(-1), ways.count(1), clear.count(-1), clear.count(1))


def direction(gaps: Sequence[float]) -> int:
    """-1, 0 or 1: the sign of the mean gap, of the median where runs diverged; pairs of two diverged runs have none."""
    known = [gap for gap in gaps if not math.isnan(gap)]
    if not known:
        return 0
    middle = statistics.fmean(known) if all(map(math.isfinite, known)) else statistics.median(known)
    return (middle > 0) - (middle < 0)  # a median between -inf and inf is no number, and has no sign


def one_side_always_diverged(gaps: Sequence[float]) -> bool:
    """Whether it diverged in each of enough pairs, and the other in none."""
    return len(gaps) >= LEAST_PAIRS and len(set(gaps)) == 1 and math.isinf(gaps[0])
