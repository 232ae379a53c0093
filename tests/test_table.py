"""The table's numbers against formulas written out here, from records written by hand: nothing is trained."""

import csv
import io
import json
import math
import statistics
import time
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from by_hand import ARMS, RECORDS, WORDS, only, plan, record, record_arms, strict, write_metrics
from conftest import TINY, make
from scipy import stats

from andrea_exp.config import formula
from andrea_exp.record import Status, run_folder
from andrea_exp.results import load_metrics, load_runs
from andrea_exp.results.formats import to_csv, to_json, to_markdown
from andrea_exp.results.frames import runs_frame
from andrea_exp.results.load import Run
from andrea_exp.results.table import ablation_table, table_of
from andrea_exp.sweep.plan import Plan, plan_sweep

pytestmark = pytest.mark.usefixtures("empty_folder")


# Means, spreads, differences


def test_mean_spread_and_count():
    cell = only(record_arms(plan(), {"pre": [2.0, 2.5, 3.3]}), "pre")
    assert cell.loss_mean == pytest.approx(2.6, rel=1e-12)
    assert cell.loss_sd == pytest.approx(math.sqrt((0.6**2 + 0.1**2 + 0.7**2) / 2), rel=1e-12)
    assert cell.loss_median == 2.5
    assert cell.bits_per_byte == pytest.approx(1.3, rel=1e-12)
    assert (cell.done, cell.diverged, cell.unfinished, cell.planned) == (3, 0, 0, 3)


def test_the_difference_is_paired_and_its_interval_is_students():
    # Differences of 0.1, 0.2, 0.3: mean 0.2, SD 0.1, and the table value t(0.975, 2) = 4.302653.
    table = record_arms(plan(), {"pre": [2.0, 3.0, 4.0], "post": [2.1, 3.2, 4.3]})
    cell, half = only(table, "post"), 4.302653 * 0.1 / math.sqrt(3)
    assert (cell.difference, cell.pairs) == (pytest.approx(0.2), 3)
    assert (cell.ci_low, cell.ci_high) == (pytest.approx(0.2 - half, rel=1e-6), pytest.approx(0.2 + half, rel=1e-6))
    assert only(table, "pre").difference is None


def test_pairs_are_made_by_seed_where_each_side_lacks_another():
    table = record_arms(plan(), {"pre": [None, 3.0, 4.0], "post": [2.5, 3.25, None]})
    cell = only(table, "post")
    assert (cell.difference, cell.pairs, cell.ci_low) == (0.25, 1, None)
    assert "(2) of 3" in to_markdown(table)


def test_pairs_are_made_by_seed_whatever_their_order():
    planned = plan(repeat={"seed": [7, 3, 5, 1]})
    losses = {7: 2.0, 3: 3.0, 5: 4.0, 1: 5.0}
    for cell in reversed(planned.cells):
        gap = {"pre": 0.0, "post": 0.1 * cell.config.seed, "none": 0.0}[cell.arm]
        record(cell, losses[cell.config.seed] + gap)
    found = only(ablation_table(planned, RECORDS), "post")
    gaps = [0.7, 0.3, 0.5, 0.1]
    half = stats.t.ppf(0.975, 3) * statistics.stdev(gaps) / 2
    assert (found.difference, found.ci_low, found.ci_high) == pytest.approx((0.4, 0.4 - half, 0.4 + half))


def test_p_is_adjusted_over_the_arms_of_a_column_alone():
    """Four arms, of which one is the baseline and one diverged: two tests a column, whatever other columns have."""
    arms = {p: {"model.norm_placement": p} for p in ("pre", "post", "none", "peri")}
    planned = plan(arms, across={"optim.warmup_steps": [0, 4]})
    gaps = {"pre": [0.0] * 3, "post": [0.1, 0.11, 0.12], "none": [0.1, 0.2, 0.4], "peri": [0.0] * 3}
    for cell in planned.cells:
        loss = 2.0 + cell.config.seed + gaps[cell.arm][cell.config.seed]
        record(cell, "stuck" if cell.arm == "peri" else loss)
    table = ablation_table(planned, RECORDS)
    alone = {arm: stats.ttest_1samp(gaps[arm], 0).pvalue for arm in ("post", "none")}
    assert 2 * alone["post"] < alone["none"]
    for cell in table.cells:
        expected = {"post": 2 * alone["post"], "none": alone["none"]}.get(cell.arm)
        assert cell.p_holm == (None if expected is None else pytest.approx(expected, rel=1e-6))
        assert cell.p == (None if expected is None else pytest.approx(alone[cell.arm], rel=1e-6))


