"""Verdicts follow from rules and records: simulated data for the rules, records by hand for the way from a claim."""

import json
import math
import statistics
from functools import partial
from typing import Any

import numpy as np
import pytest
from by_hand import RECORDS, plan, record, strict
from conftest import andrea
from scipy import stats

from andrea_exp.errors import UserError
from andrea_exp.facts import check_all
from andrea_exp.record import MetricsWriter, run_folder
from andrea_exp.results import load_claims, plan_of
from andrea_exp.results.claims import Claim, Judged, judge, judge_all, read_claims
from andrea_exp.results.claims_view import render, row, rows, to_markdown
from andrea_exp.results.load import read_runs
from andrea_exp.results.verdicts import (
    Finding,
    Verdict,
    between,
    combined,
    equal,
    fails,
    less,
    trains,
    with_seeds_needed,
)
from andrea_exp.sweep.plan import Plan

INF = math.inf


def share(verdicts: list[Verdict], wanted: Verdict) -> float:
    return verdicts.count(wanted) / len(verdicts)


def draws(mean: float, sd: float, n: int, trials: int = 1000) -> list[list[float]]:
    return np.random.default_rng(0).normal(mean, sd, (trials, n)).tolist()


# Rules on data of known truth


@pytest.mark.parametrize(
    ("truth", "expected"),
    [(-0.1, Verdict.supported), (0.1, Verdict.contradicted), (0.0, Verdict.equal)],
)
def test_less_finds_the_truth_where_seeds_tell_it(truth: float, expected: Verdict):
    assert share([less(gaps, 0.02).verdict for gaps in draws(truth, 0.005, 5)], expected) > 0.99


def test_less_is_rarely_wrong_where_noise_hides_the_truth():
    found = [less(gaps, 0.02).verdict for gaps in draws(0.0, 0.2, 3)]
    assert share(found, Verdict.inconclusive) > 0.9
    assert share(found, Verdict.supported) < 0.05
    assert share(found, Verdict.contradicted) < 0.05


@pytest.mark.parametrize(
    ("truth", "sd", "expected"),
    [(0.0, 0.005, Verdict.supported), (0.1, 0.005, Verdict.contradicted), (-0.1, 0.005, Verdict.contradicted),
     (0.0, 0.2, Verdict.inconclusive)],
)  # fmt: skip
def test_equality_is_shown_and_never_a_large_p(truth: float, sd: float, expected: Verdict):
    assert share([equal(gaps, 0.02).verdict for gaps in draws(truth, sd, 5)], expected) > 0.95


def test_a_difference_at_the_margin_passes_as_equal_in_5_of_100():
    found = share([equal(gaps, 0.02).verdict for gaps in draws(0.02, 0.005, 5, 4000)], Verdict.supported)
    assert found == pytest.approx(0.05, abs=0.014)


def test_divergence_decides_where_it_is_always_one_side():
    assert less([-INF] * 3, 0.01).verdict is Verdict.supported
    assert less([INF] * 3, 0.01).verdict is Verdict.contradicted
    assert less([-INF] * 2, 0.01).verdict is Verdict.inconclusive
    assert less([-INF, -0.1, -0.1], 0.01).verdict is Verdict.inconclusive
    assert equal([INF] * 3, 0.01).verdict is Verdict.contradicted
    assert less([-INF] * 3, 0.01).effect is None


def test_too_few_pairs_decide_nothing_and_none_is_no_run():
    assert (less([-1.0, -1.0], 0.01).verdict, less([], 0.01).verdict) == (Verdict.inconclusive, Verdict.missing)
    assert (equal([0.0, 0.0], 0.01).verdict, equal([], 0.01).verdict) == (Verdict.inconclusive, Verdict.missing)
    assert (between([0.5, 0.5], 0, 1).verdict, between([], 0, 1).verdict) == (Verdict.inconclusive, Verdict.missing)
    assert (fails([True] * 2).verdict, fails([]).verdict) == (Verdict.inconclusive, Verdict.missing)
    assert fails([True] * 3, []).verdict is Verdict.missing


