"""The token file on disk: written once, under a temporary name, and renamed.

A prepared folder holds `train.bin` and `val.bin` (flat little-endian ids, a mix's parts one after another),
`token_bytes.npy` (bytes a token stands for), `unigram.npy` (counts of training tokens, a mix's by weight),
`doc_offsets.npy`, `tokenizer.json`, `meta.json`.
Its name is a hash of content, split rule, tokenizer and weights, so equal names mean equal tokens.
"""

import hashlib
import json
import os
import secrets
import shutil
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from andrea_exp.config import DataConfig, sources
from andrea_exp.data.corpus import content_hash, documents
from andrea_exp.data.document import Document, TokenRun
from andrea_exp.data.tokenizer import Tokenizer, make_tokenizer, tokenizer_hash
from andrea_exp.errors import UserError

LEFT_OVER_S = 86400
SPLIT_RULE = "groups by SHA-256 until the fraction of bytes is held out, v1"

CHUNK = 1 << 24  # tokens looked at together
BATCH = 1000  # documents encoded together

Ids = npt.NDArray[np.integer]
# Per split, the pieces of each part of a mix by its name.
Splits = dict[str, dict[str, list[Ids]]]


@dataclass(frozen=True)
class Part:
    """One corpus of a mix, or all there is: its share of the windows, and where its tokens lie (start, end)."""

    name: str
    share: float
    train: tuple[int, int]
    val: tuple[int, int]


@dataclass(frozen=True)
class Prepared:
    """An opened token folder. `train` and `val` are read-only memory maps of token ids."""

    folder: Path
    train: Ids
    val: Ids
    parts: tuple[Part, ...]
    token_bytes: npt.NDArray[np.int64]
    unigram: npt.NDArray[np.int64]
    meta: dict[str, Any]


def fingerprint(data: DataConfig) -> str:
    """Names the prepared tokens by everything that decides them, without preparing them."""
    shares = _shares(data)
    content = {name: content_hash(source) for name, source in sources(data).items()}
    recipe: dict[str, Any] = {
        "content": {n: [shares[n], content[n]] for n in content} if data.mix else content[""],
        "split": [SPLIT_RULE, data.val_fraction],
        "tokenizer": [tokenizer_hash(data) or data.tokenizer.name, data.vocab_size],
    }
    if data.mix:  # earlier preparations had the order in which they were given, under the same name
        recipe["order"] = "parts by name"
    return hashlib.sha256(json.dumps(recipe, sort_keys=True).encode()).hexdigest()[:16]


def prepare(data: DataConfig, corpora: Path, seq_len: int) -> Path:
    """The folder with a corpus's tokens, made if it is not there yet, and verified if it is.

    Safe under concurrent starts (whoever renames first wins) and under kills (nothing half-made is found).
    Raises UserError for a corpus without usable text, too short for one window, or spoilt on disk.
    """
    folder = corpora / fingerprint(data)
    if not folder.exists():
        _build(data, folder, seq_len)
    _verify(folder)
    for part in load(folder).parts:
        _require_windows(part.name, {"train": part.train[1] - part.train[0], "val": part.val[1] - part.val[0]}, seq_len)
    return folder


def load(folder: Path) -> Prepared:
    """Opens a prepared folder, by memory map."""
    meta = json.loads((folder / "meta.json").read_text())
    train, val = (np.memmap(folder / f"{name}.bin", dtype=meta["dtype"], mode="r") for name in ("train", "val"))
    token_bytes, unigram = (np.load(folder / f"{name}.npy") for name in ("token_bytes", "unigram"))
    whole = Part("", 1.0, (0, len(train)), (0, len(val)))
    parts = tuple(Part(p["name"], p["share"], tuple(p["train"]), tuple(p["val"])) for p in meta.get("parts", []))
    return Prepared(folder, train, val, parts or (whole,), token_bytes, unigram, meta)


def _shares(data: DataConfig) -> dict[str, float]:
    """The share of each part of a mix, together 1."""
    weights = {name: data.mix[name].weight if data.mix else 1.0 for name in sources(data)}
    return {name: weight / sum(weights.values()) for name, weight in weights.items()}


Piece = Document | TokenRun


