"""What the fused ops do to training: the model alone on random tokens, by each implementation, eager and compiled.

    python benchmarks/training.py --out FOLDER [--budget-s 120]

Needs torch and Triton, no Lightning, Hydra or corpus. bfloat16 autocast, fused AdamW, one GPU. Each variant has a
process of its own, since ops are chosen once a process. FOLDER/training.json: losses of the first steps, the same seed
and tokens in all, and how far they are from those of the reference; tokens/s, MFU, peak memory; and the dtype that
each op gives under autocast. Exit code 1 where a variant failed or its losses are not the reference's.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryFile
from typing import Any

import torch
from torch import Tensor

from andrea_exp import accounting, ops
from andrea_exp.config import (
    Activation,
    AttentionScale,
    BlockLayout,
    BranchMultiplier,
    DepthMode,
    EmbeddingScale,
    Init,
    MLPMatch,
    ModelConfig,
    NormPlacement,
    NormType,
    Position,
    Precision,
    QKNorm,
)
from andrea_exp.errors import UserError, did_you_mean
from andrea_exp.model import GPT

FIRST = 20  # steps whose losses are compared
BATCHES = 4  # of random tokens, in turn, so that there is something to learn
CHUNK = 5  # steps timed at once
VARIANT_S = 120  # more than any variant should take, compiling included
CLOSE = 2**-7  # of the loss: bfloat16's grain
GELUS = (Activation.gelu, Activation.gelu_tanh)


def model_config(d_model: int, n_layers: int, n_heads: int, seq_len: int, **others: Any) -> ModelConfig:
    """A resolved config, GPT-2's block where `others` say nothing else."""
    config = ModelConfig(
        d_model=d_model,
        n_layers=n_layers,
        depth_mode=DepthMode.fixed_width,
        reference_layers=None,
        n_heads=n_heads,
        n_kv_heads=n_heads,
        d_head=d_model // n_heads,
        seq_len=seq_len,
        vocab_size=50257,
        expansion_ratio="4",
        mlp_match=MLPMatch.none,
        activation=Activation.gelu_tanh,
        block_layout=BlockLayout.sequential,
        residual=True,
        branch_multiplier=BranchMultiplier.one,
        norm_placement=NormPlacement.pre,
        norm_type=NormType.layernorm,
        norm_bias=True,
        eps=1e-5,
        final_norm=True,
        qk_norm=QKNorm.none,
        attention_scale=AttentionScale.inv_sqrt_d_head,
        embedding_scale=EmbeddingScale.one,
        embedding_norm=False,
        bias=True,
        tied_head=True,
        position=Position.learned,
        rope_theta=None,
        init=Init.scaled,
        dropout=0.0,
    )
    for name, value in others.items():
        assert hasattr(config, name), name
        setattr(config, name, value)
    return config


@dataclass(frozen=True)
class Size:
    """A model and its batch, in sequences."""

    model: ModelConfig
    batch: int


LLAMA = {
    "norm_type": NormType.rmsnorm,
    "norm_bias": None,
    "activation": Activation.swiglu,
    "expansion_ratio": "8/3",
    "bias": False,
    "position": Position.rope,
    "rope_theta": 1e4,
}
# GPT-2's block, and Llama's, so that together they run LayerNorm and RMSNorm, a GELU and a gate.
SIZES = {
    "124m": Size(model_config(768, 12, 12, 1024), 32),
    "10m": Size(model_config(384, 6, 6, 256, vocab_size=257, **LLAMA), 128),
    "tiny": Size(model_config(16, 2, 2, 16, vocab_size=64), 2),
}


@dataclass(frozen=True)
class Variant:
    size: str
    impl: str
    mode: str  # eager or compiled

    @property
    def name(self) -> str:
        return f"{self.size} {self.impl} {self.mode}"