def test_between_takes_the_whole_interval():
    values = [0.9, 1.0, 1.1]  # its interval is 1 ± 0.248
    assert between(values, 0.7, 1.3).verdict is Verdict.supported
    assert between(values, 0.8, 1.3).verdict is Verdict.inconclusive
    assert between(values, 1.3, 2.0).verdict is Verdict.contradicted
    assert between(values, 0.0, 0.7).verdict is Verdict.contradicted


@pytest.mark.parametrize(
    ("left", "right", "expected"),
    [
        ([1, 1, 1], [0, 0, 0], Verdict.supported),
        ([1, 1, 0], [1, 0, 0], Verdict.supported),
        ([1, 0, 0], [0, 0, 0], Verdict.contradicted),
        ([0, 0, 0], [1, 1, 1], Verdict.contradicted),
        ([1, 1, 1], [1, 1, 0], Verdict.inconclusive),
        ([1, 1, 0, 0], [0, 0, 0, 0], Verdict.contradicted),
        ([1, 1, 1], None, Verdict.supported),
    ],
)
def test_failing_is_more_than_half_of_the_seeds(left: list[int], right: list[int] | None, expected: Verdict):
    found = fails(list(map(bool, left)), None if right is None else list(map(bool, right)))
    assert found.verdict is expected
    assert found.effect == sum(left) / len(left)


def test_training_is_the_opposite_of_failing():
    assert trains([False] * 3).verdict is Verdict.supported
    assert trains([True, True, False]).verdict is Verdict.contradicted
    assert trains([True] * 2).verdict is Verdict.inconclusive


def first_n_by_scipy(gaps: list[float], sides: list[tuple[float, float]]) -> int:
    """The first n whose interval of mean ± t(level) SD / sqrt(n) is narrower than a distance, by search."""
    sd = np.std(gaps, ddof=1)
    return next(
        n
        for n in range(3, 1001)
        if any(distance > stats.t.ppf(level, n - 1) * sd / math.sqrt(n) for distance, level in sides)
    )


@pytest.mark.parametrize("n", [3, 4, 8])
def test_the_seeds_that_an_undecided_rule_needs_are_those_of_the_t_test(n: int):
    for gaps in draws(0.008, 0.03, n, trials=40):
        mean = abs(statistics.fmean(gaps))
        told = with_seeds_needed(partial(less, margin=0.02), gaps)
        if told.verdict is Verdict.inconclusive:
            assert told.seeds_needed == first_n_by_scipy(gaps, [(mean, 0.975), (0.02 - mean, 0.95)])
        told = with_seeds_needed(partial(equal, margin=0.02), gaps)
        if told.verdict is Verdict.inconclusive and abs(0.02 - mean) > 0.003:
            assert told.seeds_needed == first_n_by_scipy(gaps, [(0.02 - mean, 0.95), (mean - 0.02, 0.975)])
        told = with_seeds_needed(partial(between, least=0.0, most=1.0), gaps)
        if told.verdict is Verdict.inconclusive and mean > 0.003:
            assert told.seeds_needed == first_n_by_scipy(gaps, [(mean, 0.975)])


def test_a_decided_rule_needs_no_seeds_and_an_effect_at_the_bound_has_none():
    rule = partial(between, least=1.0, most=2.0)
    assert with_seeds_needed(rule, [1.5, 1.6, 1.7]).seeds_needed is None
    assert with_seeds_needed(rule, [0.9, 1.0, 1.1]) == between([0.9, 1.0, 1.1], 1.0, 2.0)
    assert with_seeds_needed(rule, [1.1, 1.0]) == between([1.1, 1.0], 1.0, 2.0)
    assert with_seeds_needed(partial(equal, margin=0.1), [INF, 0.0, 0.0]).seeds_needed is None


def of(*verdicts: Verdict, p: float | None = None) -> list[Finding]:
    return [Finding(v, p=p) for v in verdicts]


