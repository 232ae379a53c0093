"""Verbs that take the words of a sweep."""

import argparse
import json
import os
import sys
import time
import urllib.parse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from andrea_exp.errors import UserError, did_you_mean
from andrea_exp.verbs.common import Command, check_figure, save_figure

if TYPE_CHECKING:
    from andrea_exp.results.table import AblationTable

# What TensorBoard shows first: its own order is the alphabet's.
PINNED = ("val/loss", "train/loss", "grad_norm/total", "clip/coef")


def add(verbs: Any) -> None:
    """Verbs that take the words of a sweep."""

    def verb(name: str, run: Command, help_: str) -> argparse.ArgumentParser:
        sub = verbs.add_parser(name, help=help_, description=help_, epilog="Further words override the config.")
        sub.add_argument("name", help="a file in sweeps/, or an override such as seed=0,1 for an ad-hoc sweep")
        sub.set_defaults(run=run)
        return sub

    listing = verbs.add_parser("list", help="the sweeps that there are, and what each asks")
    listing.add_argument("--json", action="store_true", help="for machines")
    listing.set_defaults(run=_list)
    verb("sweep", _sweep, "run what is missing of a sweep, then print its table")
    table = verb("table", _table, "the ablation table, from whatever runs there are")
    formats = ("text", "markdown", "latex", "html", "csv", "json")
    table.add_argument("--format", choices=formats, default="text", help="csv and json hold everything, unrounded")
    table.add_argument("--columns", metavar="A,B,...", help="a row an arm and column, with these side by side")
    table.add_argument("--full", action="store_true", help="all of them, in several tables where one is too wide")
    table.add_argument("--published", action="store_true", help="differences beside those of published tables")
    _add_report(verbs)
    blocks = verb("specialise", _specialise, "what each block of a sweep's runs is worth: skipped, swapped, read out")
    blocks.add_argument("--json", action="store_true", help="for machines: every block of every run")
    blocks.add_argument("--figure", metavar="FILE", help="draw the loss increases by block, as .png or .svg")
    status = verb("status", _status, "how a sweep stands, from its records")
    status.add_argument("--watch", action="store_true", help="keep it on the screen until the sweep is done")
    status.add_argument("--json", action="store_true", help="for machines")
    board = verb("tensorboard", _tensorboard, "TensorBoard on this machine, over a sweep's runs")
    board.add_argument("--port", type=int, default=6006)
    ahead = verb("plan", _plan, "what a sweep will cost before anything runs: runs, FLOPs, tokens, disk, time")
    ahead.add_argument("--json", action="store_true", help="for machines")
    verb("retry", _retry, "run those of a sweep's runs again that failed, and no others")
    packing = verb("pack", _pack, "write a sweep's ended runs into two small files, for others to unpack")
    packing.add_argument("--to", metavar="FOLDER", type=Path, default=Path("analysis/data"), help="default %(default)s")


def _add_report(verbs: Any) -> None:
    told = "one HTML page: question, table, figures, claims, and how to have each number again"
    page = verbs.add_parser("report", help=told, description=told, epilog="Further words are those of the sweep.")
    page.add_argument("name", nargs="?", help="as of `table`; without it, or with records=FOLDER alone, all sweeps")
    page.add_argument("--out", metavar="FILE", type=Path, help="default: report.html beside the sweep's tables")
    page.set_defaults(run=_report)


def _list(options: argparse.Namespace, _: list[str]) -> int:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from andrea_exp.sweep.plan import questions

    found = questions()
    if options.json:
        print(json.dumps(found, indent=2))
        return 0
    table = Table(box=None, show_header=False, pad_edge=False)
    for name, question in found.items():
        table.add_row(Text(name, "bold"), Text(question))
    Console().print(table)
    return 0


def _sweep(options: argparse.Namespace, overrides: list[str]) -> int:
    from andrea_exp import train
    from andrea_exp.compose import sweep_words

    return train.main(["-m", *sweep_words(options.name, overrides)])


def _table(options: argparse.Namespace, overrides: list[str]) -> int:
    from andrea_exp.results import formats, layout
    from andrea_exp.results.load import plan_of
    from andrea_exp.results.table import ablation_table

    columns = tuple(layout.COLUMNS) if options.full else None
    if options.columns:
        columns = layout.columns_of(options.columns.split(","))
    plan, records = plan_of(options.name, overrides)
    made = ablation_table(plan, records)
    if not any(cell.done + cell.diverged for cell in made.cells):
        raise UserError(
            f"{plan.name}: no finished runs with these overrides in {records}/; run: andrea-exp sweep {options.name}"
        )
    if options.published:
        _print_published(made)
    elif options.format == "text":
        formats.print_table(made, columns)
    else:
        print(formats.FORMATS[options.format](made, columns), end="")
    return 0


def _print_published(table: "AblationTable") -> None:
    from rich.console import Console

    from andrea_exp.results.formats import published_to_rich
    from andrea_exp.results.published import of_sweep, read_published

    found = of_sweep(table.name)
    if not found:
        asked = sorted({p.sweep for p in read_published() if p.sweep})
        raise UserError(f"{table.name}: no published table asks this; {did_you_mean(table.name, asked)}")
    Console().print(published_to_rich(table, found))