def split(docs: Sequence[Piece], val_fraction: float) -> tuple[list[Piece], list[Piece]]:
    """Training and validation documents; whole groups are held out, chosen by hash, never by date."""
    if any(isinstance(d, TokenRun) and d.held_out is not None for d in docs):
        return [d for d in docs if not d.held_out], [d for d in docs if d.held_out]  # type: ignore[union-attr]
    groups: dict[str, int] = {}
    for doc in docs:
        groups[doc.group] = groups.get(doc.group, 0) + doc.size
    wanted, held = val_fraction * sum(groups.values()), set()
    for group in sorted(groups, key=lambda g: hashlib.sha256(g.encode("utf-8", "surrogateescape")).hexdigest())[
        : len(groups) - 1
    ]:
        if wanted <= 0:
            break
        held.add(group)
        wanted -= groups[group]
    return [d for d in docs if d.group not in held], [d for d in docs if d.group in held]


def _build(data: DataConfig, folder: Path, seq_len: int) -> None:
    kept: dict[str, dict[str, list[Piece]]] = {"train": {}, "val": {}}
    for name, source in sources(data).items():
        docs = documents(source)
        kept["train"][name], kept["val"][name] = split(docs, data.val_fraction)
        if not kept["val"][name] or not kept["train"][name]:
            raise UserError(f"{_where(name)}: {len(docs)} document is too little to hold one out for validation")
    texts = [d.text for docs in kept["train"].values() for d in docs if isinstance(d, Document)]
    tokenizer = make_tokenizer(data, texts)
    if data.vocab_size and len(tokenizer.lengths) < data.vocab_size:
        raise UserError(f"data.vocab_size={data.vocab_size}: this text yields no more than {len(tokenizer.lengths)}")
    splits = {k: {name: _encode(docs, tokenizer) for name, docs in parts.items()} for k, parts in kept.items()}
    for name in sources(data):
        _require_windows(name, {k: sum(map(len, parts[name])) for k, parts in splits.items()}, seq_len)
    folder.parent.mkdir(parents=True, exist_ok=True)
    _clear_leftovers(folder.parent)
    partial = folder.parent / f".{folder.name}.{secrets.token_hex(8)}"
    partial.mkdir()  # not by tempfile, which makes it ours alone
    try:
        _write(partial, data, tokenizer, splits)
        if fingerprint(data) != folder.name:
            raise UserError("data: the text changed while it was prepared; the same command goes on")
        try:
            partial.rename(folder)
        except OSError:  # another process was first, with the same tokens
            if not folder.exists():
                raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _clear_leftovers(corpora: Path) -> None:
    """Removes what preparations that were killed a day ago or more had begun."""
    for partial in corpora.glob(".*.*"):
        with suppress(FileNotFoundError):  # its maker may just have renamed it
            if time.time() - partial.stat().st_mtime > LEFT_OVER_S:
                shutil.rmtree(partial, ignore_errors=True)


def _encode(docs: Sequence[Piece], tokenizer: Tokenizer) -> list[Ids]:
    """The tokens (N,) of each document, its end among them."""
    encoded: list[Ids] = []
    for start in range(0, len(docs), BATCH):
        some = docs[start : start + BATCH]
        ids = iter(tokenizer.encode_batch([d.text for d in some if isinstance(d, Document)]))
        encoded += [_within(d, tokenizer) if isinstance(d, TokenRun) else next(ids) for d in some]
    return encoded


def _within(run: TokenRun, tokenizer: Tokenizer) -> Ids:
    largest = int(run.ids.max())
    if largest >= len(tokenizer.lengths):
        raise UserError(
            f"data: {run.group} holds token {largest}, which a tokenizer of {len(tokenizer.lengths)} entries lacks"
        )
    return run.ids


