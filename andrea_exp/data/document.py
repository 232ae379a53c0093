"""What a corpus consists of: documents of text, or runs of tokens that another program made."""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

FEW_DOCUMENTS, PIECES = 20, 100


@dataclass(frozen=True)
class Document:
    """A text; documents of one group are held out together."""

    group: str
    text: str

    @property
    def size(self) -> int:
        """Bytes."""
        return len(self.text.encode())


@dataclass(frozen=True)
class TokenRun:
    """Consecutive tokens (N,), ends of documents among them."""

    group: str
    ids: npt.NDArray[np.integer]
    held_out: bool | None = None  # as its maker decided; None: by the split rule

    @property
    def size(self) -> int:
        return len(self.ids)


def pieces(documents: Sequence[Document]) -> list[Document]:
    """Documents as they are, or a few cut into about a hundred pieces.

    Of a few none could be held out without holding out far too much or too little.
    """
    if len(documents) >= FEW_DOCUMENTS:
        return list(documents)
    size = max(1, -(-sum(len(d.text) for d in documents) // PIECES))
    return [piece for document in documents for piece in _cut(document, size)]


def hash_files(paths: Iterable[Path], root: Path) -> str:
    """SHA-256 of files' contents and of their names within `root`: the same wherever that lies."""
    digest = hashlib.sha256()
    for path in paths:
        with path.open("rb") as file:
            content = hashlib.file_digest(file, "sha256").hexdigest()
        # A name may be any bytes, which Python shows as lone surrogates.
        digest.update(f"{path.relative_to(root).as_posix()}\0{content}\n".encode("utf-8", "surrogateescape"))
    return digest.hexdigest()


def _cut(document: Document, size: int) -> Iterable[Document]:
    """A document cut at line ends into pieces of about `size` characters, each a group of its own."""
    lines = document.text.splitlines(keepends=True)
    if len(lines) < len(document.text) / size:  # a few endless lines: cut anywhere
        lines = [document.text[i : i + size] for i in range(0, len(document.text), size)]
    piece, count = "", 0
    for line in lines:
        piece += line
        if len(piece) >= size:
            yield Document(f"{document.group}/{count:03d}", piece)
            piece, count = "", count + 1
    if piece:
        yield Document(f"{document.group}/{count:03d}", piece)
