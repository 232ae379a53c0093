"""Figures read back from what was drawn, against numbers computed here from records written by hand."""

import json
import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import matplotlib.cbook
import matplotlib.colors
import pytest
from by_hand import ARMS, RECORDS, filled, log, plan, record
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from scipy import stats

from andrea_exp import ROOT
from andrea_exp.errors import UserError
from andrea_exp.record import LAYERS, MetricsWriter, run_folder
from andrea_exp.results import figures
from andrea_exp.results.figures import CAPTIONS, Drawn, figures_of, save_figures
from andrea_exp.results.published import of_sweep
from andrea_exp.results.table import ablation_table
from andrea_exp.style import COLOURS
from andrea_exp.sweep.plan import Cell, Plan

pytestmark = pytest.mark.usefixtures("empty_folder")


def labels(figure: Figure) -> list[str]:
    (legend,) = figure.legends
    return [legend.get_title().get_text(), *(text.get_text() for text in legend.get_texts())]


def lines(panel: Axes, colour: int, style: str = "-") -> list[Line2D]:
    """An arm's lines of a style that have two points or more."""
    wanted = [line for line in panel.lines if line.get_color() == COLOURS[colour] and line.get_linestyle() == style]
    return [line for line in wanted if len(line.get_xdata()) > 1]


def xy(line: Line2D) -> list[tuple[float, float]]:
    return [(float(x), float(y)) for x, y in zip(line.get_xdata(), line.get_ydata(), strict=True)]


def near(points: Any) -> Any:
    """Points that equal others to a millionth."""
    return [(pytest.approx(x), pytest.approx(y)) for x, y in points]


def texts(panel: Axes) -> list[str]:
    return [text.get_text() for text in panel.texts]


# Loss by step


def test_a_curve_is_the_median_of_done_seeds_in_their_range():
    planned = plan(repeat={"seed": [0, 1, 2]})
    for cell in planned.cells:
        record(cell, 2.0)
        log(cell, lambda step, seed=cell.config.seed: (1 + seed**2) / step)  # type: ignore[misc]
    (panel,) = figures.loss_curves(planned, RECORDS).axes
    (line,) = lines(panel, 0)
    assert xy(line) == near([(step, 2 / step) for step in range(1, 7)])
    band = panel.collections[0].get_paths()[0].vertices
    assert (band[:, 1].min(), band[:, 1].max()) == pytest.approx((1 / 6, 5))


def test_long_curves_are_running_means_over_a_sixtieth_of_their_points():
    planned = plan(repeat={"seed": [0]})
    for cell in planned.cells:
        record(cell, 2.0)
        writer = MetricsWriter(run_folder(RECORDS, cell.signature))
        for step in range(1, 181):
            writer.write({"step": step, "train/loss": {0: 5.0, 1: 3.0, 2: 1.0}[step % 3]})
        writer.close()
    (panel,) = figures.loss_curves(planned, RECORDS).axes
    smooth = dict(xy(lines(panel, 0)[0]))
    assert (smooth[1.0], smooth[2.0]) == (3.0, 2.0)  # over what there is so far
    assert [smooth[float(step)] for step in range(3, 181)] == pytest.approx([3.0] * 178)


def test_a_diverged_seed_is_counted_and_has_a_line_of_its_own():
    planned = plan()
    for cell in planned.cells:
        bad = cell.arm == "post" and cell.config.seed == 1
        record(cell, "stuck" if bad else 2.0)
        log(cell, lambda step, bad=bad: 3.0 if bad else 2.0 / step)  # type: ignore[misc]
    figure = figures.loss_curves(planned, RECORDS)
    assert labels(figure) == [
        "median and range\nof n = 3 seeds",
        "pre",
        "post: 1/3 diverged",
        "none",
        "a diverged seed",
    ]
    (panel,) = figure.axes
    assert [y for _, y in xy(lines(panel, 1)[0])] == pytest.approx([2 / step for step in range(1, 7)])
    (alone,) = lines(panel, 1, "--")
    assert [y for _, y in xy(alone)] == [3.0] * 6
    assert panel.collections[1].get_paths()[0].vertices[:, 1].max() == 2.0  # no part of the others' band
    assert not lines(panel, 0, "--")