def _report(options: argparse.Namespace, overrides: list[str]) -> int:
    from rich.console import Console

    from andrea_exp.results.page import write_page, write_page_of_all

    words = [options.name, *overrides] if options.name else overrides
    with Console(stderr=True).status("reading records, drawing figures"):
        if not words or words[0].startswith("records="):
            path = write_page_of_all(words, options.out)
        else:
            path = write_page(words[0], words[1:], options.out)
    print(path)
    return 0


def _specialise(options: argparse.Namespace, overrides: list[str]) -> int:
    from rich.console import Console

    from andrea_exp.record import run_folder
    from andrea_exp.results import layers
    from andrea_exp.results.load import plan_of, read_runs
    from andrea_exp.specialise import measure_missing

    check_figure(options.figure)
    plan, records = plan_of(options.name, overrides)
    runs = [run for run in read_runs(plan, records) if run.status.finished and run.cell.purpose == "report"]
    if not runs:
        raise UserError(f"{plan.name}: no finished runs in {records}/; run: andrea-exp sweep {options.name}")
    folders = [run_folder(records, sig) for sig in dict.fromkeys(run.cell.signature for run in runs)]
    refused = measure_missing(folders, records / "corpora")
    if len(refused) == len(folders):
        raise UserError(f"{plan.name}: none of its runs can be measured; the first: {refused[0]}")
    for why in refused:
        print(f"andrea-exp: left out: {why}", file=sys.stderr)
    if options.figure:
        from andrea_exp.results.figures import loss_by_block

        save_figure(loss_by_block(plan, records), options.figure)
    if options.json:
        print(json.dumps(layers.rows(plan, records), indent=2))
    else:
        Console().print(layers.to_rich(plan, records))
    return 0


def _status(options: argparse.Namespace, overrides: list[str]) -> int:
    from rich.console import Console
    from rich.live import Live

    from andrea_exp.config import PoolKind
    from andrea_exp.record import Status, run_folder
    from andrea_exp.results.load import plan_of
    from andrea_exp.sweep import board
    from andrea_exp.sweep.slots import slots_of
    from andrea_exp.sweep.slurm import forget_gone

    plan, records = plan_of(options.name, overrides)
    if plan.cells[0].config.pool.kind is PoolKind.slurm:
        forget_gone(run_folder(records, c.signature) for c in plan.cells)
    reader = board.Reader(records, len(slots_of([cell.config for cell in plan.cells])))
    now = reader.read(plan)
    if options.json:
        print(json.dumps(now.as_json(), indent=2))
        return 0
    console = Console()
    if not options.watch:
        console.print(board.render(now))
        return 0
    with Live(console=console, auto_refresh=False) as live:
        while True:
            live.update(board.render(now, most=max(5, console.height - 6)), refresh=True)
            if all(r.status.finished or r.status is Status.failed for r in now.runs) and not plan.waiting:
                return 0
            time.sleep(1)
            if plan.waiting:  # what the tuning runs chose shows in a new plan alone
                plan, _ = plan_of(options.name, overrides)
            now = reader.read(plan)


def _plan(options: argparse.Namespace, overrides: list[str]) -> int:
    from rich.console import Console

    from andrea_exp.index import Index
    from andrea_exp.results.load import plan_of
    from andrea_exp.sweep.forecast import forecast, render
    from andrea_exp.sweep.slots import slots_of

    plan, records = plan_of(options.name, overrides)
    with Index(records) as index:
        found = forecast(plan, index, len(slots_of([c.config for c in (*plan.cells, *plan.guesses)])))
    if options.json:
        print(json.dumps(found.as_json(), indent=2))
    else:
        Console().print(render(found))
    return 0


def _retry(options: argparse.Namespace, overrides: list[str]) -> int:
    from andrea_exp.compose import compose, sweep_words
    from andrea_exp.sweep.session import run_sweep

    words = sweep_words(options.name, overrides)
    return run_sweep(compose(words), words, only_failed=True)


def _pack(options: argparse.Namespace, overrides: list[str]) -> int:
    from andrea_exp.pack import pack
    from andrea_exp.results.load import plan_of

    paths, left_out = pack(*plan_of(options.name, overrides), options.to)
    size = sum(path.stat().st_size for path in paths)
    print(f"{' '.join(map(str, paths))}: {size / 1e6:.2f} MB" + f"; {left_out} runs have not ended" * bool(left_out))
    return 0


def _tensorboard(options: argparse.Namespace, overrides: list[str]) -> int:
    from andrea_exp.results.load import plan_of
    from andrea_exp.sweep.session import link_views

    plan, records = plan_of(options.name, overrides)
    if not any((records / "runs" / c.signature).exists() for c in plan.cells):
        raise UserError(f"{plan.name}: no runs in {records}/; run: andrea-exp sweep {options.name}")
    without = sum(not (records / "runs" / c.signature / "tensorboard").exists() for c in plan.cells)
    if without:
        told = f"{without} of {len(plan.cells)} runs have no event files: not begun, or unpacked"
        print(f"andrea-exp: {told}", file=sys.stderr)
    folder = link_views(plan, records)
    pins = json.dumps([{"plugin": "scalars", "tag": tag} for tag in PINNED], separators=(",", ":"))
    address = f"http://localhost:{options.port}/?pinnedCards={urllib.parse.quote(pins)}#timeseries"
    print(f"TensorBoard, Ctrl-C ends it: {address}", flush=True)
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", str(Path(folder).resolve())]
    # In place of this process, so that whatever ends the one ends the other.
    os.execv(sys.executable, [*command, "--host", "127.0.0.1", "--port", str(options.port)])
