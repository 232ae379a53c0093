"""The protocol's statistics against simulated data whose truth is known, and against closed forms.

Error rates are binomial counts: bounds lie 4 standard errors or more from what the method promises, and the methods'
usual faults (a normal quantile for Student's, no adjustment, one test of the two) lie outside.
"""

import math
import statistics

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scipy import stats as scipy_stats

from andrea_exp.results.stats import (
    direction,
    equivalence_p,
    holm,
    lr_sensitivity,
    median_with_diverged,
    paired_interval,
    paired_p,
    signs,
)

TRIALS = 4000


def draws(mean: float, sd: float, n: int, trials: int = TRIALS, seed: int = 0) -> list[list[float]]:
    return np.random.default_rng(seed).normal(mean, sd, (trials, n)).tolist()


def share(hits: list[bool]) -> float:
    return sum(hits) / len(hits)


# Intervals and p values


@pytest.mark.parametrize("n", [3, 5, 10])
def test_the_interval_covers_the_truth_in_95_of_100(n: int):
    hits = []
    for gaps in draws(0.3, 0.02, n):
        low, high = paired_interval(gaps)
        assert low is not None
        assert high is not None
        hits.append(low <= 0.3 <= high)
    assert share(hits) == pytest.approx(0.95, abs=4 * math.sqrt(0.95 * 0.05 / TRIALS))


@pytest.mark.parametrize("n", [3, 5])
def test_without_a_difference_p_falls_below_5_percent_in_5_of_100(n: int):
    found = share([(paired_p(gaps) or 0) < 0.05 for gaps in draws(0.0, 0.02, n)])
    assert found == pytest.approx(0.05, abs=4 * math.sqrt(0.05 * 0.95 / TRIALS))


def test_pairing_takes_out_what_seeds_share():
    """Seeds move both arms by ten times the difference: pairs see it, unpaired samples do not."""
    rng = np.random.default_rng(0)
    paired, unpaired = [], []
    for _ in range(500):
        seeds, noise = rng.normal(0, 0.1, 5), rng.normal(0, 0.002, (2, 5))
        one, other = seeds + noise[0], seeds + 0.01 + noise[1]
        paired.append((paired_p((other - one).tolist()) or 1) < 0.05)
        unpaired.append(scipy_stats.ttest_ind(one, other).pvalue < 0.05)
    assert share(paired) > 0.95
    assert share(unpaired) < 0.1


gap = st.floats(-10, 10, allow_nan=False).map(lambda x: round(x, 6))


@settings(max_examples=50, deadline=None)
@given(st.lists(gap, min_size=3, max_size=10))
@example([0.5, 0.5, 0.5])
@example([0.0, 0.0, 0.0])
def test_the_interval_is_the_textbooks(gaps: list[float]):
    mean, error = statistics.fmean(gaps), statistics.stdev(gaps) / math.sqrt(len(gaps))
    half = scipy_stats.t.ppf(0.975, len(gaps) - 1) * error
    assert paired_interval(gaps) == pytest.approx((mean - half, mean + half), rel=1e-9, abs=1e-9)


@settings(max_examples=50, deadline=None)
@given(st.lists(gap, min_size=3, max_size=10).filter(lambda gaps: statistics.stdev(gaps) > 1e-3))
def test_p_and_the_two_one_sided_tests_are_scipys(gaps: list[float]):
    assert paired_p(gaps) == pytest.approx(scipy_stats.ttest_1samp(gaps, 0).pvalue, rel=1e-9)
    lower = scipy_stats.ttest_1samp(gaps, -0.5, alternative="greater").pvalue
    upper = scipy_stats.ttest_1samp(gaps, 0.5, alternative="less").pvalue
    assert equivalence_p(gaps, 0.5) == pytest.approx(max(lower, upper), rel=1e-9, abs=1e-12)


def test_too_few_pairs_and_diverged_ones_have_neither_interval_nor_p():
    for gaps in ([], [0.1], [0.1, 0.2], [0.1, 0.2, math.inf]):
        assert (paired_interval(gaps), paired_p(gaps), equivalence_p(gaps, 1.0)) == ((None, None), None, None)


