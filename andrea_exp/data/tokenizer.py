"""Text to token ids: bytes, a byte-level BPE trained on the training split, or a byte-level tokenizer from a file.

All end a document with one token of their own; for the first two it is the last id.
"""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from andrea_exp.config import BYTES_VOCAB, DataConfig
from andrea_exp.config import Tokenizer as Kind
from andrea_exp.errors import UserError

END_OF_TEXT = "<|endoftext|>"
ENDS = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>")
# The byte-level alphabet: printable Latin characters are their own byte, the others follow from U+0100 on.
_OWN = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
_OTHERS = [byte for byte in range(256) if byte not in _OWN]
BYTE_OF = {chr(byte): byte for byte in _OWN} | {chr(0x100 + i): byte for i, byte in enumerate(_OTHERS)}


class Tokenizer(Protocol):
    """What the rest needs of a tokenizer. `lengths[i]` is the number of bytes that token i stands for."""

    lengths: npt.NDArray[np.int64]
    end_of_text: int

    def encode_batch(self, texts: Sequence[str]) -> list[npt.NDArray[np.integer]]:
        """Each text's tokens (N,) and the end of text."""
        ...

    def decode(self, ids: Sequence[int]) -> str: ...
    def spelled(self, token: int) -> str:
        """One token on one line: what is no printable text is escaped as in Python."""
        ...

    def save(self, path: Path) -> None: ...


class Bytes:
    """One token a byte: 256 values and the end of text."""

    def __init__(self) -> None:
        self.lengths = np.array([1] * 256 + [0])
        self.end_of_text = BYTES_VOCAB - 1

    def encode_batch(self, texts: Sequence[str]) -> list[npt.NDArray[np.integer]]:
        raw = (np.frombuffer(text.encode(), dtype=np.uint8) for text in texts)
        return [np.append(ids.astype(np.uint16), np.uint16(self.end_of_text)) for ids in raw]

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(i for i in ids if i < 256).decode(errors="replace")

    def spelled(self, token: int) -> str:
        return escaped(bytes([token])) if token < 256 else END_OF_TEXT if token == self.end_of_text else f"#{token}"

    def save(self, path: Path) -> None:
        path.write_text('{"kind": "bytes"}\n')


class BPE:
    """GPT-2's scheme: byte-level pieces, merges learned from text; every text can be written in it."""

    def __init__(self, inner: Any) -> None:
        """Raises ValueError for a tokenizer that is not byte-level or has no token for the end of a text."""
        self.inner = inner
        # The end of text written out in a document is text; a saved tokenizer does not remember this.
        inner.encode_special_tokens = True
        end = next((t for t in ENDS if inner.token_to_id(t) is not None), None)
        if end is None:
            raise ValueError(f"has none of {', '.join(ENDS)} to end a document with")
        if "ByteLevel" not in str(inner.decoder):
            raise ValueError("is not byte-level, so the bytes of a token are not known")
        self.end_of_text = inner.token_to_id(end)
        tokens = [inner.id_to_token(i) for i in range(inner.get_vocab_size())]
        added = inner.get_added_tokens_decoder()
        special = {t.content for t in added.values() if t.special}
        self._plain = {i: t.content for i, t in added.items() if not t.special}  # such as runs of blanks: text as it is
        # In the byte-level alphabet each character stands for one byte.
        self.lengths = np.array([0 if t is None or t in special else len(t) for t in tokens])
        for i, text in self._plain.items():
            self.lengths[i] = len(text.encode())

    @classmethod
    def train(cls, texts: Sequence[str], vocab_size: int) -> "BPE":
        from tokenizers import Tokenizer as HFTokenizer
        from tokenizers import decoders, models, pre_tokenizers, trainers

        inner = HFTokenizer(models.BPE())
        inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        inner.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size - 1,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        inner.train_from_iterator(texts, trainer)
        inner.add_special_tokens([END_OF_TEXT])
        return cls(inner)

    @classmethod
    def load(cls, path: Path) -> "BPE":
        from tokenizers import Tokenizer as HFTokenizer

        return cls(HFTokenizer.from_file(str(path)))

    def encode_batch(self, texts: Sequence[str]) -> list[npt.NDArray[np.integer]]:
        found = self.inner.encode_batch(list(texts), add_special_tokens=False)
        return [np.array([*f.ids, self.end_of_text], dtype=np.uint32) for f in found]

    def decode(self, ids: Sequence[int]) -> str:
        return self.inner.decode(list(ids), skip_special_tokens=True)

    def spelled(self, token: int) -> str:
        known = token < len(self.lengths) and self.inner.id_to_token(token)
        if not known:
            return f"#{token}"
        if token in self._plain:
            return escaped(known.encode())
        return escaped(bytes(map(BYTE_OF.__getitem__, known))) if self.lengths[token] else known

    def save(self, path: Path) -> None:
        self.inner.save(str(path))


def escaped(raw: bytes) -> str:
    """Bytes as printable text on one line; what is none, and a backslash, as Python's literals have it."""

    def safe(c: str) -> str:
        if "\udc80" <= c <= "\udcff":  # a byte that is no UTF-8
            return f"\\x{ord(c) - 0xDC00:02x}"
        return c if c.isprintable() and c != "\\" else c.encode("unicode_escape").decode()

    return "".join(map(safe, raw.decode(errors="surrogateescape")))


def ids_of(tokenizer: Tokenizer, text: str) -> list[int]:
    """A text's tokens, without an end. Raises UserError for what the tokenizer cannot write, naming it."""

    def written(part: str) -> list[int]:
        ids = tokenizer.encode_batch([part])[0][:-1].tolist()
        return ids if sum(tokenizer.lengths[ids]) == len(part.encode()) else []

    try:
        found = written(text)
    except UnicodeEncodeError as error:
        raise UserError(f"the text is not UTF-8: {error.object[error.start : error.end]!a}") from error
    if text and not found:
        lost = [c for c in dict.fromkeys(text) if not written(c)]
        raise UserError(f"the tokenizer has no tokens for {', '.join(map(repr, lost)) or 'all of this text'}")
    return found


def tokenizer_hash(data: DataConfig) -> str | None:
    """SHA-256 of a tokenizer's file, or None where there is none. Raises UserError for a missing one."""
    if data.tokenizer is not Kind.file:
        return None
    return hashlib.sha256(_file(data).read_bytes()).hexdigest()


def make_tokenizer(data: DataConfig, train_texts: Sequence[str]) -> Tokenizer:
    """Raises UserError for a file that is no usable tokenizer."""
    if data.tokenizer is Kind.bytes:
        return Bytes()
    assert data.vocab_size is not None
    if data.tokenizer is Kind.bpe:
        return BPE.train(train_texts, data.vocab_size)
    path = _file(data)
    try:
        loaded = BPE.load(path)
    except Exception as error:  # the library raises nothing more special
        raise UserError(f"data.tokenizer_path={path}: {error}") from error
    if len(loaded.lengths) != data.vocab_size:
        raise UserError(
            f"data.vocab_size={data.vocab_size}: {path} has {len(loaded.lengths)} entries; "
            f"use data.vocab_size={len(loaded.lengths)}"
        )
    return loaded


def _file(data: DataConfig) -> Path:
    path = Path(data.tokenizer_path or "").expanduser()
    if not path.is_file():
        raise UserError(f"data.tokenizer_path={data.tokenizer_path}: no such file")
    return path
