"""The whole path as a user walks it: one tiny sweep through the command line, in processes of its own."""

import csv
import functools
import io
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from conftest import andrea
from rich.console import Console

from andrea_exp import cli
from andrea_exp.accounting import flops_per_token
from andrea_exp.results import ablation_table, formats, plan_of
from andrea_exp.sweep.plan import plan_sweep

SWEEP = """\
# @package _global_
model: {{d_model: 16, n_layers: 2, n_heads: 2, seq_len: 16}}
data: {{path: {corpus}, val_windows: 8}}
optim: {{lr: 0.01}}
train: {{batch_size: 4, steps: 20, device: cpu}}
log: {{validate_every: 10, diagnose_every: 10}}
sweep:
  question: Does placement | matter?
  baseline: pre
  compare: {arms}
  across: {{optim.warmup_steps: [0, 4]}}
  tune: {{}}
  repeat: {{seed: [0, 1]}}
"""
TINY_ARMS = "{pre: {model.norm_placement: pre}, post: {model.norm_placement: post}}"
MORE_ARMS = "{pre: {model.norm_placement: pre}, rms: {model.norm_type: rmsnorm}}"


def write_sweeps(folder: Path, corpus: Path) -> None:
    sweeps = folder / "sweeps"
    sweeps.mkdir()
    (sweeps / "tiny.yaml").write_text(SWEEP.format(corpus=corpus, arms=TINY_ARMS))
    (sweeps / "more.yaml").write_text(SWEEP.format(corpus=corpus, arms=MORE_ARMS))


