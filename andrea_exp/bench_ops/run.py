"""The order of things: odd shapes are checked, then each shape is checked and timed, the most important first.

What is wrong is named and not timed. Every step's result is on disk before the next begins.
"""

import json
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from datetime import datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from andrea_exp import ops
from andrea_exp.bench_ops import report
from andrea_exp.bench_ops.cases import (
    GRIDS,
    INEXACT,
    MOVED,
    OURS,
    Case,
    Op,
    Work,
    absent,
    build,
    odd_works,
    tensors,
    works,
)
from andrea_exp.bench_ops.clock import Clock, Inputs, copy_time
from andrea_exp.ops.yardstick import Error, error_of, evaluate, largest_value

RESULT = "ops.json"
PACKAGES = ("torch", "triton", "cuda-core", "cuda-bindings", "nvidia-cuda-nvrtc", "liger-kernel", "numpy")
Row = dict[str, Any]


class Bench:
    """What has been found so far, in a file that is never half written."""

    def __init__(
        self,
        folder: Path,
        device: str,
        grid: str,
        impls: Sequence[str],
        budget_s: float | None = None,
        words: Sequence[str] = (),
    ) -> None:
        """`words` is the command line that asked for it, to be recorded."""
        self.device, self.grid, self.path = device, GRIDS[grid], folder / RESULT
        self.began, self.budget_s = time.perf_counter(), budget_s
        missing = {impl: why for impl in impls if (why := absent(impl, device))}
        self.impls = tuple(impl for impl in impls if impl not in missing)
        self.clock = Clock(device)
        self.copies: dict[int, Row] = {}
        lists: dict[str, list[Row]] = {name: [] for name in ("checks", "rows", "copies", "skipped")}
        self.found: dict[str, Any] = {"about": about(device, grid, words), "absent": missing, **lists}

    def run(self) -> bool:
        """Whether all of ours that could be checked are right."""
        odd, timed = list(odd_works(self.grid, self.impls)), list(works(self.grid, self.impls))
        for number, work in enumerate([*odd, *timed]):
            self._say(f"{number + 1}/{len(odd) + len(timed)} {_name(work)}: {', '.join(work.impls)}")
            self._one(work, timed=number >= len(odd))
            self.save()
        for copied in self.found["copies"]:
            copied["after_gb_s"] = self._copy_speed(copied["M"] * copied["N"], getattr(torch, copied["dtype"]))
        self.found["comparisons"] = report.comparisons(self.found)
        self.found["about"]["seconds"] = round(time.perf_counter() - self.began, 1)
        self.save()
        return not any(self.wrong(impl) for impl in OURS)

    def wrong(self, impl: str, **where: Any) -> list[Row]:
        """The checks that an implementation failed, of all or of one op and dtype."""
        wanted = {"impl": impl, "right": False, **where}
        return [c for c in self.found["checks"] if all(c[k] == v for k, v in wanted.items())]

    def save(self) -> None:
        draft = self.path.with_suffix(".new")
        draft.write_text(json.dumps(self.found, indent=1))
        draft.replace(self.path)

    def _one(self, work: Work, timed: bool) -> None:
        if self.budget_s is not None and time.perf_counter() - self.began > self.budget_s:
            return self._skip(work, timed, f"the budget of {self.budget_s:g} s was spent")
        try:
            built = dict(self._build_and_check(work))
            if timed and built:
                self._time(work, built)
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
            self._skip(work, timed, "out of memory")
        return None

    def _skip(self, work: Work, timed: bool, why: str) -> None:
        self._say(f"skipped {_name(work)}: {why}")
        what = "check and time" if timed else "check"
        self.found["skipped"].append({**work.where, "impls": list(work.impls), "what": what, "why": why})

    def _build_and_check(self, work: Work) -> Iterator[tuple[str, Op]]:
        """The implementations that may be timed: those that are right, and the one whose error is the question."""
        for impl, op, row in check(work, self.device):
            self.found["checks"].append(row)
            if told := report.what_is_wrong(row):
                self._say(told)
            where = {k: row[k] for k in ("op", "dtype")}
            if op is not None and (impl == INEXACT or not self.wrong(impl, **where)):
                yield impl, op

    def _time(self, work: Work, built: dict[str, Op]) -> None:
        copied = self._copied(work)
        bytes_moved = [moved * work.tensor_bytes for moved in MOVED[work.case.op]]
        inputs = tensors(work, self.device, self.clock.sets(bytes_moved[0]))
        for impl, op in built.items():
            where = {**work.where, "impl": impl}
            try:
                for direction, moved in zip(report.DIRECTIONS, bytes_moved, strict=True):
                    times = self._timed(direction, op, inputs, moved, copied["before_gb_s"])
                    self.found["rows"].append({**where, **times})
            except torch.OutOfMemoryError:
                raise
            except Exception as error:
                failed = f"while it was timed: {_in_a_line(error)}"
                self.found["checks"].append({**where, **_worst([], []), "failed": failed})

    def _timed(self, direction: str, op: Op, inputs: Inputs, moved: int, copy_gb_s: float) -> Row:
        found = getattr(self.clock, direction)(op, inputs)
        gb_s = moved / found.median / 1e3
        times = {"median_us": found.median, "p20_us": found.p20, "p80_us": found.p80}
        measured = {"calls": found.calls, "ahead": found.ahead, "gb_s": gb_s, "share": gb_s / copy_gb_s}
        return {"direction": direction, **times, **measured}

    def _copied(self, work: Work) -> Row:
        """The speed of a copy of a tensor of this size, measured when it is first asked for."""
        if work.tensor_bytes not in self.copies:
            speed = self._copy_speed(work.M * work.N, work.dtype)
            row = {k: work.where[k] for k in ("dtype", "M", "N")} | {"before_gb_s": speed}
            self.copies[work.tensor_bytes] = row
            self.found["copies"].append(row)
        return self.copies[work.tensor_bytes]

    def _copy_speed(self, elements: int, dtype: torch.dtype) -> float:
        return 2 * elements * dtype.itemsize / copy_time(self.clock, elements, dtype, self.device).median / 1e3

    def _say(self, text: str) -> None:
        print(f"[{time.perf_counter() - self.began:6.1f} s] {text}", file=sys.stderr, flush=True)