def test_regimes_are_combined():
    yes, no, same, unclear, none = (
        Verdict.supported,
        Verdict.contradicted,
        Verdict.equal,
        Verdict.inconclusive,
        Verdict.missing,
    )
    assert combined(of(yes, unclear, no)) is Verdict.depends
    assert combined(of(yes, unclear, none)) is yes
    assert combined(of(yes, unclear), every=True) is unclear
    assert combined(of(yes, yes, none), every=True) is yes
    assert combined(of(same, same)) is same
    assert combined(of(same, unclear)) is unclear
    assert combined(of(none, none)) is none
    assert combined([]) is none


def test_many_regimes_need_a_smaller_p():
    one = Finding(Verdict.supported, p=0.02)
    others = of(*[Verdict.inconclusive] * 9, p=0.5)
    assert combined([one]) is Verdict.supported
    assert combined([one, *others]) is Verdict.inconclusive


def test_noise_over_many_regimes_is_no_verdict():
    rng = np.random.default_rng(3)
    found = [combined([less(rng.normal(0, 0.1, 5).tolist(), 0.001) for _ in range(9)]) for _ in range(600)]
    assert share(found, Verdict.inconclusive) > 0.93


# From a claim to its runs

CLAIM: dict[str, Any] = {"id": "c", "text": "t", "source": "s", "sweep": "tiny"}
TUNE = {"tune": {"optim.lr": [0.01, 0.02, 0.04, 0.08, 0.16], "seed": [8]}}
ARMS = {p: {"model.norm_placement": p} for p in ("pre", "post", "none")}


def judged(planned: Plan, **fields: Any) -> Judged:
    return judge(Claim(**CLAIM, **fields), planned, RECORDS, read_runs(planned, RECORDS))


def tuned_plan(best: float = 0.04, rates: list[float] | None = None) -> Plan:
    roles = {"tune": {**TUNE["tune"], **({"optim.lr": rates} if rates else {})}}
    for cell in plan(ARMS, **roles).cells:
        away = (
            0.0 if cell.arm == "pre" or cell.tuned["optim.lr"] > 0.02 else 0.1 - 0.2 * (cell.tuned["optim.lr"] > 0.01)
        )
        record(cell, 2.0 if cell.tuned["optim.lr"] == best else 3.0 + away)
    return plan(ARMS, **roles)


@pytest.mark.usefixtures("empty_folder")
def test_a_claim_about_losses_rests_on_reported_seeds_alone():
    planned = tuned_plan()
    reported = [c for c in planned.cells if c.purpose == "report"]
    assert (
        judged(planned, rule="less", left={"arm": "pre"}, right={"arm": "post"}, margin=0.01).verdict == "no runs yet"
    )
    for cell in reported:
        record(cell, {"pre": 2.0, "post": 2.5, "none": 2.0}[cell.arm] + cell.config.seed + 0.001 * cell.config.seed**2)
    found = judged(planned, rule="less", left={"arm": "pre"}, right={"arm": "post"}, margin=0.01)
    assert (found.verdict, found.main.n) == (Verdict.supported, 3)
    assert found.remarks == ["left below right in 1/2 of the settings tried"]
    assert found.main.effect == pytest.approx(-0.5)
    assert set(found.signatures) == {c.signature for c in reported if c.arm in ("pre", "post")}
    other = judged(planned, rule="less", left={"arm": "post"}, right={"arm": "pre"}, margin=0.01)
    assert other.verdict is Verdict.contradicted
    same = judged(planned, rule="equal", left={"arm": "none"}, right={"arm": "pre"}, margin=0.01)
    assert same.verdict is Verdict.supported


