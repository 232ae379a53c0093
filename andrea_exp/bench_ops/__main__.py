"""The command line of `andrea-exp bench ops`."""

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from andrea_exp.bench_ops import report
from andrea_exp.bench_ops.cases import GRIDS, IMPLEMENTATIONS, absent
from andrea_exp.errors import UserError, did_you_mean, refuse_words

DESCRIPTION = "Every op by every implementation: errors against float64 first, then times beside a copy's."


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        refuse_words(f"{message}; see {self.prog} --help")


def main(words: Sequence[str]) -> int:
    """0; 1 where one of our implementations is wrong. Raises UserError for bad input."""
    options = _parser().parse_args(words)
    if options.figure:
        print(report.figure(_read(options.figure), options.figure.with_suffix(".png")))
        return 0
    found, right = _measure(options, words)
    if options.json:
        print(json.dumps(found, indent=1))
    else:
        report.show(found)
    if drawn := report.figure_if_possible(found, options.out / "ops.png"):
        print(f"drawn: {drawn}", file=sys.stderr)
    return 0 if right else 1


def _parser() -> argparse.ArgumentParser:
    parser = _Parser("andrea-exp bench ops", description=DESCRIPTION)
    parser.add_argument("--out", type=Path, default=Path("out/bench_ops"), metavar="FOLDER")
    parser.add_argument("--grid", help=f"shapes: {', '.join(GRIDS)} (default: device on a GPU, small on a CPU)")
    named = "; ".join(f"{name}: {what}" for name, what in IMPLEMENTATIONS.items())
    parser.add_argument("--impl", metavar="A,B,...", help=f"only these (default: all that can run here). {named}")
    parser.add_argument("--budget-s", type=float, metavar="SECONDS", help="after it the rest is listed as skipped")
    parser.add_argument("--json", action="store_true", help="print ops.json in place of a table")
    parser.add_argument("--figure", type=Path, metavar="JSON", help="only draw an earlier ops.json, as a PNG beside it")
    return parser


def _measure(options: argparse.Namespace, words: Sequence[str]) -> tuple[dict[str, Any], bool]:
    import torch

    from andrea_exp.bench_ops.run import Bench

    device = "cuda" if torch.cuda.is_available() else "cpu"
    grid = options.grid or ("device" if device == "cuda" else "small")
    impls = options.impl.split(",") if options.impl else list(IMPLEMENTATIONS)
    _known("--grid", [grid], GRIDS)
    _known("--impl", impls, IMPLEMENTATIONS)
    for impl in impls if options.impl else ():  # what is asked for by name is not left out without a word
        if why := absent(impl, device):
            raise UserError(f"--impl {impl}: {why}")
    if options.budget_s is not None and not options.budget_s > 0:
        raise UserError(f"--budget-s {options.budget_s:g}: must be above 0")
    try:
        options.out.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise UserError(f"--out {options.out}: not a folder") from error
    bench = Bench(options.out, device, grid, impls, options.budget_s, words)
    return bench.found, bench.run()


def _known(option: str, given: Sequence[str], valid: Iterable[str]) -> None:
    for word in given:
        if word not in valid:
            raise UserError(f"{option} {word}: no such name; {did_you_mean(word, valid)}")


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
        return found if found["rows"] else _refuse(path, "holds no times")
    except (OSError, ValueError, KeyError, TypeError) as error:
        _refuse(path, f"not an ops.json of this command ({type(error).__name__})")


def _refuse(path: Path, why: str) -> NoReturn:
    raise UserError(f"--figure {path}: {why}")


if __name__ == "__main__":
    from andrea_exp import cli

    sys.exit(cli.main(["bench", "ops", *sys.argv[1:]]))
