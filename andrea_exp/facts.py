"""Every countable statement of the two source texts, beside its exact value: computed from recipes, never typed in.

A: the lesson on ANDREA-120M's block. B: the one on Llama 3 8B's. A statement holds if the exact value, rounded as the
text rounds, is the stated one.
"""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

from andrea_exp import accounting
from andrea_exp.accounting import Decode
from andrea_exp.config import ModelConfig
from andrea_exp.sweep.plan import plan_sweep


@dataclass(frozen=True)
class Statement:
    """`stated` and `exact` are in `unit`; `within` is half of the last digit that the text gives."""

    row: str
    text: str
    stated: float
    within: float
    unit: str
    exact: Callable[[], float]
    remark: str = ""


@cache
def recipe(name: str) -> ModelConfig:
    """A recipe's resolved model at its published size."""
    return plan_sweep([f"recipe={name}"]).cells[0].config.model


@cache
def _parts(name: str) -> dict[str, int]:
    return accounting.parameters(recipe(name))


def _total(name: str) -> int:
    return sum(_parts(name).values())


def _trunk(name: str) -> int:
    return sum(_parts(name)[part] for part in ("attention", "mlp", "norms"))


def _mlp_matrices(name: str) -> int:
    return (3 if recipe(name).gated else 2) * recipe(name).d_model * recipe(name).d_ff


def _mlp_share(**decode: int) -> float:
    return 100 * accounting.shares(accounting.decode_bytes(recipe("llama3_8b"), Decode(**decode)))["mlp"]


def _ops64(name: str, *values: float) -> list[float]:
    """An op's definition at float64."""
    import torch

    from andrea_exp import ops

    return getattr(ops, name)(torch.tensor(values, dtype=torch.float64)).tolist()


def _tanh_form_error() -> float:
    grid = [i / 1000 for i in range(-8000, 8001)]
    return max(abs(a - b) for a, b in zip(_ops64("gelu", *grid), _ops64("gelu_tanh", *grid), strict=True))


def _least_gelu() -> float:
    return min(_ops64("gelu", *(i / 10000 for i in range(-20000, 1))))


def _share_of_ratios(wanted: float, *names: str) -> float:
    """Percent of recipes whose d_ff / d_model is `wanted`."""
    return 100 * sum(math.isclose(recipe(n).d_ff / recipe(n).d_model, wanted) for n in names) / len(names)


