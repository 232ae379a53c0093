"""What is not fair is marked, and what a fair comparison varies is not."""

from typing import Any

import pytest
from by_hand import RECORDS, plan, record

from andrea_exp.results.formats import to_html, to_latex, to_markdown
from andrea_exp.results.table import AblationTable, ablation_table
from andrea_exp.sweep.plan import Plan

pytestmark = pytest.mark.usefixtures("empty_folder")

BASE = {"model.norm_placement": "pre"}


def marks(compare: dict[str, Any], **roles: Any) -> dict[str, dict[str, str]]:
    """Check -> marked arms, of a table without runs."""
    return {mark.check: mark.arms for mark in ablation_table(plan(compare, **roles), RECORDS).marks}


def with_parameters(**counts: int) -> AblationTable:
    planned = plan({name: {"model.n_layers": i + 1} for i, name in enumerate(counts)})
    for cell in planned.cells:
        record(cell, 2.0, parameters=counts[cell.arm])
    return ablation_table(planned, RECORDS)


# Parameters, tokens, text


@pytest.mark.parametrize(("count", "marked"), [(1010, False), (990, False), (1011, True), (989, True)])
def test_parameters_may_differ_by_one_percent(count: int, marked: bool):
    table = with_parameters(base=1000, other=count)
    assert [mark.check for mark in table.marks] == (["parameters"] if marked else [])
    if marked:
        assert table.marks[0].arms == {"other": f"{count / 1000 - 1:+.1%}"}


def test_parameters_are_compared_within_a_column():
    """Two columns of different size, each matched: depth grows both sides alike."""
    planned = plan({"a": BASE, "b": {"model.norm_placement": "post"}}, across={"model.n_layers": [2, 4]})
    for cell in planned.cells:
        record(cell, 2.0, parameters=1000 * cell.config.model.n_layers)
    assert ablation_table(planned, RECORDS).marks == []


def test_another_number_of_tokens_is_marked_even_where_it_is_what_is_compared():
    found = marks({"short": {"train.steps": 6}, "long": {"train.steps": 12}})
    assert found == {"tokens": {"long": "768 for 384"}}  # 12 and 6 steps of 4 sequences of 16 tokens


def test_another_tokenizer_is_marked(corpus_path: Any):
    found = marks({"bytes": {"data.val_fraction": 0.05}, "other": {"data.val_fraction": 0.2}})
    assert list(found) == ["text"]
    assert list(found["text"]) == ["other"]


# What differs beside the compared factor


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        # Alone it is what is compared, and fair; beside something else it is marked.
        ({"model.init": "xavier"}, {"model.init": "normal"}, {}),
        (
            {"model.init": "xavier", **BASE},
            {"model.init": "normal", "model.norm_placement": "post"},
            {"init": {"other": "init=normal"}},
        ),
        ({"model.embedding_norm": False}, {"model.embedding_norm": True}, {}),
        (
            BASE,
            {"model.norm_placement": "post", "model.embedding_norm": True},
            {"norms": {"other": "embedding_norm=true"}},
        ),
        (BASE, {"model.norm_placement": "reordered", "model.qk_norm": "full"}, {"norms": {"other": "qk_norm=full"}}),
        # Post-norm has no final norm of its own: the placement explains that one, and no other.
        (BASE, {"model.norm_placement": "post"}, {}),
        (BASE, {"model.norm_placement": "post", "model.final_norm": True}, {"norms": {"other": "final_norm=true"}}),
        ({"optim.lr": 0.1}, {"optim.lr": 0.2}, {}),
        (
            BASE,
            {"model.norm_placement": "post", "optim.lr": 0.2, "optim.clip": None},
            {"training": {"other": "lr=0.2, clip=null"}},
        ),
        (
            BASE,
            {"model.norm_placement": "post", "train.precision": "64-true"},
            {"training": {"other": "precision=64-true"}},
        ),
        # A recipe brings many fields; none of them alone is what is compared.
        (
            {"recipe": "gpt1", "model.vocab_size": None},
            {"recipe": "bert", "model.vocab_size": None},
            {"norms": {"other": "embedding_norm=true"}},
        ),
    ],
    ids=str,
)
def test_a_difference_is_marked_unless_it_is_what_is_compared(
    one: dict[str, Any], other: dict[str, Any], expected: dict[str, Any]
):
    assert marks({"base": one, "other": other}) == expected


