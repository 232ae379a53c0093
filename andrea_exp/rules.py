"""The rules between fields: which have a meaning, what they default to, what cannot be built; and a run's signature.

A field that another choice makes meaningless is null ("dead") in a resolved config; `CONDITIONAL` lists when.
"""

import dataclasses
import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, get_args

from andrea_exp import NUMERICS_VERSION, accounting
from andrea_exp.config import (
    BYTES_VOCAB,
    GPT2_VOCAB,
    BlockLayout,
    BranchMultiplier,
    Corpus,
    DataConfig,
    DepthMode,
    Device,
    Init,
    ModelConfig,
    NormPlacement,
    NormType,
    OpsImpl,
    PoolConfig,
    PoolKind,
    Position,
    QKNorm,
    RunConfig,
    Schedule,
    SourceConfig,
    Tokenizer,
    as_dict,
    plain,
    round_width,
    sources,
)
from andrea_exp.errors import UserError

IDENTITY_SECTIONS = ("model", "data", "optim", "train", "log", "ops", "seed")
# Decided before the model is built, so that only what they built enters the signature.
BUILT_AWAY = ("expansion_ratio", "mlp_match", "depth_mode", "reference_layers")
DERIVES_WIDTH = ("model.depth_mode", "model.reference_layers")
ENDS_IN_A_NORM = frozenset({NormPlacement.post, NormPlacement.deepnorm})


@dataclass(frozen=True)
class Conditional:
    """A field that has a meaning only under other fields' choices, and its value where none is set."""

    field: str
    decided_by: tuple[str, ...]  # the nearest first
    live: Callable[[RunConfig], bool]
    default: Callable[[RunConfig], Any]


def _fixed(value: Any) -> Callable[[RunConfig], Any]:
    return lambda _: value


def _always(_: RunConfig) -> bool:
    return True


def _has_norm(c: RunConfig) -> bool:
    m = c.model
    placed = m.norm_placement is not NormPlacement.none
    return placed or bool(m.final_norm) or m.embedding_norm or m.qk_norm is not QKNorm.none


def default_final_norm(c: RunConfig) -> bool:
    """Whether the placement's own trunk ends with a final norm."""
    return c.model.norm_placement not in ENDS_IN_A_NORM | {NormPlacement.none}


def _of_pool(name: str, *kinds: PoolKind, default: Any) -> Conditional:
    return Conditional(f"pool.{name}", ("pool.kind",), lambda c: c.pool.kind in kinds, _fixed(default))


# Order matters where one row reads another row's field.
CONDITIONAL = (
    Conditional("data.tokenizer_path", ("data.tokenizer",), lambda c: c.data.tokenizer is Tokenizer.file, _fixed(None)),
    Conditional(
        "data.vocab_size",
        ("data.tokenizer",),
        lambda c: c.data.tokenizer is not Tokenizer.bytes,
        lambda c: 2048 if c.data.tokenizer is Tokenizer.bpe else GPT2_VOCAB,
    ),
    Conditional("model.vocab_size", ("data.tokenizer",), _always, lambda c: c.data.vocab_size or BYTES_VOCAB),
    Conditional(
        "model.reference_layers",
        ("model.depth_mode",),
        lambda c: c.model.depth_mode is not DepthMode.fixed_width,
        lambda c: c.model.n_layers,
    ),
    Conditional("model.n_kv_heads", ("model.n_heads",), _always, lambda c: c.model.n_heads),
    Conditional("model.final_norm", ("model.norm_placement",), _always, default_final_norm),
    Conditional("model.norm_type", ("model.norm_placement",), _has_norm, _fixed(NormType.layernorm)),
    Conditional(
        "model.norm_bias",
        ("model.norm_type", "model.norm_placement"),
        lambda c: c.model.norm_type in (NormType.layernorm, NormType.dyt),
        lambda c: c.model.bias,
    ),
    Conditional(
        "model.eps",
        ("model.norm_type", "model.norm_placement"),
        lambda c: c.model.norm_type not in (None, NormType.dyt),
        _fixed(1e-5),
    ),
    Conditional("model.rope_theta", ("model.position",), lambda c: c.model.position is Position.rope, _fixed(1e4)),
    *(_of_pool(name, PoolKind.local, default=default) for name, default in (("runs_per_gpu", 1),)),
    *(
        _of_pool(name, PoolKind.slurm, default=default)
        for name, default in (
            ("partition", None),
            ("account", None),
            ("time_min", 60),
            ("warn_s", 90),
            ("mem_gb", None),
            ("flags", None),
            ("detach", False),
        )
    ),
    _of_pool("gpus", PoolKind.slurm, PoolKind.ray, default=None),
    _of_pool("address", PoolKind.ray, default=None),
    Conditional(
        "optim.min_lr_ratio",
        ("optim.schedule",),
        lambda c: c.optim.schedule is not Schedule.constant,
        _fixed(0.1),
    ),
    Conditional("optim.decay_fraction", ("optim.schedule",), lambda c: c.optim.schedule is Schedule.wsd, _fixed(0.2)),
)


