"""Real tiny runs: their numbers against a loop written by hand, their diagnostics against naive formulas, faults."""

import dataclasses
import itertools
import math
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import make
from torch import Tensor

from andrea_exp import data, record
from andrea_exp.config import NormPlacement, OptimConfig, RunConfig
from andrea_exp.data.batches import train_batch, val_batch
from andrea_exp.diagnostics import _stream_metrics, block_name, diagnose
from andrea_exp.lit import LitGPT
from andrea_exp.model import GPT
from andrea_exp.run import spikes, summarise, train

torch.set_num_threads(1)
EXACT = "train.precision=64-true"
# What a run may measure otherwise when it is run again.
MEASURED = {"time", "tokens_per_s", "memory_mb"}


@dataclass
class Run:
    config: RunConfig
    summary: dict[str, Any]
    rows: list[dict[str, Any]]

    def column(self, name: str) -> list[float | None]:
        return [row[name] for row in self.rows if name in row]

    def numbers(self) -> list[dict[str, Any]]:
        """All rows without speed and memory."""
        return [{k: v for k, v in row.items() if k not in MEASURED} for row in self.rows]


@pytest.fixture(autouse=True)
def _default_dtype() -> Iterator[None]:
    """A run with precision 64-true sets the default dtype of its process."""
    yield
    torch.set_default_dtype(torch.float32)


@pytest.fixture
def run(tmp_path: Path, corpus_path: Path, prepared: data.Prepared) -> Callable[..., Run]:
    """Trains one run in this process: `run("optim.lr=1e-2")`."""
    number = itertools.count()

    def go(*overrides: str) -> Run:
        torch.set_default_dtype(torch.float32)
        config = make(f"data.path={corpus_path}", "tensorboard=false", *overrides)
        folder = record.open_run(tmp_path / str(next(number)), config, prepared.folder.name)
        summary = train(folder, prepared.folder)
        return Run(config, summary, record.read_metrics(folder))

    return go


# The oracle: a loop by hand


@dataclass
class Hand:
    losses: list[float] = field(default_factory=list)
    totals: list[float] = field(default_factory=list)  # gradient norms before clipping
    coefs: list[float] = field(default_factory=list)
    val: list[float] = field(default_factory=list)  # before the first step, and after each
    moved: list[float] = field(default_factory=list)  # |change| / |weights|, over all weights


class HandAdamW:
    """Loshchilov & Hutter 2019, algorithm 2: bias-corrected moments; decay apart, on matrices alone."""

    def __init__(self, parameters: list[Tensor], optim: OptimConfig) -> None:
        self.parameters, self.optim, self.t = parameters, optim, 0
        self.first, self.second = ([torch.zeros_like(p) for p in parameters] for _ in range(2))

    @torch.no_grad()
    def step(self, lr: float) -> None:
        o = self.optim
        self.t += 1
        for p, m, v in zip(self.parameters, self.first, self.second, strict=True):
            m.copy_(o.beta1 * m + (1 - o.beta1) * p.grad)
            v.copy_(o.beta2 * v + (1 - o.beta2) * p.grad**2)
            direction = (m / (1 - o.beta1**self.t)) / ((v / (1 - o.beta2**self.t)).sqrt() + o.eps)
            decay = o.weight_decay if p.ndim >= 2 else 0.0
            p.copy_(p - lr * direction - lr * decay * p)


def cross_entropy(model: GPT, ids: tuple[Any, Any]) -> Tensor:
    """(B, T) losses in nats of each target."""
    tokens, targets = (torch.from_numpy(a) for a in ids)
    return -model(tokens).log_softmax(-1).gather(-1, targets[..., None])[..., 0]


def flat(parameters: list[Tensor]) -> Tensor:
    return torch.cat([p.detach().flatten() for p in parameters])


