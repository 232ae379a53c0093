"""`describe` and `facts` on the command line."""

import json
from pathlib import Path

import pytest
from conftest import make

from andrea_exp.cli import main
from andrea_exp.describe import human
from andrea_exp.facts import STATEMENTS
from andrea_exp.record import open_run


def described(capsys: pytest.CaptureFixture[str], *words: str) -> dict:
    assert main(["describe", *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_largest_recipe_in_json(capsys: pytest.CaptureFixture[str]):
    found = described(capsys, "palm_540b")
    assert found["parameters"]["total"] == sum(found["parameters"]["by_part"].values()) == 540_356_474_880
    assert (found["norms"], found["corrections"]) == (119, 118)
    assert sum(found["decode"]["shares"].values()) == pytest.approx(1)


def test_overrides_change_a_recipe(capsys: pytest.CaptureFixture[str]):
    found = described(capsys, "llama3_8b", "model.activation=gelu", "model.expansion_ratio=4")
    assert found["model"]["d_ff"] == 4 * 4096
    assert found["parameters"]["by_part"]["mlp"] == 32 * 2 * 4096 * 16384


def test_batch_and_context_weigh_the_cache(capsys: pytest.CaptureFixture[str]):
    alone, crowded = (described(capsys, "llama3_8b", *w) for w in ((), ("--batch", "16", "--context", "8192")))
    assert alone["decode"]["bytes_per_token"]["key/value cache"] == 0
    assert crowded["decode"]["bytes_per_token"]["key/value cache"] == 8192 * 131_072
    assert crowded["decode"]["flops_per_byte"] > alone["decode"]["flops_per_byte"]


def test_a_recorded_run_is_described_as_it_ran(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    config = make("model.norm_placement=peri")
    folder = open_run(Path("records"), config, "data")
    assert described(capsys, folder.name)["model"]["norm_placement"] == "peri"
    assert main(["describe", folder.name, "model.n_layers=3"]) == 2
    assert "a recorded run is as it ran" in capsys.readouterr().err


def test_a_picture_is_drawn(tmp_path: Path):
    path = tmp_path / "bars.png"
    assert main(["describe", "gpt2", "--figure", str(path)]) == 0
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["llama3"], "did you mean llama3_8b"),
        (["gpt2", "--batch", "0"], "--batch 0"),
        (["gpt2", "--context", "-1"], "--context -1"),
        (["gpt2", "model.n_heads=7"], "6 heads would fit"),
    ],
)
def test_bad_input_is_one_line(words: list[str], hint: str, capsys: pytest.CaptureFixture[str]):
    assert main(["describe", *words]) == 2
    told = capsys.readouterr().err
    assert hint in told
    assert len(told.splitlines()) == 1


def test_facts_in_json_and_text(capsys: pytest.CaptureFixture[str]):
    assert main(["facts", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["row"] for row in rows] == [s.row for s in STATEMENTS]
    assert all(isinstance(row["holds"], bool) for row in rows)
    assert main(["facts"]) == 0
    assert "A30" in capsys.readouterr().out


@pytest.mark.parametrize(("value", "text"), [(0, "0"), (999.4, "999"), (999.6, "1K"), (8.03e9, "8.03G"), (2e15, "2P")])
def test_human(value: float, text: str):
    assert human(value) == text
