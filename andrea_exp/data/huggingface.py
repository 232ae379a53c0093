"""Data sets of the Hugging Face hub, or of a local folder, through the library `datasets` (the extra `huggingface`).

Read once, when a corpus is prepared, in whole documents up to `max_bytes`; training never streams.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

from andrea_exp.config import SourceConfig
from andrea_exp.data.document import Document, hash_files, pieces
from andrea_exp.errors import UserError, did_you_mean

SAVED = "state.json"  # marks a folder that `Dataset.save_to_disk` wrote


def documents(source: SourceConfig) -> list[Document]:
    """The rows' texts up to `max_bytes`. Raises UserError for a missing data set, split or field."""
    assert source.max_bytes is not None
    rows = iter(_rows(source))
    first = next(rows, None)
    if first is None:
        raise UserError(f"data.path={source.path}: split {source.split} has no rows")
    texts = _texts(chain([first], rows), source)
    kept = [Document(str(i), text) for i, text in enumerate(_until(texts, source.max_bytes)) if text.strip()]
    if not kept:
        raise UserError(f"data.path={source.path}: no text in field {source.text_field} of split {source.split}")
    return pieces(kept)


def content_hash(source: SourceConfig) -> str:
    """Of a local data set the files' hash; of one on the hub its name and commit, which fix its content."""
    root = _local(source)
    if root is None and not re.fullmatch("[0-9a-f]{40}", source.revision or ""):
        raise UserError(
            f"data.path={source.path}: no such folder here; for a data set on the Hugging Face hub, data.revision has "
            f"to name a commit (40 hex digits), listed at https://huggingface.co/datasets/{source.path}/commits/main"
        )
    if root is not None and source.revision:
        raise UserError(f"data.revision={source.revision}: {source.path} is a folder here and has no revisions")
    content = [source.path, source.revision] if root is None else hash_files(_files(root), root)
    choice = [content, source.subset, source.split, source.text_field, source.max_bytes]
    return hashlib.sha256(json.dumps(choice).encode()).hexdigest()


def _local(source: SourceConfig) -> Path | None:
    root = Path(source.path or "").expanduser()
    return root if root.is_dir() else None


def _files(root: Path) -> list[Path]:
    found = sorted(p for p in root.rglob("*") if p.is_file() and not p.name.startswith("."))
    if not found:
        raise UserError(f"data.path={root}: an empty folder")
    return found


def _rows(source: SourceConfig) -> Iterable[dict[str, Any]]:
    try:
        import datasets
    except ImportError as error:
        raise UserError("data.corpus=huggingface needs: pip install 'andrea-exp[huggingface]'") from error
    root = _local(source)
    try:
        if root and (root / "dataset_dict.json").exists():
            return datasets.load_from_disk(str(root))[source.split]
        if root and (root / SAVED).exists():
            return datasets.load_from_disk(str(root))
        path = str(root or source.path)
        return datasets.load_dataset(path, source.subset, split=source.split, revision=source.revision, streaming=True)
    except (OSError, ValueError, KeyError, datasets.exceptions.DatasetsError) as error:
        told = str(error).strip().splitlines()[0]
        raise UserError(f"data.path={source.path}: split {source.split} cannot be read: {told}") from error


def _texts(rows: Iterable[dict[str, Any]], source: SourceConfig) -> Iterator[str]:
    assert source.text_field is not None
    for row in rows:
        text = row.get(source.text_field)
        if not isinstance(text, str):
            wrong = f"data.text_field={source.text_field}"
            hint = did_you_mean(source.text_field, [k for k, v in row.items() if isinstance(v, str)])
            raise UserError(f"{wrong}: {source.path} has no text there; {hint}")
        yield text


def _until(texts: Iterable[str], max_bytes: int) -> Iterator[str]:
    """Whole texts until they hold `max_bytes`, the one that reaches it among them."""
    total = 0
    for text in texts:
        yield text
        total += len(text.encode())
        if total >= max_bytes:
            return