def test_each_panel_says_which_arms_lack_seeds():
    planned = plan(across={"optim.warmup_steps": [0, 4]})
    for cell in planned.cells:
        first = cell.config.optim.warmup_steps == 0
        if cell.arm == "pre" and first and cell.config.seed:
            continue
        record(cell, "non-finite" if cell.arm == "none" and not first else 2.0)
        log(cell)
    figure = figures.loss_curves(planned, RECORDS)
    titles = [panel.get_title("left").replace("\n", " ") for panel in figure.axes]
    assert titles == ["warmup_steps=0 pre n = 1 of 3", "warmup_steps=4 none 3/3 diverged"]
    assert labels(figure)[1:4] == ["pre: n = 4 of 6", "post", "none: 3/6 diverged"]


def test_runs_on_their_way_are_shown_and_not_averaged():
    planned = plan()
    for cell in planned.cells:
        log(cell, steps=3)
    figure = figures.loss_curves(planned, RECORDS)
    assert labels(figure)[1:] == [*(f"{arm}: n = 0 of 3" for arm in ARMS), "a seed not done yet"]
    assert len(lines(figure.axes[0], 0, "--")) == 3


def test_losses_that_are_not_finite_are_left_out_and_huge_ones_leave_the_axis():
    planned = plan(repeat={"seed": [0]})
    odd = {"pre": 2.0, "post": math.nan, "none": 1e30}
    for cell in planned.cells:
        record(cell, "non-finite" if cell.arm == "post" else 2.0)
        log(cell, lambda step, arm=cell.arm: odd[arm] if step > 3 else 4.0)  # type: ignore[misc]
    (panel,) = figures.loss_curves(planned, RECORDS).axes
    (dead,) = lines(panel, 1, "--")
    assert len(dead.get_xdata()) == 3
    assert panel.get_ylim()[1] == 8.0


def test_an_arm_that_starts_huge_does_not_flatten_the_others():
    planned = plan()
    for cell in planned.cells:
        record(cell, 2.0)
        log(cell, lambda step, arm=cell.arm: 1e6 if arm == "none" else 4 / step)  # type: ignore[misc]
    (panel,) = figures.loss_curves(planned, RECORDS).axes
    assert panel.get_ylim() == pytest.approx((0.95 * 4 / 6, 8.0))


# Loss by learning rate

RATES = [1e-3, 3e-3, 1e-2]
TUNED = {"tune": {"optim.lr": RATES, "seed": [8, 9]}, "repeat": {"seed": [0, 1, 2]}}


def tuned(bad: Callable[[Cell], bool] = lambda cell: False, **roles: Any) -> Plan:
    """A tuned sweep, recorded: the best rate is 3e-3 for pre, 1e-2 for post, 1e-3 for none."""
    best = {"pre": 3e-3, "post": 1e-2, "none": 1e-3}
    for purpose in ("tune", "report"):
        planned = plan(**{**TUNED, **roles})
        for cell in planned.cells:
            if cell.purpose == purpose:
                away = abs(math.log(cell.config.optim.lr / best[cell.arm]))
                record(cell, "stuck" if bad(cell) else 2 + away + 0.01 * cell.config.seed)
    return planned


def ring(panel: Axes, colour: int) -> list[tuple[float, float]]:
    own = [line for line in panel.lines if line.get_color() == COLOURS[colour] and line.get_markersize() == 10]
    return [point for line in own for point in xy(line)]


def star(panel: Axes, colour: int) -> list[tuple[float, float]]:
    own = [line for line in panel.lines if line.get_color() == COLOURS[colour] and line.get_marker() == "*"]
    return [point for line in own for point in xy(line)]


