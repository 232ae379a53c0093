"""What one run is: every field typed, every choice an enum, every derived size a property.

Values live in `conf/`; here are their types, the rules between them, and the signature of a run. A field
that another choice makes meaningless is null ("dead") in a resolved config; `CONDITIONAL` lists when.
"""

import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from fractions import Fraction
from typing import Any, get_args

from omegaconf import MISSING, DictConfig, OmegaConf

from andrea_exp import NUMERICS_VERSION
from andrea_exp.errors import UserError


class NormPlacement(Enum):
    """Each value is the placement's formula, printed wherever its name is shown. Code: `model/residual.py`."""

    pre = "x+F(N(x))"
    post = "N(x+F(x))"
    deepnorm = "N(a·x+F(x))"
    none = "x+F(x)"


NormType = Enum("NormType", ["layernorm", "rmsnorm"])
Activation = Enum("Activation", ["relu", "gelu", "gelu_tanh", "swiglu"])
Position = Enum("Position", ["learned", "rope"])
Init = Enum("Init", ["normal", "scaled", "xavier", "small"])
Corpus = Enum("Corpus", ["sotu", "files"])
Tokenizer = Enum("Tokenizer", ["bytes", "bpe"])
Schedule = Enum("Schedule", ["constant", "cosine", "wsd"])
Precision = Enum("Precision", ["32-true", "64-true", "bf16-mixed", "fp16-mixed"])
Device = Enum("Device", ["auto", "cpu", "cuda"])
OpsImpl = Enum("OpsImpl", ["auto", "reference"])

GATED = frozenset({Activation.swiglu})
BYTES_VOCAB = 257  # 256 byte values and the end of text


@dataclass
class ModelConfig:
    d_model: int = MISSING
    n_layers: int = MISSING
    n_heads: int = MISSING
    seq_len: int = MISSING
    vocab_size: int | None = MISSING  # null: the tokenizer's
    expansion_ratio: str = MISSING  # d_ff / d_model as built: "4", "8/3", "2.6875"
    activation: Activation = MISSING
    norm_placement: NormPlacement = MISSING
    norm_type: NormType | None = MISSING
    eps: float | None = MISSING
    bias: bool = MISSING
    tied_head: bool = MISSING
    position: Position = MISSING
    rope_theta: float | None = MISSING
    init: Init = MISSING

    @property
    def d_head(self) -> int:
        return self.d_model // self.n_heads

    @property
    def d_ff(self) -> int:
        return round_width(self.d_model * parse_ratio(self.expansion_ratio))

    @property
    def gated(self) -> bool:
        return self.activation in GATED


@dataclass
class DataConfig:
    corpus: Corpus | None = MISSING  # null: files where `path` is set, sotu otherwise
    path: str | None = MISSING
    tokenizer: Tokenizer = MISSING
    vocab_size: int | None = MISSING  # of a BPE; bytes have 257
    val_fraction: float = MISSING  # of the bytes, held out by document
    val_windows: int = MISSING


@dataclass
class OptimConfig:
    lr: float = MISSING
    beta1: float = MISSING
    beta2: float = MISSING
    eps: float = MISSING
    weight_decay: float = MISSING
    clip: float | None = MISSING  # largest gradient norm; null: no clipping
    schedule: Schedule = MISSING
    warmup_steps: int = MISSING
    min_lr_ratio: float | None = MISSING
    decay_fraction: float | None = MISSING


@dataclass
class TrainConfig:
    steps: int = MISSING
    batch_size: int = MISSING  # sequences an optimizer step
    accumulate: int = MISSING  # micro-batches an optimizer step
    precision: Precision = MISSING
    device: Device = MISSING


@dataclass
class LogConfig:
    every: int = MISSING
    validate_every: int = MISSING
    diagnose_every: int = MISSING  # 0: never


@dataclass
class OpsConfig:
    impl: OpsImpl = MISSING


@dataclass
class PoolConfig:
    kind: str = MISSING
    threads: int = MISSING  # a run
    slots: int | None = MISSING  # runs at once; null: cores // threads


@dataclass
class SweepConfig:
    """A question as data. Every swept field has one role, and the table follows from the roles."""

    question: str = MISSING
    baseline: str = MISSING  # the arm that the others are compared with
    compare: dict[str, dict[str, Any]] = MISSING  # rows: arm name -> overrides
    across: dict[str, list[Any]] = MISSING  # columns
    tune: dict[str, list[Any]] = MISSING  # chosen per row and column; its `seed` entry holds the tuning seeds
    repeat: dict[str, list[Any]] = MISSING  # seeds, paired across rows


@dataclass
class RunConfig:
    model: ModelConfig = MISSING
    data: DataConfig = MISSING
    optim: OptimConfig = MISSING
    train: TrainConfig = MISSING
    log: LogConfig = MISSING
    ops: OpsConfig = MISSING
    seed: int = MISSING
    # Below: how and where, not what. None of it enters the signature.
    pool: PoolConfig = MISSING
    records: str = MISSING
    tensorboard: bool = MISSING
    sweep: SweepConfig | None = MISSING


