"""How two runs differ: in what they compute, in how they ran, in what came out."""

import json
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from andrea_exp.config import RunConfig
from andrea_exp.errors import UserError
from andrea_exp.record import load_config, read_json, status

ABSENT = "(absent)"
RESULTS = ("status", "val/loss", "val/bits_per_byte", "grad_norm/median", "parameters", "flops_per_token", "weights")

Differences = dict[str, tuple[Any, Any]]


def why(one: Path, other: Path) -> dict[str, Differences]:
    """Fields with the values of both runs, only where they differ, in three parts.

    "computes" decides the signature; "ran" does not; "gave" is what came out. Raises UserError for a folder
    without an identity.
    """
    return {
        "computes": _differences(_identity(one), _identity(other)),
        "ran": _differences(_ran(one), _ran(other)),
        "gave": _differences(_gave(one), _gave(other)),
    }


def summary_line(folder: Path, config: RunConfig) -> str:
    """One run in a line."""
    m, loss = config.model, (read_json(folder / "summary.json") or {}).get("val/loss")
    model = f"{m.norm_placement.name} {m.activation.name} d={m.d_model} L={m.n_layers} seed={config.seed}"
    return f"{folder.name}: {status(folder)}, {model}" + (f", val/loss {loss:.3f}" if loss is not None else "")


def _identity(folder: Path) -> dict[str, Any]:
    found = read_json(folder / "identity.json")
    if found is None:
        raise UserError(f"{folder}: no identity.json; the run was never opened whole")
    flat = _flat(found)
    # The fingerprint says that texts differ; the fields behind it say how.
    data = {k: v for k, v in vars(load_config(folder).data).items() if k != "val_windows"}
    return flat | {f"data.{k}": str(v) if isinstance(v, dict) else getattr(v, "name", v) for k, v in data.items()}


def _ran(folder: Path) -> dict[str, Any]:
    found = read_json(folder / "provenance.json") or {}
    kept = {k: v for k, v in found.items() if k not in ("attempts", "seed", "data_fingerprint", "numerics_version")}
    return _flat(kept) | {"attempts": len(found.get("attempts", []))}


def _gave(folder: Path) -> dict[str, Any]:
    summary = read_json(folder / "summary.json") or {}
    return {"status": str(status(folder)), **{k: summary.get(k) for k in RESULTS if k != "status"}}


def _flat(value: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, inner in value.items():
        flat |= _flat(inner, f"{prefix}{name}.") if isinstance(inner, dict) else {f"{prefix}{name}": inner}
    return flat


def _differences(one: dict[str, Any], other: dict[str, Any]) -> Differences:
    names = [*one, *(name for name in other if name not in one)]
    pairs = {name: (one.get(name, ABSENT), other.get(name, ABSENT)) for name in names}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def render(found: dict[str, Differences], one: Path, other: Path) -> RenderableType:
    table = Table("", one.name, other.name, box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
    titles = {"computes": "what they compute", "ran": "how they ran", "gave": "what came out"}
    for part, differences in found.items():
        table.add_row(Text(titles[part] + ("" if differences else ": no difference"), "bold"))
        for name, pair in differences.items():
            table.add_row(Text(f"  {name}"), *(Text(json.dumps(value)) for value in pair))
    same = not found["computes"]
    verdict = "one run twice: every bit of training should agree" if same else "two runs: their signatures differ"
    return Group(table, Text(verdict if one != other else "the same run", "dim"))