def source_rules(prefix: str, mixed: bool) -> tuple[Conditional, ...]:
    """The rules of one source of text, at `data` or at `data.mix.NAME`; with a mix, `data` itself is none."""

    def source(c: RunConfig) -> SourceConfig:
        return get(c, prefix)

    def single(_: RunConfig) -> bool:
        return not mixed

    def of_hub(c: RunConfig) -> bool:
        return source(c).corpus is Corpus.huggingface

    def has_path(c: RunConfig) -> bool:
        return source(c).corpus not in (None, Corpus.sotu, Corpus.wiki)

    def implied(c: RunConfig) -> Corpus:
        return Corpus.files if source(c).path else Corpus.sotu

    corpus = f"{prefix}.corpus"
    by = ("data.mix",) if mixed else (corpus, "data.mix")
    return (
        Conditional(corpus, (f"{prefix}.path", "data.mix")[mixed:], single, implied),
        Conditional(f"{prefix}.path", by, has_path, _fixed(None)),
        Conditional(f"{prefix}.subset", by, of_hub, _fixed(None)),
        Conditional(f"{prefix}.split", by, of_hub, _fixed("train")),
        Conditional(f"{prefix}.text_field", by, of_hub, _fixed("text")),
        Conditional(f"{prefix}.revision", by, of_hub, _fixed(None)),
        Conditional(f"{prefix}.max_bytes", by, of_hub, _fixed(10**9)),
    )


def rules_of(config: RunConfig) -> Iterator[Conditional]:
    """All conditional fields of a config: those of `CONDITIONAL`, and of each of its sources of text."""
    yield from source_rules("data", mixed=bool(config.data.mix))
    for name in config.data.mix:
        yield from source_rules(f"data.mix.{name}", mixed=False)
    yield from CONDITIONAL


def get(config: RunConfig, dotted: str) -> Any:
    """The value of a field named like `optim.lr`."""
    value: Any = config
    for name in dotted.split("."):
        value = value[name] if isinstance(value, dict) else getattr(value, name)
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


def settle(config: RunConfig, swept: frozenset[str] = frozenset()) -> None:
    """Gives every live field its value, and checks the whole.

    `swept` names the fields that a sweep varies: a field that such a variation makes meaningless is dropped;
    one that is set by hand and means nothing raises UserError, as does any value that cannot be built.
    """
    _check_mix(config.data)
    for rule in rules_of(config):
        value = get(config, rule.field)
        if rule.live(config):
            put(config, rule.field, rule.default(config) if value is None else value)
        elif value is not None and not {rule.field, *rule.decided_by} & swept:
            decided_by = rule.decided_by[0]
            raise UserError(
                f"{rule.field}={plain(value)} has no meaning with "
                f"{decided_by}={plain(get(config, decided_by))}; leave one of them out"
            )
        else:
            put(config, rule.field, None)
    _build_width(config)
    check(config)