IDENTITY_SECTIONS = ("model", "data", "optim", "train", "log", "ops", "seed")


@dataclass(frozen=True)
class Conditional:
    """A field that has a meaning only under another field's choice, and its value where none is set."""

    field: str
    decided_by: str
    live: Callable[[RunConfig], bool]
    default: Callable[[RunConfig], Any]


def _fixed(value: Any) -> Callable[[RunConfig], Any]:
    return lambda _: value


def _has_norm(c: RunConfig) -> bool:
    return c.model.norm_placement is not NormPlacement.none


# Order matters where one row's default reads another row's field.
CONDITIONAL = (
    Conditional("data.corpus", "data.path", _fixed(True), lambda c: Corpus.files if c.data.path else Corpus.sotu),
    Conditional("data.path", "data.corpus", lambda c: c.data.corpus is Corpus.files, _fixed(None)),
    Conditional("data.vocab_size", "data.tokenizer", lambda c: c.data.tokenizer is Tokenizer.bpe, _fixed(2048)),
    Conditional("model.vocab_size", "data.tokenizer", _fixed(True), lambda c: c.data.vocab_size or BYTES_VOCAB),
    Conditional("model.norm_type", "model.norm_placement", _has_norm, _fixed(NormType.layernorm)),
    Conditional("model.eps", "model.norm_placement", _has_norm, _fixed(1e-5)),
    Conditional("model.rope_theta", "model.position", lambda c: c.model.position is Position.rope, _fixed(1e4)),
    Conditional(
        "optim.min_lr_ratio",
        "optim.schedule",
        lambda c: c.optim.schedule is not Schedule.constant,
        _fixed(0.1),
    ),
    Conditional("optim.decay_fraction", "optim.schedule", lambda c: c.optim.schedule is Schedule.wsd, _fixed(0.2)),
)


def parse_ratio(text: str) -> Fraction:
    """An exact positive ratio from "4", "2.6875" or "8/3". Raises UserError for anything else."""
    try:
        ratio = Fraction(text)
    except (ValueError, ZeroDivisionError):
        ratio = Fraction(0)
    if ratio <= 0:
        raise UserError(f"model.expansion_ratio={text}: not a positive ratio; write for example 4, 8/3 or 2.6875")
    return ratio


def round_width(exact: Fraction) -> int:
    """The nearest multiple of the largest of 8, 4, 2, 1 that stays within 1% of `exact`."""
    for multiple in (8, 4, 2, 1):
        width = round(exact / multiple) * multiple
        if width and abs(width - exact) <= exact / 100:
            return width
    raise UserError(
        f"model.expansion_ratio gives d_ff={float(exact):.4g}, which no whole width meets within 1%; "
        f"{max(1, round(exact))} is the nearest: change the ratio or model.d_model"
    )


def get(config: RunConfig, dotted: str) -> Any:
    """The value of a field named like `optim.lr`."""
    value: Any = config
    for name in dotted.split("."):
        value = getattr(value, name)
    return value


def put(config: RunConfig, dotted: str, value: Any) -> None:
    *path, last = dotted.split(".")
    owner = get(config, ".".join(path)) if path else config
    setattr(owner, last, value)


def field_names() -> list[str]:
    """Every dotted name that a config accepts."""

    def walk(cls: type, prefix: str) -> Iterator[str]:
        for field in dataclasses.fields(cls):
            name = f"{prefix}{field.name}"
            nested = next((t for t in (field.type, *get_args(field.type)) if dataclasses.is_dataclass(t)), None)
            if nested:
                yield from walk(nested, f"{name}.")  # type: ignore[arg-type]
            else:
                yield name

    return list(walk(RunConfig, ""))


def resolve(composed: DictConfig, swept: frozenset[str] = frozenset()) -> RunConfig:
    """Turns a composed config into a checked run in which every live field has its value.

    `swept` names the fields that a sweep varies: a field that such a variation makes meaningless is dropped;
    one that is set by hand and means nothing raises UserError, as does any value that cannot be built.
    """
    config: RunConfig = OmegaConf.to_object(composed)  # type: ignore[assignment]
    for rule in CONDITIONAL:
        value = get(config, rule.field)
        if rule.live(config):
            put(config, rule.field, rule.default(config) if value is None else value)
        elif value is not None and not {rule.decided_by, rule.field} & swept:
            raise UserError(
                f"{rule.field}={_plain(value)} has no meaning with "
                f"{rule.decided_by}={_plain(get(config, rule.decided_by))}; leave one of them out"
            )
        else:
            put(config, rule.field, None)
    check(config)
    return config


def check(config: RunConfig) -> None:
    """Raises UserError for the first value that cannot be built or trained."""
    for rule in (_check_sizes, _check_model, _check_optim, _check_train):
        rule(config)


def _require(ok: bool, message: str) -> None:
    if not ok:
        raise UserError(message)


