"""What one run is: every field typed, every choice an enum, every derived size a property.

Values live in `conf/`, the rules between fields in `rules.py`.
"""

import copy
import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from fractions import Fraction
from typing import Any

from andrea_exp.errors import UserError, did_you_mean

# OmegaConf's mark, and its only trace in a typed config: a model is built without OmegaConf, which reads and checks.
MISSING: Any = "???"


class NormPlacement(Enum):
    """Each value is the placement's formula, printed wherever its name is shown. Code: `model/residual.py`."""

    pre = "x+F(N(x))"
    post = "N(x+F(x))"
    peri = "x+N(F(N(x)))"
    reordered = "x+N(F(x))"
    deepnorm = "N(a·x+F(x))"
    layer_scaled = "x+F(N(x)/√l)"
    mix = "first ¼ N(x+F(x)), then x+F(N(x))"
    none = "x+F(x)"


class Activation(Enum):
    """Each value is the formula of an MLP's hidden layer. Code: `ops/reference.py`."""

    relu = "max(u,0)"
    gelu = "u·Φ(u)"
    gelu_tanh = "u·Φ(u), tanh form"
    silu = "u·σ(u)"
    relu2 = "max(u,0)²"
    identity = "u"
    glu = "σ(g)·u"
    bilinear = "g·u"
    reglu = "max(g,0)·u"
    geglu = "g·Φ(g)·u"
    geglu_tanh = "g·Φ(g)·u, tanh form"
    swiglu = "g·σ(g)·u"


GATED = frozenset(
    {
        Activation.glu,
        Activation.bilinear,
        Activation.reglu,
        Activation.geglu,
        Activation.geglu_tanh,
        Activation.swiglu,
    }
)
NormType = Enum("NormType", ["layernorm", "rmsnorm", "rmsnorm_1p", "dyt"])
QKNorm = Enum("QKNorm", ["none", "per_head", "full"])
AttentionScale = Enum("AttentionScale", ["inv_sqrt_d_head", "one"])
EmbeddingScale = Enum("EmbeddingScale", ["one", "sqrt_d_model"])
BlockLayout = Enum("BlockLayout", ["sequential", "parallel"])
BranchMultiplier = Enum("BranchMultiplier", ["one", "rezero", "inv_sqrt_depth", "inv_depth"])
MLPMatch = Enum("MLPMatch", ["none", "params"])
Position = Enum("Position", ["learned", "sinusoidal", "rope", "t5", "none"])
Init = Enum("Init", ["normal", "scaled", "xavier", "small"])
DepthMode = Enum("DepthMode", ["fixed_width", "equal_parameters", "equal_flops"])
Corpus = Enum("Corpus", ["sotu", "wiki", "files", "huggingface", "shards"])
Tokenizer = Enum("Tokenizer", ["bytes", "bpe", "file"])
Schedule = Enum("Schedule", ["constant", "cosine", "wsd"])
Precision = Enum("Precision", ["32-true", "64-true", "bf16-mixed", "fp16-mixed"])
Device = Enum("Device", ["auto", "cpu", "cuda"])
OpsImpl = Enum("OpsImpl", ["auto", "reference", "triton", "cuda"])
Keep = Enum("Keep", ["none", "final", "all"])
PoolKind = Enum("PoolKind", ["local", "slurm", "ray"])

BYTES_VOCAB = 257  # 256 byte values and the end of text
GPT2_VOCAB = 50257