@pytest.fixture(scope="module")
def swept(corpus_path: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A folder in which `andrea-exp sweep tiny` has ended, and what it printed. Only to be read."""
    folder = tmp_path_factory.mktemp("swept")
    write_sweeps(folder, corpus_path)
    return folder, andrea("sweep", "tiny", cwd=folder).stdout


@pytest.fixture
def copy(swept: tuple[Path, str], tmp_path: Path) -> Path:
    """The same folder, to be changed."""
    return Path(shutil.copytree(swept[0], tmp_path / "copy", symlinks=True))


@pytest.fixture
def here(copy: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(copy)
    return copy


def summaries(folder: Path) -> dict[str, int]:
    """When each run's summary was written, by signature."""
    return {p.parent.name: p.stat().st_mtime_ns for p in (folder / "records/runs").glob("*/summary.json")}


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """What a verb prints, called in this process."""
    assert cli.main(list(words)) == 0
    return capsys.readouterr().out


def test_a_sweep_prints_its_table_and_where_things_are(swept: tuple[Path, str]):
    _, out = swept
    assert all(word in out for word in ("Does placement | matter?", "pre", "post", "warmup_steps=4", "±", "records"))


def test_a_sweep_leaves_records_tables_figures_and_readable_links(swept: tuple[Path, str]):
    records = swept[0] / "records"
    runs = list((records / "runs").iterdir())
    links = list((records / "tensorboard/tiny").iterdir())
    assert len(runs) == len(links) == 8
    for run in runs:
        assert json.loads((run / "summary.json").read_text())["status"] == "done"
        assert {"config.json", "identity.json", "metrics.jsonl", "provenance.json"} <= {p.name for p in run.iterdir()}
        assert not (run / "lease.json").exists()
    assert all(list(link.glob("events.out.tfevents.*")) for link in links)
    assert all((records / f"tables/tiny/table.{kind}").stat().st_size for kind in ("md", "csv", "json"))
    assert list((records / "tables/tiny").glob("*.png"))
    assert "</html>" in (records / "tables/tiny/report.html").read_text()


def test_the_same_sweep_again_runs_nothing(copy: Path):
    before = summaries(copy)
    again = andrea("sweep", "tiny", cwd=copy)
    assert summaries(copy) == before
    assert "±" in again.stdout


def test_the_hydra_app_is_the_same_sweep(copy: Path):
    before = summaries(copy)
    done = subprocess.run(
        [sys.executable, "-m", "andrea_exp.train", "sweeps=tiny"], cwd=copy, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert summaries(copy) == before
    assert "±" in done.stdout


def test_a_table_in_text_shows_the_numbers_of_the_markdown_one(copy: Path):
    text = andrea("table", "tiny", cwd=copy).stdout
    markdown = andrea("table", "tiny", "--format", "markdown", cwd=copy).stdout
    shown = [cell.split("<br>")[0].strip() for line in markdown.splitlines() for cell in line.split("|")]
    losses = [cell for cell in shown if "±" in cell and "(2)" in cell]
    assert len(losses) == 4
    assert all(loss in text for loss in losses)


def test_a_table_in_json_and_csv_has_a_row_for_each_arm_and_column(here: Path, capsys: pytest.CaptureFixture[str]):
    parsed = json.loads(printed(capsys, "table", "tiny", "--format", "json"))
    rows = list(csv.DictReader(io.StringIO(printed(capsys, "table", "tiny", "--format", "csv"))))
    assert len(parsed["cells"]) == len(rows) == 4
    for cell, row in zip(parsed["cells"], rows, strict=True):
        assert (cell["arm"], str(cell["column"]["optim.warmup_steps"])) == (row["arm"], row["optim.warmup_steps"])
        assert cell["loss_mean"] == float(row["loss_mean"])
        assert cell["signatures"] == row["signatures"].split()
    assert {s for c in parsed["cells"] for s in c["signatures"]} == set(summaries(here))


def test_status_as_text_names_every_run(copy: Path):
    text = andrea("status", "tiny", cwd=copy).stdout
    assert text.count("20/20") == 8
    assert "8 done" in text


def test_status_as_json_counts_runs_by_state(here: Path, capsys: pytest.CaptureFixture[str]):
    shutil.rmtree(next((here / "records/runs").iterdir()))
    now = json.loads(printed(capsys, "status", "tiny", "--json"))
    assert now["counts"] == {"done": 7, "missing": 1}
    assert len(now["runs"]) == 8


def test_an_incomplete_table_says_of_how_many(here: Path, capsys: pytest.CaptureFixture[str]):
    assert "(2) of 3" in printed(capsys, "table", "tiny", "seed=0,1,2", "--format", "markdown")
    shutil.rmtree(next((here / "records/runs").iterdir()))
    text = printed(capsys, "table", "tiny", "--format", "markdown")
    assert text.count("of 2") == 1
    assert "1 missing" in text


def numbers(folder: Path, signature: str) -> dict[str, float]:
    """What of a summary must come out the same, bit for bit."""
    summary = json.loads((folder / "records/runs" / signature / "summary.json").read_text())
    return {k: summary[k] for k in ("val/loss", "train/loss", "grad_norm/max", "val/bits_per_byte")}


def test_only_what_is_missing_runs_also_where_sweeps_share_cells_and_in_the_same_bits(copy: Path):
    cells = json.loads((copy / "records/tables/tiny/table.json").read_text())["cells"]
    deleted = next(c for c in cells if c["arm"] == "pre")["signatures"][1]
    before, lost = summaries(copy), numbers(copy, deleted)
    shutil.rmtree(copy / "records/runs" / deleted)
    andrea("sweep", "more", cwd=copy)
    after = summaries(copy)
    assert [s for s in before if after[s] != before[s]] == [deleted]
    assert len(after) == len(before) + 4  # arm rms: two columns, two seeds
    assert numbers(copy, deleted) == lost


@pytest.mark.slow
def test_an_ad_hoc_multirun_runs_what_a_single_run_has_not(corpus_path: Path, tmp_path: Path):
    base = ["model.d_model=16", "model.n_layers=1", "model.n_heads=2", "model.seq_len=16", "train.steps=4"]
    base += ["train.batch_size=4", "data.val_windows=8", "train.device=cpu", f"data.path={corpus_path}"]
    andrea("train", "model.activation=gelu", "seed=1", *base, cwd=tmp_path)
    before = summaries(tmp_path)
    assert len(before) == 1
    multirun = [sys.executable, "-m", "andrea_exp.train", "-m", "model.activation=relu,gelu", "seed=0,1", *base]
    done = subprocess.run(multirun, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    after = summaries(tmp_path)
    assert len(after) == 4
    assert after.items() >= before.items()


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (["--help"], "tensorboard"),
        (["sweep", "--help"], "seed=0,1"),
        (["train", "--help"], "model"),
        (["train", "--cfg", "job", "model.d_model=32", "model.n_heads=2"], "d_model: 32"),
        (["train", "--cfg", "job", "sweeps=demo"], "question:"),
    ],
    ids=" ".join,
)
def test_what_only_shows_something_runs_nothing(words: list[str], shown: str, tmp_path: Path):
    assert shown in andrea(*words, cwd=tmp_path).stdout
    assert list(tmp_path.iterdir()) == []


@contextmanager
def every_summary(folder: Path) -> Iterator[dict[str, set[int]]]:
    """While open, notes each summary that appears: signature -> the times at which it was written."""
    seen: dict[str, set[int]] = {}
    ended = threading.Event()

    def look() -> None:
        last = False
        while not last:
            last = ended.wait(0.01)
            with suppress(FileNotFoundError):  # cleared between listing and looking
                for signature, written in summaries(folder).items():
                    seen.setdefault(signature, set()).add(written)

    thread = threading.Thread(target=look)
    thread.start()
    yield seen
    ended.set()
    thread.join()


@pytest.mark.slow
def test_two_launches_at_once_run_each_cell_once(corpus_path: Path, tmp_path: Path):
    write_sweeps(tmp_path, corpus_path)
    command = [sys.executable, "-m", "andrea_exp.cli", "sweep", "tiny", "train.steps=60"]
    with every_summary(tmp_path) as seen:
        launches = [
            subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            for _ in range(2)
        ]
        outputs = [launch.communicate(timeout=120)[0] for launch in launches]
    assert [launch.returncode for launch in launches] == [0, 0], outputs
    assert "Traceback" not in "".join(outputs)
    assert {s: len(times) for s, times in seen.items()} == dict.fromkeys(summaries(tmp_path), 1)
    assert len(seen) == 8


# Looking ahead, back, and away


def run_of(here: Path, slug: str) -> str:
    return (here / "records/tensorboard/tiny" / slug).readlink().parent.name


def test_plan_counts_what_is_left_before_and_after(here: Path, capsys: pytest.CaptureFixture[str]):
    whole = json.loads(printed(capsys, "plan", "tiny", "--json"))
    assert [(r["arm"], r["purpose"], r["runs"], r["done"]) for r in whole["rows"]] == [
        ("pre", "report", 4, 4),
        ("post", "report", 4, 4),
    ]
    assert whole["seconds"] == whole["disk_bytes"] == 0
    table = json.loads(printed(capsys, "table", "tiny", "--format", "json"))
    built = {cell["arm"]: cell["parameters"] for cell in table["cells"]}
    assert {r["arm"]: r["parameters"] for r in whole["rows"]} == built
    more = json.loads(printed(capsys, "plan", "tiny", "seed=0,1,2,3,4", "--json"))
    assert [(r["runs"], r["done"]) for r in more["rows"]] == [(10, 4), (10, 4)]
    config = plan_sweep(["sweeps=tiny"]).cells[0].config
    tokens = 6 * 20 * 4 * 16
    assert [r["tokens"] for r in more["rows"]] == [tokens, tokens]
    assert more["rows"][0]["flops"] == tokens * flops_per_token(config.model)
    assert "measured on 8 runs of this sweep" in more["speed_from"]
    assert more["seconds"] > 0
    text = printed(capsys, "plan", "tiny", "seed=0,1,2,3,4")
    assert "12 of 20 runs are left" in text


def test_a_run_is_counted_once_and_those_that_wait_are_counted(here: Path, capsys: pytest.CaptureFixture[str]):
    twice = "{pre: {model.norm_placement: pre}, again: {model.norm_placement: pre}}"
    text = (here / "sweeps/tiny.yaml").read_text().replace(TINY_ARMS, twice)
    (here / "sweeps/twice.yaml").write_text(text)
    found = json.loads(printed(capsys, "status", "twice", "--json"))
    assert (found["counts"], [r["label"].split(",")[0] for r in found["runs"]]) == ({"done": 4}, ["pre"] * 4)
    tuned = text.replace("tune: {}", "tune: {optim.lr: [0.01, 0.02], seed: [7]}")
    (here / "sweeps/tuned.yaml").write_text(tuned)
    found = json.loads(printed(capsys, "status", "tuned", "--json"))
    assert (found["counts"], found["waiting"]) == ({"missing": 4}, 8)
    assert "8 waiting for tuning" in printed(capsys, "status", "tuned")


def test_status_names_runs_so_that_other_verbs_know_them(here: Path, capsys: pytest.CaptureFixture[str]):
    lines = printed(capsys, "status", "tiny").splitlines()
    (short,) = [line.split()[0] for line in lines if "pre,warmup_steps=0,seed=0" in line]
    assert run_of(here, "pre,warmup_steps=0,seed=0").startswith(short)
    assert printed(capsys, "why", short, short)


def test_own_sweeps_come_before_the_projects(here: Path, capsys: pytest.CaptureFixture[str]):
    (here / "sweeps/demo.yaml").write_text((here / "sweeps/tiny.yaml").read_text())
    assert plan_sweep(["sweeps=demo"]).arms == ["pre", "post"]
    found = json.loads(printed(capsys, "list", "--json"))
    assert found["demo"] == found["tiny"] == "Does placement | matter?"
    assert "norm_type" in found
    (here / "sweeps/broken.yaml").write_text("sweep: [")
    assert "not a sweep" in json.loads(printed(capsys, "list", "--json"))["broken"]


@pytest.mark.parametrize("width", [60, 80, 300])
def test_a_narrow_terminal_breaks_lines_and_loses_nothing(width: int, here: Path, monkeypatch: pytest.MonkeyPatch):
    """All signs of the table are there, in whatever line."""
    table = ablation_table(*plan_of("tiny"))
    shown = io.StringIO()
    monkeypatch.setattr(formats, "Console", functools.partial(Console, file=shown, force_terminal=True, width=width))
    formats.print_table(table)
    plain = re.sub(r"\x1b\[[0-9;]*m", "", shown.getvalue())
    assert "…" not in plain
    intervals = [f"[{c.ci_low:+.3f}," for c in table.cells if c.ci_low is not None]
    assert [text for text in intervals if text not in plain] == []
    assert max(map(len, plain.splitlines())) <= width


def test_a_terminal_without_a_sign_shows_another(here: Path):
    command = [sys.executable, "-m", "andrea_exp.cli", "table", "tiny"]
    ran = subprocess.run(command, cwd=here, capture_output=True, env={**os.environ, "PYTHONIOENCODING": "ascii"})
    assert (ran.returncode, ran.stderr) == (0, b"")
    assert b" ? " in ran.stdout  # the ± of a spread


def test_retry_says_that_nothing_failed(here: Path):
    assert "none of its runs has failed" in andrea("retry", "tiny", cwd=here).stdout


def test_plan_guesses_a_speed_where_nothing_ran_yet(
    here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    found = json.loads(printed(capsys, "plan", "norm_type", f"records={tmp_path / 'none'}", "--json"))
    assert "estimated" in found["speed_from"]
    assert 1e9 < found["flops_per_s"] < 1e13
    assert found["waiting"] == sum(r["runs"] for r in found["rows"] if r["purpose"] == "report")
    assert not (tmp_path / "none").exists()


def test_why_names_the_fields_in_which_two_runs_differ(here: Path, capsys: pytest.CaptureFixture[str]):
    one, other = run_of(here, "pre,warmup_steps=0,seed=0"), "post,warmup_steps=4,seed=0"
    found = json.loads(printed(capsys, "why", one, other, "--json"))
    differing = {name: tuple(values) for name, values in found["computes"].items()}
    assert (
        differing.items()
        >= {
            "model.norm_placement": ("pre", "post"),
            "model.final_norm": (True, False),
            "optim.warmup_steps": (0, 4),
        }.items()
    )
    assert "seed" not in differing
    assert "val/loss" in found["gave"]
    assert "model.norm_placement" in printed(capsys, "why", one[:12], other)
    same = json.loads(printed(capsys, "why", one, one, "--json"))
    assert same == {"computes": {}, "ran": {}, "gave": {}}


def test_a_forgotten_run_lies_in_the_trash_and_runs_anew(here: Path, capsys: pytest.CaptureFixture[str]):
    before, slug = summaries(here), "pre,warmup_steps=0,seed=0"
    run = run_of(here, slug)
    assert cli.main(["forget", slug]) == 2  # nobody is there to ask
    assert "--yes" in capsys.readouterr().err
    assert summaries(here) == before
    printed(capsys, "forget", slug, "--yes")
    (trashed,) = (here / "records/trash").iterdir()
    assert trashed.name.startswith(run)
    assert (trashed / "metrics.jsonl").exists()
    assert cli.main(["forget", slug, "--yes"]) == 2
    assert "no such run" in capsys.readouterr().err
    assert json.loads(printed(capsys, "status", "tiny", "--json"))["counts"] == {"done": 7, "missing": 1}
    assert "1 runs to do" in andrea("sweep", "tiny", cwd=here).stdout
    after = summaries(here)
    assert after.keys() == before.keys()
    assert {sig for sig in after if after[sig] != before[sig]} == {run}


@pytest.mark.parametrize("spoilt", ["missing", "broken", "stale"])
def test_the_index_of_runs_is_made_anew_where_it_is_missing_or_wrong(
    spoilt: str, here: Path, capsys: pytest.CaptureFixture[str]
):
    path = here / "records/index.json"
    fresh = printed(capsys, "status", "tiny", "--json")
    assert len(json.loads(path.read_text())) == 8
    run = run_of(here, "pre,warmup_steps=0,seed=0")
    if spoilt == "missing":
        path.unlink()
    elif spoilt == "broken":
        path.write_text('{"half')
    else:
        known = json.loads(path.read_text())
        known[run][1]["val/loss"] = 99.0
        known[run][0][0] += 1
        path.write_text(json.dumps(known))
    assert printed(capsys, "status", "tiny", "--json") == fresh
    assert json.loads(path.read_text())[run][1]["val/loss"] != 99.0
