"""The one place that counts: parameters, FLOPs, bytes. Exact, from a config alone, on the meta device.

Plans and depth modes need only closed forms, so torch is imported where a model is built.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from andrea_exp.config import BlockLayout, ModelConfig, Position, Precision, as_dict

ADAM_STATES = 2  # first and second moment, float32
FLOAT32 = 4
DIAGNOSIS_WINDOWS = 8  # of the validation windows, those that a diagnosis looks at


@dataclass(frozen=True)
class Decode:
    """How text is generated: `batch` sequences side by side, each with `context` tokens behind it."""

    batch: int = 1
    context: int = 0
    dtype_bytes: int = 2
    bandwidth: float = 3.35e12  # bytes/s; an H100's


def trunk_matrices(config: ModelConfig) -> int:
    """Values in the weight matrices of all blocks: what depth modes hold equal."""
    attention, mlp = _matrices(config)
    return config.n_layers * (attention + mlp)


def _matrices(config: ModelConfig) -> tuple[int, int]:
    """Values in one block's attention and MLP matrices."""
    D, A, KV = config.d_model, config.d_attention, config.d_key_value
    return D * (A + 2 * KV) + A * D, (3 if config.gated else 2) * D * config.d_ff


def about_parameters(config: ModelConfig) -> int:
    """Trainable values but for norms and biases, without building the model."""
    assert config.vocab_size is not None
    positions = config.seq_len if config.position is Position.learned else 0
    tables = config.vocab_size * (1 if config.tied_head else 2) + positions
    return trunk_matrices(config) + config.d_model * tables


def about_activations(config: ModelConfig) -> int:
    """Bytes that training holds for one token in float32, to within a third: for sizing, never for a table."""
    assert config.vocab_size is not None
    widths = 8 * config.d_model + 2 * config.d_attention + 2 * config.d_key_value + 4 * config.d_ff
    return FLOAT32 * (config.n_layers * widths + 3 * config.vocab_size)


def forward_flops(config: ModelConfig, context: float | None = None) -> dict[str, int]:
    """Matrix FLOPs of one token's forward pass by part, a multiply-add as 2.

    Norms and activations are left out, as in Chowdhery et al. 2022, appendix B. A training token meets the whole
    window (what dense kernels compute; causal ones skip half); a decoded one the `context` behind it.
    """
    assert config.vocab_size is not None
    attention, mlp = _matrices(config)
    seen = config.seq_len if context is None else context
    return {
        "attention projections": 2 * config.n_layers * attention,
        "attention scores and mix": round(4 * config.n_layers * seen * config.d_attention),
        "mlp": 2 * config.n_layers * mlp,
        "head": 2 * config.d_model * config.vocab_size,
    }


def flops_per_token(config: ModelConfig) -> int:
    """Matrix FLOPs of one training token: forward, and twice that backward."""
    return 3 * sum(forward_flops(config).values())


# Dense peak FLOP/s by the makers' data sheets, without sparsity: half precision on tensor cores, float32 without.
PEAK_FLOPS = {"H200": (989e12, 67e12), "H100": (989e12, 67e12), "A100": (312e12, 19.5e12)}


def peak_flops(device: str, precision: Precision) -> float | None:
    """What MFU is measured against, or None for a device whose peak is not known (CPUs)."""
    known = next((peak for name, peak in PEAK_FLOPS.items() if name in device), None)
    if known is None or precision.name == "64-true":
        return None
    return known[0] if precision.name.endswith("mixed") else known[1]


def parameters(config: ModelConfig) -> dict[str, int]:
    """Trainable values by part of the model, a tied head's none of its own."""
    parts = dict.fromkeys(("token embedding", "positions", "attention", "mlp", "norms", "head"), 0)
    for name, parameter in _meta_model(config).named_parameters():
        parts[_part(name)] += parameter.numel()
    return parts


def parameters_a_layer(config: ModelConfig) -> dict[str, int]:
    """Attention, MLP and norms of one more layer: what a model one deeper has over this one.

    Taken between depths beyond `mix`'s first quarter, so that a norm which opens or ends the trunk counts nowhere.
    """
    here, deeper = parameters(config), parameters(replace(config, n_layers=config.n_layers + 1))
    return {part: deeper[part] - here[part] for part in ("attention", "mlp", "norms")}


def _meta_model(config: ModelConfig) -> Any:
    return _build(json.dumps(as_dict(config)))


@lru_cache(maxsize=4)
def _build(config: str) -> Any:
    """A model on the meta device; one description asks for the same one several times."""
    import torch
    from omegaconf import OmegaConf

    from andrea_exp.model import GPT

    typed = OmegaConf.merge(OmegaConf.structured(ModelConfig), json.loads(config))
    with torch.device("meta"):
        return GPT(OmegaConf.to_object(typed))  # type: ignore[arg-type]


def _part(name: str) -> str:
    words = name.split(".")
    if words[0] in ("token_embedding", "head"):
        return words[0].replace("_", " ")
    if words[0] in ("position_embedding", "relative_bias"):
        return "positions"
    if words[-2].endswith("norm") or words[3].endswith("junction"):  # with it a branch's learned weight
        return "norms"
    return {"attn": "attention", "mlp": "mlp"}[words[3]]