@dataclass
class ModelConfig:
    """A resolved one holds a value in every live field; its nulls mean that the field has no meaning here."""

    d_model: int = MISSING
    n_layers: int = MISSING
    depth_mode: DepthMode = MISSING  # what stays fixed while n_layers varies; others change d_model
    reference_layers: int | None = MISSING  # the depth at which d_model is as given
    n_heads: int = MISSING
    n_kv_heads: int | None = MISSING  # null: n_heads
    d_head: int | None = MISSING  # null: d_model / n_heads
    seq_len: int = MISSING
    vocab_size: int | None = MISSING  # null: the tokenizer's
    expansion_ratio: str = MISSING  # d_ff / d_model as built: "4", "8/3", "2.6875"
    mlp_match: MLPMatch = MISSING
    activation: Activation = MISSING
    block_layout: BlockLayout = MISSING
    residual: bool = MISSING
    branch_multiplier: BranchMultiplier = MISSING
    norm_placement: NormPlacement = MISSING
    norm_type: NormType | None = MISSING
    norm_bias: bool | None = MISSING  # null: bias
    eps: float | None = MISSING
    final_norm: bool | None = MISSING  # null: as the placement needs
    qk_norm: QKNorm = MISSING
    attention_scale: AttentionScale = MISSING
    embedding_scale: EmbeddingScale = MISSING
    embedding_norm: bool = MISSING
    bias: bool = MISSING
    tied_head: bool = MISSING
    position: Position = MISSING
    rope_theta: float | None = MISSING
    init: Init = MISSING
    dropout: float = MISSING

    @property
    def gated(self) -> bool:
        return self.activation in GATED

    @property
    def d_ff(self) -> int:
        return round_width(self.d_model * self.built_ratio)

    @property
    def built_ratio(self) -> Fraction:
        """d_ff / d_model before rounding: a gated MLP that matches parameters has two thirds of the ratio."""
        matched = self.mlp_match is MLPMatch.params and self.gated
        return parse_ratio(self.expansion_ratio) * (Fraction(2, 3) if matched else 1)

    @property
    def d_attention(self) -> int:
        """Width of all query heads together."""
        assert self.d_head is not None
        return self.n_heads * self.d_head

    @property
    def d_key_value(self) -> int:
        """Width of all key heads together, and of all value heads."""
        assert self.n_kv_heads is not None
        assert self.d_head is not None
        return self.n_kv_heads * self.d_head


@dataclass
class SourceConfig:
    """Where text comes from. The nulls are resolved by `rules.source_rules`."""

    corpus: Corpus | None = None  # null: files where `path` is set, sotu otherwise
    path: str | None = None  # a file or folder; or a data set's name on the Hugging Face hub
    subset: str | None = None  # of a Hugging Face data set
    split: str | None = None
    text_field: str | None = None
    revision: str | None = None  # the commit of a data set on the hub
    max_bytes: int | None = None  # of text, in whole documents


@dataclass
class PartConfig(SourceConfig):
    """One of several corpora that are mixed."""

    weight: float = 1.0  # share of the training and validation windows, after all weights are made to sum to 1


@dataclass
class DataConfig(SourceConfig):
    # In place of a single source: PartConfig by name once built, empty for none. Typed any further, it could not be
    # set from a command line: Hydra adds no keys to a typed dict.
    mix: Any = MISSING
    tokenizer: Tokenizer = MISSING
    tokenizer_path: str | None = MISSING  # a byte-level tokenizer.json
    vocab_size: int | None = MISSING  # of a BPE or a tokenizer file; bytes have 257
    val_fraction: float = MISSING  # of the bytes, held out by document
    val_windows: int = MISSING

    def __post_init__(self) -> None:
        """Raises UserError for a mix that is not a part's fields by name."""
        parts = self.mix or {}
        if not isinstance(parts, dict) or not all(isinstance(p, (dict, PartConfig)) for p in parts.values()):
            raise UserError(f"data.mix={self.mix}: write {{NAME: {{corpus or path, weight}}, NAME: ...}}, or null")
        self.mix = {name: _part(f"data.mix.{name}", fields) for name, fields in parts.items()}


def _part(where: str, fields: dict[str, Any] | PartConfig) -> PartConfig:
    if isinstance(fields, PartConfig):
        return fields
    known = [f.name for f in dataclasses.fields(PartConfig)]
    for wrong in fields.keys() - set(known):
        raise UserError(f"{where}.{wrong}: no such field; {did_you_mean(wrong, known)}")
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        return OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(PartConfig), fields))  # type: ignore[return-value]
    except OmegaConfBaseException as error:
        raise UserError(f"{where}.{error.full_key}: {str(error).splitlines()[0]}") from error


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
    ranks: int = MISSING  # processes that share each micro-batch (DDP)
    precision: Precision = MISSING
    compile: bool = MISSING  # the trunk, by torch.compile
    recompute: bool = MISSING  # blocks in the backward pass instead of keeping their activations
    deterministic: bool = MISSING  # the same bits on a GPU too
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
class CheckpointConfig:
    every_s: float = MISSING  # seconds between checkpoints; more where saving would take more than 2% of the time
    keep: Keep = MISSING  # of a run that has ended: no weights, the final ones, or all checkpoints