def _name(work: Work) -> str:
    return "{op} {dtype} {M} x {N}".format(**work.where)


def check(work: Work, device: str) -> Iterator[tuple[str, Op | None, Row]]:
    """Each implementation against float64: itself, None where it failed, and what to record of it."""
    ((inputs, grads),) = tensors(work, device)
    definition = build("reference", work.case)
    wide = [[None if t is None else t.double() for t in given] for given in (inputs, grads)]
    exact, eager = evaluate(definition, *wide), evaluate(definition, inputs, grads)
    largest = largest_value(*inputs, *grads)
    names = tensor_names(work.case)
    for impl in work.impls:
        op, found, failed = _evaluated(impl, work.case, inputs, grads)
        failed = failed or next((w for w in map(_unlike, names, found, eager) if w), None)
        errors = [error_of(*three, largest) for three in zip(found, eager, exact, strict=True)] if not failed else []
        yield impl, None if failed else op, {**work.where, "impl": impl, **_worst(names, errors), "failed": failed}


def _evaluated(impl: str, case: Case, inputs: Any, grads: Any) -> tuple[Op | None, list[torch.Tensor], str | None]:
    """The op, its outputs and gradients, and in one line what it raised: a rival may refuse what ours take."""
    try:
        op = build(impl, case)
        return op, evaluate(op, inputs, grads), None
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # whatever it is, the others are still to be measured
        return None, [], _in_a_line(error)


def _in_a_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def _unlike(name: str, found: torch.Tensor, eager: torch.Tensor) -> str | None:
    if (found.shape, found.dtype) == (eager.shape, eager.dtype):
        return None
    return f"{name} is {tuple(found.shape)} {found.dtype}, not {tuple(eager.shape)} {eager.dtype}"


def _worst(names: list[str], errors: list[Error]) -> Row:
    """The tensor nearest to what is allowed, or beyond it."""
    if not errors:
        return {"right": False, "tensor": None, "largest": None, "beyond": None, "allowed": None}
    at = max(range(len(errors)), key=lambda i: (not errors[i].right, errors[i].beyond - errors[i].allowed))
    return {"right": errors[at].right, "tensor": names[at], **asdict(errors[at])}


def tensor_names(case: Case) -> list[str]:
    """Of the outputs, then of the inputs' gradients."""
    fused = case.op in ("add_norm", "norm_add")
    outputs = ["s", "y"] if case.op == "add_norm" else ["y"]
    inputs = ["dstream", "ddelta"] if fused else ["dx"]
    parameters = ["dgain"] * ("norm" in case.op) + ["dbias"] * case.has_bias
    return [*outputs, *inputs, *parameters]


def about(device: str, grid: str, words: Sequence[str]) -> Row:
    """The machine, the versions, the command, and what the times are worth."""
    found: Row = {
        "date": datetime.now().astimezone().isoformat(timespec="seconds"),
        "command": shlex.join(["andrea-exp", "bench", "ops", *words]),
        "grid": grid,
        "device": device,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "versions": {name: _version(name) for name in PACKAGES},
        "interpreted": ops.interpreted(),
    }
    if device != "cuda":
        return found | {"note": "times on a CPU mean nothing: they only show that this runs"}
    properties = torch.cuda.get_device_properties("cuda")
    return found | {
        "name": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "memory_bytes": properties.total_memory,
        "L2_bytes": properties.L2_cache_size,
        "cuda": torch.version.cuda,
        "nvidia_smi": _nvidia_smi(),
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _nvidia_smi() -> Row | None:
    """Driver, clocks, power and temperature now, where the tool is there to tell."""
    asked = ("driver_version", "clocks.sm", "clocks.mem", "clocks.max.sm", "power.draw", "temperature.gpu")
    command = ["nvidia-smi", f"--query-gpu={','.join(asked)}", "--format=csv,noheader"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    return dict(zip(asked, said.splitlines()[0].split(", "), strict=False)) if said.strip() else None