@pytest.mark.filterwarnings("error")
def test_one_run_against_itself_is_equal_with_certainty():
    assert (paired_p([0.0] * 3), equivalence_p([0.0] * 3, 0.01)) == (1.0, 0.0)
    assert (paired_p([0.5] * 3), equivalence_p([0.5] * 3, 0.01)) == (0.0, 1.0)


# Equality


@pytest.mark.parametrize("truth", [0.02, -0.02])
def test_a_difference_as_large_as_the_margin_passes_as_equal_in_5_of_100(truth: float):
    found = share([(equivalence_p(gaps, 0.02) or 0) < 0.05 for gaps in draws(truth, 0.002, 5)])
    assert found == pytest.approx(0.05, abs=4 * math.sqrt(0.05 * 0.95 / TRIALS))


def test_the_power_of_the_equality_test_is_the_one_that_theory_gives():
    """No difference, known noise: the chance that Student's 90% interval lies inside the margin, by integration."""
    n, sd, margin = 5, 0.015, 0.02
    error, quantile = sd / math.sqrt(n), scipy_stats.t.ppf(0.95, n - 1)
    spreads = np.linspace(1e-6, 4, 4001)  # of the sample's SD over the true one
    density = scipy_stats.chi.pdf(spreads * math.sqrt(n - 1), n - 1) * math.sqrt(n - 1)
    room = np.maximum(0, margin - quantile * spreads * error)
    inside = 2 * scipy_stats.norm.cdf(room / error) - 1
    power = float(np.trapezoid(density * inside, spreads))
    found = share([(equivalence_p(gaps, margin) or 0) < 0.05 for gaps in draws(0.0, sd, n)])
    assert 0.2 < power < 0.9
    assert found == pytest.approx(power, abs=4 * math.sqrt(power * (1 - power) / TRIALS))


def test_large_noise_is_never_equality():
    """Where a large p would call noise equal, the two one-sided tests do not."""
    noisy = draws(0.0, 0.5, 3)
    assert share([(paired_p(gaps) or 0) > 0.05 for gaps in noisy]) > 0.9
    assert share([(equivalence_p(gaps, 0.02) or 0) < 0.05 for gaps in noisy]) < 0.01


@pytest.mark.parametrize("margin", [0.0, -0.1, math.nan])
def test_a_margin_is_above_zero(margin: float):
    with pytest.raises(ValueError, match="margin"):
        equivalence_p([0.1, 0.2, 0.3], margin)


# Many arms


@pytest.mark.parametrize("false", [0, 3])
def test_holm_keeps_the_chance_of_any_false_alarm_at_5_percent(false: int):
    """Eight arms against one baseline, which ties their differences together; `false` of them do differ."""
    rng = np.random.default_rng(1)
    plain, adjusted = [], []
    for _ in range(1500):
        baseline = rng.normal(0, 0.02, 5)
        arms = rng.normal(0, 0.02, (8, 5))
        arms[:false] += 1.0
        ps = [paired_p((arm - baseline).tolist()) for arm in arms]
        plain.append(any((p or 1) < 0.05 for p in ps[false:]))
        adjusted.append(any((p or 1) < 0.05 for p in holm(ps)[false:]))
    assert share(plain) > 0.1
    assert share(adjusted) <= 0.05 + 4 * math.sqrt(0.05 * 0.95 / 1500)


def test_holm_on_independent_tests_is_as_large_as_theory_says():
    ps = np.random.default_rng(2).uniform(size=(TRIALS, 6)).tolist()
    found = share([any((p or 1) < 0.05 for p in holm(row)) for row in ps])
    assert found == pytest.approx(1 - (1 - 0.05 / 6) ** 6, abs=4 * math.sqrt(0.05 * 0.95 / TRIALS))