ANDREA, CARD, LLAMA = "andrea_120m", "andrea_120m_card", "llama3_8b"
M = 1e6
STATEMENTS = (
    Statement("A1", "two norms in each of 12 blocks and a final one: 25", 25, 0, "norms",
              lambda: accounting.norms(recipe(ANDREA))),
    Statement("A2", "the MLP is 3072 wide, four times the model", 3072, 0, "units", lambda: recipe(ANDREA).d_ff),
    Statement("A3", "each of the MLP's two matrices has about 2.36M", 2.36, 0.005, "M values",
              lambda: _mlp_matrices(ANDREA) / 2 / M),
    Statement("A4", "4.72M a block without biases", 4.72, 0.005, "M values", lambda: _mlp_matrices(ANDREA) / M),
    Statement("A5", "over 12 blocks 56.6M", 56.6, 0.05, "M values", lambda: 12 * _mlp_matrices(ANDREA) / M),
    Statement("A6", "MLPs are about half of all parameters", 50, 5, "%",
              lambda: 100 * 12 * _mlp_matrices(ANDREA) / _total(ANDREA), "47.2% only of a nominal 120M"),
    Statement("A8", "the blocks together have 85M", 85, 0.5, "M values", lambda: _trunk(ANDREA) / M),
    Statement("A9", "token embedding and head, tied: about 13M", 13, 0.5, "M values",
              lambda: _parts(ANDREA)["token embedding"] / M, "a tied table is stored once"),
    Statement("A11", "positions add nothing to the count", 0, 0, "M values", lambda: _parts(ANDREA)["positions"] / M),
    Statement("A13", "about 120M in all", 120, 5, "M values", lambda: _total(ANDREA) / M,
              "98.7M by the published card"),
    Statement("A14", "blocks are two thirds of the model", 66.7, 5, "%",
              lambda: 100 * _trunk(ANDREA) / _total(ANDREA), "86.1% by the published card"),
    Statement("A20", "the tanh form is GELU closely: within 0.0005", 0, 5e-4, "largest error", _tanh_form_error),
    Statement("A21", "GELU(0) is 0", 0, 0, "", lambda: _ops64("gelu", 0.0)[0]),
    Statement("A23", "large negatives give about 0: GELU(-5)", 0, 5e-6, "", lambda: _ops64("gelu", -5.0)[0],
              "the tanh form is 6 times off there, relatively"),
    Statement("A24", "small negatives pass a little: least value", -0.17, 0.005, "", _least_gelu),
    Statement("A28", "GPT, BERT, T5 and LLaMA all use a ratio of 4", 100, 0, "% of them",
              lambda: _share_of_ratios(4, "gpt1", "gpt2", "bert", "t5", "llama1_7b", "llama3_8b"),
              "LLaMA 2.69, Llama 3 3.5; T5's largest models 16 and 64"),
    Statement("A30", "PaLM and Chinchilla found 8/3", 100, 0, "% of them",
              lambda: _share_of_ratios(8 / 3, "palm_540b", "chinchilla_70b"),
              "Shazeer 2020; PaLM gates at 4, Chinchilla is ungated"),
    Statement("A31", "a gate at 8/3 costs less than no gate at 4: saved", 100, 99.5, "% of the MLP",
              lambda: 100 * (1 - 3 * 768 * 2048 / _mlp_matrices(ANDREA)), "the same matrices' sizes"),
    Statement("B1", "32 layers make 64 corrections", 64, 0, "corrections",
              lambda: accounting.corrections(recipe(LLAMA))),
    Statement("B2", "4096 to 14336 twice and back: 176M", 176, 0.5, "M values", lambda: _mlp_matrices(LLAMA) / M),
    Statement("B3", "attention has about 42M a layer", 42, 0.5, "M values",
              lambda: _parts(LLAMA)["attention"] / 32 / M),
    Statement("B5", "the MLP is 81% of a layer", 81, 0.5, "%", lambda: 100 * _parts(LLAMA)["mlp"] / _trunk(LLAMA)),
    Statement("B6", "5.64B of 8.03B are MLP: 70%", 70, 0.5, "%",
              lambda: 100 * _parts(LLAMA)["mlp"] / _total(LLAMA)),
    Statement("B8", "of what a decoded token reads, the MLP is 75%", 75, 0.5, "%", _mlp_share,
              "an embedding is read by the row"),
    Statement("B9", "(nothing on batch and context: the same 75% at 16 x 8192)", 75, 0.5, "%",
              lambda: _mlp_share(batch=16, context=8192), "the key/value cache takes 131,072 bytes a token"),
    Statement("B10", "SiLU of 2 is 1.76, so with an up of 1.5 the gate gives 2.64", 2.64, 0.005, "",
              lambda: _ops64("swiglu", 2.0, -2.0, 0.5, 1.5, 3.0, -1.0)[0], "the others: -0.72, -0.31"),
    Statement("B14", "add and norm, fused, take one pass over memory", 1, 0, "tensor passes",
              lambda: 5 * (1 - accounting.fused_add_norm(recipe(LLAMA))["share_saved"]),
              "5 apart: at most 1.25 times as fast"),
)  # fmt: skip


def check(statement: Statement) -> dict[str, Any]:
    """A statement with its exact value and whether it holds."""
    exact = float(statement.exact())
    told = {k: v for k, v in asdict(statement).items() if k not in ("exact", "within")}
    return {**told, "exact": exact, "holds": abs(exact - statement.stated) <= statement.within}


def check_all() -> list[dict[str, Any]]:
    return [check(statement) for statement in STATEMENTS]