@pytest.mark.usefixtures("empty_folder")
@pytest.mark.parametrize(
    ("best", "rates", "remark"),
    [(0.16, None, "edge"), (0.02, [0.01, 0.02, 0.04], "3 values"), (0.04, None, None)],
)
def test_the_protocols_conditions_come_before_a_verdict(best: float, rates: list[float] | None, remark: str | None):
    planned = tuned_plan(best, rates)
    for cell in planned.cells:
        if cell.purpose == "report":
            record(cell, {"pre": 2.0, "post": 2.5, "none": 2.0}[cell.arm])
    found = judged(planned, rule="less", left={"arm": "pre"}, right={"arm": "post"}, margin=0.01)
    assert found.verdict is (Verdict.inconclusive if remark else Verdict.supported)
    assert not remark or any(remark in told for told in found.remarks)


@pytest.mark.usefixtures("empty_folder")
@pytest.mark.parametrize(("seeds", "expected"), [([7, 8, 9], Verdict.depends), ([8], Verdict.supported)])
def test_a_sign_that_flips_over_the_learning_rates_makes_a_verdict_depend_on_it(seeds: list[int], expected: Verdict):
    """Clear only with three tuning seeds or more; with fewer the share of settings is told all the same."""
    rates = [0.01, 0.02, 0.04, 0.08, 0.16]
    roles = {"tune": {"optim.lr": rates, "seed": seeds}}
    for cell in plan(ARMS, **roles).cells:
        flipped = -1 if cell.tuned["optim.lr"] > 0.03 else 1
        loss = {0.04: 2.0}.get(cell.tuned["optim.lr"], 3.0) + (0.1 * flipped if cell.arm == "post" else 0.0)
        record(cell, loss + 0.001 * cell.config.seed * (cell.arm == "post"))
    planned = plan(ARMS, **roles)
    for cell in planned.cells:
        if cell.purpose == "report":
            record(cell, {"pre": 2.0, "post": 2.5, "none": 2.0}[cell.arm])
    found = judged(planned, rule="less", left={"arm": "pre"}, right={"arm": "post"}, margin=0.01)
    assert found.verdict is expected
    assert found.remarks == ["left below right in 2/5 of the settings tried"]


@pytest.mark.usefixtures("empty_folder")
def test_columns_that_a_claim_leaves_open_are_its_regimes():
    """Post needs warm-up at 4 layers, does not at 2, and fails all the same at 8."""
    planned = plan(ARMS, across={"model.n_layers": [2, 4, 8], "optim.warmup_steps": [0, 4]})
    for cell in planned.cells:
        deep, warm = cell.config.model.n_layers, cell.config.optim.warmup_steps
        bad = cell.arm == "post" and (deep == 8 or (deep == 4 and not warm))
        record(cell, "stuck" if bad else 2.0)
    sides: Any = {"left": {"arm": "post", "optim.warmup_steps": 0}, "right": {"arm": "post", "optim.warmup_steps": 4}}
    found = judged(planned, rule="fails", **sides)
    assert {r.where: str(r.finding.verdict) for r in found.regimes} == {
        "n_layers=2": "contradicted",
        "n_layers=4": "supported",
        "n_layers=8": "inconclusive",
    }
    assert found.verdict is Verdict.depends
    named = {side: {**value, "model.n_layers": 4} for side, value in sides.items()}
    assert judged(planned, rule="fails", **named).verdict is Verdict.supported
    assert judged(planned, rule="fails", kind="non-finite", **named).verdict is Verdict.contradicted
    assert judged(planned, rule="trains", left={"arm": "pre"}).verdict is Verdict.supported


@pytest.mark.usefixtures("empty_folder")
def test_a_regime_without_runs_leaves_the_claim_undecided():
    planned = plan(ARMS, across={"model.n_layers": [2, 4]})
    for cell in planned.cells:
        if cell.config.model.n_layers == 2:
            record(cell, "stuck" if cell.arm == "post" else 2.0)
    sides: Any = {"left": {"arm": "post"}, "right": {"arm": "pre"}}
    found = judged(planned, rule="fails", **sides)
    assert (found.verdict, found.remarks) == (Verdict.inconclusive, ["6 of 12 runs have ended"])
    sides["left"]["model.n_layers"] = sides["right"]["model.n_layers"] = 2
    assert judged(planned, rule="fails", **sides).verdict is Verdict.supported