def test_holm_by_hand():
    # 0.01 x 3, 0.02 x 2, 0.03 x 1 made to rise.
    assert holm([0.03, None, 0.01, 0.02]) == [pytest.approx(0.04), None, pytest.approx(0.03), pytest.approx(0.04)]
    assert holm([0.5, 0.9]) == [1.0, 1.0]
    assert holm([]) == []


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(0, 1), max_size=8))
def test_holm_is_never_smaller_and_keeps_the_order(ps: list[float]):
    adjusted = [p for p in holm(ps) if p is not None]
    assert all(p <= a <= min(1, len(ps) * p) for p, a in zip(ps, adjusted, strict=True))
    assert [adjusted[i] for i in np.argsort(ps, kind="stable")] == sorted(adjusted)


# Learning-rate sensitivity


def test_sensitivity_of_a_loss_known_in_closed_form():
    """A parabola over half-decades, capped at the loss at start."""
    start, losses = 5.0, {10**e: 2.0 + 4 * e**2 for e in (-1.0, -0.5, 0.0, 0.5, 1.0)}  # 6, 3, 2, 3, 6
    runs = {lr: [(loss, start)] * 2 for lr, loss in losses.items()}
    assert lr_sensitivity(runs) == pytest.approx((5 + 3 + 2 + 3 + 5) / 5 - 2)


def test_sensitivity_counts_a_run_without_a_loss_as_its_start_and_averages_seeds_first():
    assert lr_sensitivity({1.0: [(2.0, 4.0), (None, 4.0)], 2.0: [(2.0, 4.0), (2.0, 4.0)]}) == 0.5
    assert lr_sensitivity({1.0: [(math.nan, 4.0)], 2.0: [(3.0, 4.0)]}) == 0.5
    assert lr_sensitivity({1.0: [(2.0, 4.0)]}) is None
    assert lr_sensitivity({1.0: [(2.0, 4.0)], 2.0: []}) is None


@given(st.lists(st.floats(0, 9), min_size=2, max_size=6))
def test_sensitivity_is_zero_just_where_all_rates_do_alike(losses: list[float]):
    found = lr_sensitivity({float(i): [(loss, 10.0)] for i, loss in enumerate(losses)})
    assert found is not None
    assert found >= -1e-12
    assert (found < 1e-9) == (max(losses) - min(losses) < 1e-9 * len(losses))


# Divergence and flips


def test_the_median_counts_diverged_runs_as_infinite():
    assert median_with_diverged([2.0, 3.0], 1) == 3.0
    assert median_with_diverged([2.0], 2) is None
    assert median_with_diverged([2.0, 3.0], 0) == 2.5
    assert median_with_diverged([], 0) is None


def grid(effect: dict[float, float], noise: float, seed: int, n: int = 5) -> list[list[float]]:
    rng = np.random.default_rng(seed)
    return [rng.normal(mean, noise, n).tolist() for mean in effect.values()]


def test_the_flip_finder_finds_a_sign_that_changes_with_the_learning_rate():
    effect = {lr: -0.05 if lr <= 3e-3 else 0.03 for lr in (3e-4, 1e-3, 3e-3, 1e-2, 3e-2)}
    for seed in range(20):
        found = signs(grid(effect, 0.002, seed))
        assert (found.below, found.above, found.flips) == (3, 2, True)
        assert (found.holds(-1), found.holds(1)) == (0.6, 0.4)


def test_noise_alone_is_no_flip():
    """Nine regimes without any effect: signs are mixed in nearly all trials, and called a flip in none to speak of."""
    found = [signs(grid(dict.fromkeys(range(9), 0.0), 0.02, seed)) for seed in range(1500)]
    assert share([s.below > 0 and s.above > 0 for s in found]) > 0.9
    assert share([s.clearly_below + s.clearly_above > 0 for s in found]) <= 0.05 + 4 * math.sqrt(0.05 * 0.95 / 1500)
    assert share([s.flips for s in found]) < 0.005


def test_divergence_has_a_sign_and_a_tie_has_none():
    inf = math.inf
    found = signs([[inf] * 3, [-inf] * 3, [0.0] * 3, [], [inf, 0.1, -0.1], [inf] * 2])
    assert (found.below, found.above) == (1, 3)
    assert (found.clearly_below, found.clearly_above) == (1, 1)
    assert direction([inf, -inf]) == 0
    assert signs([]).holds(-1) is None