def test_losses_by_rate_are_means_and_the_chosen_one_is_the_tables():
    planned = tuned()
    figure = figures.loss_by_lr(planned, RECORDS)
    (panel,) = figure.axes
    assert labels(figure)[0] == "mean and range\nof n = 2 tuning seeds"
    assert labels(figure)[1:] == [*ARMS, "chosen", "reported seeds, n = 3"]
    assert [label.get_text() for label in panel.get_xticklabels()] == ["0.001", "0.003", "0.01"]
    table = ablation_table(planned, RECORDS)
    for place, cell in enumerate(table.cells):
        found = xy(lines(panel, place)[0])
        assert [x for x, _ in found] == pytest.approx(RATES, rel=0.04)  # side by side
        best = min(found, key=lambda point: point[1])
        assert ring(panel, place) == [best]
        assert best[0] == pytest.approx(cell.tuned["optim.lr"], rel=0.04)
        assert best[1] == pytest.approx(2.085)  # seeds 8 and 9
        assert star(panel, place) == [(best[0], pytest.approx(cell.loss_mean))]
    (segment,) = [s for s in panel.collections[0].get_segments() if s[0][1] < 2.1]
    assert [segment[0][1], segment[1][1]] == pytest.approx([2.08, 2.09])


def test_a_rate_with_a_diverged_seed_has_no_mean_but_a_count_at_the_top():
    planned = tuned(lambda cell: cell.arm == "post" and cell.tuned == {"optim.lr": 1e-3} and cell.config.seed == 8)
    figure = figures.loss_by_lr(planned, RECORDS)
    (panel,) = figure.axes
    assert [x for x, _ in xy(lines(panel, 1)[0])] == pytest.approx(RATES[1:], rel=0.04)
    assert len(xy(lines(panel, 0)[0])) == 3
    assert texts(panel) == ["1/2"]
    assert "k/n diverged" in labels(figure)
    (mark,) = [line for line in panel.lines if line.get_markerfacecolor() == "none" and line.get_markersize() == 5]
    assert (mark.get_color(), mark.get_xdata()[0]) == (COLOURS[1], pytest.approx(1e-3, rel=0.04))


def test_reported_seeds_that_diverged_are_counted_too():
    planned = tuned(lambda cell: cell.arm == "none" and cell.purpose == "report" and cell.config.seed == 1)
    (panel,) = figures.loss_by_lr(planned, RECORDS).axes
    assert texts(panel) == ["1/3"]
    assert [line.get_marker() for line in panel.lines if line.get_markerfacecolor() == "none"].count("*") == 1


def test_half_a_tuned_sweep_says_n_at_its_points():
    planned = plan(**TUNED)
    for cell in planned.cells:
        if cell.purpose == "tune" and (cell.config.seed == 8 or cell.arm == "pre"):
            record(cell, 2.0)
    figure = figures.loss_by_lr(planned, RECORDS)
    assert texts(figure.axes[0]) == ["n = 1"] * 6
    assert labels(figure)[1:] == list(ARMS)


def test_a_rate_that_is_a_column_is_an_axis_too():
    planned = plan(across={"optim.lr": RATES, "optim.warmup_steps": [0, 4]})
    for cell in planned.cells:
        record(cell, 2.0 + cell.config.optim.lr + cell.config.optim.warmup_steps)
    figure = figures.loss_by_lr(planned, RECORDS)
    assert [panel.get_title("left") for panel in figure.axes] == ["warmup_steps=0", "warmup_steps=4"]
    assert [y for _, y in xy(lines(figure.axes[1], 2)[0])] == pytest.approx([6.001, 6.003, 6.01])
    assert labels(figure)[0] == "mean and range\nof n = 3 seeds"


def test_other_tuned_values_are_held_at_the_chosen_ones():
    planned = tuned(tune={"optim.lr": RATES, "optim.clip": [None, 1.0], "seed": [8, 9]})
    for cell in planned.cells:
        if cell.purpose == "tune" and cell.tuned["optim.clip"] is not None:
            record(cell, 9.0)
    (panel,) = figures.loss_by_lr(planned, RECORDS).axes
    assert max(y for line in lines(panel, 0) for _, y in xy(line)) < 5