def train(variant: Variant, seconds: float) -> dict[str, Any]:
    """One variant in this process: losses of the first steps, then as many timed ones as `seconds` hold."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    chosen = ops.use(variant.impl, device)
    size = SIZES[variant.size]
    model = GPT(size.model, seed=0).to(device)
    if variant.mode == "compiled":
        model.trunk.compile(fullgraph=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1, fused=True)
    batches = list(_batches(size, device))

    def step(index: int) -> Tensor:
        tokens, targets = batches[index % BATCHES]
        with torch.autocast(device, torch.bfloat16):
            loss = model.loss(tokens, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    losses = [step(index).item() for index in range(FIRST)]
    spent = list(_timed(step, seconds, device))
    tokens_s = size.batch * size.model.seq_len / median(spent)
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "ops": chosen,
        "losses": losses,
        "ms_a_step": 1e3 * median(spent),
        "chunks": len(spent),
        "tokens_per_s": tokens_s,
        "mfu": _mfu(size.model, tokens_s, device),
        "peak_memory_bytes": torch.cuda.max_memory_allocated() if device == "cuda" else None,
        "under_autocast": dtypes_under_autocast(device),
    }


def _batches(size: Size, device: str) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    for _ in range(BATCHES):
        shape = (size.batch, size.model.seq_len + 1)
        ids = torch.randint(0, size.model.vocab_size or 0, shape, generator=generator).to(device)
        yield ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def _timed(step: Callable[[int], Tensor], seconds: float, device: str) -> Iterator[float]:
    """Seconds a step, by chunks; three at least."""
    began, done = time.perf_counter(), 0
    while done < 3 or time.perf_counter() - began < seconds:
        start = time.perf_counter()
        for index in range(CHUNK):
            step(index)
        if device == "cuda":
            torch.cuda.synchronize()
        yield (time.perf_counter() - start) / CHUNK
        done += 1


def _mfu(config: ModelConfig, tokens_s: float, device: str) -> float | None:
    name = torch.cuda.get_device_name() if device == "cuda" else device
    peak = accounting.peak_flops(name, Precision["bf16-mixed"])
    return None if peak is None else accounting.flops_per_token(config) * tokens_s / peak


def dtypes_under_autocast(device: str) -> dict[str, str]:
    """What the chosen ops give of bfloat16 with float32 parameters, as a branch under autocast has them."""
    x, gain = torch.randn(4, 32, device=device).bfloat16(), torch.ones(32, device=device)
    with torch.autocast(device, torch.bfloat16):
        given = {
            "layer_norm": ops.layer_norm(x, gain, gain, 1e-5),
            "rms_norm": ops.rms_norm(x, gain, 1e-5),
            "add_norm's sum": ops.add_norm(x, x, gain, gain, 1e-5, "layernorm")[0],
            "add_norm's copy": ops.add_norm(x, x, gain, gain, 1e-5, "layernorm")[1],
            "add_norm's sum, float32 stream": ops.add_norm(x.float(), x, gain, gain, 1e-5, "layernorm")[0],
            "norm_add": ops.norm_add(x, x, gain, gain, 1e-5, "layernorm"),
            "gelu_tanh": ops.gelu_tanh(x),
            "swiglu": ops.swiglu(x),
        }
    return {name: str(tensor.dtype).removeprefix("torch.") for name, tensor in given.items()}


def variants(sizes: list[str], impls: list[str], modes: list[str]) -> list[Variant]:
    """Eager ones first, since compiling takes long; gelu.cu only there, and only where there is a GELU."""
    return [
        Variant(size, impl, mode)
        for mode in modes
        for size in sizes
        for impl in impls
        if impl != "cuda" or (mode == "eager" and SIZES[size].model.activation in GELUS)
    ]


def compare(found: dict[str, dict[str, Any]]) -> dict[str, dict[str, float]]:
    """How far each variant's losses are from the eager reference's of its size: the largest share of the loss."""
    apart = {}
    for name, one in found.items():
        reference = found.get(f"{name.split()[0]} reference eager", {}).get("losses")
        if reference and "losses" in one:
            shares = [abs(a - b) / b for a, b in zip(one["losses"], reference, strict=True)]
            apart[name] = {"first step": shares[0], "largest": max(shares), "last step": shares[-1]}
    return apart


def in_a_process(variant: Variant, seconds: float, limit_s: float) -> dict[str, Any]:
    """What the variant's own process says of it; or what went wrong."""
    words = [sys.executable, __file__, "--variant", *variant.name.split(), "--seconds", str(seconds)]
    # Files, not pipes: a compiler's processes may outlive a variant that is ended, and hold its pipes open.
    with TemporaryFile("w+") as out, TemporaryFile("w+") as err:
        try:
            code = subprocess.run(words, stdout=out, stderr=err, timeout=limit_s).returncode
        except subprocess.TimeoutExpired:
            return {"failed": f"longer than {limit_s:.0f} s"}
        out.seek(0), err.seek(0)
        if code:
            return {"failed": f"exit code {code}: {err.read()[-2000:]}"}
        return json.loads(out.read().splitlines()[-1])


