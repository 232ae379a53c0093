"""`andrea-exp verify`: a true record agrees to the last bit, a changed one does not, a compact one is enough."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import Sweep

from andrea_exp.cli import main
from andrea_exp.errors import UserError
from andrea_exp.record import read_json, write_json
from andrea_exp.sweep.slots import cores
from andrea_exp.verify import Value, Verified, last_step

Edit = Callable[[dict[str, Any]], None]


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory, corpus_path: Path) -> Sweep:
    """One run whose schedule depends on its length, recorded where each test may change a copy."""
    folder = tmp_path_factory.mktemp("sweep")
    words = ("optim.schedule=cosine", "log.every=2", "model.dropout=0.1", "pool.threads=1")
    made = Sweep(folder, corpus_path, "0", *words, steps=12)
    made.run()
    return made


@pytest.fixture
def record(sweep: Sweep, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The compact record: config, metrics, provenance, summary."""
    monkeypatch.chdir(sweep.folder)
    folder = tmp_path / sweep.runs[0].name
    folder.mkdir()
    for name in ("config.json", "metrics.jsonl", "provenance.json", "summary.json"):
        shutil.copy(sweep.runs[0] / name, folder / name)
    return folder


def verified(capsys: pytest.CaptureFixture[str], folder: Path, *words: str, exit_code: int) -> dict[str, Any]:
    assert main(["verify", str(folder), "--json", *words]) == exit_code
    return json.loads(capsys.readouterr().out)


def edit(path: Path, change: Edit) -> None:
    content = read_json(path) or {}
    change(content)
    write_json(path, content)


def edit_rows(folder: Path, change: Edit) -> None:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for row in rows:
        change(row)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_a_run_agrees_with_itself_to_the_last_bit(
    sweep: Sweep, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """Also where it stops before its end: cosine and dropout follow from the whole config."""
    monkeypatch.chdir(sweep.folder)
    before = {path: path.read_bytes() for path in sweep.runs[0].iterdir() if path.is_file()}
    found = verified(capsys, Path(sweep.runs[0].name[:8]), "--steps", "6", exit_code=0)
    assert (found["expected"], found["circumstances"], found["until_step"]) == ("the same bits", {}, 6)
    losses = [(v["step"], v["name"]) for v in found["values"] if v["name"].endswith("/loss")]
    assert losses == [
        (0, "val/loss"),
        *[(2, "train/loss"), (3, "train/loss"), (3, "val/loss")],
        *[(4, "train/loss"), (6, "train/loss"), (6, "val/loss")],
    ]
    assert all(v["recorded"] == v["now"] for v in found["values"])
    assert {"lr", "grad_norm/total", "stream/rms/final"} <= {v["name"] for v in found["values"]}
    assert {path: path.read_bytes() for path in sweep.runs[0].iterdir() if path.is_file()} == before


@pytest.mark.parametrize("name", ["train/loss", "grad_norm/head"])
def test_a_planted_bit_is_found(name: str, record: Path, capsys: pytest.CaptureFixture[str]):
    def plant(row: dict[str, Any]) -> None:
        if row["step"] == 2:
            row[name] *= 1 + 1e-9

    edit_rows(record, plant)
    found = verified(capsys, record, "--steps", "4", exit_code=1)
    assert [(v["step"], v["name"]) for v in found["disagreements"]] == [(2, name)]
    assert main(["verify", str(record), "--steps", "0"]) == 0  # before the plant
    assert "agrees up to step 0" in capsys.readouterr().out


@pytest.mark.parametrize(("factor", "exit_code"), [(1 + 1e-6, 0), (1.01, 1)])
def test_another_version_is_told_and_judged_by_the_tolerance(
    factor: float, exit_code: int, record: Path, capsys: pytest.CaptureFixture[str]
):
    def plant(row: dict[str, Any]) -> None:
        if "train/loss" in row:
            row["train/loss"] *= factor
        row["grad_norm/total"] = 7.0  # in another version only losses are compared

    def older(made: dict[str, Any]) -> None:
        made["versions"]["torch"] = made["attempts"][0]["torch"] = "2.0.0"

    edit_rows(record, plant)
    edit(record / "provenance.json", older)
    found = verified(capsys, record, "--steps", "3", exit_code=exit_code)
    assert found["circumstances"]["torch"]["recorded"] == "2.0.0"
    assert found["expected"] == "losses within 0.001, relative"
    assert {v["name"] for v in found["disagreements"]} == ({"train/loss"} if exit_code else set())


def test_more_threads_than_cores_are_told(record: Path, capsys: pytest.CaptureFixture[str]):
    edit(record / "provenance.json", lambda made: made.update(threads=cores() + 1))
    found = verified(capsys, record, "--steps", "2", exit_code=0)
    assert found["circumstances"] == {"cores": {"recorded": f"{cores() + 1} threads", "now": cores()}}


def test_config_and_metrics_are_enough(record: Path, capsys: pytest.CaptureFixture[str]):
    """What is not recorded is unknown, so no bits are expected; the summary says what it knows."""
    (record / "provenance.json").unlink()
    known = verified(capsys, record, "--steps", "2", exit_code=0)
    assert known["circumstances"] == {}
    (record / "summary.json").unlink()
    unknown = verified(capsys, record, "--steps", "2", exit_code=0)
    assert set(unknown["circumstances"]) == {"device", "torch", "threads", "ops", "numerics_version"}
    assert unknown["expected"] == "losses within 0.001, relative"


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["verify", *words]) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.strip()]
    return line


