"""Shards of llm.c: tokens of GPT-2's vocabulary as another program wrote them.

A file is 256 int32 (magic 20240520, version 1, number of tokens, zeros), then the tokens as uint16, little-endian
(karpathy/llm.c, dev/data/data_common.py). Files with "val" in their name hold the validation split.
"""

import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

from andrea_exp.data.document import PIECES, TokenRun
from andrea_exp.errors import UserError

MAGIC, VERSION, HEADER = 20240520, 1, 256


def shard_paths(root: Path) -> list[Path]:
    """A file, or all *.bin files of a folder, by name."""
    if root.is_file():
        return [root]
    found = sorted(root.rglob("*.bin"))
    if not found:
        raise UserError(f"data.path={root}: " + ("no .bin file in this folder" if root.is_dir() else "no such path"))
    return found


def token_runs(root: Path) -> list[TokenRun]:
    """The tokens of all shards, by memory map. Raises UserError for a file that is no shard."""
    opened = {path: _open(path) for path in shard_paths(root)}
    named_val = {path: bool(re.search("(^|[^a-z])val", path.name)) for path in opened}
    names = {path: path.relative_to(root).as_posix() for path in opened}  # a single file's is "."
    if any(named_val.values()):
        return [TokenRun(names[path], ids, held_out=named_val[path]) for path, ids in opened.items()]
    size = max(1, -(-sum(map(len, opened.values())) // PIECES))
    return [run for path, ids in opened.items() for run in _cut(names[path], ids, size)]


def _open(path: Path) -> npt.NDArray[np.uint16]:
    header = np.fromfile(path, dtype="<i4", count=HEADER)
    if len(header) < HEADER or header[0] != MAGIC or header[1] != VERSION:
        found = header[:2].tolist()
        raise UserError(f"{path}: no shard of llm.c: begins with {found}, expected [{MAGIC}, {VERSION}]")
    there = (path.stat().st_size - 4 * HEADER) // 2
    if there != header[2] or not there:
        raise UserError(f"{path}: says that it holds {header[2]} tokens, but {there} are there")
    return np.memmap(path, dtype="<u2", mode="r", offset=4 * HEADER)


def _cut(name: str, ids: npt.NDArray[np.uint16], size: int) -> Iterator[TokenRun]:
    for i, start in enumerate(range(0, len(ids), size)):
        yield TokenRun(f"{name}/{i:03d}", ids[start : start + size])
