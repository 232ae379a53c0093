"""Verbs about runs that are recorded."""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from andrea_exp.errors import UserError
from andrea_exp.verbs.common import check_figure, save_figure


def add(verbs: Any) -> None:
    """Verbs about runs that are recorded."""
    differ = verbs.add_parser("why", help="how two runs differ")
    differ.add_argument("one", help="a signature, its beginning, or a name under records/tensorboard/")
    differ.add_argument("other")
    differ.add_argument("--json", action="store_true", help="for machines")
    differ.set_defaults(run=_why)
    into = verbs.add_parser("unpack", help="put packed runs into a records folder, where tables and figures read them")
    into.add_argument("packed", type=Path, help="NAME.runs.parquet, or a folder of such")
    into.set_defaults(run=_unpack)
    follow = verbs.add_parser("trace", help="what one token meets on its way through a model")
    follow.add_argument("name", help="a run, or a fresh model: a file in conf/recipe/, an override such as seed=1")
    follow.add_argument("text")
    follow.add_argument("--token", type=int, default=-1, help="the traced position (default the last, -1)")
    follow.add_argument("--json", action="store_true", help="for machines")
    follow.add_argument("--figure", metavar="FILE", help="draw sizes and readings by depth, as .png or .svg")
    follow.set_defaults(run=_trace)
    again = verbs.add_parser("verify", help="train a recorded run's first steps again, and compare what it logged")
    again.add_argument("one", metavar="run", help="as for `why`, or a folder with config.json and metrics.jsonl")
    again.add_argument("--steps", type=int, metavar="K", help="the last step to compare (default: as logged up to 20)")
    again.add_argument("--json", action="store_true", help="for machines: every value")
    again.set_defaults(run=_verify)
    drop = verbs.add_parser("forget", help="move a run to records/trash/, so that it is run anew")
    drop.add_argument("one", metavar="run", help="a signature, its beginning, or a name under records/tensorboard/")
    drop.add_argument("--yes", action="store_true", help="do not ask")
    drop.set_defaults(run=_forget)


def _why(options: argparse.Namespace, overrides: list[str]) -> int:
    from rich.console import Console

    from andrea_exp.record import find_run
    from andrea_exp.why import render, why

    one, other = (find_run(_records(overrides), word) for word in (options.one, options.other))
    found = why(one, other)
    if options.json:
        print(json.dumps(found, indent=2))
    else:
        Console().print(render(found, one, other))
    return 0


def _trace(options: argparse.Namespace, overrides: list[str]) -> int:
    from rich.console import Console

    from andrea_exp import trace_view
    from andrea_exp.trace import of_text

    check_figure(options.figure)
    with Console(stderr=True).status("tracing"):
        traced = of_text(options.name, overrides, options.text, options.token)
    if options.figure:
        save_figure(trace_view.figure(traced), options.figure)
    if options.json:
        print(trace_view.to_json(traced))
    else:
        trace_view.show(traced)
    return 0


def _verify(options: argparse.Namespace, overrides: list[str]) -> int:
    from rich.console import Console

    from andrea_exp.verify import render, verify

    with Console(stderr=True).status("training again") as status:
        found = verify(options.one, _records(overrides), options.steps, status.update)
    if options.json:
        print(json.dumps(found.as_json(), indent=2))
    else:
        Console().print(render(found))
    return 1 if found.disagreements else 0


def _unpack(options: argparse.Namespace, overrides: list[str]) -> int:
    from andrea_exp.pack import unpack

    records = _records(overrides)
    new, there = unpack(options.packed, records)
    print(f"{records}/: {new} runs unpacked" + f", {there} were there already" * bool(there))
    return 0


def _forget(options: argparse.Namespace, overrides: list[str]) -> int:
    from andrea_exp.record import Status, find_run, load_config, status
    from andrea_exp.sweep.slurm import forget_gone
    from andrea_exp.why import summary_line

    records = _records(overrides)
    folder = find_run(records, options.one)
    forget_gone([folder])
    if status(folder) in (Status.running, Status.queued):
        raise UserError(f"{folder.name}: {status(folder)}; stop it first")
    if not options.yes:
        if not sys.stdin.isatty():
            raise UserError(f"{folder.name}: asks before it forgets; add --yes where nobody can answer")
        print(summary_line(folder, load_config(folder)))
        if input("move it to the trash? [y/N] ").strip().lower() not in ("y", "yes"):
            return 1
    target = records / "trash" / f"{folder.name}-{time.strftime('%Y%m%d-%H%M%S')}"
    target.parent.mkdir(exist_ok=True)
    folder.rename(target)
    print(f"moved to {target}; the next sweep that has it runs it anew")
    return 0


def _records(overrides: list[str]) -> Path:
    """The records folder of a verb that knows no other override."""
    for word in overrides:
        if not word.startswith("records="):
            raise UserError(f"{word}: only records=FOLDER has a meaning here")
    return Path(overrides[-1].partition("=")[2] if overrides else "records")