# Depth


def depth_plan(**roles: Any) -> Plan:
    arms = {"pre": {"model.norm_placement": "pre"}, "post": {"model.norm_placement": "post"}}
    return plan(arms, across={"model.n_layers": [2, 4, 8, 16]}, **roles)


def planted(cell: Cell, exponent: float, seed: float) -> None:
    """The last MLP's gradient is L to an exponent that goes with the seed."""
    blocks = cell.config.model.n_layers
    record(cell, 2.0)
    log(cell, size=(1 + seed) * blocks ** (exponent + 0.01 * seed) / blocks)


def test_a_planted_exponent_is_found_with_its_interval():
    planned = depth_plan()
    for cell in planned.cells:
        planted(cell, -0.5 if cell.arm == "pre" else 0.0, cell.config.seed)
    figure = figures.last_mlp_gradient(planned, RECORDS)
    half = stats.t.ppf(0.975, 2) * 0.01 / math.sqrt(3)
    assert labels(figure)[1:] == [
        f"pre: L^-0.49 [{-0.49 - half:.2f}, {-0.49 + half:.2f}]",
        f"post: L^0.01 [{0.01 - half:.2f}, {0.01 + half:.2f}]",
        "Xiong 2020: post flat, pre L^-0.5",
    ]
    assert labels(figure)[0].endswith("over n = 3 seeds")
    (panel,) = figure.axes
    (line,) = lines(panel, 0)
    first = 2 ** (-0.49) * 6 ** (1 / 3)
    assert xy(line)[0] == pytest.approx((2, first))
    (guide,) = lines(panel, 0, ":")
    assert [y for _, y in xy(guide)] == pytest.approx([first, first / 2**0.5, first / 2, first / 8**0.5])
    assert len({y for _, y in xy(lines(panel, 1, ":")[0])}) == 1


def test_arms_that_are_depths_are_one_line():
    arms = {str(n): {"model.n_layers": n} for n in (2, 4, 8)}
    planned = plan(arms, across={"optim.warmup_steps": [0, 4]}, repeat={"seed": [0, 1]})
    for cell in planned.cells:
        planted(cell, -0.5, 0)
    figure = figures.last_mlp_gradient(planned, RECORDS)
    assert labels(figure)[1:-1] == ["all arms: L^-0.50"]  # warm-up is nothing to an untrained model; two seeds
    assert [x for x, _ in xy(lines(figure.axes[0], 0)[0])] == [2, 4, 8]


def test_a_gradient_that_is_not_finite_is_counted_at_the_top():
    planned = depth_plan()
    for cell in planned.cells:
        planted(cell, 0.0, 0)
        if cell.arm == "post" and cell.config.model.n_layers == 16 and cell.config.seed == 0:
            folder = run_folder(RECORDS, cell.signature)
            (folder / "metrics.jsonl").write_text('{"step": 0, "grad_norm/block_15/mlp": null}\n')
    figure = figures.last_mlp_gradient(planned, RECORDS)
    assert texts(figure.axes[0]) == ["1/3"]
    assert [x for x, _ in xy(lines(figure.axes[0], 1)[0])] == [2, 4, 8]
    assert "k/n not finite" in labels(figure)


# Profiles over blocks