def _check_sizes(c: RunConfig) -> None:
    positive = (
        "model.d_model model.n_layers model.n_heads model.seq_len model.vocab_size data.val_windows "
        "train.steps train.batch_size train.accumulate log.every log.validate_every pool.threads"
    )
    for name in positive.split():
        _require(get(c, name) >= 1, f"{name}={get(c, name)}: must be at least 1")
    _require(c.pool.slots is None or c.pool.slots >= 1, f"pool.slots={c.pool.slots}: must be at least 1, or null")
    _require(c.log.diagnose_every >= 0, f"log.diagnose_every={c.log.diagnose_every}: must be 0 (never) or more")
    _require(0 <= c.seed < 2**63, f"seed={c.seed}: must be between 0 and 2^63 - 1")


def _check_model(c: RunConfig) -> None:
    m = c.model
    fitting = [h for h in range(1, m.d_model + 1) if m.d_model % h == 0]
    nearest = min(fitting, key=lambda h: abs(h - m.n_heads))
    _require(
        m.d_model % m.n_heads == 0,
        f"model.d_model={m.d_model} is not divisible by model.n_heads={m.n_heads}; {nearest} heads would fit",
    )
    _require(
        m.position is not Position.rope or m.d_head % 2 == 0,
        f"model.position=rope needs an even head size, but d_model / n_heads = {m.d_head}",
    )
    round_width(m.d_model * parse_ratio(m.expansion_ratio))
    _require(m.eps is None or m.eps > 0, f"model.eps={m.eps}: must be above 0")
    tokens = c.data.vocab_size or BYTES_VOCAB
    _require(
        m.vocab_size is not None and m.vocab_size >= tokens,
        f"model.vocab_size={m.vocab_size} is smaller than the tokenizer's {tokens}",
    )
    _require(
        c.data.vocab_size is None or c.data.vocab_size >= BYTES_VOCAB,
        f"data.vocab_size={c.data.vocab_size}: a byte-level BPE needs at least {BYTES_VOCAB}",
    )
    _require(
        c.data.corpus is not Corpus.files or bool(c.data.path),
        "data.corpus=files needs data.path: a text file, or a folder of *.txt and *.md files",
    )
    _require(0 < c.data.val_fraction < 1, f"data.val_fraction={c.data.val_fraction}: must lie between 0 and 1")


def _check_optim(c: RunConfig) -> None:
    o = c.optim
    _require(0 < o.lr < float("inf"), f"optim.lr={o.lr}: must be above 0 and finite")
    _require(0 <= o.beta1 < 1 and 0 <= o.beta2 < 1, f"optim.beta1={o.beta1}, optim.beta2={o.beta2}: in [0, 1)")
    _require(o.eps > 0, f"optim.eps={o.eps}: must be above 0")
    _require(o.weight_decay >= 0, f"optim.weight_decay={o.weight_decay}: must be 0 or more")
    _require(o.clip is None or o.clip > 0, f"optim.clip={o.clip}: must be above 0, or null for none")
    _require(o.warmup_steps >= 0, f"optim.warmup_steps={o.warmup_steps}: must be 0 or more")
    for name in ("min_lr_ratio", "decay_fraction"):
        value = getattr(o, name)
        _require(value is None or 0 <= value <= 1, f"optim.{name}={value}: must lie between 0 and 1")


def _check_train(c: RunConfig) -> None:
    t = c.train
    _require(
        t.batch_size % t.accumulate == 0,
        f"train.batch_size={t.batch_size} is not divisible by train.accumulate={t.accumulate}",
    )
    _require(
        t.precision.name != "fp16-mixed" or t.device is not Device.cpu,
        "train.precision=fp16-mixed needs a GPU (on a CPU it would silently become bf16); use 32-true or bf16-mixed",
    )


def _plain(value: Any) -> Any:
    return value.name if isinstance(value, Enum) else value


def as_dict(config: Any) -> dict[str, Any]:
    """A config as plain containers, enums by name."""
    pairs = ((f.name, getattr(config, f.name)) for f in dataclasses.fields(config))
    return {k: as_dict(v) if dataclasses.is_dataclass(v) else _plain(v) for k, v in pairs}


def from_dict(values: dict[str, Any]) -> RunConfig:
    """The inverse of `as_dict`, with the same strict types."""
    typed = OmegaConf.merge(OmegaConf.structured(RunConfig), values)
    return OmegaConf.to_object(typed)  # type: ignore[return-value]


def identity(config: RunConfig, data_fingerprint: str) -> dict[str, Any]:
    """What a resolved run computes, in canonical values: equal identities mean the same run.

    The ratio gives way to the width that it builds, and the place of a corpus to its content.
    """
    full = {name: value for name, value in as_dict(config).items() if name in IDENTITY_SECTIONS}
    full["model"] = {**full["model"], "d_ff": config.model.d_ff}
    del full["model"]["expansion_ratio"]
    full["data"] = {"fingerprint": data_fingerprint, "val_windows": config.data.val_windows}
    return {**full, "numerics_version": NUMERICS_VERSION}


def signature(config: RunConfig, data_fingerprint: str) -> str:
    """16 hex digits that name a run by what it computes."""
    canonical = json.dumps(identity(config, data_fingerprint), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()[:16]
