"""Verbs that count and measure, and the source texts' claims."""

import argparse
import json
from typing import Any

from andrea_exp.errors import UserError
from andrea_exp.verbs.common import check_figure, save_figure

BENCHES = {
    "train": "the harness beside a bare torch loop",
    "slots": "how runs share this machine's cores",
    "scale": "planning, showing and tabling 10,000 runs",
    "read": "2,000 runs into frames and a table, beside tbparse",
    "ops": "every op against float64, then timed beside others; see `bench ops --help`",
}


def add(verbs: Any) -> None:
    """Verbs that count and measure, and the source texts' claims."""
    count = verbs.add_parser("describe", help="count a model: parameters, FLOPs, bytes")
    count.add_argument(
        "name", help="a file in conf/recipe/, a run's signature, or an override such as model.n_layers=4"
    )
    count.add_argument("--json", action="store_true", help="for machines")
    count.add_argument("--batch", type=int, default=1, help="sequences decoded side by side (default 1)")
    count.add_argument("--context", type=int, default=0, help="tokens behind a decoded one (default 0)")
    count.add_argument("--bandwidth", type=float, default=3.35e12, help="bytes/s of the memory (default an H100's)")
    count.add_argument("--figure", metavar="FILE", help="draw the shares as stacked bars, as .png or .svg")
    count.set_defaults(run=_describe)
    facts = verbs.add_parser("facts", help="the source texts' countable statements beside their exact values")
    facts.add_argument("--json", action="store_true", help="for machines")
    facts.set_defaults(run=_facts)
    told = "what the source texts claim, and what the runs that there are say to it"
    claims = verbs.add_parser("claims", help=told, description=told, epilog="Further words are those of the sweeps.")
    claims.add_argument("--format", choices=("text", "markdown", "json"), default="text")
    claims.add_argument("--json", action="store_const", dest="format", const="json", help="every regime, and its runs")
    claims.set_defaults(run=_claims)
    told = "; ".join(f"{what}: {meaning}" for what, meaning in BENCHES.items())
    bench = verbs.add_parser("bench", help="measure the harness, its reading and the ops", description=told)
    bench.add_argument("what", choices=BENCHES)
    bench.add_argument("--json", action="store_true", help="for machines")
    bench.set_defaults(run=_bench)


def _describe(options: argparse.Namespace, overrides: list[str]) -> int:
    from rich.console import Console

    from andrea_exp import describe
    from andrea_exp.accounting import Decode

    for name in ("batch", "bandwidth"):
        if getattr(options, name) <= 0:
            raise UserError(f"--{name} {getattr(options, name)}: must be above 0")
    if options.context < 0:
        raise UserError(f"--context {options.context}: must be 0 or more")
    check_figure(options.figure)
    config, _ = describe.named(options.name, overrides)
    found = describe.describe(config, Decode(options.batch, options.context, bandwidth=options.bandwidth))
    if options.figure:
        save_figure(describe.picture(found, options.name), options.figure)
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

    from andrea_exp.results import claims, claims_view

    found = list(claims_view.rows(claims.judge_all(overrides)))
    if options.format == "json":
        print(json.dumps(found, indent=2))
    elif options.format == "markdown":
        print(claims_view.to_markdown(found), end="")
    else:
        Console().print(claims_view.render(found))
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