def test_profiles_are_means_over_seeds_at_both_ends():
    arms = {"pre": {"model.norm_placement": "pre"}, "post": {"model.norm_placement": "post"}}
    planned = plan(arms, across={"model.n_layers": [4]}, repeat={"seed": [1, 4]})
    for cell in planned.cells:
        record(cell, 2.0)
        log(cell, size=float(cell.config.seed))  # geometric mean of sizes: 2
    (panel,) = figures.stream_by_depth(planned, RECORDS).axes
    roots = [math.sqrt(block) for block in (1, 2, 3, 4)]
    assert xy(lines(panel, 0, "--")[0]) == near([(i + 1, 2 * root) for i, root in enumerate(roots)])
    assert xy(lines(panel, 0)[0]) == near([(i + 1, 6 * root) for i, root in enumerate(roots)])
    (guide,) = [line for line in panel.lines if line.get_color() == "black"]
    assert xy(guide) == near(xy(lines(panel, 0, "--")[0]))
    (panel,) = figures.gradient_norms_by_depth(planned, RECORDS).axes
    assert xy(lines(panel, 1, "--")[0]) == near([(b, 2.0 * b) for b in (1, 2, 3, 4)])
    assert xy(lines(panel, 1)[0]) == near([(b, 2.0 * b / 6) for b in (1, 2, 3, 4)])
    (panel,) = figures.branch_ratio(planned, RECORDS).axes
    assert xy(lines(panel, 0, "--")[0]) == near([(b, 0.2) for b in (1, 2, 3, 4)])
    (panel,) = figures.token_cosine(planned, RECORDS).axes
    assert xy(lines(panel, 0)[0]) == near([(b + 1, b / 4) for b in range(4)])


def test_a_diverged_seeds_end_is_a_line_of_its_own():
    planned = plan()
    for cell in planned.cells:
        stuck = cell.arm == "post" and cell.config.seed == 2
        record(cell, "stuck" if stuck else 2.0)
        log(cell, size=1e-6 if stuck else 1.0)
    figure = figures.gradient_norms_by_depth(planned, RECORDS)
    (panel,) = figure.axes
    assert xy(lines(panel, 1)[0]) == near([(1, 1 / 6), (2, 2 / 6)])
    assert xy(lines(panel, 1, ":")[0]) == near([(1, 1e-6 / 6), (2, 2e-6 / 6)])
    assert "post: 1/3 diverged" in labels(figure)
    assert "a diverged seed's last" in labels(figure)


def test_a_run_that_ended_in_nan_shows_its_first_step_only():
    planned = plan(repeat={"seed": [0]})
    for cell in planned.cells:
        record(cell, "non-finite" if cell.arm == "none" else 2.0)
        log(cell, steps=3 if cell.arm == "none" else 6)
    (panel,) = figures.gradient_norms_by_depth(planned, RECORDS).axes
    assert [len(lines(panel, 2, style)) for style in ("--", "-", ":")] == [1, 0, 0]


# Size


def test_arms_that_a_number_orders_are_a_line_a_column():
    arms = {str(r): {"model.expansion_ratio": r} for r in (4, 1, 2)}
    planned = plan(arms, across={"optim.warmup_steps": [0, 4]})
    for cell in planned.cells:
        ratio = int(cell.arm)
        bad = ratio == 2 and cell.config.optim.warmup_steps == 4 and cell.config.seed == 0
        loss = 3.0 - ratio / 4 + 0.1 * cell.config.seed
        record(cell, "stuck" if bad else loss, parameters=1000 * ratio, flops_per_token=10 * ratio)
    figure = figures.loss_by_size(planned, RECORDS)
    by_parameters, by_flops = figure.axes
    tokens = 6 * 4 * 16
    assert xy(lines(by_parameters, 0)[0]) == near([(1000 * r, 3.1 - r / 4) for r in (1, 2, 4)])
    assert xy(lines(by_parameters, 1)[0]) == near([(1000 * r, 3.1 - r / 4) for r in (1, 4)])
    assert [x for x, _ in xy(lines(by_flops, 0)[0])] == pytest.approx([10 * r * tokens for r in (1, 2, 4)])
    bars = by_parameters.collections[0].get_segments()
    assert [bars[0][0][1], bars[0][1][1]] == pytest.approx([2.85 - 0.1, 2.85 + 0.1])  # SD of 0, 0.1, 0.2 is 0.1
    assert {"1", "2", "4", "1/3"} == set(texts(by_parameters))
    assert labels(figure) == ["mean ± SD\nover n = 3 seeds", "warmup_steps=0", "warmup_steps=4", "k/n diverged"]