def main() -> int:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    options = _options(device)
    if options.variant:
        print(json.dumps(train(Variant(*options.variant), options.seconds)))
        return 0
    options.out.mkdir(parents=True, exist_ok=True)
    began, found, skipped = time.perf_counter(), dict[str, dict[str, Any]](), list[str]()
    for variant in variants(options.size, options.impl, options.mode):
        left = min(VARIANT_S, options.budget_s - (time.perf_counter() - began))
        if left <= 0:
            skipped.append(variant.name)
            continue
        print(f"[{time.perf_counter() - began:6.1f} s] {variant.name}", file=sys.stderr, flush=True)
        found[variant.name] = in_a_process(variant, options.seconds, left)
        result = {"device": _device(device), "torch": torch.__version__, "variants": found}
        result |= {"skipped": skipped, "apart": compare(found)}
        (options.out / "training.json").write_text(json.dumps(result, indent=1))
    show(found, skipped)
    return int(any("failed" in one for one in found.values()) or not close(compare(found)))


def close(apart: dict[str, dict[str, float]]) -> bool:
    return all(one["largest"] <= CLOSE for one in apart.values())


def _device(device: str) -> str:
    return torch.cuda.get_device_name() if device == "cuda" else "cpu (its times mean nothing)"


def show(found: dict[str, dict[str, Any]], skipped: list[str]) -> None:
    apart = compare(found)
    for name, one in found.items():
        if "failed" in one:
            print(f"{name}: FAILED: {one['failed']}")
            continue
        mfu = "" if one["mfu"] is None else f", MFU {one['mfu']:.1%}"
        memory = "" if one["peak_memory_bytes"] is None else f", {one['peak_memory_bytes'] / 1e9:.1f} GB"
        far = f", losses within {apart[name]['largest']:.2e}" if name in apart else ""
        print(f"{name}: {one['tokens_per_s']:,.0f} tokens/s{mfu}{memory}, loss {one['losses'][-1]:.4f}{far}")
    for name in skipped:
        print(f"{name}: skipped, out of time")


def _options(device: str) -> argparse.Namespace:
    def words(valid: dict[str, Any] | tuple[str, ...]) -> Callable[[str], list[str]]:
        def split(text: str) -> list[str]:
            for word in text.split(","):
                if word not in valid:
                    raise argparse.ArgumentTypeError(f"{word}: {did_you_mean(word, valid)}")
            return text.split(",")

        return split

    impls = ("reference", "triton", "cuda")
    able = [impl for impl in impls if ops.refusal(impl, device) is None]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("out/training"), metavar="FOLDER")
    parser.add_argument("--size", type=words(SIZES), default=["124m", "10m"] if device == "cuda" else ["tiny"])
    parser.add_argument("--impl", type=words(impls), default=able)
    parser.add_argument("--mode", type=words(("eager", "compiled")), default=["eager", "compiled"])
    parser.add_argument("--seconds", type=float, default=3.0, help="of timed steps a variant")
    parser.add_argument("--budget-s", type=float, default=3600.0, help="after it the rest is skipped, and listed")
    parser.add_argument("--variant", nargs=3, metavar=("SIZE", "IMPL", "MODE"), help="this one alone, here; JSON")
    return parser.parse_args()


if __name__ == "__main__":
    try:
        sys.exit(main())
    except UserError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