def test_two_seeds_have_no_interval_and_the_table_says_so():
    table = record_arms(plan(repeat={"seed": [0, 1]}), {"pre": [2.0, 3.0], "post": [2.5, 3.25]})
    cell = only(table, "post")
    assert (cell.difference, cell.pairs, cell.ci_low, cell.ci_high) == (0.375, 2, None, None)
    assert any("no interval" in note for note in table.notes)


def test_one_seed_has_no_spread():
    cell = only(record_arms(plan(repeat={"seed": [0]}), {"pre": [2.0], "post": [2.5]}), "post")
    assert (cell.loss_mean, cell.loss_sd, cell.difference) == (2.5, None, 0.5)


def test_without_repeats_the_one_run_is_its_own_pair():
    cell = only(record_arms(plan(repeat={}), {"pre": [2.0], "post": [2.5]}), "post")
    assert (cell.planned, cell.done, cell.difference, cell.pairs) == (1, 1, 0.5, 1)


@pytest.mark.filterwarnings("error")  # a user would see them
def test_two_arms_that_are_one_run_differ_by_exactly_nothing():
    same = {"gelu4": {"model.expansion_ratio": 4}, "gelu12_3": {"model.expansion_ratio": "12/3"}}
    planned = plan(same)
    assert len({c.signature for c in planned.cells}) == 3
    table = record_arms(planned, {"gelu4": [2.0, 2.5, 3.3]})
    cell = only(table, "gelu12_3")
    assert (cell.difference, cell.ci_low, cell.ci_high) == (0, 0, 0)
    assert strict(to_json(table))


# Divergence and what is missing


@pytest.mark.parametrize(
    ("outcomes", "shown", "median"),
    [
        (["stuck", 2.5, 3.0], "1/3 diverged (stuck at ", 3.0),  # inf is the largest of the three
        (["stuck", "non-finite", 2.0], "2/3 diverged (non-finite, stuck at ", None),
        (["above start"] * 3, "3/3 diverged (above start at ", None),
    ],
)
def test_divergence_is_counted_never_averaged(outcomes: list[float | str], shown: str, median: float | None):
    table = record_arms(plan(), {"pre": [2.0, 2.1, 2.2], "post": outcomes})
    cell = only(table, "post")
    assert (cell.loss_mean, cell.loss_sd, cell.bits_per_byte) == (None, None, None)
    assert (cell.difference, cell.ci_low, cell.ci_high, cell.pairs) == (None, None, None, 0)
    assert cell.loss_median == median
    assert cell.diverged == sum(isinstance(o, str) for o in outcomes)
    assert shown in to_markdown(table)


def test_a_diverged_baseline_takes_everyones_difference():
    cell = only(record_arms(plan(), {"pre": [2.0, "stuck", 2.2], "post": [2.0, 2.1, 2.2]}), "post")
    assert (cell.loss_mean, cell.difference, cell.pairs) == (pytest.approx(2.1), None, 0)


@pytest.mark.parametrize("outcome", [None, "failed", "interrupted"])
def test_what_is_not_in_is_counted_and_said(outcome: str | None):
    table = record_arms(plan(), {"pre": [2.0, outcome, 3.0], "post": [outcome] * 3})
    pre, post = only(table, "pre"), only(table, "post")
    assert (pre.done, pre.unfinished, pre.loss_mean) == (2, 1, 2.5)
    assert (post.done, post.unfinished, post.loss_mean, post.loss_median, post.difference) == (0, 3, None, None, None)
    assert "(2) of 3" in to_markdown(table)
    assert any(f"{4 if outcome else 7} {outcome or 'missing'}" in note for note in table.notes)


def test_mixed_numbers_of_threads_are_marked():
    planned = plan()
    for i, cell in enumerate(planned.cells):
        record(cell, 2.0, threads=1 + i % 2)
    (mark,) = ablation_table(planned, RECORDS).marks
    assert (mark.check, mark.arms) == ("threads", {})


def test_old_summaries_are_accepted_and_leave_out_what_they_lack():
    cell = only(record_arms(plan(), {"pre": [2.0, 2.5, 3.3]}), "pre")
    assert (cell.grad_norm_first_block, cell.flops, cell.loss_stderr, cell.lr_sensitivity) == (None, None, None, None)


