"""One command, a few verbs: `andrea_exp/verbs/` has them."""

import argparse
import io
import sys
from collections.abc import Sequence
from importlib import metadata
from typing import NoReturn

from andrea_exp.errors import UserError, of_the_machine, refuse_words
from andrea_exp.verbs import counting, runs, sweeps


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one verb; returns 0, 1 where a run failed or disagrees with its record, or 2 for bad input."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that lacks a sign shows another
    if words[:1] == ["train"]:  # all of its words are Hydra's
        from andrea_exp import train

        return train.main(words[1:])
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
    parser.add_argument("--version", action="version", version=f"andrea-exp {metadata.version('andrea-exp')}")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    verbs.add_parser("train", help="one run or a multirun: a Hydra app; see `andrea-exp train --help`")
    for group in (sweeps, runs, counting):
        group.add(verbs)
    return parser


if __name__ == "__main__":
    sys.exit(main())