def test_arms_without_an_order_are_lines_over_the_columns_that_make_them_larger():
    planned = plan(across={"model.n_layers": [2, 4], "optim.warmup_steps": [0, 4]})
    for cell in planned.cells:
        blocks = cell.config.model.n_layers
        record(cell, 3.0 / blocks, parameters=100 * blocks, flops_per_token=10 * blocks)
    figure = figures.loss_by_size(planned, RECORDS)
    names = [f"warmup_steps={w}: by {cost}" for w in (0, 4) for cost in ("parameters", "training FLOPs")]
    assert [panel.get_title("left") for panel in figure.axes] == names
    assert labels(figure)[1:] == list(ARMS)
    assert xy(lines(figure.axes[2], 2)[0]) == near([(200, 1.5), (400, 0.75)])


def test_sizes_that_hardly_differ_have_no_figure():
    planned = plan()
    for cell in planned.cells:
        record(cell, 2.0, parameters=1000 + (cell.arm == "post") * 19, flops_per_token=10)
    with pytest.raises(UserError, match="loss_by_size has nothing to show; it needs arms or columns whose"):
        figures.loss_by_size(planned, RECORDS)


# Stability


def test_a_map_counts_what_diverged_and_how():
    clips = [0.1, 1.0, None]
    planned = plan(across={"optim.lr": RATES, "optim.clip": clips})
    for cell in planned.cells:
        clip, lr = cell.config.optim.clip, cell.config.optim.lr
        worst = cell.arm == "none" and clip is None
        outcome: float | str = 2.0 + 0.1 * cell.config.seed + lr
        if worst and lr == 1e-2:
            outcome = ("stuck", "non-finite", "above start")[cell.config.seed]
        elif worst and lr == 3e-3 and cell.config.seed == 0:
            outcome = "stuck"
        if not (cell.arm == "pre" and clip == 0.1 and lr == 1e-3 and cell.config.seed):
            record(cell, outcome)
        if cell.arm == "post" and clip == 1.0 and lr == 1e-2:
            (run_folder(RECORDS, cell.signature) / "summary.json").unlink()
    figure = figures.stability(planned, RECORDS)
    pre, post, none = figure.axes
    assert [panel.get_title("left") for panel in figure.axes] == list(ARMS)
    assert [label.get_text() for label in pre.get_xticklabels()] == ["0.001", "0.003", "0.01"]
    assert [label.get_text() for label in pre.get_yticklabels()] == ["0.1", "1.0", "null"]
    grid = {(round(t.get_position()[0] - 0.5), round(t.get_position()[1] - 0.5)): t.get_text() for t in none.texts}
    assert len(grid) == 9
    assert (grid[2, 2], grid[1, 2], grid[0, 2], grid[2, 0]) == ("3/3 SNA", "1/3 S", "2.101", "2.110")
    assert none.collections[0].get_array().tolist()[2] == pytest.approx([0, 1 / 3, 1])
    assert texts(pre)[0] == "2.001\nn = 1"
    assert texts(post).count("not run") == 1
    assert labels(figure)[0] == "diverged of n = 3 seeds"
    assert labels(figure)[3:] == ["S: stuck", "N: non-finite", "A: above start"]


def test_a_tuned_rate_is_an_axis_over_its_own_seeds():
    planned = tuned(
        lambda cell: cell.purpose == "tune" and cell.config.optim.lr == 1e-2 and cell.config.optim.warmup_steps == 0,
        across={"optim.warmup_steps": [0, 4]},
    )
    figure = figures.stability(planned, RECORDS)
    assert labels(figure)[0] == "diverged of n = 2 tuning seeds"
    assert [texts(panel).count("2/2 S") for panel in figure.axes] == [1, 1, 1]


def test_where_nothing_diverged_there_is_no_map():
    planned = plan(across={"optim.lr": RATES, "optim.warmup_steps": [0, 4]})
    for cell in planned.cells:
        record(cell, 2.0)
    assert "stability" not in figures_of(planned, RECORDS)


# Published