@pytest.mark.usefixtures("empty_folder")
def test_the_seeds_that_came_first_decide_nothing():
    planned = tuned_plan()
    sides: Any = {"left": {"arm": "pre"}, "right": {"arm": "post"}}
    reported = [c for c in planned.cells if c.purpose == "report" and c.arm != "none"]
    for cell in reported:
        record(cell, 2.0 + (cell.arm == "post"))
    assert judged(planned, rule="less", margin=0.01, **sides).verdict is Verdict.supported
    record(reported[-1], "failed")
    found = judged(planned, rule="less", margin=0.01, **sides)
    assert (found.verdict, found.remarks[0]) == (Verdict.inconclusive, "5 of 6 runs have ended")


@pytest.mark.usefixtures("empty_folder")
def test_an_arm_that_waits_for_its_tuning_is_an_open_regime():
    for cell in plan(ARMS, **TUNE).cells:
        if cell.arm != "none":
            record(cell, 2.0 if cell.tuned["optim.lr"] == 0.04 else 3.0)
    planned = plan(ARMS, **TUNE)
    for cell in planned.cells:
        if cell.purpose == "report":
            record(cell, 2.0)
    fields: Any = {"rule": "equal", "right": {"arm": "pre"}, "margin": 0.01}
    assert judged(planned, left={"arm": ["post"]}, **fields).verdict is Verdict.supported
    found = judged(planned, left={"arm": ["post", "none"]}, **fields)
    assert (found.verdict, found.remarks[0]) == (Verdict.inconclusive, "6 of 9 runs have ended")


@pytest.mark.usefixtures("empty_folder")
def test_runs_without_a_number_leave_a_mean_undecided():
    planned = plan(ARMS)
    for cell in planned.cells:
        record(cell, 2.0, **{"grad_norm/first_block": 1.01 + 0.001 * cell.config.seed, "grad_norm/last_block": 1.0})
    fields: Any = {"rule": "between", "left": {"arm": "post"}, "metric": "first_over_last_block", "bounds": [1, INF]}
    assert judged(planned, **fields).verdict is Verdict.supported
    (vanished,) = [c for c in planned.cells if c.arm == "post" and c.config.seed == 2]
    record(vanished, 2.0, **{"grad_norm/first_block": 0.0, "grad_norm/last_block": 1.0})
    found = judged(planned, **fields)
    assert (found.verdict, found.main.n) == (Verdict.inconclusive, 2)


@pytest.mark.usefixtures("empty_folder")
def test_a_side_that_diverged_in_some_seeds_does_not_win_by_the_others():
    planned = plan(ARMS, repeat={"seed": [0, 1, 2, 3, 4, 5]})
    for cell in planned.cells:
        record(cell, "stuck" if cell.arm == "post" or cell.config.seed < 3 else 2.0)
    fields: Any = {"left": {"arm": "pre"}, "right": {"arm": "post"}, "margin": 0.01}
    assert judged(planned, rule="less", **fields).verdict is Verdict.inconclusive
    assert judged(planned, rule="equal", **fields).verdict is Verdict.inconclusive


@pytest.mark.usefixtures("empty_folder")
def test_an_undecided_claim_says_what_it_would_take():
    planned = tuned_plan()
    for cell in planned.cells:
        if cell.purpose == "report":
            record(cell, 2.0 + (cell.arm == "post") * 0.1 * cell.config.seed)
    sides: Any = {"left": {"arm": "post"}, "right": {"arm": "pre"}}
    found = judged(planned, rule="equal", margin=0.01, **sides)
    assert (found.verdict, found.main.seeds_needed) == (Verdict.inconclusive, 8)  # 0.1 - 0.0836 is above 0.01
    assert found.remarks[-1] == "about 8 seeds would decide it, if effect and spread stay as they are"
    for cell in planned.cells:
        record(cell, "stuck")
    stuck = judged(planned, rule="fails", **sides)
    assert (stuck.verdict, stuck.remarks) == (Verdict.inconclusive, ["more seeds alone would not decide it"])