def _build_width(config: RunConfig) -> None:
    """Settles d_model, which two of the depth modes derive from n_layers, and the head size that follows from it."""
    m = config.model
    for name in ("d_model", "n_layers", "n_heads"):
        _require(getattr(m, name) >= 1, f"model.{name}={getattr(m, name)}: must be at least 1")
    if m.depth_mode is not DepthMode.fixed_width:
        assert m.reference_layers is not None
        _require(m.reference_layers >= 1, f"model.reference_layers={m.reference_layers}: must be at least 1")
        _require(m.d_head is None, f"model.d_head={m.d_head}: model.depth_mode={m.depth_mode.name} derives it")
        m.d_model = _matched_width(m)
    if m.d_head is None:
        _require(
            m.d_model % m.n_heads == 0,
            f"model.d_model={m.d_model} is not divisible by model.n_heads={m.n_heads}; "
            f"{_nearest_divisor(m.d_model, m.n_heads)} heads would fit",
        )
        m.d_head = m.d_model // m.n_heads


def _matched_width(m: ModelConfig) -> int:
    """The width, in whole even heads, at which n_layers cost what reference_layers cost at d_model."""
    assert m.reference_layers is not None
    equal_flops = m.depth_mode is DepthMode.equal_flops

    def cost(d_model: int, n_layers: int) -> int:
        sized = replace(m, d_model=d_model, n_layers=n_layers, d_head=max(1, d_model // m.n_heads))
        return accounting.flops_per_token(sized) if equal_flops else accounting.trunk_matrices(sized)

    wanted, step = cost(m.d_model, m.reference_layers), 2 * m.n_heads
    gaps: dict[int, int] = {}
    for d_model in range(step, max(step, 2 * m.d_model * m.reference_layers) + 1, step):
        with suppress(UserError):  # a width at which the ratio cannot be built
            gaps[d_model] = abs(cost(d_model, m.n_layers) - wanted)
    _require(bool(gaps), f"model.depth_mode={m.depth_mode.name}: no width fits {m.n_layers} layers")
    return min(gaps, key=lambda d: gaps[d])


def check(config: RunConfig) -> None:
    """Raises UserError for the first value that cannot be built or trained."""
    for rule in (_check_sizes, _check_model, _check_data, _check_optim, _check_train):
        rule(config)


def _require(ok: bool, message: str) -> None:
    if not ok:
        raise UserError(message)


def _check_pool(pool: PoolConfig) -> None:
    _require(pool.gpus is None or pool.gpus >= 0, f"pool.gpus={pool.gpus}: must be 0 or more, or null")
    _require(pool.mem_gb is None or pool.mem_gb > 0, f"pool.mem_gb={pool.mem_gb}: must be above 0, or null")
    _require(
        pool.flags is None or isinstance(pool.flags, dict),
        f"pool.flags={pool.flags}: write the options of sbatch by name: '{{qos: long}}'",
    )
    if pool.time_min and pool.warn_s is not None:
        _require(
            0 < pool.warn_s < 60 * pool.time_min,
            f"pool.warn_s={pool.warn_s}: must lie between 0 and the {60 * pool.time_min} seconds of pool.time_min",
        )


def _check_sizes(c: RunConfig) -> None:
    positive = (
        "model.d_model model.n_layers model.n_heads model.seq_len model.vocab_size data.val_windows "
        "train.batch_size train.accumulate train.ranks log.every log.validate_every"
    )
    for name in positive.split():
        _require(get(c, name) >= 1, f"{name}={get(c, name)}: must be at least 1")
    for name in ("pool.slots", "pool.threads", "pool.runs_per_gpu", "pool.time_min"):
        _require(get(c, name) is None or get(c, name) >= 1, f"{name}={get(c, name)}: must be at least 1, or null")
    _require(c.pool.retries >= 0, f"pool.retries={c.pool.retries}: must be 0 or more")
    _check_pool(c.pool)
    every_s = c.checkpoint.every_s
    _require(0 <= every_s < float("inf"), f"checkpoint.every_s={every_s}: must be 0 (after every step) or more")
    _require(c.log.diagnose_every >= 0, f"log.diagnose_every={c.log.diagnose_every}: must be 0 (never) or more")
    _require(c.train.steps >= 0, f"train.steps={c.train.steps}: must be 0 (the untrained model) or more")
    _require(0 <= c.seed < 2**63, f"seed={c.seed}: must be between 0 and 2^63 - 1")


def _refusals(m: ModelConfig) -> Iterator[tuple[bool, str]]:
    """(is it asked for, why it cannot be had) for combinations of choices that nobody has defined."""
    placement = m.norm_placement
    own_weights = {
        NormPlacement.deepnorm: "weighs stream and branch by itself",
        NormPlacement.layer_scaled: "scales what each branch reads by its depth",
    }
    if placement in own_weights:
        why = f"model.norm_placement={placement.name} {own_weights[placement]}"
        parallel = m.block_layout is BlockLayout.parallel
        yield parallel, f"{why} and is defined for sequential blocks; use model.block_layout=sequential"
        yield not m.residual, f"{why} and needs the stream; use model.residual=true"
    yield (
        placement is NormPlacement.deepnorm and m.branch_multiplier is not BranchMultiplier.one,
        "model.norm_placement=deepnorm weighs stream and branch by itself; use model.branch_multiplier=one",
    )
    yield (
        placement is NormPlacement.layer_scaled and m.init is Init.scaled,
        "model.norm_placement=layer_scaled replaces the scaling by depth of model.init=scaled; use init=normal",
    )
    yield (
        placement is NormPlacement.mix and m.n_layers < 4,
        f"model.norm_placement=mix has post-norm in a first quarter that n_layers={m.n_layers} lacks; use 4 or more",
    )
    yield (
        not m.residual and m.branch_multiplier is not BranchMultiplier.one,
        "model.residual=false leaves nothing to weigh a branch against; use model.branch_multiplier=one",
    )


def _check_model(c: RunConfig) -> None:
    m = c.model
    for asked, why in _refusals(m):
        _require(not asked, why)
    assert m.d_head is not None
    assert m.n_kv_heads is not None
    _require(m.d_head >= 1, f"model.d_head={m.d_head}: must be at least 1")
    _require(
        m.n_kv_heads >= 1 and m.n_heads % m.n_kv_heads == 0,
        f"model.n_heads={m.n_heads} is not divisible by model.n_kv_heads={m.n_kv_heads}; "
        f"{_nearest_divisor(m.n_heads, m.n_kv_heads)} would fit",
    )
    _require(
        m.position is not Position.rope or m.d_head % 2 == 0,
        f"model.position=rope needs an even head size, but d_head = {m.d_head}",
    )
    _require(
        m.position is not Position.sinusoidal or m.d_model % 2 == 0,
        f"model.position=sinusoidal needs an even model.d_model, not {m.d_model}",
    )
    round_width(m.d_model * m.built_ratio)
    _require(m.eps is None or m.eps > 0, f"model.eps={m.eps}: must be above 0")
    _require(0 <= m.dropout < 1, f"model.dropout={m.dropout}: must lie in [0, 1)")


def _check_data(c: RunConfig) -> None:
    tokens = c.data.vocab_size or BYTES_VOCAB
    _require(
        c.model.vocab_size is not None and c.model.vocab_size >= tokens,
        f"model.vocab_size={c.model.vocab_size} is smaller than the tokenizer's {tokens}",
    )
    _require(
        c.data.vocab_size is None or c.data.vocab_size >= BYTES_VOCAB,
        f"data.vocab_size={c.data.vocab_size}: a byte-level BPE needs at least {BYTES_VOCAB}",
    )
    _require(
        c.data.tokenizer is not Tokenizer.file or bool(c.data.tokenizer_path),
        "data.tokenizer=file needs data.tokenizer_path: a byte-level tokenizer.json",
    )
    for name, source in sources(c.data).items():
        where = f"data.mix.{name}" if name else "data"
        _check_source(source, where)
        _require(
            source.corpus is not Corpus.shards or c.data.tokenizer is Tokenizer.file,
            f"{where}.corpus=shards holds tokens, not text; say whose: data.tokenizer=file data.tokenizer_path=FILE",
        )
    _require(0 < c.data.val_fraction < 1, f"data.val_fraction={c.data.val_fraction}: must lie between 0 and 1")


def _check_mix(data: DataConfig) -> None:
    for name, part in data.mix.items():
        good = re.fullmatch(r"[A-Za-z][A-Za-z0-9_-]*", name)
        _require(bool(good), f"data.mix: {name!r} is no name for a part; use letters, digits, _ and -")
        _require(0 < part.weight < float("inf"), f"data.mix.{name}.weight={part.weight}: must be above 0 and finite")
    _require(len(data.mix) != 1, "data.mix: one part is no mix; give at least two, or none")


def _check_source(source: SourceConfig, where: str) -> None:
    needs = {
        Corpus.files: "a text file, or a folder of *.txt and *.md files",
        Corpus.huggingface: "a data set's folder, or its name on the hub such as roneneldan/TinyStories",
        Corpus.shards: "a .bin file of llm.c, or a folder of them",
    }
    assert source.corpus is not None
    _require(
        source.corpus not in needs or bool(source.path),
        f"{where}.corpus={source.corpus.name} needs {where}.path: {needs.get(source.corpus)}",
    )
    _require(
        source.max_bytes is None or source.max_bytes > 0, f"{where}.max_bytes={source.max_bytes}: must be at least 1"
    )


def _nearest_divisor(number: int, wanted: int) -> int:
    return min((d for d in range(1, number + 1) if number % d == 0), key=lambda d: abs(d - wanted))


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
        t.batch_size % (t.accumulate * t.ranks) == 0,
        f"train.batch_size={t.batch_size} is not divisible by train.accumulate={t.accumulate} x train.ranks={t.ranks}",
    )
    _require(
        t.precision.name != "fp16-mixed" or t.device is not Device.cpu,
        "train.precision=fp16-mixed needs a GPU (on a CPU it would silently become bf16); use 32-true or bf16-mixed",
    )
    if c.ops.impl in (OpsImpl.triton, OpsImpl.cuda):
        wanted = f"ops.impl={c.ops.impl.name}"
        _require(t.precision.name != "64-true", f"{wanted} computes in float32; use ops.impl=reference for 64-true")
        # Triton's interpreter runs on a CPU, for tests; what else can be known only of a machine is asked there.
        interpreted = c.ops.impl is OpsImpl.triton and os.environ.get("TRITON_INTERPRET") == "1"
        _require(
            t.device is not Device.cpu or interpreted,
            f"{wanted} needs a CUDA GPU, not train.device=cpu; use ops.impl=reference or auto",
        )


def identity(config: RunConfig, data_fingerprint: str) -> dict[str, Any]:
    """What a resolved run computes, in canonical values: equal identities mean the same run.

    Ratios and depth modes give way to the widths that they build, the place of a corpus to its content.
    """
    full = {name: value for name, value in as_dict(config).items() if name in IDENTITY_SECTIONS}
    built = {name: value for name, value in full["model"].items() if name not in BUILT_AWAY}
    full["model"] = {**built, "d_ff": config.model.d_ff}
    full["data"] = {"fingerprint": data_fingerprint, "val_windows": config.data.val_windows}
    return {**full, "numerics_version": NUMERICS_VERSION}


def signature(config: RunConfig, data_fingerprint: str) -> str:
    """16 hex digits that name a run by what it computes."""
    return signature_of(identity(config, data_fingerprint))


def signature_of(identity: Mapping[str, Any]) -> str:
    canonical = json.dumps(identity, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()[:16]