def _write(folder: Path, data: DataConfig, tokenizer: Tokenizer, splits: Splits) -> None:
    size = len(tokenizer.lengths)
    dtype = np.dtype("<u2" if size <= 65536 else "<u4")
    content = {name: [s.corpus.name if s.corpus else None, content_hash(s)] for name, s in sources(data).items()}
    meta: dict[str, Any] = {
        "source": {"corpus": content[""][0], "sha256": content[""][1]} if not data.mix else content,
        "split": SPLIT_RULE,
        "val_fraction": data.val_fraction,
        "tokenizer": data.tokenizer.name,
        "vocab_size": size,
        "dtype": dtype.str,
        "files": {},
    }
    counts: dict[str, npt.NDArray[np.int64]] = {}
    for split_name, parts in splits.items():
        pieces = [piece for part in parts.values() for piece in part]
        _write_tokens(folder / f"{split_name}.bin", pieces, dtype)
        meta["files"][f"{split_name}.bin"] = _hash_file(folder / f"{split_name}.bin")
        counts = {name: _count(part, size) for name, part in parts.items()}
        total = sum(counts.values())
        meta[split_name] = {
            "documents": len(pieces),
            "tokens": int(np.sum(total)),
            "bytes": int(np.dot(total, tokenizer.lengths)),
        }
        if split_name == "train":
            unigram = _mixed(counts, _shares(data))
            p = unigram[unigram > 0] / unigram.sum()
            meta["unigram_entropy_nats"] = float(-(p * np.log(p)).sum())
            np.save(folder / "unigram.npy", unigram)
            np.save(folder / "doc_offsets.npy", np.cumsum([0] + [len(x) for x in pieces]))
    if data.mix:
        meta["parts"] = _places(splits, _shares(data))
    np.save(folder / "token_bytes.npy", tokenizer.lengths)
    tokenizer.save(folder / "tokenizer.json")
    for other in ("token_bytes.npy", "unigram.npy", "doc_offsets.npy", "tokenizer.json"):
        meta["files"][other] = _hash_file(folder / other)
    _write_synced(folder / "meta.json", [json.dumps(meta, indent=2).encode()])


def _write_tokens(path: Path, pieces: Iterable[Ids], dtype: np.dtype[Any]) -> None:
    chunks = (piece[i : i + CHUNK] for piece in pieces for i in range(0, len(piece), CHUNK))
    _write_synced(path, (chunk.astype(dtype).tobytes() for chunk in chunks))


def _count(pieces: Sequence[Ids], size: int) -> npt.NDArray[np.int64]:
    """How often each of `size` tokens occurs."""
    counts = np.zeros(size, dtype=np.int64)
    for piece in pieces:
        for i in range(0, len(piece), CHUNK):
            found = np.bincount(piece[i : i + CHUNK])
            counts[: len(found)] += found
    return counts


def _mixed(counts: dict[str, npt.NDArray[np.int64]], shares: dict[str, float]) -> npt.NDArray[np.int64]:
    """Counts of a single corpus as they are; of a mix, as if each part had its share of all tokens."""
    if len(counts) == 1:
        return next(iter(counts.values()))
    total = sum(int(c.sum()) for c in counts.values())
    scaled = sum(c * (shares[name] * total / c.sum()) for name, c in counts.items())
    return np.rint(scaled).astype(np.int64)


def _places(splits: Splits, shares: dict[str, float]) -> list[dict[str, Any]]:
    """What `Part` holds, of each part of a mix."""
    ends = {k: np.cumsum([0] + [sum(map(len, p)) for p in parts.values()]).tolist() for k, parts in splits.items()}
    return [
        {"name": name, "share": share, **{k: ends[k][i : i + 2] for k in ends}}
        for i, (name, share) in enumerate(shares.items())
    ]


def _write_synced(path: Path, content: Iterable[bytes]) -> None:
    with path.open("wb") as file:
        file.writelines(content)
        file.flush()
        os.fsync(file.fileno())


def _hash_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _verify(folder: Path) -> None:
    try:
        recorded = json.loads((folder / "meta.json").read_text())["files"]
        spoilt = [name for name, digest in recorded.items() if _hash_file(folder / name) != digest]
    except PermissionError:
        raise
    except (OSError, ValueError, KeyError) as error:
        spoilt = [str(getattr(error, "filename", None) or "meta.json")]
    if spoilt:
        raise UserError(
            f"prepared corpus {folder}: {', '.join(spoilt)} does not have its recorded hash; "
            "delete that folder, and it is made again"
        )


def _where(part: str) -> str:
    return f"data.mix.{part}" if part else "data"


def _require_windows(part: str, lengths: dict[str, int], seq_len: int) -> None:
    for name, tokens in lengths.items():
        if tokens < seq_len + 1:
            raise UserError(
                f"{_where(part)}: the {name} split has {tokens} tokens, too short for one window of "
                f"model.seq_len={seq_len} and its target; use more text or a shorter window"
            )