@pytest.mark.usefixtures("empty_folder")
def test_a_run_that_has_not_ended_counts_on_neither_side():
    planned = plan(ARMS)
    for cell in planned.cells:
        if cell.config.seed:
            record(cell, "stuck" if cell.arm == "post" else 2.0)
        elif cell.arm == "post":
            record(cell, "failed")
    found = judged(planned, rule="fails", left={"arm": "post"}, right={"arm": "pre"})
    assert (found.verdict, found.main.n, found.main.effect) == (Verdict.inconclusive, 2, 1.0)
    assert len(found.signatures) == 4


@pytest.mark.usefixtures("empty_folder")
def test_several_arms_are_regimes_of_their_own_and_no_more_seeds():
    planned = plan(ARMS)
    for cell in planned.cells:
        gap = {"pre": 0.0, "post": 0.001, "none": 0.0}[cell.arm]
        record(cell, 2.0 + cell.config.seed + gap * cell.config.seed)
    found = judged(planned, rule="equal", left={"arm": ["post", "none"]}, right={"arm": "pre"}, margin=0.1)
    assert [(r.where, r.finding.n) for r in found.regimes] == [("post", 3), ("none", 3)]


@pytest.mark.usefixtures("empty_folder")
def test_a_slope_over_depth_is_fitted_seed_by_seed():
    """Gradients of 3 L^-0.5, up to a factor of each seed: the slope is exact, whatever the factor."""
    planned = plan(ARMS, across={"model.n_layers": [2, 4, 8]})
    for cell in planned.cells:
        folder = run_folder(RECORDS, cell.signature)
        record(cell, 2.0)
        deep, last = cell.config.model.n_layers, cell.config.model.n_layers - 1
        noise = 1 + 1e-4 * deep * cell.config.seed
        writer = MetricsWriter(folder)
        norms = {"grad_norm/block_00/mlp": 100.0, f"grad_norm/block_{last:02d}/mlp": 3 * deep**-0.5 * noise}
        writer.write({"step": 0, **norms, "stream/rms/final": 5.0, "branch/ratio/block_00/mlp": 0.05})
        writer.close()
    slope = {"metric": "last_mlp_gradient", "slope_over": "model.n_layers", "left": {"arm": "pre"}}
    found = judged(planned, rule="between", bounds=[-0.6, -0.4], **slope)
    assert (found.verdict, found.main.n) == (Verdict.supported, 3)
    assert found.main.effect == pytest.approx(-0.5, abs=0.01)
    assert judged(planned, rule="between", bounds=[-0.15, 0.15], **slope).verdict is Verdict.contradicted
    level: Any = {"rule": "between", "left": {"arm": "pre", "model.n_layers": 4}}
    found = judged(planned, metric="stream_rms", bounds=[4, 6], **level)
    assert (found.verdict, found.main.effect) == (Verdict.supported, pytest.approx(5.0))
    assert judged(planned, metric="branch_ratio", bounds=[0, 0.1], **level).verdict is Verdict.supported
    assert judged(planned, metric="branch_ratio", bounds=[0.1, INF], **level).verdict is Verdict.contradicted


# The file


@pytest.mark.usefixtures("empty_folder")
def test_every_claim_names_arms_and_columns_that_its_sweep_has():
    found = judge_all()
    assert [(j.verdict, j.remarks) for j in found] == [(Verdict.missing, [])] * len(found)
    ids = [j.claim.id for j in found]
    assert len(set(ids)) == len(ids)
    assert len([j for j in found if j.claim.sweep]) >= 15
    told = list(rows(found))
    assert [r["id"] for r in told[len(found) :]] == [fact["row"] for fact in check_all()]
    assert {r["verdict"] for r in told[len(found) :]} == {"supported", "contradicted"}
    assert strict(json.dumps(told)) == told
    assert render(told).row_count == len(told)


