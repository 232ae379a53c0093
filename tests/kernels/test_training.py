"""Whole runs with the kernels in place of the definitions: the same losses, and a record of what ran."""

import json
from pathlib import Path

import pytest
import torch
from oracle import DEVICE

from andrea_exp import data, ops
from andrea_exp.diagnostics import diagnose
from andrea_exp.model import GPT
from andrea_exp.record import open_run, read_metrics
from andrea_exp.run import train
from andrea_exp.sweep.plan import plan_sweep

SMALL = (
    *("model.d_model=16", "model.n_heads=2", "model.seq_len=16", "train.batch_size=2"),
    *("train.steps=20", "log.validate_every=20", "log.diagnose_every=20", "data.val_windows=4", "tensorboard=false"),
    f"train.device={DEVICE}",
)
# Together: every placement, every norm type, fused ops with and without scales, activations and gates.
MODELS = [
    ("pre", "layernorm", "gelu_tanh"),
    ("post", "rmsnorm", "relu2"),
    ("peri", "rmsnorm_1p", "swiglu"),
    ("reordered", "layernorm", "geglu_tanh"),
    ("deepnorm", "layernorm", "gelu"),
    ("layer_scaled", "rmsnorm", "reglu"),
    ("mix", "layernorm", "silu"),
]


def model_words(placement: str, norm: str, activation: str) -> tuple[str, ...]:
    words = (f"model.norm_placement={placement}", f"model.norm_type={norm}", f"model.activation={activation}")
    return (*words, f"model.n_layers={4 if placement == 'mix' else 2}")


def losses(impl: str, words: tuple[str, ...], corpus: Path, root: Path) -> tuple[list[float], dict[str, str]]:
    """Training losses of a recorded run, and what it says ran."""
    config = plan_sweep([*SMALL, *words, f"ops.impl={impl}", f"data.path={corpus}"]).cells[0].config
    prepared = data.prepare(config.data, root / "corpora", config.model.seq_len)
    folder = open_run(root, config, prepared.name)
    train(folder, prepared)
    recorded = json.loads((folder / "provenance.json").read_text())
    assert "triton" in recorded["versions"]
    ran = recorded["ops"]
    return [row["train/loss"] for row in read_metrics(folder) if "train/loss" in row], ran


@pytest.mark.parametrize(("placement", "norm", "activation"), MODELS)
def test_twenty_steps_give_the_definitions_losses(
    placement: str, norm: str, activation: str, corpus_path: Path, tmp_path: Path
) -> None:
    """Each step's float32 roundings, about 1e-7 of the loss, are carried on by AdamW: 20 steps, and a factor of 10."""
    words = model_words(placement, norm, activation)
    plain, ran = losses("reference", words, corpus_path, tmp_path)
    assert set(ran.values()) == {"reference"}
    fast, ran = losses("triton", words, corpus_path, tmp_path)
    assert ran[activation] == ran["add_norm"] == "triton"
    assert len(fast) == 20
    assert fast[-1] < fast[0] - 0.1
    torch.testing.assert_close(torch.tensor(fast), torch.tensor(plain), rtol=2e-5, atol=0)
    ops.use("reference")


def test_no_op_with_a_kernel_is_left_to_its_definition(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model's forward and backward pass under `triton` touches no definition but DyT's and the identity's."""
    ops.use("triton", DEVICE)

    def forbidden(*_: object, **__: object) -> None:
        raise AssertionError("a definition ran")

    for name in ops.NAMES:
        monkeypatch.setitem(ops.DEFINITIONS, name, forbidden)
    for function in ("layer_norm", "rms_norm", "gelu", "silu", "relu"):
        monkeypatch.setattr(torch.nn.functional, function, forbidden)
    for placement, norm, activation in MODELS:
        words = model_words(placement, norm, activation)
        config = plan_sweep([*SMALL, *words, "model.qk_norm=per_head", "model.embedding_norm=true"]).cells[0].config
        model, tokens = GPT(config.model).to(DEVICE), torch.zeros(1, 16, dtype=torch.long, device=DEVICE)
        model.loss(tokens, tokens).backward()
        assert all(p.grad is not None for p in model.parameters())
    monkeypatch.undo()
    ops.use("reference")


def test_diagnosis_is_the_same_under_both() -> None:
    """It runs the definitions, and leaves the choice as it was."""
    config = plan_sweep([*SMALL, "model.n_layers=2", "model.activation=relu"]).cells[0].config
    model, tokens = GPT(config.model).to(DEVICE), torch.arange(32, device=DEVICE).view(2, 16)
    plain = diagnose(model, tokens, tokens)
    chosen = ops.use("triton", DEVICE)
    assert diagnose(model, tokens, tokens) == plain
    assert any(name.startswith("activation/dead") for name in plain)
    assert ops._chosen["gelu"] is not ops.DEFINITIONS["gelu"]
    assert chosen["gelu"] == "triton"
    ops.use("reference")