def by_hand(config: RunConfig, prepared: data.Prepared, lrs: list[float]) -> Hand:
    """A run in float64 with a given learning rate at each step."""
    torch.set_default_dtype(torch.float64)
    t, T, hand = config.train, config.model.seq_len, Hand()
    model = GPT(config.model, config.seed)
    parameters = list(model.parameters())
    optimizer = HandAdamW(parameters, config.optim)
    windows = val_batch(prepared, config.data.val_windows, T)
    hand.val.append(cross_entropy(model, windows).mean().item())
    for step, lr in enumerate(lrs):
        model.zero_grad()
        batches = [
            train_batch(prepared, config.seed, step, m, t.batch_size // t.accumulate, T) for m in range(t.accumulate)
        ]
        loss = torch.stack([cross_entropy(model, ids).mean() for ids in batches]).mean()
        loss.backward()
        limit = math.inf if config.optim.clip is None else config.optim.clip
        hand.losses.append(loss.item())
        hand.totals.append(torch.nn.utils.clip_grad_norm_(parameters, limit).item())
        hand.coefs.append(min(1.0, limit / (hand.totals[-1] + 1e-6)))
        before = flat(parameters)
        optimizer.step(lr)
        after = flat(parameters)
        hand.moved.append(((after - before).norm() / after.norm()).item())
        hand.val.append(cross_entropy(model, windows).mean().item())
    return hand


VARIANTS = {
    "plain": ("optim.clip=null",),
    "clipped": ("optim.clip=0.5", "optim.weight_decay=0.3"),
    "accumulated": ("train.accumulate=2", "optim.clip=1"),
    "post": ("model.norm_placement=post", "model.norm_type=rmsnorm", "model.tied_head=true", "seed=3"),
    "rope": ("model.position=rope", "model.activation=swiglu", "model.bias=false", "optim.beta1=0.5", "optim.eps=1e-4"),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_run_equals_a_loop_by_hand(run: Callable[..., Run], prepared: data.Prepared, variant: str) -> None:
    """To the precision of float64, over 6 steps: losses, norms, clipping, updates, validation."""
    schedule = ("optim.lr=1e-2", "optim.warmup_steps=3", "log.validate_every=1", "log.diagnose_every=1")
    found = run(EXACT, *schedule, *VARIANTS[variant])
    hand = by_hand(found.config, prepared, [1e-2 * share for share in (1 / 3, 2 / 3, 1, 1, 1, 1)])
    assert found.column("train/loss") == pytest.approx(hand.losses, rel=1e-12)
    assert found.column("val/loss") == pytest.approx(hand.val, rel=1e-12)
    assert found.column("grad_norm/total")[1:] == pytest.approx(hand.totals, rel=1e-6)
    assert found.column("update/ratio/total") == pytest.approx(hand.moved, rel=1e-6)
    if found.config.optim.clip is not None:
        assert found.column("clip/coef") == pytest.approx(hand.coefs, rel=1e-6)


GOLDEN = {
    "model.norm_placement=pre": [5.585111859, 5.343882773, 5.214853892, 5.164690308, 5.088681966, 4.995534547],
    "model.norm_placement=post": [5.621610646, 5.391451108, 5.301018795, 5.151563494, 5.078626501, 5.001089898],
    "model.norm_placement=deepnorm": [5.577743607, 5.410915431, 5.373416332, 5.239148453, 5.10754523, 5.06820049],
    "model.norm_placement=none": [5.550094652, 5.532337848, 5.517192875, 5.485366468, 5.442876162, 5.38006755],
}


@pytest.mark.parametrize("arm", GOLDEN)
def test_golden_losses(run: Callable[..., Run], arm: str) -> None:
    """The numbers of this version. Where a change of the code changes them on purpose, NUMERICS_VERSION must rise."""
    assert run(EXACT, arm).column("train/loss") == pytest.approx(GOLDEN[arm], rel=1e-6)


def test_the_same_run_twice_gives_the_same_bits(run: Callable[..., Run]) -> None:
    overrides = ("train.accumulate=2", "model.activation=swiglu", "log.diagnose_every=2")
    one, again = run(*overrides), run(*overrides)
    assert one.numbers() == again.numbers()
    timed = {"times", *MEASURED}
    assert {k: v for k, v in one.summary.items() if k not in timed} == {
        k: v for k, v in again.summary.items() if k not in timed
    }


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_looking_changes_no_bit_of_training(run: Callable[..., Run], precision: str) -> None:
    """Whatever is diagnosed, validated and logged, and however often."""
    base = (f"train.precision={precision}", "train.steps=6")
    often = run(*base, "log.diagnose_every=1", "log.validate_every=1")
    never = run(*base, "log.diagnose_every=0", "log.validate_every=6")
    for name in ("train/loss", "clip/coef"):
        assert often.column(name) == never.column(name)
    assert often.rows[-1]["val/loss"] == never.rows[-1]["val/loss"]


def test_diagnosing_every_0_steps_is_never(run: Callable[..., Run]) -> None:
    rows = run("log.diagnose_every=0").rows
    assert not any(name.startswith(("stream/", "branch/", "update/")) for row in rows for name in row)


def test_bf16_mixed_runs_on_a_cpu_near_float32(run: Callable[..., Run]) -> None:
    """bf16 keeps 8 bits: a loss near 5 moves in the third digit, and does move."""
    mixed, single = (run(f"train.precision={p}").column("train/loss") for p in ("bf16-mixed", "32-true"))
    assert mixed == pytest.approx(single, abs=0.02)
    assert mixed != single


# Optimizer

# A field -> overrides that make it live, and one that changes it.
CHANGES: dict[str, tuple[tuple[str, ...], str]] = {
    "lr": ((), "optim.lr=2e-3"),
    "beta1": ((), "optim.beta1=0.8"),
    "beta2": ((), "optim.beta2=0.9"),
    "eps": ((), "optim.eps=1e-6"),
    "weight_decay": ((), "optim.weight_decay=0"),
    "clip": ((), "optim.clip=0.5"),
    "schedule": ((), "optim.schedule=cosine"),
    "warmup_steps": ((), "optim.warmup_steps=2"),
    "min_lr_ratio": (("optim.schedule=cosine",), "optim.min_lr_ratio=0.5"),
    "decay_fraction": (("optim.schedule=wsd",), "optim.decay_fraction=0.9"),
}


@pytest.mark.parametrize("name", [f.name for f in dataclasses.fields(OptimConfig)])
def test_every_field_of_the_optimizer_changes_a_run(run: Callable[..., Run], name: str) -> None:
    live, change = CHANGES[name]
    without, changed = (run("log.diagnose_every=0", *live, *more) for more in ((), (change,)))
    assert without.rows[-1]["val/loss"] != changed.rows[-1]["val/loss"]


RAMP = [0.25, 0.5, 0.75, 1.0]
ROOT = math.sqrt(3) / 2
TRACES = {
    "constant": (("optim.schedule=constant",), [*RAMP, 1, 1, 1, 1, 1, 1]),
    # From 1 to 0.1 as 0.1 + 0.9 (1 + cos(pi k/6)) / 2 with k = 0..5: the least value would be that of step 11.
    "cosine": (
        ("optim.schedule=cosine",),
        [*RAMP, 1, 0.55 + 0.45 * ROOT, 0.55 + 0.225, 0.55, 0.55 - 0.225, 0.55 - 0.45 * ROOT],
    ),
    # The last 4 of 10 steps fall, by an eighth of the way to 0.5 each.
    "wsd": (
        ("optim.schedule=wsd", "optim.decay_fraction=0.4", "optim.min_lr_ratio=0.5"),
        [*RAMP, 1, 1, 1, 0.875, 0.75, 0.625],
    ),
}


@pytest.mark.parametrize("schedule", TRACES)
def test_learning_rate_of_every_step(run: Callable[..., Run], schedule: str) -> None:
    """The first step takes a quarter of the peak, the fourth all of it; micro-steps don't count."""
    overrides, shares = TRACES[schedule]
    steps = ("train.steps=10", "train.accumulate=2", "optim.warmup_steps=4", "optim.lr=1e-2")
    found = run(*steps, *overrides, "log.diagnose_every=0")
    assert found.column("lr") == pytest.approx([1e-2 * share for share in shares])


# What a row holds


@pytest.mark.parametrize(
    ("every", "validate", "diagnose_every", "steps"),
    [
        (4, 10, 0, [0, 4, 8, 10]),
        (4, 3, 0, [0, 3, 4, 6, 8, 9, 10]),
        (100, 100, 0, [0, 10]),
        (100, 100, 4, [0, 4, 8, 10]),
        (1, 100, 0, list(range(11))),
    ],
)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_which_steps_are_logged(
    run: Callable[..., Run], every: int, validate: int, diagnose_every: int, steps: list[int], accumulate: int
) -> None:
    logs = (f"log.every={every}", f"log.validate_every={validate}", f"log.diagnose_every={diagnose_every}")
    found = run("train.steps=10", f"train.accumulate={accumulate}", *logs)
    assert found.column("step") == steps
    assert found.column("tokens") == [step * 4 * 16 for step in steps]
    validated = [row["step"] for row in found.rows if "val/loss" in row]
    assert validated == [s for s in steps if s % validate == 0 or s == 10]
    diagnosed = [row["step"] for row in found.rows if "stream/rms/final" in row]
    assert not diagnose_every or diagnosed == [0, 4, 8, 10]


def test_a_row_means_the_losses_since_the_last(run: Callable[..., Run]) -> None:
    each = run("train.steps=10", "log.diagnose_every=0").column("train/loss")
    sparse = run("train.steps=10", "log.diagnose_every=0", "log.every=4", "log.validate_every=10")
    expected = [statistics.fmean(each[a:b]) for a, b in ((0, 4), (4, 8), (8, 10))]
    assert sparse.column("train/loss") == pytest.approx(expected, rel=1e-12)


def test_validation_by_hand(run: Callable[..., Run], prepared: data.Prepared) -> None:
    """Of the untrained model: mean, standard error over windows, bits over the bytes that targets stand for."""
    found = run(EXACT, "data.val_windows=200")
    windows = val_batch(prepared, 200, 16)
    losses = cross_entropy(GPT(found.config.model, found.config.seed), windows).detach()
    means = losses.mean(1).tolist()
    size = int((windows[1] != 256).sum())
    assert size < windows[1].size  # the end of a document is a token, but no byte
    row = found.rows[0]
    assert row["val/loss"] == pytest.approx(statistics.fmean(means), rel=1e-12)
    assert row["val/loss_stderr"] == pytest.approx(statistics.stdev(means) / math.sqrt(len(means)), rel=1e-9)
    assert row["val/bits_per_byte"] == pytest.approx(losses.sum().item() / math.log(2) / size, rel=1e-12)
    assert found.summary["val/loss_start"] == row["val/loss"]


def parts(names: list[str]) -> list[str]:
    return [n for n in names if n.startswith("grad_norm/") and n != "grad_norm/total"]


def test_squares_of_the_groups_add_up_to_the_total(run: Callable[..., Run]) -> None:
    for row in run().rows:
        assert row["grad_norm/total"] ** 2 == pytest.approx(sum(row[n] ** 2 for n in parts(list(row))), rel=1e-5)


@pytest.mark.parametrize(("clip", "touches"), [("0.1", True), ("1e6", False)])
def test_clip_coefficient(run: Callable[..., Run], clip: str, touches: bool) -> None:
    """Of the row's own step, whose norm stands beside it."""
    found = run(f"optim.clip={clip}", "log.diagnose_every=0", "log.every=3")
    for row in found.rows[1:]:
        expected = min(1.0, float(clip) / (row["grad_norm/total"] + 1e-6))
        assert row["clip/coef"] == pytest.approx(expected, rel=1e-6)
        assert row["clip/fraction"] == touches
    assert found.summary["clip/fraction"] == touches


def test_without_clipping_nothing_is_said_of_it(run: Callable[..., Run]) -> None:
    found = run("optim.clip=null")
    assert not any(name.startswith("clip/") for row in found.rows for name in row)
    assert found.summary["clip/fraction"] is None


def test_fraction_of_clipped_steps(run: Callable[..., Run]) -> None:
    """Over the steps since the last row, of which a limit between their norms touches some."""
    base = ("optim.lr=1e-9", "log.diagnose_every=0", "log.validate_every=6")
    norms = [row["grad_norm/total"] for row in run("optim.clip=1e6", *base).rows[1:]]
    found = run(f"optim.clip={statistics.median(norms)}", "log.every=6", *base)
    assert found.column("clip/fraction") == [0.5]


# Diagnostics against naive formulas


def model_of(*overrides: str) -> GPT:
    """A float64 model a little away from its init, so that biases and gains count."""
    model = GPT(make("model.activation=relu", *overrides).model).double()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in model.parameters():
            p += 0.1 * torch.randn(p.shape, generator=generator, dtype=torch.float64)
    return model


def text(seed: int = 0) -> tuple[Tensor, Tensor]:
    ids = torch.randint(257, (2, 9), generator=torch.Generator().manual_seed(seed))
    return ids[:, :-1], ids[:, 1:]


@dataclass
class Trace:
    """One forward pass by hand: what enters each sublayer, what it reads and adds, the last stream, the features."""

    streams: list[Tensor]
    reads: list[Tensor]
    deltas: list[Tensor]
    last: Tensor
    features: Tensor


def trace(model: GPT, placement: NormPlacement, x: Tensor, first: int = 0) -> Trace:
    """From the stream that enters sublayer number `first`: attention and MLP of all blocks count from 0."""
    sublayers = [part for block in model.trunk.blocks for part in (block.attn, block.mlp)]
    junctions = [j for block in model.trunk.blocks for j in (block.attn_junction, block.mlp_junction)]
    closing = [j.read_norm if placement is NormPlacement.pre else j.stream_norm for j in junctions]
    streams, reads, deltas = [], [], []
    for i in range(first, len(sublayers)):
        before = [model.trunk.opening, *closing][i]  # under pre, a junction's norm serves the next sublayer
        streams.append(x)
        reads.append(before(x) if placement is NormPlacement.pre else x)
        deltas.append(sublayers[i](reads[-1]))
        x = x + deltas[-1] if placement is NormPlacement.pre else closing[i](x + deltas[-1])
    return Trace(streams, reads, deltas, x, closing[-1](x) if placement is NormPlacement.pre else x)


def embedded(model: GPT, tokens: Tensor) -> Tensor:
    return model.token_embedding(tokens) + model.position_embedding.weight[: tokens.shape[1]]


def loss_from(model: GPT, placement: NormPlacement, x: Tensor, first: int, targets: Tensor) -> Tensor:
    logits = model.head(trace(model, placement, x, first).features)
    return -logits.log_softmax(-1).gather(-1, targets[..., None]).mean()


def rms(x: Tensor) -> float:
    return math.sqrt(statistics.fmean(v * v for v in x.flatten().tolist()))


def mean_cosine(x: Tensor) -> float:
    """Over every pair of different tokens of a text, one by one."""
    pairs = [(a, b) for rows in x for a, b in itertools.permutations(rows, 2)]
    return statistics.fmean(float(a @ b / (a.norm() * b.norm())) for a, b in pairs)


def kurtosis(x: Tensor) -> float:
    """Fourth moment over the squared second of each token, averaged."""
    rows = x.flatten(0, -2).tolist()
    return statistics.fmean(
        statistics.fmean(v**4 for v in row) / statistics.fmean(v**2 for v in row) ** 2 for row in rows
    )


both_placements = pytest.mark.parametrize("placement", [NormPlacement.pre, NormPlacement.post], ids=lambda p: p.name)


@both_placements
def test_stream_and_branch_metrics(placement: NormPlacement) -> None:
    model, (tokens, targets) = model_of(f"model.norm_placement={placement.name}"), text()
    found = diagnose(model, tokens, targets)
    with torch.no_grad():
        expected = trace(model, placement, embedded(model, tokens))
    for i, (stream, delta) in enumerate(zip(expected.streams, expected.deltas, strict=True)):
        name, branch = f"block_{i // 2:02d}", ("attn", "mlp")[i % 2]
        assert found[f"branch/ratio/{name}/{branch}"] == pytest.approx(rms(delta) / rms(stream), rel=1e-5)
        if branch == "attn":
            assert found[f"stream/rms/{name}"] == pytest.approx(rms(stream), rel=1e-5)
            assert found[f"stream/token_cosine/{name}"] == pytest.approx(mean_cosine(stream), abs=1e-5)
            assert found[f"stream/kurtosis/{name}"] == pytest.approx(kurtosis(stream), rel=1e-5)
            assert found[f"stream/max_abs/{name}"] == pytest.approx(stream.abs().max().item(), rel=1e-5)
    assert found["stream/rms/final"] == pytest.approx(rms(expected.last), rel=1e-5)


@pytest.mark.parametrize("scale", [1e-30, 1e-13, 1.0, 1e19, 1e30])
def test_streams_far_from_1_are_measured_like_others(scale: float) -> None:
    """Squares of float32 overflow from 1e19 on, and vanish below 1e-23."""
    torch.manual_seed(0)
    each = torch.randn(2, 5, 8) * torch.tensor([1.0, 1e-6, 3.0, 1e3, 1e-3])[:, None]  # tokens of unlike sizes
    stream, gradient = each * scale, 7 * each.flip(1) * scale
    found = _stream_metrics("x", stream, gradient)
    exact = stream.double()
    assert found["stream/rms/x"] == pytest.approx(rms(exact), rel=1e-5)
    assert found["stream/grad_norm/x"] == pytest.approx(gradient.double().norm().item(), rel=1e-5)
    assert found["stream/token_cosine/x"] == pytest.approx(mean_cosine(exact), abs=1e-5)
    assert found["stream/kurtosis/x"] == pytest.approx(kurtosis(exact), rel=1e-5)
    assert found["stream/max_abs/x"] == pytest.approx(exact.abs().max().item(), rel=1e-5)
    if scale == 1:  # to the last bit what the plain formulas give
        assert found["stream/rms/x"] == stream.square().mean().sqrt().item()
        assert found["stream/grad_norm/x"] == gradient.norm().item()
        assert found["stream/kurtosis/x"] == (stream.pow(4).mean(-1) / stream.square().mean(-1) ** 2).mean().item()


def test_a_token_of_zeros_is_alike_to_none_and_what_is_not_finite_stays_so() -> None:
    stream = torch.ones(1, 3, 4)
    stream[0, 1] = 0
    assert _stream_metrics("x", stream, stream)["stream/token_cosine/x"] == pytest.approx(1 / 3)
    zeros = _stream_metrics("x", torch.zeros(1, 3, 4), torch.zeros(1, 3, 4))
    assert (zeros["stream/rms/x"], zeros["stream/grad_norm/x"], zeros["stream/token_cosine/x"]) == (0, 0, 0)
    for odd in (math.nan, math.inf):
        stream[0, 2, 0] = odd
        assert not math.isfinite(_stream_metrics("x", stream, stream)["stream/rms/x"])


@both_placements
@pytest.mark.parametrize("block", [0, 1])
def test_stream_gradient(placement: NormPlacement, block: int) -> None:
    """Along its own direction a gradient's size is the slope of the loss: no autograd of ours in the oracle."""
    model, (tokens, targets) = model_of(f"model.norm_placement={placement.name}"), text()
    found = diagnose(model, tokens, targets)[f"stream/grad_norm/block_{block:02d}"]
    with torch.no_grad():
        stream = trace(model, placement, embedded(model, tokens)).streams[2 * block]
    stream.requires_grad_()
    (gradient,) = torch.autograd.grad(loss_from(model, placement, stream, 2 * block, targets), stream)
    step = 1e-5 * gradient / gradient.norm()
    with torch.no_grad():
        up, down = (loss_from(model, placement, stream + s, 2 * block, targets).item() for s in (step, -step))
    assert found == pytest.approx((up - down) / 2e-5, rel=1e-4)


@both_placements
def test_token_cosine_of_collapsed_tokens_is_1(placement: NormPlacement) -> None:
    model, (tokens, targets) = model_of(f"model.norm_placement={placement.name}"), text()
    with torch.no_grad():
        model.position_embedding.weight.zero_()
    found = diagnose(model, torch.full_like(tokens, 7), targets)
    assert found["stream/token_cosine/block_01"] == pytest.approx(1, abs=1e-6)


def entropy_by_hand(attention: torch.nn.Module, read: Tensor) -> tuple[float, float]:
    """Entropy over its largest value, averaged over tokens with a choice, and the largest score in size."""
    D, shares, largest = read.shape[-1], [], 0.0
    for sequence in attention.qkv_proj(read).detach():
        for head, t in itertools.product(range(2), range(len(sequence))):
            q, k = (sequence[:, D * i + 8 * head : D * i + 8 * head + 8] for i in (0, 1))
            scores = [float(q[t] @ k[s]) / math.sqrt(8) for s in range(t + 1)]
            largest = max(largest, *map(abs, scores))
            total = math.fsum(map(math.exp, scores))
            weights = [math.exp(score) / total for score in scores]
            if t:
                shares.append(-math.fsum(w * math.log(w) for w in weights) / math.log(t + 1))
    return statistics.fmean(shares), largest


@both_placements
def test_attention_metrics(placement: NormPlacement) -> None:
    model, (tokens, targets) = model_of(f"model.norm_placement={placement.name}"), text()
    found = diagnose(model, tokens, targets)
    reads = trace(model, placement, embedded(model, tokens)).reads[::2]
    for i, (block, read) in enumerate(zip(model.trunk.blocks, reads, strict=True)):
        entropy, largest = entropy_by_hand(block.attn, read)
        assert found[f"attention/entropy/block_{i:02d}"] == pytest.approx(entropy, rel=1e-5)
        assert found[f"attention/max_logit/block_{i:02d}"] == pytest.approx(largest, rel=1e-5)


@pytest.mark.parametrize(("scale", "entropy"), [(0.0, 1.0), (1e4, 0.0)])
def test_attention_entropy_reaches_from_0_to_1(scale: float, entropy: float) -> None:
    """Equal scores spread evenly, enormous ones choose a single token; in between lie all others."""
    model, (tokens, targets) = model_of(), text()
    assert 0 < diagnose(model, tokens, targets)["attention/entropy/block_00"] < 1
    with torch.no_grad():
        model.trunk.blocks[0].attn.qkv_proj.weight.mul_(scale)
        model.trunk.blocks[0].attn.qkv_proj.bias.mul_(scale)
    assert diagnose(model, tokens, targets)["attention/entropy/block_00"] == pytest.approx(entropy, abs=1e-2)


def test_dead_units_are_counted() -> None:
    """Three units whose bias keeps them at 0, and whichever these few tokens never wake."""
    model, (tokens, targets) = model_of(), text()
    before = diagnose(model, tokens, targets)["activation/dead/block_01"]
    mlp = model.trunk.blocks[1].mlp
    with torch.no_grad():
        reads = trace(model, NormPlacement.pre, embedded(model, tokens)).reads
        alive = mlp.up_proj(reads[3]).relu().amax((0, 1)) > 0
        doomed = alive.nonzero().flatten()[:3]
        mlp.up_proj.bias[doomed] = -1e6
    found = diagnose(model, tokens, targets)
    assert before == pytest.approx(1 - alive.double().mean().item())
    assert found["activation/dead/block_01"] == pytest.approx(before + 3 / 64)
    assert found["activation/max_abs/block_01"] == pytest.approx(mlp.up_proj(reads[3]).relu().max().item(), rel=1e-5)


MEMBERS = {
    "embedding": ("token_embedding.", "position_embedding."),
    "opening": ("trunk.opening.",),
    "head": ("head.",),
    **{f"block_0{i}/{part}": (f"trunk.blocks.{i}.{part}.",) for i in (0, 1) for part in ("attn", "mlp")},
    **{f"block_0{i}/norm": tuple(f"trunk.blocks.{i}.{j}_junction." for j in ("attn", "mlp")) for i in (0, 1)},
}


def test_gradient_norms_by_group() -> None:
    model, (tokens, targets) = model_of(), text()
    found = {k: v for k, v in diagnose(model, tokens, targets).items() if k.startswith("grad_norm/")}
    (-model(tokens).log_softmax(-1).gather(-1, targets[..., None]).mean()).backward()
    grads = {name: p.grad for name, p in model.named_parameters()}
    assert set(found) == {"grad_norm/total", *(f"grad_norm/{group}" for group in MEMBERS)}
    assert found["grad_norm/total"] == pytest.approx(flat(list(grads.values())).norm().item(), rel=1e-5)
    for group, prefixes in MEMBERS.items():
        members = [g for name, g in grads.items() if name.startswith(prefixes)]
        assert found[f"grad_norm/{group}"] == pytest.approx(flat(members).norm().item(), rel=1e-5)


def test_diagnosing_leaves_the_model_alone() -> None:
    model, (tokens, targets) = model_of(), text()
    before = {name: p.clone() for name, p in model.state_dict().items()}
    first, second = diagnose(model, tokens, targets), diagnose(model, tokens, targets)
    assert first == second
    assert all(torch.equal(before[name], p) for name, p in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


@pytest.mark.parametrize(("layers", "index", "name"), [(2, 1, "block_01"), (100, 7, "block_07"), (101, 7, "block_007")])
def test_block_names_sort(layers: int, index: int, name: str) -> None:
    model = GPT(make("model.d_model=8", f"model.n_layers={layers}").model)
    names = [block_name(model, i) for i in range(layers)]
    assert names[index] == name
    assert names == sorted(names)


# Divergence and spikes


@pytest.mark.parametrize("every", [1, 4])
def test_a_learning_rate_beyond_reason_ends_as_non_finite(run: Callable[..., Run], every: int) -> None:
    """At the step whose loss was lost, however rarely losses are logged; and the run stops at that row."""
    found = run("optim.lr=1e6", "train.steps=20", f"log.every={every}", "log.validate_every=20", "log.diagnose_every=0")
    each = run("optim.lr=1e6", "train.steps=20", "log.validate_every=20", "log.diagnose_every=0")
    lost = next(row["step"] for row in each.rows[1:] if row["train/loss"] is None)
    assert found.summary["status"] == "diverged"
    assert found.summary["diverged"] == {"kind": "non-finite", "step": lost}
    assert found.rows[-1]["step"] == math.ceil(lost / every) * every
    assert found.summary["val/loss"] is None


def poison(monkeypatch: pytest.MonkeyPatch, method: str, step: int, fault: Callable[[LitGPT], None]) -> None:
    """Lets a fault strike a run when `method` is called within optimizer step `step`, from 1."""
    original = getattr(LitGPT, method)

    def struck(lit: LitGPT, *arguments: Any) -> Any:
        if lit.trainer.global_step + 1 == step:
            fault(lit)
        return original(lit, *arguments)

    monkeypatch.setattr(LitGPT, method, struck)


@pytest.mark.parametrize(("step", "last_row"), [(1, 4), (4, 4), (6, 8), (12, 12)])
def test_an_injected_nan_is_found_at_its_step(
    run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch, step: int, last_row: int
) -> None:
    poison(monkeypatch, "training_step", step, lambda lit: lit.model.head.weight.data.fill_(math.nan))
    found = run("train.steps=12", "log.every=4", "log.validate_every=12", "log.diagnose_every=4")
    assert found.summary["diverged"] == {"kind": "non-finite", "step": step}
    assert found.rows[-1]["step"] == last_row
    assert found.rows[-1]["train/loss"] is None


def test_a_nan_in_the_last_update_is_found_by_validation(
    run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No training loss shows it any more."""
    poison(monkeypatch, "on_before_optimizer_step", 6, lambda lit: lit.model.head.weight.grad.fill_(math.nan))
    found = run("log.diagnose_every=0")
    assert None not in found.column("train/loss")
    assert found.summary["diverged"] == {"kind": "non-finite", "step": 6}
    assert found.summary["val/loss"] is None


def rows_ending_at(val_loss: float | None) -> list[dict[str, Any]]:
    """A run of 6 steps that began at 5 nats."""
    measured = {"train/loss": 4.0, "grad_norm/total": 1.0, "tokens_per_s": 1.0, "memory_mb": 1.0}
    return [
        {"step": 0, "tokens": 0, "val/loss": 5.0},
        {"step": 6, "tokens": 384, "val/loss": val_loss, "val/loss_stderr": 0.1, "val/bits_per_byte": 1.0, **measured},
    ]


# The unigram model scores 3 nats: above 2.97 a run is stuck.
@pytest.mark.parametrize(
    ("end", "non_finite_step", "expected"),
    [
        (2.96, None, None),
        (2.98, None, {"kind": "stuck", "step": 6}),
        (5.0, None, {"kind": "stuck", "step": 6}),
        (5.01, None, {"kind": "above start", "step": 6}),
        (None, None, {"kind": "non-finite", "step": 6}),
        (None, 4, {"kind": "non-finite", "step": 4}),
        (2.5, 4, {"kind": "non-finite", "step": 4}),
    ],
)
def test_kinds_of_divergence(end: float | None, non_finite_step: int | None, expected: dict[str, Any] | None) -> None:
    summary = summarise(make(), rows_ending_at(end), 3.0, non_finite_step)
    assert summary["diverged"] == expected
    assert summary["status"] == ("done" if expected is None else "diverged")
    kept = expected is None or expected["kind"] != "non-finite"
    assert summary["val/loss"] == (end if kept else None)


def test_spikes_lie_seven_deviations_above_the_hundred_before() -> None:
    before = [2 + 0.1 * (-1) ** i for i in range(100)]  # mean 2, deviation 0.1
    assert spikes([*before, 2.701]) == 1
    assert spikes([*before, 2.699]) == 0
    assert spikes([*before, 1.0]) == 0
    assert spikes([*before, 2.71, *before, 2.71]) == 2
    assert spikes([9.0, *before[:98], 99.0]) == 0  # without a hundred before it, nothing counts
    assert spikes([2.5] * 300) == 0


def test_a_run_counts_its_spikes() -> None:
    first, last = rows_ending_at(2.0)
    calm = [2 + 0.1 * (-1) ** i for i in range(100)]
    rows = [{**last, "step": step, "train/loss": loss} for step, loss in enumerate([*calm, 9.0, *calm], start=1)]
    assert summarise(make(), [first, *rows], 3.0, None)["spikes"] == 1


def block_row(step: int, first: list[float | None], last: list[float | None]) -> dict[str, Any]:
    parts = ("attn", "mlp", "norm")
    norms = {
        f"grad_norm/block_{b}/{p}": v for b, vs in (("00", first), ("11", last)) for p, v in zip(parts, vs, strict=True)
    }
    middle = {f"grad_norm/block_05/{p}": 100.0 for p in parts}
    return {"step": step, "tokens": 1, "train/loss": 2.0, "tokens_per_s": 1, "memory_mb": 1, "grad_norm/total": 1.0} | (
        middle | norms
    )


def test_a_summary_has_the_gradients_of_the_outer_blocks_at_the_end():
    start = {"step": 0, "tokens": 0, "val/loss": 6.0, "grad_norm/total": 9.0, "grad_norm/block_00/mlp": 8.0}
    rows = [block_row(1, [9.0] * 3, [9.0] * 3), block_row(2, [2.0, 3.0, 6.0], [1.0, 4.0, 8.0])]
    found = summarise(make(), [start, *rows, {**rows[-1], "val/loss": 2.0, "step": 3}], 3.0, None)
    assert (found["grad_norm/first_block"], found["grad_norm/last_block"]) == (7.0, 9.0)
    assert (found["grad_norm/median"], found["grad_norm/max"]) == (1.0, 1.0)  # step 0 has another batch
    died = block_row(3, [None, 3.0, 6.0], [1.0, 4.0, 8.0])
    found = summarise(make(), [start, *rows, died], 3.0, 3)
    assert (found["grad_norm/first_block"], found["grad_norm/last_block"]) == (7.0, 9.0)  # the last finite ones


def test_an_untrained_run_has_the_gradients_of_its_one_row():
    only = {"step": 0, "tokens": 0, "val/loss": 6.0, "grad_norm/total": 9.0, "grad_norm/block_00/mlp": 8.0}
    found = summarise(make(), [only], 3.0, None)
    assert (found["grad_norm/median"], found["grad_norm/first_block"], found["grad_norm/last_block"]) == (9.0, 8.0, 8.0)
    bare = summarise(make(), [{"step": 0, "tokens": 0, "val/loss": 6.0}], 3.0, None)
    assert (bare["grad_norm/median"], bare["grad_norm/first_block"]) == (None, None)


def test_a_runs_summary_says_what_a_table_must_not_mix(tmp_path: Path, prepared: data.Prepared):
    folder = record.open_run(tmp_path, make(), prepared.folder.name)
    summary = train(folder, prepared.folder)
    assert summary is not None
    made = record.read_json(folder / "provenance.json")
    assert made is not None
    assert summary["machine"] == {
        "device": made["device"]["name"],
        "torch": made["versions"]["torch"],
        "ops": made["ops"],
        "numerics_version": made["numerics_version"],
    }
    rows = record.read_metrics(folder)
    parts = [v for k, v in rows[-1].items() if k.startswith("grad_norm/block_01/")]
    assert len(parts) > 1
    assert summary["grad_norm/last_block"] == pytest.approx(math.hypot(*parts))