@pytest.mark.usefixtures("empty_folder")
@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"left": {"arm": "prey"}}, "no arm=prey; did you mean pre"),
        ({"left": {"arm": "pre", "model.n_layer": 4}}, "no column model.n_layer"),
        ({"left": {"arm": "pre", "model.n_layers": 5}}, "no model.n_layers=5"),
    ],
)
def test_a_claim_about_what_its_sweep_lacks_is_refused(fields: dict[str, Any], message: str):
    with pytest.raises(UserError, match=message):
        judged(plan(ARMS, across={"model.n_layers": [2, 4]}), rule="trains", **fields)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("rule: les", "did you mean less"),
        ("rule: less\n  right: {arm: a}", "needs margin"),
        ("rule: between", "needs bounds"),
        ("rule: trains\n  metric: val_los", "did you mean val_loss"),
        ("rule: less\n  right: {arm: a}\n  margin: 0.1\n  metric: branch_ratio", "unknown to rule less"),
        ("rule: fails\n  left: {arm: a}\n  right: {arm: [b, c]}", "left may name several arms, right one"),
        ("rule: fails\n  left: {arm: a, seed: 0}\n  right: {arm: b}", "name different fields"),
    ],
)
def test_a_claim_that_no_rule_could_judge_is_refused(entry: str, message: str, tmp_path: Any):
    (tmp_path / "c.yaml").write_text(f"- id: c\n  text: t\n  source: s\n  sweep: warmup\n  {entry}\n")
    with pytest.raises(UserError, match=message):
        read_claims(tmp_path / "c.yaml")


@pytest.mark.usefixtures("empty_folder")
def test_a_frame_of_claims_is_what_the_command_prints():
    frame = load_claims()
    assert list(frame.index) == [claim.id for claim in read_claims()]
    assert set(frame["verdict"]) == {"no runs yet"}
    assert set(load_claims("warmup").index) == {"post-warmup", "pre-warmup"}
    assert list(load_claims("demo").columns) == list(frame.columns)
    for cell in (planned := plan_of("warmup", ["train.device=cpu"])[0]).cells:
        record(cell, 2.0)
    found = load_claims("warmup", ["train.device=cpu"])
    for claim in (c for c in read_claims() if c.sweep == "warmup"):
        told = row(judge(claim, planned, RECORDS, read_runs(planned, RECORDS)))
        assert found.loc[claim.id, "verdict"] == told["verdict"] != "no runs yet"
        assert found.loc[claim.id, "n"] == told["n"] > 0


@pytest.mark.usefixtures("empty_folder")
def test_runs_that_leave_no_number_are_not_missing():
    planned = plan(ARMS)
    fields: Any = {"rule": "equal", "left": {"arm": "post"}, "right": {"arm": "pre"}, "margin": 0.1}
    for cell in planned.cells:
        if cell.arm == "post":
            record(cell, "stuck")
    assert judged(planned, **fields).verdict is Verdict.missing
    for cell in planned.cells:
        record(cell, "stuck")
    assert judged(planned, **fields).verdict is Verdict.inconclusive
    table = to_markdown([row(judged(planned, **fields))])
    assert "| inconclusive |" in table


@pytest.mark.usefixtures("empty_folder")
def test_a_narrowed_sweep_leaves_the_other_claims_their_verdicts():
    found = {j.claim.id: j for j in judge_all(["model.n_layers=6"])}
    assert found["deep-gradients"].remarks == [
        "claim deep-gradients: sweep init_depth has no model.n_layers=128; valid: 6"
    ]
    assert found["rmsnorm"].remarks == []


def test_the_command_prints_verdicts_for_machines(tmp_path: Any):
    told = json.loads(andrea("claims", "--json", cwd=tmp_path).stdout)
    assert {"id", "verdict", "effect", "runs"} <= set(told[0])
