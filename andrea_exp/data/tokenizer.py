"""Text to token ids: bytes, or a byte-level BPE trained on the training split.

Both end a document with one token of their own, the last id.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from andrea_exp.config import BYTES_VOCAB, DataConfig
from andrea_exp.config import Tokenizer as Kind

END_OF_TEXT = "<|endoftext|>"


class Tokenizer(Protocol):
    """What the rest needs of a tokenizer. `lengths[i]` is the number of bytes that token i stands for."""

    lengths: npt.NDArray[np.int64]
    end_of_text: int

    def encode(self, text: str) -> npt.NDArray[np.int64]: ...
    def decode(self, ids: Sequence[int]) -> str: ...
    def save(self, path: Path) -> None: ...


class Bytes:
    """One token a byte: 256 values and the end of text."""

    def __init__(self) -> None:
        self.lengths = np.array([1] * 256 + [0])
        self.end_of_text = BYTES_VOCAB - 1

    def encode(self, text: str) -> npt.NDArray[np.int64]:
        return np.frombuffer(text.encode(), dtype=np.uint8).astype(np.int64)

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(i for i in ids if i < 256).decode(errors="replace")

    def save(self, path: Path) -> None:
        path.write_text('{"kind": "bytes"}\n')


class BPE:
    """GPT-2's scheme: byte-level pieces, merges learned from the text; every text can be written in it."""

    def __init__(self, inner: "object") -> None:
        self.inner = inner
        # The end of text written out in a document is text; a saved tokenizer does not remember this.
        inner.encode_special_tokens = True  # type: ignore[attr-defined]
        self.end_of_text = inner.token_to_id(END_OF_TEXT)  # type: ignore[attr-defined]
        tokens = [inner.id_to_token(i) for i in range(inner.get_vocab_size())]  # type: ignore[attr-defined]
        # In the byte-level alphabet each character stands for one byte.
        self.lengths = np.array([0 if t == END_OF_TEXT else len(t) for t in tokens])

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

    def encode(self, text: str) -> npt.NDArray[np.int64]:
        return np.array(self.inner.encode(text).ids, dtype=np.int64)  # type: ignore[attr-defined]

    def decode(self, ids: Sequence[int]) -> str:
        return self.inner.decode(list(ids), skip_special_tokens=True)  # type: ignore[attr-defined]

    def save(self, path: Path) -> None:
        self.inner.save(str(path))  # type: ignore[attr-defined]


def make_tokenizer(data: DataConfig, train_texts: Sequence[str]) -> Tokenizer:
    if data.tokenizer is Kind.bytes:
        return Bytes()
    assert data.vocab_size is not None
    return BPE.train(train_texts, data.vocab_size)
