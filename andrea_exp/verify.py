"""Is a record true? The first steps of a recorded run, trained again in a scratch folder, beside what it logged.

The very job that a pool would carry, from the recorded config (schedule and batches depend on all of it) and with the
recorded number of threads, asked to stop once it has logged the last step to be compared. A record needs no more than
config.json and metrics.jsonl; provenance.json or summary.json say whether the same bits are to be expected.
"""

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf.errors import OmegaConfBaseException
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from andrea_exp.config import Keep, RunConfig, as_dict, copy_config
from andrea_exp.errors import UserError
from andrea_exp.record import INTERRUPTED, find_run, last_metrics, load_config, read_json, read_metrics, write_json
from andrea_exp.sweep import local
from andrea_exp.sweep.pool import Job
from andrea_exp.sweep.slots import cores, slots_of, threads_of
from andrea_exp.trained import corpus_of

STEPS = 20
# Relative, on losses. Rounding differs between machines, versions and numbers of threads, and grows as a run goes on.
# Over the demo's first 20 steps, losses with 1, 2 and 3 threads differ by at most 1.6e-7 in float32; with 1 and 3, by
# 2e-16 in float64 and 6e-5 in bf16. Other machines and rates are granted far more: bf16 a hundred times as much, the
# others over a thousand times.
TOLERANCE = {"64-true": 1e-6, "32-true": 1e-3, "bf16-mixed": 1e-2, "fp16-mixed": 1e-2}
FLEETING = ("step", "time", "tokens_per_s", "memory_mb", "mfu")  # no part of what a run computes


@dataclass(frozen=True)
class Value:
    """One logged number, then and now; None where it was not finite."""

    step: int
    name: str
    recorded: float | None
    now: float | None

    @property
    def difference(self) -> float | None:
        """Relative to the recorded one; None where either is none."""
        if self.recorded is None or self.now is None:
            return None
        return 0.0 if self.recorded == self.now else abs(self.now - self.recorded) / abs(self.recorded or 1)

    @property
    def is_loss(self) -> bool:
        return self.name == "train/loss" or self.name == "val/loss" or self.name.startswith("val/loss/")


@dataclass(frozen=True)
class Verified:
    """What came out. `tolerance` is None where every bit was expected to be the same."""

    run: str
    until: int  # the last step compared
    circumstances: dict[str, tuple[Any, Any]]  # those that differ: recorded, now
    tolerance: float | None
    values: list[Value]

    @property
    def disagreements(self) -> list[Value]:
        return [v for v in self.values if not self._agrees(v)]

    def _agrees(self, value: Value) -> bool:
        if self.tolerance is None or None in (value.recorded, value.now):
            return value.recorded == value.now
        return not value.is_loss or (value.difference or 0) <= self.tolerance

    def as_json(self) -> dict[str, Any]:
        names = ("step", "name", "recorded", "now", "difference")
        return {
            "run": self.run,
            "agrees": not self.disagreements,
            "until_step": self.until,
            "expected": "the same bits" if self.tolerance is None else f"losses within {self.tolerance:g}, relative",
            "circumstances": {k: {"recorded": then, "now": now} for k, (then, now) in self.circumstances.items()},
            "disagreements": [{k: getattr(v, k) for k in names} for v in self.disagreements],
            "values": [{k: getattr(v, k) for k in names} for v in self.values],
        }


def verify(word: str, records: Path, steps: int | None, tell: Callable[[str], None] = lambda _: None) -> Verified:
    """Runs a record's first steps again. `word` names a run in `records`, or a folder.

    Raises UserError for a record that cannot be run again: no metrics, no config, no such text, a machine that lacks
    what it asks for.
    """
    folder = Path(word) if (Path(word) / "config.json").is_file() else find_run(records, word)
    config, rows = _config(folder), read_metrics(folder)
    if not rows:
        raise UserError(f"{folder}: no metrics.jsonl with a logged step, so there is nothing to compare")
    until = last_step([int(row["step"]) for row in rows], steps)
    corpus = corpus_of(folder, config, records / "corpora")
    with tempfile.TemporaryDirectory(prefix="andrea-exp-verify-") as scratch:
        again = Path(scratch) / folder.resolve().name
        _train(again, config, corpus, circumstances(folder)["threads"] or threads_of(config), until, tell)
        differ = _differences(circumstances(folder), circumstances(again))
        device, now = circumstances(again)["type"], {row["step"]: row for row in read_metrics(again)}
    bitwise = not differ and (device == "cpu" or config.train.deterministic)
    values = [
        Value(int(row["step"]), name, recorded, now[row["step"]][name])
        for row in rows
        if row["step"] <= until
        for name, recorded in row.items()
        if name not in FLEETING and name in now.get(row["step"], {})
    ]
    if not any(value.is_loss for value in values):
        raise UserError(f"{folder}: no loss among its first {until} steps is logged today too")
    return Verified(folder.name, until, differ, None if bitwise else TOLERANCE[config.train.precision.name], values)