def test_ours_and_theirs_stand_on_one_axis():
    planned = filled("norm_placement")
    figure = figures.published_differences(planned, RECORDS)
    (panel,) = figure.axes
    assert [label.get_text() for label in panel.get_yticklabels()] == ["post", "peri", "deepnorm", "layer_scaled"]
    seeds = len(planned.spec.repeat["seed"])
    assert labels(figure)[1:] == [f"ours [95% CI], n = {seeds} seeds", *(p.name for p in of_sweep("norm_placement"))]
    table = ablation_table(planned, RECORDS)
    ours = [table.cell(arm, {}).difference for arm in ("post", "peri", "deepnorm", "layer_scaled")]
    assert panel.lines[0].get_xdata() == pytest.approx([difference for difference in ours if difference is not None])


# Which figures a sweep has

PROFILES = {"grad_norm", "stream_by_depth", "branch_ratio", "token_cosine"}
EXPECTED = {
    "activation": {"loss", "loss_by_lr", "published"},
    "demo": {"loss"},
    "depth": {"loss", "loss_by_size", "last_mlp_gradient"},
    "expansion_ratio": {"loss", "loss_by_lr", "loss_by_size"},
    "expansion_ratio_equal_parameters": {"loss", "loss_by_lr"},
    "init_depth": {"last_mlp_gradient"},
    "no_norm": {"loss", "loss_by_lr", "stability"},
    "norm_placement": {"loss", "loss_by_lr", "published"},
    "norm_type": {"loss", "loss_by_lr", "published"},
    "recipes": {"loss", "loss_by_lr", "loss_by_size"},
    "recipes_equal_parameters": {"loss", "loss_by_lr", "loss_by_size"},
    "specialise": {"loss"},
    "residual": {"loss", "loss_by_size", "last_mlp_gradient"},
    "warmup": {"loss", "loss_by_lr", "loss_by_size", "stability", "last_mlp_gradient"},
}


LARGE = ("warmup", "no_norm", "recipes", "residual", "specialise")  # of many panels or steps


def test_every_sweep_is_expected():
    assert set(EXPECTED) == {path.stem for path in (ROOT / "sweeps").glob("*.yaml")}


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) if n in LARGE else n for n in EXPECTED])
def test_a_sweeps_roles_and_records_say_which_figures_it_has(name: str):
    short = [] if name in ("init_depth", "specialise") else ["train.steps=4"]
    planned = filled(name, *short, *(["model.n_layers=4,8,16"] if name == "init_depth" else []))
    drawn = figures_of(planned, RECORDS)
    assert set(drawn) == EXPECTED[name] | PROFILES
    assert list(drawn) == [drawn_.name for drawn_ in figures.ALL if drawn_.name in drawn]
    assert set(drawn) <= set(CAPTIONS)
    for title, figure in drawn.items():
        assert re.search(r"n = \d", " ".join(labels(figure))), title
        check_look(figure)


def colours(figure: Figure) -> Iterator[Any]:
    for panel in figure.axes:
        for line in panel.lines:
            yield from (line.get_color(), line.get_markerfacecolor())
        for collection in panel.collections:
            if collection.get_array() is None:
                yield from (*collection.get_facecolor(), *collection.get_edgecolor())
        yield from (text.get_color() for text in panel.texts)


def check_look(figure: Figure) -> None:
    """Colours are Okabe and Ito's, or none; nothing reaches over the canvas; the legend covers no panel."""
    known = {matplotlib.colors.to_hex(c) for c in (*COLOURS, "black", "white")}
    assert {matplotlib.colors.to_hex(c) for c in colours(figure) if not isinstance(c, str) or c != "none"} <= known
    figure.draw_without_rendering()
    inside = figure.get_tightbbox()
    width, height = figure.get_size_inches()
    assert inside.x0 >= 0
    assert inside.y0 >= 0
    assert inside.x1 <= width
    assert inside.y1 <= height
    (legend,) = figure.legends
    box = legend.get_window_extent()
    panels = [panel for panel in figure.axes if panel.axison]
    assert all(not panel.get_tightbbox().overlaps(box) for panel in panels)
    boxes = [panel.get_tightbbox() for panel in panels]
    assert not any(one.overlaps(other) for i, one in enumerate(boxes) for other in boxes[:i])


