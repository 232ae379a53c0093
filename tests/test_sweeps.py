"""Every sweep file is a document and a protocol: a whole header, and roles that plan."""

import re

import pytest

from andrea_exp import ROOT
from andrea_exp.sweep.plan import plan_sweep

FILES = sorted((ROOT / "sweeps").glob("*.yaml"))


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_the_header_says_what_and_how_long_and_what_to_expect(path):
    header = path.read_text()
    for title in ("Question", "Command", "Run time", "Expected"):
        assert re.search(rf"^# {title}: +\S", header, flags=re.MULTILINE), title
    assert f"andrea-exp sweep {path.stem}\n" in header


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_it_plans(path):
    plan = plan_sweep([f"sweeps={path.stem}"])
    spec = plan.spec
    assert spec.question.endswith("?")
    assert len(spec.compare) > 1
    assert len(spec.repeat["seed"]) >= 3
    assert plan.cells
    if spec.tune:  # reported runs wait for their tuned values
        assert plan.waiting == len(plan.arms) * len(plan.columns) * len(spec.repeat["seed"])
        assert len(spec.tune["optim.lr"]) >= 3
    labels = [cell.label for cell in plan.cells]
    assert len(set(labels)) == len(labels)


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_a_scale_can_replace_its_own(path):
    small, large = (plan_sweep([f"sweeps={path.stem}", *words]) for words in ([], ["scale=cpu"]))
    assert len(small.cells) == len(large.cells)
    assert small.cells[0].signature != large.cells[0].signature


@pytest.mark.parametrize("name", ["expansion_ratio_equal_parameters", "recipes_equal_parameters"])
def test_at_equal_parameters_means_within_one_percent(name: str):
    from andrea_exp import accounting

    plan = plan_sweep([f"sweeps={name}"])
    sizes = {cell.arm: sum(accounting.parameters(cell.config.model).values()) for cell in plan.cells}
    assert all(abs(size / sizes[plan.spec.baseline] - 1) < 0.01 for size in sizes.values())


def test_recipe_arms_keep_their_blocks_at_the_sweeps_size():
    plan = plan_sweep(["sweeps=recipes"])
    blocks = {cell.arm: cell.config.model for cell in plan.cells}
    assert {m.d_model for m in blocks.values()} == {48}
    assert blocks["gemma2"].norm_placement.name == "peri"
    assert blocks["palm_540b"].block_layout.name == "parallel"
    assert blocks["t5"].position.name == "t5"
