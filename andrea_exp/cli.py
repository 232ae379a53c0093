"""One command, a few verbs."""

import argparse
import json
import os
import sys
import time
import urllib.parse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from andrea_exp.errors import UserError, did_you_mean, of_the_machine, refuse_words

if TYPE_CHECKING:
    from andrea_exp.results.table import AblationTable

# What TensorBoard shows first: its own order is the alphabet's.
PINNED = ("val/loss", "train/loss", "grad_norm/total", "clip/coef")

Command = Callable[[argparse.Namespace, list[str]], int]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one verb; returns 0, 1 where a run failed or disagrees with its record, or 2 for bad input."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words[:1] == ["train"]:  # all of its words are Hydra's
        return _app(words[1:])
    try:
        if words[:2] == ["bench", "ops"]:  # a command that also runs without this one, and without Hydra
            from andrea_exp.bench_ops.__main__ import main as bench_ops

            return bench_ops(words[2:])
        options, overrides = _parser().parse_known_args(words)
        for word in overrides:
            if "=" not in word or word.startswith("-"):
                raise UserError(f"{word}: neither an option of {options.verb} nor an override key=value")
        return options.run(options, overrides)
    except UserError as error:
        print(f"andrea-exp: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # a reader such as `head` has seen enough
        sys.stderr.close()
        return 0
    except OSError as error:
        if (told := of_the_machine(error)) is None:
            raise
        print(f"andrea-exp: {told}", file=sys.stderr)
        return 1


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        refuse_words(f"{message}; see {self.prog} --help")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser("andrea-exp", description="Experiment sweeps over the transformer block.")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    verbs.add_parser("train", help="one run or a multirun: a Hydra app; see `andrea-exp train --help`")
    _add_sweep_verbs(verbs)
    _add_run_verbs(verbs)
    _add_counting_verbs(verbs)
    return parser


def _add_sweep_verbs(verbs: Any) -> None:
    """Verbs that take the words of a sweep."""

    def verb(name: str, run: Command, help_: str) -> argparse.ArgumentParser:
        sub = verbs.add_parser(name, help=help_, description=help_, epilog="Further words override the config.")
        sub.add_argument("name", help="a file in sweeps/, or an override such as seed=0,1 for an ad-hoc sweep")
        sub.set_defaults(run=run)
        return sub

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


def _add_run_verbs(verbs: Any) -> None:
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


def _add_counting_verbs(verbs: Any) -> None:
    """Verbs that count and measure, and the source texts' claims."""
    count = verbs.add_parser("describe", help="count a model: parameters, FLOPs, bytes")
    count.add_argument(
        "name", help="a file in conf/recipe/, a run's signature, or an override such as model.n_layers=4"
    )
    count.add_argument("--json", action="store_true", help="for machines")
    count.add_argument("--batch", type=int, default=1, help="sequences decoded side by side (default 1)")
    count.add_argument("--context", type=int, default=0, help="tokens behind a decoded one (default 0)")
    count.add_argument("--bandwidth", type=float, default=3.35e12, help="bytes/s of the memory (default an H100's)")
    count.add_argument("--figure", metavar="PNG", help="draw the shares as stacked bars")
    count.set_defaults(run=_describe)
    facts = verbs.add_parser("facts", help="the source texts' countable statements beside their exact values")
    facts.add_argument("--json", action="store_true", help="for machines")
    facts.set_defaults(run=_facts)
    told = "what the source texts claim, and what the runs that there are say to it"
    claims = verbs.add_parser("claims", help=told, description=told, epilog="Further words are those of the sweeps.")
    claims.add_argument("--json", action="store_true", help="for machines: every regime, and the runs behind it")
    claims.set_defaults(run=_claims)
    bench = verbs.add_parser("bench", help="measure the harness, its reading and the ops; see `bench ops --help`")
    bench.add_argument("what", choices=("train", "slots", "scale", "read", "ops"))
    bench.add_argument("--json", action="store_true", help="for machines")
    bench.set_defaults(run=_bench)


def _app(words: list[str]) -> int:
    from andrea_exp import train

    return train.main(words)


def _sweep(options: argparse.Namespace, overrides: list[str]) -> int:
    named = options.name if "=" in options.name else f"sweeps={options.name}"
    return _app(["-m", named, *overrides])


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


def _print_published(table: "AblationTable") -> None:
    from rich.console import Console

    from andrea_exp.results.formats import published_to_rich
    from andrea_exp.results.published import of_sweep, read_published

    found = of_sweep(table.name)
    if not found:
        asked = sorted({p.sweep for p in read_published() if p.sweep})
        raise UserError(f"{table.name}: no published table asks this; {did_you_mean(table.name, asked)}")
    Console().print(published_to_rich(table, found))


def _specialise(options: argparse.Namespace, overrides: list[str]) -> int:
    from rich.console import Console

    from andrea_exp.record import run_folder
    from andrea_exp.results import layers
    from andrea_exp.results.load import plan_of, read_runs
    from andrea_exp.specialise import measure_missing

    _check_figure(options.figure)
    plan, records = plan_of(options.name, overrides)
    runs = [run for run in read_runs(plan, records) if run.status.finished and run.cell.purpose == "report"]
    if not runs:
        raise UserError(f"{plan.name}: no finished runs in {records}/; run: andrea-exp sweep {options.name}")
    folders = [run_folder(records, sig) for sig in dict.fromkeys(run.cell.signature for run in runs)]
    for why in measure_missing(folders, records / "corpora"):
        print(f"andrea-exp: left out: {why}", file=sys.stderr)
    if options.figure:
        from andrea_exp.results import loss_by_block

        loss_by_block(plan, records).savefig(options.figure)
    if options.json:
        print(json.dumps(layers.rows(plan, records), indent=2))
    else:
        Console().print(layers.to_rich(plan, records))
    return 0


def _check_figure(path: str | None) -> None:
    if path and Path(path).suffix not in (".png", ".svg"):
        raise UserError(f"--figure {path}: write a file that ends in .png or .svg")


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
    from andrea_exp.compose import compose
    from andrea_exp.sweep.session import run_sweep

    words = [options.name if "=" in options.name else f"sweeps={options.name}", *overrides]
    run_sweep(compose(words), words, only_failed=True)
    return 0


def _pack(options: argparse.Namespace, overrides: list[str]) -> int:
    from andrea_exp.pack import pack
    from andrea_exp.results.load import plan_of

    paths, left_out = pack(*plan_of(options.name, overrides), options.to)
    size = sum(path.stat().st_size for path in paths)
    print(f"{' '.join(map(str, paths))}: {size / 1e6:.2f} MB" + f"; {left_out} runs have not ended" * bool(left_out))
    return 0


def _unpack(options: argparse.Namespace, overrides: list[str]) -> int:
    from andrea_exp.pack import unpack

    records = _records(overrides)
    new, there = unpack(options.packed, records)
    print(f"{records}/: {new} runs unpacked" + f", {there} were there already" * bool(there))
    return 0


def _records(overrides: list[str]) -> Path:
    """The records folder of a verb that knows no other override."""
    for word in overrides:
        if not word.startswith("records="):
            raise UserError(f"{word}: only records=FOLDER has a meaning here")
    return Path(overrides[-1].partition("=")[2] if overrides else "records")


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

    _check_figure(options.figure)
    with Console(stderr=True).status("tracing"):
        traced = of_text(options.name, overrides, options.text, options.token)
    if options.figure:
        trace_view.figure(traced).savefig(options.figure)
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


def _forget(options: argparse.Namespace, overrides: list[str]) -> int:
    from andrea_exp.record import Status, find_run, load_config, status
    from andrea_exp.why import summary_line

    records = _records(overrides)
    folder = find_run(records, options.one)
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


def _tensorboard(options: argparse.Namespace, overrides: list[str]) -> int:
    from andrea_exp.results.load import plan_of
    from andrea_exp.sweep.session import link_views

    plan, records = plan_of(options.name, overrides)
    if not any((records / "runs" / c.signature).exists() for c in plan.cells):
        raise UserError(f"{plan.name}: no runs in {records}/; run: andrea-exp sweep {options.name}")
    folder = link_views(plan, records)
    pins = json.dumps([{"plugin": "scalars", "tag": tag} for tag in PINNED], separators=(",", ":"))
    address = f"http://localhost:{options.port}/?pinnedCards={urllib.parse.quote(pins)}#timeseries"
    print(f"TensorBoard, Ctrl-C ends it: {address}", flush=True)
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", str(Path(folder).resolve())]
    # In place of this process, so that whatever ends the one ends the other.
    os.execv(sys.executable, [*command, "--host", "127.0.0.1", "--port", str(options.port)])


def _describe(options: argparse.Namespace, overrides: list[str]) -> int:
    from rich.console import Console

    from andrea_exp import describe
    from andrea_exp.accounting import Decode

    for name in ("batch", "bandwidth"):
        if getattr(options, name) <= 0:
            raise UserError(f"--{name} {getattr(options, name)}: must be above 0")
    if options.context < 0:
        raise UserError(f"--context {options.context}: must be 0 or more")
    config, _ = describe.named(options.name, overrides)
    found = describe.describe(config, Decode(options.batch, options.context, bandwidth=options.bandwidth))
    if options.figure:
        describe.picture(found, options.name).savefig(options.figure)
    if options.json:
        print(describe.to_json(found))
    else:
        Console().print(describe.render(found))
    return 0


def _facts(options: argparse.Namespace, _: list[str]) -> int:
    from rich.console import Console
    from rich.table import Table

    from andrea_exp.facts import check_all

    found = check_all()
    if options.json:
        print(json.dumps(found, indent=2))
        return 0
    table = Table("", "the text", "stated", "exact", "holds", "remark", box=None)
    for row in found:
        stated, exact = (f"{row[k]:.6g}" for k in ("stated", "exact"))
        holds = "[green]yes[/]" if row["holds"] else "[red]no[/]"
        table.add_row(row["row"], row["text"], stated, f"{exact} {row['unit']}", holds, row["remark"])
    Console().print(table)
    return 0


def _claims(options: argparse.Namespace, overrides: list[str]) -> int:
    from rich.console import Console

    from andrea_exp.results import claims

    found = list(claims.rows(claims.judge_all(overrides)))
    if options.json:
        print(json.dumps(found, indent=2))
    else:
        Console().print(claims.render(found))
    return 0


def _bench(options: argparse.Namespace, overrides: list[str]) -> int:
    if options.what == "slots":
        from andrea_exp.bench_slots import bench_slots

        return bench_slots(as_json=options.json)
    if options.what == "scale":
        from andrea_exp.bench_scale import bench_scale

        return bench_scale(as_json=options.json)
    if options.what == "read":
        from andrea_exp.bench_read import bench_read

        return bench_read(as_json=options.json)
    from andrea_exp.bench import bench_train

    return bench_train(overrides, as_json=options.json)


if __name__ == "__main__":
    sys.exit(main())