def test_what_a_run_costs():
    planned = plan()
    for i, cell in enumerate(planned.cells):
        told = {"flops_per_token": 10, "val/loss_stderr": 0.1 * (i % 3 + 1), "grad_norm/first_block": 10.0 ** -(i % 3)}
        record(cell, 2.0, **told, **{"grad_norm/last_block": 3.0})
    cell = only(ablation_table(planned, RECORDS), "post")
    assert (cell.tokens, cell.flops) == (6 * 4 * 16, 10 * 6 * 4 * 16)
    assert cell.loss_stderr == pytest.approx(0.2)
    assert (cell.grad_norm_first_block, cell.grad_norm_last_block) == (0.1, 3.0)


# Speed


def test_a_tables_time_grows_as_its_cells_do():
    """Eight times the columns take about eight times as long: anything quadratic would take 64 times."""

    def seconds(columns: int) -> float:
        planned = plan(across={"optim.warmup_steps": list(range(columns))}, repeat={"seed": [0]})
        done = {"status": "done", "val/loss": 2.0, "val/bits_per_byte": 3.0, "parameters": 1}
        runs = [Run(cell, Status.done, done) for cell in planned.cells]

        def once() -> float:
            start = time.process_time()
            table = table_of(planned, runs)
            to_markdown(table)
            to_csv(table)
            return time.process_time() - start

        return min(once() for _ in range(3))

    assert seconds(400) < 20 * seconds(50)


# Rows in = rows out


@pytest.mark.parametrize(
    ("key", "values"),
    [
        ("model.norm_type", [None, "rmsnorm"]),
        ("optim.clip", [None, 1.0, 5]),
        ("model.expansion_ratio", [1, "8/3", "4"]),
        ("model.bias", [True, False]),
        ("optim.warmup_steps", [0, 4]),
        ("data.val_fraction", [0.05, 0.1]),
    ],
)
def test_every_column_value_keeps_its_runs(key: str, values: list[Any]):
    arms = {p: ARMS[p] for p in ("pre", "post")}
    planned = plan(arms, across={key: values}, repeat={"seed": [0, 1]})
    assert len(planned.cells) == 2 * len(values) * 2
    for i, cell in enumerate(planned.cells):
        record(cell, 2.0 + i)
    frame = runs_frame(planned, RECORDS)
    assert list(frame["val_loss"]) == [2.0 + i for i in range(len(planned.cells))]
    table = ablation_table(planned, RECORDS)
    assert [c.done for c in table.cells] == [2] * (2 * len(values))
    assert [c.loss_mean for c in table.cells] == [2.5 + 2 * i for i in range(2 * len(values))]
    assert len(pd.read_csv(io.StringIO(to_csv(table)))) == len(table.cells)
    assert [c["column"][key] for c in strict(to_json(table))["cells"]] == values * 2


def test_load_runs_has_a_row_for_each_planned_cell_run_or_not():
    planned = plan(across={"optim.warmup_steps": [0, 4]})
    record(planned.cells[3], 2.25)
    record(planned.cells[4], "stuck")
    frame = load_runs("tiny", WORDS)
    assert len(frame) == len(planned.cells) == 18
    assert list(frame["signature"]) == [c.signature for c in planned.cells]
    assert frame["status"].value_counts().to_dict() == {"missing": 16, "done": 1, "diverged": 1}
    assert frame["val_loss"].tolist()[3] == 2.25
    assert frame["diverged"].tolist()[4] == "stuck"
    assert frame["optim.warmup_steps"].tolist()[:6] == [0, 0, 0, 4, 4, 4]
    assert str(frame["val_loss"].dtype) == "float64"


def test_every_number_can_be_found_again_through_its_signatures():
    planned = plan(across={"optim.warmup_steps": [0, 4]})
    for i, cell in enumerate(planned.cells):
        record(cell, 2.0 + 0.1 * i)
    table = ablation_table(planned, RECORDS)
    for cell in table.cells:
        summaries = [json.loads((run_folder(RECORDS, s) / "summary.json").read_text()) for s in cell.signatures]
        assert len(summaries) == cell.done == 3
        assert cell.loss_mean == pytest.approx(statistics.fmean(s["val/loss"] for s in summaries), rel=1e-12)
    assert sorted(s for c in table.cells for s in c.signatures) == sorted(c.signature for c in planned.cells)