def test_the_mark_of_several_columns_says_a_difference_once():
    arms = {"base": BASE, "other": {"model.norm_placement": "post", "model.qk_norm": "full"}}
    assert marks(arms, across={"model.n_layers": [2, 4]}) == {"norms": {"other": "qk_norm=full"}}


# Tuning


def tuned(grid: list[Any], best: dict[str, Any], key: str = "optim.lr", **roles: Any) -> Plan:
    arms = {"a": BASE, "b": {"model.norm_placement": "post"}}
    roles = {"tune": {key: grid, "seed": [8]}, "repeat": {"seed": [0]}, **roles}
    for cell in plan(arms, **roles).cells:
        record(cell, 2.0 if cell.tuned[key] == best[cell.arm] else 3.0)
    return plan(arms, **roles)


@pytest.mark.parametrize(
    ("grid", "best", "marked"),
    [
        ([0.1, 0.2, 0.3], 0.2, False),
        ([0.1, 0.2, 0.3], 0.1, True),
        ([0.1, 0.2, 0.3], 0.3, True),
        ([0.2, 0.1, 0.3], 0.2, False),  # listed first, and in the middle all the same
        ([0.2, 0.3, 0.1], 0.3, True),
        ([0.1], 0.1, False),  # nothing is tuned
    ],
)
def test_an_optimum_at_the_edge_of_its_grid_is_marked(grid: list[float], best: float, marked: bool):
    found = {m.check: m.arms for m in ablation_table(tuned(grid, {"a": grid[0], "b": best}), RECORDS).marks}
    assert ("b" in found.get("edge", {})) == marked
    assert not marked or found["edge"]["b"] == f"lr={best}"


def test_words_have_an_edge_where_they_are_listed():
    found = ablation_table(
        tuned(["normal", "xavier", "small"], {"a": "xavier", "b": "small"}, key="model.init"), RECORDS
    ).marks
    assert [(m.check, list(m.arms)) for m in found] == [("edge", ["b"])]


def test_another_grid_is_marked():
    planned = tuned([0.1, 0.2, 0.3], {"a": 0.2, "b": 0.2})
    cells = [c for c in planned.cells if (c.arm, c.purpose, c.tuned) != ("b", "tune", {"optim.lr": 0.3})]
    fewer = Plan(planned.name, planned.spec, cells, planned.guesses)
    assert [(m.check, list(m.arms)) for m in ablation_table(fewer, RECORDS).marks] == [("grid", ["b"])]


# Machines


@pytest.mark.parametrize("key", ["numerics_version", "torch", "device", "ops"])
def test_runs_made_otherwise_mark_the_whole_table(key: str):
    planned = plan()
    for i, cell in enumerate(planned.cells):
        record(cell, 2.0, machine={"torch": "2.11", "device": "cpu", "ops": "reference", key: i % 2})
    (mark,) = ablation_table(planned, RECORDS).marks
    assert (mark.check, mark.arms) == (key, {})
    assert "mixed" in to_markdown(ablation_table(planned, RECORDS))


def test_runs_that_told_nothing_of_their_machine_are_accepted():
    planned = plan()
    for i, cell in enumerate(planned.cells):
        record(cell, 2.0, **({"machine": {"torch": "2.11"}} if i else {}))
    assert ablation_table(planned, RECORDS).marks == []


# In the table


def test_marks_stand_at_the_arm_and_their_reasons_below():
    arms = {"base": BASE, "other": {"model.norm_placement": "post", "model.qk_norm": "full", "model.init": "normal"}}
    table = ablation_table(plan(arms), RECORDS)
    lines = to_markdown(table).splitlines()
    assert any(line.startswith("| otherᵃᵇ") for line in lines)
    assert any(line.startswith("| base<br>") for line in lines)
    reasons = [line for line in lines if line.startswith(("- ᵃ", "- ᵇ"))]
    assert [("init=normal" in r, "qk_norm=full" in r) for r in reasons] == [(True, False), (False, True)]
    assert "otherᵃᵇ" in to_html(table)
    assert "other$^{a}$$^{b}$" in to_latex(table)