@dataclass
class PoolConfig:
    kind: PoolKind = MISSING
    threads: int | None = MISSING  # a run; null: by `sweep.slots`
    slots: int | None = MISSING  # runs at once; null: as many as the machine, or the cluster, takes
    retries: int = MISSING  # of a run that crashed; a diverged one is a result
    fail_fast: bool = MISSING  # stop the sweep at the first run that failed for good
    runs_per_gpu: int | None = None  # of this machine's
    # Of Slurm:
    partition: str | None = None
    account: str | None = None
    time_min: int | None = None  # of a job; its run may take longer, since it is requeued
    warn_s: int | None = None  # before the limit a job is told to save
    mem_gb: float | None = None
    flags: Any = None  # further options of sbatch, by name
    detach: bool | None = None  # submit and end
    # Of Slurm and Ray:
    gpus: int | None = None  # a run; null: one a rank where it wants any
    # Of Ray:
    address: str | None = None  # of a running cluster; null: one of its own on this machine


@dataclass
class SweepConfig:
    """A question as data. Every swept field has one role, and the table follows from the roles."""

    question: str = ""
    baseline: str = MISSING  # the arm that the others are compared with
    compare: dict[str, dict[str, Any]] = MISSING  # rows: arm name -> overrides
    across: dict[str, list[Any]] = field(default_factory=dict)  # columns
    # Chosen per row and column; its `seed` entry holds the tuning seeds.
    tune: dict[str, list[Any]] = field(default_factory=dict)
    repeat: dict[str, list[Any]] = field(default_factory=dict)  # seeds, paired across rows


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
    checkpoint: CheckpointConfig = MISSING
    records: str = MISSING
    tensorboard: bool = MISSING
    sweep: SweepConfig | None = MISSING


def formula(model: ModelConfig) -> str:
    """The placement's formula as this model has it: without the stream where there is none."""
    text = model.norm_placement.value
    if not model.residual:
        text = text.replace("x+F", "F").replace("x+N", "N")
    return text if model.block_layout is BlockLayout.sequential else f"{text}, F=Attn+MLP"


def sources(data: DataConfig) -> Mapping[str, SourceConfig]:
    """The parts of a mix in the order of their names; a single source has no name."""
    return dict(sorted(data.mix.items())) or {"": data}


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


def plain(value: Any) -> Any:
    """A config's value without our types: enums by name, dataclasses as dicts."""
    if dataclasses.is_dataclass(value):
        return as_dict(value)
    if isinstance(value, dict):
        return {name: plain(v) for name, v in value.items()}
    return value.name if isinstance(value, Enum) else value


def as_dict(config: Any) -> dict[str, Any]:
    """A config as plain containers, enums by name."""
    return {f.name: plain(getattr(config, f.name)) for f in dataclasses.fields(config)}


def copy_config(config: RunConfig) -> RunConfig:
    """A config of its own, section by section; many times faster than a deep copy."""
    copied = copy.copy(config)
    for f in dataclasses.fields(config):
        if dataclasses.is_dataclass(section := getattr(config, f.name)):
            setattr(copied, f.name, copy.copy(section))
    copied.data.mix = {name: copy.copy(part) for name, part in config.data.mix.items()}
    return copied


def from_dict(values: dict[str, Any]) -> RunConfig:
    """The inverse of `as_dict`, with the same strict types."""
    from omegaconf import OmegaConf

    typed = OmegaConf.merge(OmegaConf.structured(RunConfig), values)
    return OmegaConf.to_object(typed)  # type: ignore[return-value]
