"""Text in, token batches out: corpora, tokenizers, the token file on disk, batch = f(seed, step)."""

from andrea_exp.data.prepare import Prepared, fingerprint, load, prepare

__all__ = ["Prepared", "fingerprint", "load", "prepare"]
