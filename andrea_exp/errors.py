"""The one kind of error that is the user's to mend: printed as a single line, exit code 2."""

import errno
from collections.abc import Iterable
from difflib import get_close_matches
from typing import NoReturn


class UserError(Exception):
    """Something the user asked for cannot be had; the message says what, where, and what would do."""


def of_the_machine(error: OSError) -> str | None:
    """One line for an error that is no fault of the code: a disk that is full or read-only, a permission, a folder."""
    if error.filename and error.errno in (errno.ENOENT, errno.ENOTDIR, errno.EISDIR):
        return f"{error.filename}: {error.strerror}"
    if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EMFILE):
        return None
    where = f": {error.filename}" if error.filename else ""
    return f"{error.strerror}{where}; nothing that was recorded is lost, the same command goes on from here"


def did_you_mean(wrong: object, valid: Iterable[str]) -> str:
    """A hint that names the nearest valid words, or all of them where none is near."""
    words = list(valid)
    fields = [word for word in words if word.endswith(f".{wrong}")]  # one that lacks its section
    near = fields or get_close_matches(str(wrong), words, n=3, cutoff=0.5)
    if near:
        return f"did you mean {' or '.join(near)}?"
    return f"valid: {', '.join(words)}" if len(words) <= 20 else f"valid names include {', '.join(words[:20])}"


def refuse_words(message: str) -> NoReturn:
    """Stands in for argparse's `error`, which prints a usage of many lines before its one."""
    raise UserError(message)
