"""A batch is a function of (seed, step, micro-step): no state, so nothing to lose in a resume."""

import numpy as np
import numpy.typing as npt

from andrea_exp.data.prepare import Prepared

Ids = npt.NDArray[np.int64]


def train_batch(data: Prepared, seed: int, step: int, micro: int, batch: int, seq_len: int) -> tuple[Ids, Ids]:
    """Inputs and targets (B, T) of one micro-batch: windows at uniformly random places of the training text."""
    starts = np.random.Generator(np.random.PCG64([seed, step, micro])).integers(
        0, len(data.train) - seq_len, size=batch
    )
    return _windows(data.train, starts, seq_len)


def val_batch(data: Prepared, windows: int, seq_len: int) -> tuple[Ids, Ids]:
    """The fixed validation windows (at most `windows`), spread evenly without overlap: the same for every run."""
    room = (len(data.val) - 1) // seq_len
    count = min(windows, room)
    starts = np.arange(count) * room // count * seq_len
    return _windows(data.val, starts, seq_len)


def unigram_loss(data: Prepared, targets: Ids) -> float:
    """Nats a token of the training text's unigram model (add-one) on given targets: what "stuck" means."""
    counts = data.unigram + 1.0
    return float(-np.log(counts / counts.sum())[targets].mean())


def _windows(tokens: npt.NDArray[np.integer], starts: Ids, seq_len: int) -> tuple[Ids, Ids]:
    cut = tokens[starts[:, None] + np.arange(seq_len + 1)].astype(np.int64)
    return cut[:, :-1], cut[:, 1:]
