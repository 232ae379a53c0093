"""Whatever is asked for wrongly: exit code 2, one line that names the place and a way out, nothing left behind."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import TINY, make

from andrea_exp import cli, data

SPEC = """\
sweep:
  question: Does it matter?
  baseline: {baseline}
  compare: {compare}
  across: {across}
  tune: {tune}
  repeat: {{seed: [0, 1]}}
"""
GOOD = {
    "baseline": "pre",
    "compare": "{pre: {model.norm_placement: pre}, post: {model.norm_placement: post}}",
    "across": "{optim.warmup_steps: [0, 4]}",
    "tune": "{}",
}
HEAD = "# @package _global_\n"

# Sweep files with one mistake each.
SWEEPS = {
    "good": HEAD + SPEC.format(**GOOD),
    "no_baseline": HEAD + SPEC.format(**{**GOOD, "baseline": "prae"}),
    "two_roles": HEAD + SPEC.format(**{**GOOD, "across": "{model.norm_placement: [pre, post]}"}),
    "value_twice": HEAD + SPEC.format(**{**GOOD, "across": "{optim.warmup_steps: [4, 4]}"}),
    "equal_values": HEAD + SPEC.format(**{**GOOD, "across": "{optim.lr: [1, 1.0]}"}),
    "no_values": HEAD + SPEC.format(**{**GOOD, "across": "{optim.warmup_steps: []}"}),
    "no_arms": HEAD + SPEC.format(**{**GOOD, "compare": "{}"}),
    "unknown_arm_key": HEAD + SPEC.format(**{**GOOD, "compare": "{pre: {model.norm_placemnt: pre}}"}),
    "bad_arm_value": HEAD + SPEC.format(**{**GOOD, "compare": "{pre: {model.norm_placement: pots}}"}),
    "no_tuning_seeds": HEAD + SPEC.format(**{**GOOD, "tune": "{optim.lr: [0.1, 0.2]}"}),
    "shared_seeds": HEAD + SPEC.format(**{**GOOD, "tune": "{optim.lr: [0.1, 0.2], seed: [1, 2]}"}),
    "unknown_section": HEAD + "modle: {d_model: 32}\n" + SPEC.format(**GOOD),
    "unknown_role": HEAD + SPEC.format(**GOOD) + "  acros: {}\n",
    "key_twice": HEAD + "train: {steps: 3}\ntrain: {steps: 4}\n" + SPEC.format(**GOOD),
    "broken": HEAD + "sweep: {question: [\n",
    "tabs": HEAD + "sweep:\n\tquestion: x\n",
    "no_header": SPEC.format(**GOOD),
    "arms_as_list": HEAD + SPEC.format(**{**GOOD, "compare": "[pre, post]"}),
    "field_as_arm": HEAD + SPEC.format(**{**GOOD, "compare": "{model.norm_placement: [pre, post]}"}),
    "one_value": HEAD + SPEC.format(**{**GOOD, "across": "{optim.warmup_steps: 4}"}),
    "names_no_baseline": HEAD + SPEC.format(**GOOD).replace("  baseline: pre\n", ""),
    "no_role_given": HEAD + "sweep:\n  question: Does it matter?\n  baseline: pre\n",
}

# What is asked for, and the words that its one line must hold.
REFUSED = {
    # keys and values
    "train model.d_modl=48": ("model.d_modl", "model.d_model"),
    "train modle.d_model=48": ("modle", "model."),
    "train model.norm_placement=pots": ("model.norm_placement", "pots", "post"),
    "train model.activation=swigl": ("model.activation", "swiglu"),
    "train optim.schedule=linear": ("optim.schedule", "linear"),
    "train -m sweeps=glob(*)": ("sweeps=glob(*)", "one sweep", "norm_placement"),
    "train -m scale=glob(*)": ("scale=glob(*)", "cpu, demo, h200"),
    # how and where
    "train pool=slrum": ("pool=slrum", "slurm"),
    "train pool.partition=x": ("pool.partition=x", "pool.kind=local"),
    "train pool=slurm pool.warn_s=60 pool.time_min=1": ("pool.warn_s=60", "60 seconds"),
    "train pool=slurm pool.flags=long": ("pool.flags=long", "sbatch"),
    "train pool=ray pool.address=127.0.0.1:9 pool.gpus=-1": ("pool.gpus=-1",),
    "train pool.retries=-1": ("pool.retries=-1",),
    "train checkpoint.every_s=-1": ("checkpoint.every_s=-1",),
    "train checkpoint.keep=some": ("checkpoint.keep=some", "none"),
    # runs that are not there
    "why 0123 4567": ("0123", "no such run"),
    "forget 0123": ("0123", "no such run"),
    "forget 0123 seed=1": ("seed=1", "records=FOLDER"),
    "plan nowhere": ("sweeps=nowhere", "norm_type"),
    "retry nowhere": ("sweeps=nowhere", "norm_type"),
    "train train.device=gpu": ("train.device", "cpu"),
    "train train.steps=many": ("train.steps", "many"),
    "train seed=1.5": ("seed", "1.5"),
    "train seed=a": ("seed", "a"),
    "train seed=-1": ("seed", "-1"),
    "train seed=null": ("seed",),
    "train seed=true": ("seed", "bool"),
    "train train.steps=-1": ("train.steps=-1",),
    "train train.batch_size=0": ("train.batch_size=0",),
    "train train.accumulate=0": ("train.accumulate=0",),
    "train train.batch_size=4 train.accumulate=3": ("train.accumulate=3", "train.batch_size=4"),
    "train optim.lr=0": ("optim.lr",),
    "train optim.lr=nan": ("optim.lr",),
    "train optim.lr=1e400": ("optim.lr",),
    "train optim.lr=-1": ("optim.lr",),
    "train optim.eps=nan": ("optim.eps",),
    "train optim.weight_decay=nan": ("optim.weight_decay",),
    "train optim.clip=nan": ("optim.clip",),
    "train optim.clip=0": ("optim.clip",),
    "train optim.beta1=1": ("optim.beta1",),
    "train optim.warmup_steps=-1": ("optim.warmup_steps",),
    "train model.d_model=0": ("model.d_model=0",),
    "train model.n_layers=0": ("model.n_layers=0",),
    "train model.eps=0": ("model.eps",),
    "train model.vocab_size=100": ("model.vocab_size=100", "257"),
    "train data.val_fraction=1": ("data.val_fraction",),
    "train pool.threads=0": ("pool.threads=0",),
    "train pool.slots=0": ("pool.slots=0",),
    "train pool=cloud": ("pool=cloud", "local"),
    # sizes
    "train model.d_model=50": ("model.d_model=50", "model.n_heads=4", "5 heads"),
    "train model.d_model=12 model.position=rope": ("model.position=rope", "even"),
    "train model.d_model=16 model.expansion_ratio=0.22": ("model.expansion_ratio", "4", "1%"),
    "train model.expansion_ratio=abc": ("model.expansion_ratio=abc", "8/3"),
    "train model.expansion_ratio=8/0": ("model.expansion_ratio=8/0",),
    "train model.expansion_ratio=-4": ("model.expansion_ratio=-4",),
    # fields that mean nothing beside another choice
    "train model.norm_placement=none model.norm_type=rmsnorm": ("model.norm_type", "model.norm_placement=none"),
    "train model.rope_theta=1e4": ("model.rope_theta", "model.position"),
    "train optim.min_lr_ratio=0.1": ("optim.min_lr_ratio", "optim.schedule"),
    "train data.vocab_size=300": ("data.vocab_size", "data.tokenizer"),
    # devices
    "train train.precision=fp16-mixed train.device=cpu": ("train.precision=fp16-mixed", "GPU"),
    "train ops.impl=triton train.device=cpu": ("ops.impl=triton", "train.device=cpu", "reference"),
    "train ops.impl=cuda train.device=cpu": ("ops.impl=cuda", "train.device=cpu", "reference"),
    "train ops.impl=triton train.precision=64-true": ("ops.impl=triton", "float32", "reference"),
    "train ops.impl=trition": ("ops.impl", "triton"),
    # corpora
    "train data.path=nowhere": ("data.path=nowhere", "no such"),
    "train data.path=blank": ("data.path=blank", "no text"),
    "train data.path=folder": ("data.path=folder", ".txt"),
    "train data.path=latin1.txt": ("latin1.txt", "UTF-8", "0xe9"),
    "train data.corpus=files": ("data.corpus=files", "data.path"),
    "train data.corpus=sotu data.path=short.txt": ("data.path", "data.corpus=sotu"),
    # grammar
    "train seed=1 seed=2": ("seed", "twice"),
    "train +model.depth=3": ("+model.depth", "model."),
    "train ~model.bias": ("model.bias",),
    "train nonsense": ("nonsense",),
    "train model.d_model=[": ("model.d_model=[",),
    "train model.d_model=${nope}": ("nope",),
    "train optim.lr=${model}": ("optim.lr",),
    "train model.bias=${model.bias}": ("model.bias",),
    "train seed=0,1": ("seed=0,1",),
    "train -m seed=range(0,3) seed=1": ("seed", "twice"),
    "train -m optim.lr=interval(0,1)": ("optim.lr", "interval"),
    "train -m model.activation=relu,relu": ("model.activation", "twice"),
    "train -m seed=1,1": ("seed", "twice"),
    "train --cfg job model.d_model=50": ("model.d_model=50", "5 heads"),
    "train --cfg job model.norm_placement=pots": ("model.norm_placement", "post"),
    "train --nonsense": ("--nonsense",),
    # sweeps
    "train sweeps=goood": ("sweeps=goood", "good"),
    "sweep goood": ("sweeps=goood", "good"),
    "table goood": ("sweeps=goood", "good"),
    "status goood": ("sweeps=goood", "good"),
    "tensorboard goood": ("sweeps=goood", "good"),
    "table good": ("good", "no finished runs", "andrea-exp sweep good"),
    "tensorboard good": ("good", "no runs", "andrea-exp sweep good"),
    "table good model.d_model=50": ("model.d_model=50", "5 heads"),
    "status good model.d_modl=48": ("model.d_modl", "model.d_model"),
    "status good train.steps=-1": ("train.steps=-1",),
    "sweep good model.bias=true,false": ("model.bias", "no role", "optim.warmup_steps"),
    "sweep good model.norm_placement=pre": ("model.norm_placement", "sweep.compare"),
    "sweep good seed=1,1": ("seed", "twice"),
    "sweep good word": ("word",),
    "sweep no_baseline": ("no_baseline", "baseline=prae", "did you mean pre"),
    "sweep two_roles": ("two_roles", "model.norm_placement", "compare", "across"),
    "sweep value_twice": ("value_twice", "optim.warmup_steps", "twice"),
    "table equal_values": ("equal_values", "optim.lr", "twice"),
    "sweep no_values": ("no_values", "optim.warmup_steps"),
    "sweep no_arms": ("no_arms", "no arms"),
    "sweep unknown_arm_key": ("model.norm_placemnt", "model.norm_placement"),
    "sweep bad_arm_value": ("model.norm_placement", "pots", "post"),
    "sweep no_tuning_seeds": ("no_tuning_seeds", "tune.seed"),
    "sweep shared_seeds": ("shared_seeds", "seed"),
    "sweep unknown_section": ("modle", "model"),
    "sweep unknown_role": ("acros", "across"),
    "sweep key_twice": ("key_twice", "train"),
    "sweep broken": ("broken",),
    "sweep tabs": ("tabs",),
    "sweep no_header": ("@package _global_",),
    "sweep arms_as_list": ("a list where names", "{rms: {model.norm_type: rmsnorm}}"),
    "sweep field_as_arm": ("sweep.compare.model.norm_placement", "fields and their values"),
    "sweep one_value": ("sweep.across.optim.warmup_steps", "[1, 2]"),
    "sweep names_no_baseline": ("sweep.baseline", "missing"),
    "sweep no_role_given": ("sweep.compare", "missing"),
    "train lr=3": ("lr", "did you mean optim.lr?"),
    "train sweep=good": ("sweep", "sweeps=NAME"),
    "trace gpt2 word --figure nowhere/x.png": ("--figure", "no folder nowhere"),
    "describe gpt2 --figure x.foo": ("--figure", ".svg"),
    "unpack good": ("good", "runs.parquet"),
    "sweep good sweep.baseline=prae": ("baseline=prae", "did you mean pre"),
    "sweep good sweep.compare=3": ("sweep.compare",),
    "sweep good sweep.compare.pre=3": ("sweep.compare.pre",),
    "sweep good sweep.across={optim.warmup_steps:3}": ("sweep.across",),
    "sweep good sweep.repeat=[0]": ("sweep.repeat",),
    "sweep good sweep.repeat.seed=[a]": ("seed", "a"),
    "train sweep.baseline=pre": ("sweep.baseline", "sweeps=NAME"),
    # verbs
    "nonsense": ("nonsense", "sweep"),
    "swep good": ("swep", "sweep"),
    "": ("VERB",),
    "table": ("name",),
    "sweep": ("name",),
    "table good --format xml": ("--format", "xml", "csv"),
    "table good --nonsense": ("--nonsense",),
    "tensorboard good --port many": ("--port", "many"),
    "bench nonsense": ("nonsense", "train"),
    "bench ops --grid huge": ("huge", "device"),
    "bench ops --out afile": ("afile", "folder"),
    "bench ops --out afile/below": ("afile", "folder"),
    "bench ops --budget-s -1": ("--budget-s", "above 0"),
    "bench ops --impl refrence": ("refrence", "reference"),
    "bench ops --figure nowhere.json": ("nowhere.json", "ops.json"),
}


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with sweep files and texts of every unusable kind."""
    (tmp_path / "sweeps").mkdir()
    for name, text in SWEEPS.items():
        (tmp_path / f"sweeps/{name}.yaml").write_text(text)
    (tmp_path / "folder").mkdir()
    (tmp_path / "blank").mkdir()
    (tmp_path / "blank/empty.txt").write_text("")
    (tmp_path / "blank/spaces.md").write_text(" \n\n")
    (tmp_path / "latin1.txt").write_bytes("caf\xe9\n".encode("latin-1") * 200)
    (tmp_path / "short.txt").write_text("too short\n")
    (tmp_path / "long.txt").write_text("a line of text that repeats\n" * 400)
    (tmp_path / "afile").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["andrea-exp"])
    return tmp_path


