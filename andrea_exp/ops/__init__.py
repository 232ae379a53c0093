"""The front door to the operations that fast kernels serve: one name an op, one choice of implementation a process.

A fast implementation swaps the computation, never parameters or meaning; `reference.py` is the definition.

`use` chooses, once, where a run starts: a run is a process of its own, so that a module-wide choice is the simplest
way for it to reach every op, without passing through models that have no business with it. Until then, and in all
that only looks at a model (counting, describing, diagnosing), the definitions run.

| ops.impl  | what runs                                                                      | module       |
|-----------|--------------------------------------------------------------------------------|--------------|
| reference | the definition                                                                 | reference.py |
| triton    | Triton for every op that has a kernel; DyT and the identity are the definition | fast.py      |
| cuda      | gelu.cu for the two GELUs, Triton elsewhere                                    | cuda_gelu.py |
| auto      | Triton on a CUDA GPU that has it, in 32 bits or less; the reference elsewhere  |              |
"""

import functools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any, ParamSpec, TypeVar

from andrea_exp.errors import UserError
from andrea_exp.ops import reference

NAMES = (
    *("relu", "gelu", "gelu_tanh", "silu", "relu2", "identity"),
    *("glu", "bilinear", "reglu", "geglu", "geglu_tanh", "swiglu"),
    *("layer_norm", "rms_norm", "dyt", "add_norm", "norm_add"),
)
Table = dict[str, Callable[..., Any]]
DEFINITIONS: Table = {name: getattr(reference, name) for name in NAMES}
P = ParamSpec("P")
R = TypeVar("R")

_chosen: Table = dict(DEFINITIONS)


def _door(definition: Callable[P, R]) -> Callable[P, R]:
    """An op with its definition's name and signature, computed by what is chosen at the time of the call."""

    @functools.wraps(definition)
    def op(*args: P.args, **kwargs: P.kwargs) -> R:
        return _chosen[definition.__name__](*args, **kwargs)

    return op


relu = _door(reference.relu)
gelu = _door(reference.gelu)
gelu_tanh = _door(reference.gelu_tanh)
silu = _door(reference.silu)
relu2 = _door(reference.relu2)
identity = _door(reference.identity)
glu = _door(reference.glu)
bilinear = _door(reference.bilinear)
reglu = _door(reference.reglu)
geglu = _door(reference.geglu)
geglu_tanh = _door(reference.geglu_tanh)
swiglu = _door(reference.swiglu)
layer_norm = _door(reference.layer_norm)
rms_norm = _door(reference.rms_norm)
dyt = _door(reference.dyt)
add_norm = _door(reference.add_norm)
norm_add = _door(reference.norm_add)


def use(requested: str, device: str = "cpu", float64: bool = False) -> dict[str, str]:
    """Chooses for this process and returns what runs, "reference", "triton" or "cuda" by op: a run records it.

    Raises UserError where what is asked for cannot run; only `auto` looks for something else.
    """
    if requested == "auto":
        requested = "triton" if not float64 and device == "cuda" and find_spec("triton") else "reference"
    why = refusal(requested, device, float64)
    if why:
        raise UserError(why)
    tables = {"reference": DEFINITIONS} | _fast_tables(requested)
    _chosen.update({name: op for table in tables.values() for name, op in table.items()})
    last = {name: impl for impl, table in tables.items() for name in table}
    return {name: last[name] for name in NAMES}


def refusal(requested: str, device: str, float64: bool = False) -> str | None:
    """Why an implementation cannot run here, in one line; None where it can."""
    if requested in ("auto", "reference"):
        return None
    wanted = f"ops.impl={requested}"
    if float64:
        return f"{wanted} computes in float32; use ops.impl=reference with train.precision=64-true"
    if device != "cuda" and (requested == "cuda" or not interpreted()):
        return f"{wanted} needs a CUDA GPU, not device={device}; use ops.impl=reference or auto"
    missing = [name for name in {"triton": ["triton"], "cuda": ["triton", "cuda.core"]}[requested] if not _has(name)]
    return f"{wanted} needs {missing[0]}, which is not installed: pip install 'andrea-exp[gpu]'" if missing else None


def interpreted() -> bool:
    """Whether Triton runs its kernels as Python, on a CPU: slow, and right to the last bits but for rounding."""
    return os.environ.get("TRITON_INTERPRET") == "1"


@contextmanager
def definitions() -> Iterator[None]:
    """Runs the definitions within, whatever is chosen."""
    chosen = dict(_chosen)
    _chosen.update(DEFINITIONS)
    try:
        yield
    finally:
        _chosen.update(chosen)


def _fast_tables(requested: str) -> dict[str, Table]:
    """The later table wins. Imported here: the rest works without Triton, and starts without waiting for it."""
    if requested == "reference":
        return {}
    from andrea_exp.ops import fast

    if requested == "triton":
        return {"triton": fast.OPS}
    from andrea_exp.ops.cuda_gelu import OPS

    return {"triton": fast.OPS, "cuda": OPS}


def _has(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # its parent package is missing
        return False