# Tuned sweeps

TUNING = {"tune": {"optim.lr": [0.1, 0.2], "seed": [8, 9]}, "repeat": {"seed": [0, 1]}}


def tune(planned: Plan, arm: str, best: Any, key: str = "optim.lr") -> None:
    for cell in planned.cells:
        if cell.purpose == "tune" and cell.arm == arm:
            record(cell, 2.0 if cell.tuned[key] == best else 3.0)


def test_a_tuned_table_reports_other_seeds_at_the_chosen_values():
    for arm, best in (("pre", 0.1), ("post", 0.2), ("none", 0.2)):
        tune(plan(**TUNING), arm, best)
    planned = plan(**TUNING)
    for cell in planned.cells:
        if cell.purpose == "report":
            record(cell, 2.5 + cell.config.optim.lr)
    table = ablation_table(planned, RECORDS)
    assert [c.tuned["optim.lr"] for c in table.cells] == [0.1, 0.2, 0.2]
    assert [c.loss_mean for c in table.cells] == pytest.approx([2.6, 2.7, 2.7])
    assert [c.difference for c in table.cells[1:]] == pytest.approx([0.1, 0.1])
    assert strict(to_json(table))
    assert pd.read_csv(io.StringIO(to_csv(table)))["optim.lr"].tolist() == [0.1, 0.2, 0.2]


RATES = {"tune": {"optim.lr": [0.1, 0.2, 0.4], "seed": [7, 8, 9]}, "repeat": {"seed": [0, 1]}}


def test_arms_are_compared_at_the_baselines_rate_and_over_all_rates():
    """Tuned, post is 0.5 behind pre; at pre's rate it is 1 behind, and at 0.1 it diverges."""
    losses: dict[str, dict[float, float | str]] = {
        "pre": {0.1: 3.0, 0.2: 2.0, 0.4: 9.0},
        "post": {0.1: "non-finite", 0.2: 3.0, 0.4: 2.5},
        "none": {0.1: 4.0, 0.2: 4.0, 0.4: 4.0},
    }
    for cell in plan(**RATES).cells:
        record(cell, losses[cell.arm][cell.tuned["optim.lr"]], **{"val/loss_start": 5.0})
    planned = plan(**RATES)
    for cell in planned.cells:
        if cell.purpose == "report":
            record(cell, {"pre": 2.0, "post": 2.5, "none": 4.0}[cell.arm])
    table = ablation_table(planned, RECORDS)
    pre, post, none = table.cells
    assert (post.difference, post.shared_difference, post.shared_pairs) == (0.5, 1.0, 3)
    assert (pre.shared_difference, pre.shared_pairs) == (None, 0)
    # Capped at the loss at start, where what diverged counts in full.
    assert pre.lr_sensitivity == pytest.approx((3 + 2 + 5) / 3 - 2)
    assert post.lr_sensitivity == pytest.approx((5 + 3 + 2.5) / 3 - 2.5)
    assert none.lr_sensitivity == 0
    assert (table.signs["post"].below, table.signs["post"].above) == (1, 2)
    assert (table.signs["none"].below, table.signs["none"].above) == (1, 2)
    assert set(table.signs) == {"post", "none"}
    tuning = {c.signature for c in planned.cells if (c.arm, c.purpose) == ("post", "tune")}
    assert set(post.tuning_signatures) == tuning
    assert any("tuned over 3 values" in note for note in table.notes)


def test_the_shared_rate_has_no_difference_where_a_side_diverges_there():
    for cell in plan(**RATES).cells:
        at = {"pre": 0.2, "post": 0.4, "none": 0.2}[cell.arm]
        bad = cell.arm == "post" and cell.tuned["optim.lr"] == 0.2 and cell.config.seed == 7
        record(cell, "stuck" if bad else 2.0 if cell.tuned["optim.lr"] == at else 3.0)
    assert only(ablation_table(plan(**RATES), RECORDS), "post").shared_difference is None


