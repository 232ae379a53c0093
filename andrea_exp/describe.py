"""What a model costs, before anything runs: the accounting of one config as data, as tables, as a picture."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from andrea_exp import ROOT, accounting
from andrea_exp.accounting import Decode
from andrea_exp.config import RunConfig, as_dict
from andrea_exp.errors import UserError, did_you_mean
from andrea_exp.record import find_run, load_config
from andrea_exp.style import COLOURS
from andrea_exp.sweep.plan import plan_sweep

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SHOWN = (
    *("n_layers", "d_model", "n_heads", "n_kv_heads", "d_head", "d_ff", "seq_len", "vocab_size", "activation"),
    *("norm_placement", "norm_type", "block_layout", "position", "tied_head", "bias"),
)
# One colour a part in every bar.
BLUE, RED, GREEN, PINK, ORANGE, SKY, BLACK, _ = COLOURS
COLOUR = {
    **dict.fromkeys(("attention", "attention projections", "weights"), BLUE),
    **dict.fromkeys(("mlp", "activations"), RED),
    **dict.fromkeys(("token embedding", "embedding row", "optimizer"), GREEN),
    **dict.fromkeys(("head", "gradients"), PINK),
    **dict.fromkeys(("attention scores and mix", "key/value cache"), ORANGE),
    "positions": SKY,
    "norms": BLACK,
}


def named(name: str, overrides: Sequence[str]) -> tuple[RunConfig, Path | None]:
    """The resolved config of a recipe, a recorded run or an override, and a run's folder. Raises UserError.

    A run's readable name may look like an override, and comes first.
    """
    recipes = sorted(path.stem for path in (ROOT / "conf" / "recipe").glob("*.yaml"))
    if name in recipes:
        return plan_sweep([f"recipe={name}", *overrides]).cells[0].config, None
    records = Path(next((o.partition("=")[2] for o in overrides if o.startswith("records=")), "records"))
    try:
        folder = find_run(records, name)
    except UserError as error:
        if "=" in name:
            return plan_sweep([name, *overrides]).cells[0].config, None
        raise UserError(f"{name}: neither a recipe nor a run in {records}/; {did_you_mean(name, recipes)}") from error
    if rest := [o for o in overrides if not o.startswith("records=")]:
        raise UserError(f"{rest[0]}: a recorded run is as it ran; name a recipe to change it")
    return load_config(folder), folder


def describe(config: RunConfig, decode: Decode) -> dict[str, Any]:
    """All counts of a resolved config. Bytes of training are for one micro-batch in float32."""
    m = config.model
    parts = accounting.parameters(m)
    forward = accounting.forward_flops(m)
    read = accounting.decode_bytes(m, decode)
    micro = config.train.batch_size // config.train.accumulate
    return {
        "model": {k: as_dict(m).get(k, getattr(m, k)) for k in SHOWN} | {"formula": m.norm_placement.value},
        "parameters": {
            "total": sum(parts.values()),
            "by_part": parts,
            "shares": accounting.shares(parts),
            "a_layer": accounting.parameters_a_layer(m),
        },
        "norms": accounting.norms(m),
        "corrections": accounting.corrections(m),
        "flops_per_token": {
            "forward": forward,
            "forward_total": sum(forward.values()),
            "backward_total": 2 * sum(forward.values()),
            "training_total": accounting.flops_per_token(m),
        },
        "training_bytes": {"batch": micro, "seq_len": m.seq_len} | accounting.training_bytes(m, micro),
        "decode": {
            "batch": decode.batch,
            "context": decode.context,
            "dtype_bytes": decode.dtype_bytes,
            "bandwidth": decode.bandwidth,
            "bytes_per_token": read,
            "shares": accounting.shares(read),
            "cache_bytes_per_token": accounting.cache_bytes_per_token(m, decode.dtype_bytes),
            **accounting.decode_speed(m, decode),
        },
        "fused_add_norm": accounting.fused_add_norm(m, decode.dtype_bytes),
    }


def to_json(found: dict[str, Any]) -> str:
    return json.dumps(found, indent=2)


def render(found: dict[str, Any]) -> RenderableType:
    """The counts as tables for a terminal."""
    parameters, flops, decode = found["parameters"], found["flops_per_token"], found["decode"]
    sizes = "  ".join(f"{k}={v}" for k, v in found["model"].items())
    training = {k: v for k, v in found["training_bytes"].items() if k not in ("batch", "seq_len")}
    where = f"{found['training_bytes']['batch']} x {found['training_bytes']['seq_len']} tokens, float32"
    fused = found["fused_add_norm"]
    notes = [
        f"{found['norms']} norms, {found['corrections']} corrections to the stream",
        f"FLOPs a training token: {human(flops['training_total'])} (backward twice the forward pass)",
        f"decoding {decode['batch']} x {decode['context']} behind: {decode['flops_per_byte']:.2f} FLOPs a byte read; "
        f"if reading were all, {decode['tokens_per_s']:,.0f} tokens/s at {decode['bandwidth'] / 1e12:g} TB/s; "
        f"{decode['cache_bytes_per_token']:,} bytes of cache a token",
        f"add and norm fused at {fused['junctions']:.0f} junctions: {human(fused['bytes_apart'])} bytes a token "
        f"-> {human(fused['bytes_fused'])}, forward",
    ]
    return Group(
        Text(sizes),
        _parts("parameters", parameters["by_part"], exact=True),
        _parts("FLOPs a token, forward", flops["forward"]),
        _parts(f"bytes held in training, {where}", training),
        _parts("bytes read a decoded token", decode["bytes_per_token"]),
        *(Text(note) for note in notes),
    )


def human(value: float) -> str:
    """Three digits and a unit: 8.03G."""
    for unit in ("", "K", "M", "G", "T"):
        if abs(value) < 999.5:
            return f"{value:.3g}{unit}"
        value /= 1000
    return f"{value:.3g}P"


def _parts(title: str, parts: dict[str, float], exact: bool = False) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=None, show_header=False, pad_edge=False)
    for justify in ("left", "right", "right"):
        table.add_column(justify=justify, min_width=12)
    whole = sum(parts.values())
    for name, value in {**parts, "total": whole}.items():
        shown = f"{value:,.0f}" if exact else human(value)
        table.add_row(name, shown, f"{100 * value / whole:.1f}%" if whole else "")
    table.add_row()
    return table


def picture(found: dict[str, Any], name: str) -> "Figure":
    """Stacked bars: of parameters, FLOPs, bytes in training and in decoding, which part is how much."""
    from matplotlib.figure import Figure

    bars = {
        "parameters": found["parameters"]["by_part"],
        "FLOPs, forward": found["flops_per_token"]["forward"],
        "training bytes": {k: v for k, v in found["training_bytes"].items() if k not in ("batch", "seq_len")},
        "decoding bytes": found["decode"]["bytes_per_token"],
    }
    figure = Figure(figsize=(9, 3.6), layout="constrained", dpi=150)
    axes = figure.subplots(1, len(bars))
    for panel, (title, parts) in zip(axes, bars.items(), strict=True):
        bottom, whole = 0.0, sum(parts.values())
        for part, value in parts.items():
            share = 100 * value / whole
            panel.bar(0, share, bottom=bottom, color=COLOUR[part], label=f"{part} {share:.1f}%", width=1)
            bottom += share
        panel.set_title(f"{title}\n{human(whole)}", fontsize=9)
        panel.set_xticks([])
        panel.set_ylim(0, 100)
        panel.legend(fontsize=6, frameon=False, loc="upper center", bbox_to_anchor=(0.5, 0))
    axes[0].set_ylabel("%")
    figure.suptitle(name, fontsize=10)
    return figure