def test_bad_input_is_one_line(record: Path, capsys: pytest.CaptureFixture[str]):
    assert "no such run" in refused(capsys, "nowhere")
    assert "the record has the steps 0, 2, 3, ..., 12" in refused(capsys, str(record), "--steps", "13")
    edit(record / "provenance.json", lambda made: made.update(data_fingerprint="another"))
    assert "its text changed" in refused(capsys, str(record))
    edit(record / "config.json", lambda config: config["train"].update(new_field=1))
    assert "no config.json that this version reads" in refused(capsys, str(record))


def test_no_metrics_is_refused(record: Path, capsys: pytest.CaptureFixture[str]):
    (record / "metrics.jsonl").unlink()
    assert "no metrics.jsonl with a logged step" in refused(capsys, str(record))


def test_a_run_that_cannot_be_run_here_says_why(record: Path, capsys: pytest.CaptureFixture[str]):
    edit(record / "config.json", lambda config: config["ops"].update(impl="cuda"))
    assert "cannot be run again here" in refused(capsys, str(record))


@pytest.mark.parametrize(
    ("logged", "wanted", "last"),
    [
        ([0, 1, 2, 3], None, 3),
        (list(range(50)), None, 20),
        ([0, 10, 20, 30], None, 20),
        ([0, 100, 200], None, 100),
        ([0], None, 0),
        ([0, 10, 20, 30], 25, 20),
        ([0, 100], 100, 100),
        ([0, 100], 0, 0),
    ],
)
def test_the_last_step_compared(logged: list[int], wanted: int | None, last: int):
    assert last_step(logged, wanted) == last


@pytest.mark.parametrize(("wanted", "told"), [(50, "0, 100"), (4000, "0, 100"), (-1, "0, 100")])
def test_steps_that_the_record_has_none_of_are_refused(wanted: int, told: str):
    with pytest.raises(UserError, match=f"{wanted}: the record has the steps {told}"):
        last_step([0, 100], wanted)


def test_a_loss_that_was_none_must_be_none_again():
    gone, back = Value(3, "train/loss", None, None), Value(3, "train/loss", None, 2.0)
    found = Verified("run", 3, {}, 1e-3, [gone, back])
    assert found.disagreements == [back]
    assert back.difference is None