def refusal(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The one line with which a command is refused, called in this process."""
    try:
        code = cli.main(words)
    except SystemExit as end:
        code = end.code
    return only_line(code, *capsys.readouterr())


def only_line(code: object, out: str, err: str) -> str:
    assert code == 2, f"exit code {code}\n{out}{err}"
    assert "Traceback" not in out + err
    lines = err.strip().splitlines()
    assert len(lines) == 1, err
    return lines[0]


@pytest.mark.parametrize("asked", REFUSED, ids=lambda asked: asked or "no words")
def test_a_wrong_request_is_refused_in_one_line(asked: str, place: Path, capsys: pytest.CaptureFixture[str]):
    before = sorted(p.name for p in place.iterdir())
    line = refusal(asked.split(" ") if asked else [], capsys)
    assert [w for w in REFUSED[asked] if w not in line] == [], line
    assert sorted(p.name for p in place.iterdir()) == before


def tiny(*words: str) -> list[str]:
    """A tiny run's words, changed by others."""
    given = {w.split("=")[0] for w in words}
    return ["train", *(t for t in TINY if t.split("=")[0] not in given), *words]


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
@pytest.mark.parametrize("words", ["train.device=cuda", "train.device=auto train.precision=fp16-mixed"])
def test_a_gpu_that_is_not_there_is_never_replaced(words: str, place: Path, capsys: pytest.CaptureFixture[str]):
    line = refusal(tiny("data.path=long.txt", *words.split()), capsys)
    assert "train.device" in line
    assert "GPU" in line
    assert not (place / "records").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
@pytest.mark.parametrize("impl", ["triton", "cuda"])
def test_kernels_that_cannot_run_are_never_replaced(impl: str, place: Path, capsys: pytest.CaptureFixture[str]):
    line = refusal(tiny("data.path=long.txt", "train.device=auto", f"ops.impl={impl}"), capsys)
    assert f"ops.impl={impl} needs a CUDA GPU" in line
    assert not (place / "records").exists()


def test_a_corpus_shorter_than_a_window_is_refused(place: Path, capsys: pytest.CaptureFixture[str]):
    line = refusal(tiny("data.path=short.txt"), capsys)
    assert "model.seq_len=16" in line
    assert not (place / "records").exists()


def test_a_spoilt_prepared_corpus_is_named(place: Path, capsys: pytest.CaptureFixture[str]):
    config = make("data.path=long.txt")
    folder = data.prepare(config.data, place / "records/corpora", config.model.seq_len)
    tokens = bytearray((folder / "train.bin").read_bytes())
    tokens[100] ^= 1
    (folder / "train.bin").write_bytes(tokens)
    line = refusal(tiny("data.path=long.txt"), capsys)
    assert folder.name in line
    assert "train.bin" in line
    assert not list(place.glob("records/runs/*"))


@pytest.mark.parametrize("verb", ["train", "sweep"])
def test_records_below_a_file_are_refused(verb: str, place: Path, capsys: pytest.CaptureFixture[str]):
    words = tiny("data.path=long.txt", "records=afile/x")[1:]
    assert "afile/x" in refusal([verb, *(["good"] if verb == "sweep" else []), *words], capsys)


@pytest.mark.parametrize("verb", ["table", "tensorboard"])
def test_looking_for_records_below_a_file_is_refused(verb: str, place: Path, capsys: pytest.CaptureFixture[str]):
    assert "afile/x" in refusal([verb, "good", "data.path=long.txt", "records=afile/x"], capsys)


def test_below_a_file_every_run_is_missing(place: Path, capsys: pytest.CaptureFixture[str]):
    assert cli.main(["status", "good", "--json", "data.path=long.txt", "records=afile/x"]) == 0
    assert json.loads(capsys.readouterr().out)["counts"] == {"missing": 8}


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_records_without_write_permission_are_refused(place: Path, capsys: pytest.CaptureFixture[str]):
    (place / "closed").mkdir(mode=0o555)
    assert "records=closed" in refusal(tiny("data.path=long.txt", "records=closed"), capsys)


@pytest.mark.parametrize("words", ["train model.norm_placement=pots", "sweep goood", "table good", "train word"])
def test_a_real_process_refuses_as_the_function_does(words: str, place: Path, capsys: pytest.CaptureFixture[str]):
    command = [sys.executable, "-m", "andrea_exp.cli", *words.split()]
    done = subprocess.run(command, cwd=place, capture_output=True, text=True, timeout=120)
    line = only_line(done.returncode, done.stdout, done.stderr)
    assert line == refusal(words.split(), capsys)
    assert not (place / "records").exists()