def norms(config: ModelConfig) -> int:
    """Norms on the stream and its branches, the final one and one after the embedding included, QK-norms not."""
    from andrea_exp.model.attention import Attention
    from andrea_exp.model.layers import Norm

    model = _meta_model(config)
    inside = {id(n) for a in model.modules() if isinstance(a, Attention) for n in a.modules()}
    return sum(isinstance(m, Norm) and id(m) not in inside for m in model.modules())


def corrections(config: ModelConfig) -> int:
    """How often something is added to the stream."""
    return config.n_layers * (1 if config.block_layout is BlockLayout.parallel else 2)


def activation_bytes(config: ModelConfig, batch: int) -> int:
    """Bytes that the forward pass of (batch, seq_len) tokens keeps for the backward pass in float32.

    What autograd saves, each storage once, weights left out; attention by the flash kernel, which keeps no scores.
    """
    import torch
    from torch.autograd.graph import saved_tensors_hooks

    model = _meta_model(config)
    weights = {t.untyped_storage()._cdata for t in [*model.parameters(), *model.buffers()]}
    kept: dict[int, Any] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in weights:
            kept[storage._cdata] = storage  # held, so that no later storage takes its address
        return tensor

    tokens, targets = torch.zeros(2, batch, config.seq_len, dtype=torch.long, device="meta").unbind()
    with _flash_on_meta(), saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = model.loss(tokens, targets)
    del loss
    return sum(storage.nbytes() for storage in kept.values())


@contextmanager
def _flash_on_meta() -> Iterator[None]:
    """On the meta device torch picks the attention that keeps all scores; a run has the flash kernel.

    Not with T5's learned bias, which no flash kernel differentiates: there a run keeps all scores too.
    """
    import torch
    from torch.nn import functional as F

    usual = F.scaled_dot_product_attention
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu

    def attend(q: Any, k: Any, v: Any, attn_mask: Any, is_causal: bool, dropout_p: float, scale: float) -> Any:
        if attn_mask is not None:
            return usual(q, k, v, attn_mask=attn_mask, is_causal=is_causal, dropout_p=dropout_p, scale=scale)
        return flash(q, k, v, dropout_p, is_causal, scale=scale)[0]

    F.scaled_dot_product_attention = attend  # type: ignore[assignment]
    try:
        yield
    finally:
        F.scaled_dot_product_attention = usual


def training_bytes(config: ModelConfig, batch: int) -> dict[str, int]:
    """Bytes that training a micro-batch in float32 holds at the forward pass's end."""
    weights = FLOAT32 * sum(parameters(config).values())
    return {
        "weights": weights,
        "gradients": weights,
        "optimizer": ADAM_STATES * weights,
        "activations": activation_bytes(config, batch),
    }


def cache_bytes_per_token(config: ModelConfig, dtype_bytes: int) -> int:
    """Bytes of keys and values that one token leaves behind."""
    return 2 * config.n_layers * config.d_key_value * dtype_bytes


def decode_bytes(config: ModelConfig, decode: Decode) -> dict[str, float]:
    """Bytes read to decode one token, by part: weights shared by the batch, one embedding row, the cache."""
    parts = parameters(config)
    assert config.vocab_size is not None
    head = config.d_model * config.vocab_size  # read whole, tied or not
    shared = {"attention": parts["attention"], "mlp": parts["mlp"], "norms": parts["norms"], "head": head}
    read = {name: values * decode.dtype_bytes / decode.batch for name, values in shared.items()}
    rows = 2 if parts["positions"] and config.position.name == "learned" else 1
    read["embedding row"] = float(rows * config.d_model * decode.dtype_bytes)
    read["key/value cache"] = float(decode.context * cache_bytes_per_token(config, decode.dtype_bytes))
    return read


def decode_speed(config: ModelConfig, decode: Decode) -> dict[str, float]:
    """FLOPs a byte read, and tokens/s of the whole batch if reading were all."""
    flops = sum(forward_flops(config, decode.context).values())
    read = sum(decode_bytes(config, decode).values())
    return {"flops_per_byte": flops / read, "tokens_per_s": decode.batch * decode.bandwidth / read}


def fused_add_norm(config: ModelConfig, dtype_bytes: int = 2) -> dict[str, float]:
    """Traffic of a token's additions with norms, forward: apart 5 passes over (D,), fused 4."""
    fusable = min(corrections(config), max(0, norms(config) - 1))
    one_pass = config.d_model * dtype_bytes
    return {
        "junctions": fusable,
        "bytes_apart": 5.0 * fusable * one_pass,
        "bytes_fused": 4.0 * fusable * one_pass,
        "share_saved": 1 / 5,
    }


def shares(parts: dict[str, Any]) -> dict[str, float]:
    """Each part over the sum of all."""
    whole = sum(parts.values())
    return {name: value / whole for name, value in parts.items()}