# What blocks are worth


def test_blocks_increases_are_means_over_the_seeds_that_were_measured():
    planned = plan(ARMS)
    for cell in planned.cells:
        record(cell, 2.0)
        if cell.arm != "none":
            seed, own = cell.config.seed, {"attn": [2.0] * 2, "mlp": [2.0] * 2}
            found = {"loss": 2.0, "skipped": [2.5 + seed, 2.25], "swapped": [2.125], "lens": [6.0, 3.0, 2.0]}
            (run_folder(RECORDS, cell.signature) / LAYERS).write_text(json.dumps({**found, "without": own}))
    figure = figures.loss_by_block(planned, RECORDS)
    skipped, swapped, lens = figure.axes
    assert xy(lines(skipped, 0)[0]) == near([(1, 1.5), (2, 0.25)])
    assert [xy(line) for line in swapped.lines] == [near([(1, 0.125)])] * 2
    assert xy(lines(lens, 1)[0]) == near([(1, 1.0), (2, 0.0)])
    assert labels(figure) == ["mean and range\nof n = 3 seeds", "pre", "post"]
    check_look(figure)


# Whatever there is


@pytest.mark.parametrize("drawn", figures.ALL, ids=lambda drawn: drawn.name)
def test_nothing_to_show_is_said_in_one_line(drawn: Drawn):
    with pytest.raises(UserError, match=f"sweep tiny: figure {drawn.name} has nothing to show; it needs "):
        drawn(plan(), RECORDS)
    assert figures_of(plan(), RECORDS) == {}
    assert save_figures(figures_of(plan(), RECORDS), Path()) == []


ODD = {"a_b, $c$": "pre", "_hidden $5": "post", "50% \\alpha_1^2": "none", "#& <b>": "peri"}


@pytest.mark.slow
def test_many_columns_and_arms_with_odd_names_are_drawn():
    arms: dict[str, Any] = {name: {"model.norm_placement": of} for name, of in ODD.items()}
    arms |= {f"{i} {'long ' * 6}": {"model.init": "normal", "optim.beta1": 0.5 + i / 100} for i in range(8)}
    planned = plan(arms, across={"optim.warmup_steps": list(range(20))}, repeat={"seed": [0]})
    for cell in planned.cells:
        record(cell, "stuck" if cell.arm.startswith(("_", "1")) else 2.0)
        log(cell)
    drawn = figures_of(planned, RECORDS)
    assert set(drawn) == {"loss", *PROFILES}
    for figure in drawn.values():
        check_look(figure)
    assert not any(map(matplotlib.cbook.is_math_text, labels(drawn["loss"])))
    raw = [label.replace(r"\$", "$").split(":")[0] for label in labels(drawn["loss"])]
    assert [name for name in ODD if name in raw] == list(ODD)


@pytest.mark.slow
def test_the_same_records_give_the_same_bytes():
    planned = filled("warmup", "train.steps=4", "model.n_layers=2,4,12", "optim.warmup_steps=0,2", "seed=0,1")
    for folder in ("one", "two"):
        Path(folder).mkdir()
        assert len(save_figures(figures_of(planned, RECORDS), Path(folder))) == 18
    for path in Path("one").iterdir():
        content = path.read_bytes()
        assert content.startswith(b"\x89PNG\r\n\x1a\n" if path.suffix == ".png" else b"<?xml")
        assert content == (Path("two") / path.name).read_bytes(), path.name


def test_each_file_is_read_once(monkeypatch: pytest.MonkeyPatch):
    planned = filled("demo", "train.steps=4")
    read: list[str] = []
    real = figures.seen.read_metrics
    monkeypatch.setattr(figures.seen, "read_metrics", lambda folder: read.append(folder.name) or real(folder))
    figures_of(planned, RECORDS)
    assert sorted(read) == sorted(cell.signature for cell in planned.cells)
