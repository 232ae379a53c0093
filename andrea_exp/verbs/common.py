"""What verbs share."""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from andrea_exp.errors import UserError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Command = Callable[[argparse.Namespace, list[str]], int]  # options, overrides -> exit code


def save_figure(figure: "Figure", path: str) -> None:
    """As .png or .svg; the same figure gives the same bytes."""
    from andrea_exp.results.figures import encoded

    Path(path).write_bytes(encoded(figure, Path(path).suffix[1:]))
    print(f"andrea-exp: wrote {path}", file=sys.stderr)


def check_figure(path: str | None) -> None:
    if path and Path(path).suffix not in (".png", ".svg"):
        raise UserError(f"--figure {path}: write a file that ends in .png or .svg")
    if path and not Path(path).absolute().parent.is_dir():
        raise UserError(f"--figure {path}: there is no folder {Path(path).parent}")