def last_step(logged: list[int], wanted: int | None) -> int:
    """The last step to compare: the last one logged among those wanted, or the first 20, or the first after 0.

    Raises UserError where none was logged among those wanted: the untrained model alone says nothing of training.
    """
    if wanted is not None:
        among = [step for step in logged if step <= wanted]
        if wanted > logged[-1] or not among or (wanted and not among[-1]):
            raise UserError(f"--steps {wanted}: the record has the steps {', '.join(map(str, _some(logged)))}")
        return among[-1]
    early = [step for step in logged if step <= STEPS]
    return early[-1] if early and early[-1] else logged[min(1, len(logged) - 1)]


def _some(steps: list[int]) -> list[int | str]:
    return [*steps] if len(steps) < 6 else [*steps[:3], "...", steps[-1]]


def _config(folder: Path) -> RunConfig:
    try:
        return load_config(folder)
    except (OSError, ValueError, TypeError, OmegaConfBaseException) as error:
        raise UserError(f"{folder}: no config.json that this version reads ({str(error).splitlines()[0]})") from error


def circumstances(folder: Path) -> dict[str, Any]:
    """What decides bits besides the config, as recorded; None for what is not."""
    made, summary = (read_json(folder / name) or {} for name in ("provenance.json", "summary.json"))
    known, device = summary.get("machine", {}), made.get("device", {})
    # The first steps are the first attempt's, of which less is recorded than of the last one.
    first: dict[str, Any] = next(iter(made.get("attempts", [])), {})
    moved = bool(first) and first["host"] != made.get("host")
    return {
        "type": device.get("type"),
        "device": None if moved else device.get("name", known.get("device")),
        "torch": first.get("torch", known.get("torch")),
        "threads": made.get("threads", summary.get("threads")),
        "ops": made.get("ops", known.get("ops")),
        "numerics_version": made.get("numerics_version", known.get("numerics_version")),
    }


def _differences(then: dict[str, Any], now: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    differ = {name: (then[name], now[name]) for name in then if name != "type" and then[name] != now[name]}
    if (then["threads"] or 0) > cores():  # libraries may use fewer threads than there are asked for
        differ["cores"] = (f"{then['threads']} threads", cores())
    return differ


def _train(
    folder: Path, config: RunConfig, corpus: Path, threads: int, until: int, tell: Callable[[str], None]
) -> None:
    """Trains in a folder of its own until a step is logged. Raises UserError where the run fails."""
    own = copy_config(config)
    own.tensorboard, own.checkpoint.keep = False, Keep.none
    folder.mkdir()
    write_json(folder / "config.json", as_dict(own))
    local.warm_up()
    job = Job(folder, corpus.resolve(), threads, config.train.ranks, config.train.device)
    running = local.start(job, slots_of([config])[0])
    try:
        while (code := running.exitcode()) is None:
            running.wait()
            step = last_metrics(folder).get("step", -1)
            tell(f"step {max(0, step):.0f} of {until}")
            if step >= until:
                running.ask_to_stop()
    finally:
        running.kill()
    if code not in (0, INTERRUPTED):
        why = (read_json(folder / "summary.json") or {}).get("reason", f"exit code {code}")
        raise UserError(f"{folder.name}: cannot be run again here: {why}")


def render(found: Verified) -> RenderableType:
    """Losses step by step, what else was compared, the verdict."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in ("step", "", "recorded", "now", "difference"):
        table.add_column(name, justify="left" if name == "" else "right", no_wrap=True)
    for value in (v for v in found.values if v.is_loss):
        table.add_row(str(value.step), value.name, *_shown(value), style="red" if value in found.disagreements else "")
    return Group(table, *map(Text, _lines(found)))


def _shown(value: Value) -> tuple[str, str, str]:
    numbers = ("none" if v is None else f"{v:.9g}" for v in (value.recorded, value.now))
    then, now = numbers
    return then, now, "" if value.difference is None else f"{value.difference:.1e}" if value.difference else "0"


def _lines(found: Verified) -> list[str]:
    lines = [f"{k}: recorded {then or 'unknown'}, here {now}" for k, (then, now) in found.circumstances.items()]
    others = [v for v in found.values if not v.is_loss]
    equal = sum(v.recorded == v.now for v in others)
    lines.append(f"{equal} of {len(others)} other values are the same to the last bit")
    for v in [v for v in found.disagreements if not v.is_loss][:3]:
        lines.append(f"step {v.step}, {v.name}: recorded {v.recorded}, now {v.now}")
    expected = found.as_json()["expected"]
    verdict = "disagrees" if found.disagreements else "agrees"
    return [*lines, f"{found.run}: the record {verdict} up to step {found.until} (expected: {expected})"]
