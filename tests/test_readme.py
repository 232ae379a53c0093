"""What the README shows is true of the code."""

import json
import re
from pathlib import Path

import pytest
from conftest import andrea

from andrea_exp.sweep.plan import plan_sweep

README = (Path(__file__).parents[1] / "README.md").read_text()


def test_is_short():
    assert len(README.splitlines()) <= 215


def test_the_sweep_file_plans(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (example,) = re.findall(r"```yaml\n(.*?)```", README, flags=re.DOTALL)
    (tmp_path / "sweeps").mkdir()
    (tmp_path / "sweeps" / "example.yaml").write_text(example)
    monkeypatch.chdir(tmp_path)
    plan = plan_sweep(["sweeps=example"])
    assert (len(plan.cells), plan.waiting) == (2 * 2 * 3, 2 * 2 * 3)


COMMANDS = re.findall(r"^andrea-exp (train .*?)\s*(?:#.*)?$", README.replace("\\\n", ""), flags=re.MULTILINE)


@pytest.mark.parametrize("command", COMMANDS)
def test_the_commands_compose(command: str, tmp_path: Path):
    (tmp_path / "books").mkdir()
    (tmp_path / "books" / "one.txt").write_text("some text\n" * 200)
    words = command.split()
    assert len(words) > 1
    if "-m" in words:
        assert len(plan_sweep(words[2:]).cells) == 9
    else:
        andrea("train", "--cfg", "job", *words[1:], cwd=tmp_path)


def test_the_links_lead_somewhere():
    root = Path(__file__).parents[1]
    links = re.findall(r"\]\(([^)#]+)\)", README)
    assert links
    assert [link for link in links if not (root / link).exists()] == []


def test_its_table_is_the_notebooks():
    notebook = json.loads((Path(__file__).parents[1] / "analysis" / "demo.ipynb").read_text())
    outputs = [output for cell in notebook["cells"] for output in cell.get("outputs", [])]
    (shown,) = [o["data"]["text/markdown"] for o in outputs if "text/markdown" in o.get("data", {})]
    rows = [line for line in "".join(shown).splitlines() if line.startswith("|")]
    assert len(rows) > 4
    assert "\n".join(rows) in README


def test_its_overview_of_tuned_sweeps_is_that_of_the_records():
    assert (Path(__file__).parents[1] / "analysis" / "tables" / "tuned.md").read_text() in README


def test_its_verdicts_are_those_of_the_records():
    kept = (Path(__file__).parents[1] / "analysis" / "tables" / "claims.md").read_text()
    claim = r"^\| (.*?\.)((?:<br>.*?)?) \| ([a-z ]+) \| (.*?) \| (.*?) \|$"
    told = re.findall(claim, kept, flags=re.MULTILINE)
    whole = [row for row in told if row[2] != "no runs yet" and " runs have ended" not in row[1]]
    rows = [f"| {text} | {verdict} | {effect} | {n} |" for text, _, verdict, effect, n in whole]
    assert len(rows) > 8
    (shown,) = re.findall(r"^\| claim \| verdict .*?\n\n", README, flags=re.MULTILINE | re.DOTALL)
    assert shown.splitlines()[2:-1] == rows
