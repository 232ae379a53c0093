"""What verbs share."""

import argparse
from collections.abc import Callable
from pathlib import Path

from andrea_exp.errors import UserError

Command = Callable[[argparse.Namespace, list[str]], int]  # options, overrides -> exit code


def check_figure(path: str | None) -> None:
    if path and Path(path).suffix not in (".png", ".svg"):
        raise UserError(f"--figure {path}: write a file that ends in .png or .svg")