def test_sensitivity_is_over_the_learning_rate_at_the_other_chosen_values():
    tune_ = {"optim.lr": [0.1, 0.2, 0.4], "optim.clip": [None, 1.0], "seed": [8]}
    roles = {"tune": tune_, "repeat": {"seed": [0]}}
    for cell in plan(**roles).cells:
        lr, clip = cell.tuned["optim.lr"], cell.tuned["optim.clip"]
        record(cell, 2.0 + lr if clip else 4.0 + 10 * lr, **{"val/loss_start": 5.0})
    cell = ablation_table(plan(**roles), RECORDS).cells[0]
    assert cell.tuned == {"optim.lr": 0.1, "optim.clip": 1.0}
    assert cell.lr_sensitivity == pytest.approx((0.1 + 0.2 + 0.4) / 3 - 0.1)


def test_columns_without_a_tuned_value_are_the_regimes_of_the_sign():
    planned = plan(across={"optim.warmup_steps": [0, 2, 4]})
    for cell in planned.cells:
        gap = 0.1 if cell.config.optim.warmup_steps else -0.1
        loss = 2.0 + (gap + 0.001 * cell.config.seed if cell.arm == "post" else 0.0)
        record(cell, loss)
    table = ablation_table(planned, RECORDS)
    found = table.signs["post"]
    assert (found.below, found.above, found.clearly_below, found.clearly_above) == (1, 2, 1, 2)
    assert found.flips
    assert "post 1/3 (flips)" in to_markdown(table)
    assert table.signs["none"].cells == 0


@pytest.mark.parametrize("ready", ["pre", "post", None])
def test_a_half_tuned_sweep_has_a_table_in_every_format(ready: str | None):
    if ready:
        tune(plan(**TUNING), ready, 0.1)
    table = ablation_table(plan(**TUNING), RECORDS)
    assert any("wait" in note for note in table.notes)
    assert len(strict(to_json(table))["cells"]) == 3
    assert len(list(csv.DictReader(io.StringIO(to_csv(table))))) == 3
    assert "| post" in to_markdown(table)


def test_null_can_be_the_best_value():
    roles = {"tune": {"optim.clip": [None, 1.0], "seed": [8]}, "repeat": {"seed": [0, 1]}}
    for arm in ARMS:
        tune(plan(**roles), arm, None, key="optim.clip")
    planned = plan(**roles)
    assert planned.waiting == 0
    for cell in planned.cells:
        record(cell, 2.0)
    cells = strict(to_json(ablation_table(planned, RECORDS)))["cells"]
    assert [c["tuned"] for c in cells] == [{"optim.clip": None}] * 3
    assert [c["done"] for c in cells] == [2] * 3


# Metrics


def test_load_metrics_keeps_every_value_and_null_becomes_nan():
    planned = plan()
    write_metrics(planned, dies_at=4)
    frame = load_metrics("tiny", WORDS)
    assert len(frame) == 9 * (2 + 6 * 4)
    losses = frame[frame["metric"] == "train/loss"]
    assert losses["value"].isna().sum() == 3 * 3
    assert set(losses[losses["value"].isna()]["arm"]) == {"none"}
    one = losses[(losses["arm"] == "pre") & (losses["seed"] == 1)]
    assert one["value"].tolist() == [1.0 / s + 1 for s in range(1, 7)]


def test_arms_with_other_tokens_are_compared_in_bits_a_byte(tmp_path: Path, corpus_path: Path) -> None:
    """Nats a token would say that the tokenizer with the shorter tokens wins."""
    words = [*TINY, f"data.path={corpus_path}", "seed=0,1,2"]
    plan = plan_sweep([*words, "data.val_fraction=0.05,0.2"])
    for cell, (nats, bits) in zip(plan.cells, [(2.0, 3.0)] * 3 + [(5.0, 1.0)] * 3, strict=True):
        folder = tmp_path / "runs" / cell.signature
        folder.mkdir(parents=True)
        summary = {"status": "done", "val/loss": nats, "val/bits_per_byte": bits}
        (folder / "summary.json").write_text(json.dumps(summary))
    table = ablation_table(plan, tmp_path)
    assert table.metric == "bits_per_byte"
    assert [cell.loss_mean for cell in table.cells] == [3.0, 1.0]
    assert table.cells[1].difference == -2.0
    assert any("bits a byte" in note for note in table.notes)


def test_formulas_are_each_models_own() -> None:
    shown = [
        formula(make(*words).model)
        for words in (["model.residual=false"], ["model.norm_placement=peri", "model.residual=false"])
    ]
    assert shown == ["F(N(x))", "N(F(N(x)))"]
