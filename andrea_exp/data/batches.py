"""A batch is a function of (seed, step, micro-step): no state, so nothing to lose in a resume."""

import numpy as np
import numpy.typing as npt

from andrea_exp.data.prepare import Prepared

Ids = npt.NDArray[np.int64]


def train_batch(data: Prepared, seed: int, step: int, micro: int, batch: int, seq_len: int) -> tuple[Ids, Ids]:
    """Inputs and targets (B, T) of one micro-batch: windows at uniformly random places of the training text.

    Of a mix each window's part is drawn first, by its share; no window crosses from one part into another.
    """
    draw = np.random.Generator(np.random.PCG64([seed, step, micro]))
    if len(data.parts) == 1:
        return _windows(data.train, draw.integers(0, len(data.train) - seq_len, size=batch), seq_len)
    part = draw.choice(len(data.parts), size=batch, p=[p.share for p in data.parts])
    begins, ends = np.array([p.train for p in data.parts])[part].T
    return _windows(data.train, draw.integers(begins, ends - seq_len), seq_len)


def val_batch(data: Prepared, windows: int, seq_len: int) -> tuple[Ids, Ids]:
    """The fixed validation windows (at most `windows`), spread evenly without overlap: the same for every run.

    Of a mix each part has its share of them, at least one, in the order of `val_parts`.
    """
    starts = [_spread(p.val, n, seq_len) for p, n in zip(data.parts, val_parts(data, windows, seq_len), strict=True)]
    return _windows(data.val, np.concatenate(starts), seq_len)


def val_parts(data: Prepared, windows: int, seq_len: int) -> list[int]:
    """How many of the validation windows each part has."""
    rooms = [(end - begin - 1) // seq_len for begin, end in (p.val for p in data.parts)]
    return [min(max(1, round(windows * p.share)), room) for p, room in zip(data.parts, rooms, strict=True)]


def _spread(place: tuple[int, int], count: int, seq_len: int) -> Ids:
    room = (place[1] - place[0] - 1) // seq_len
    return place[0] + np.arange(count) * room // count * seq_len


def unigram_loss(data: Prepared, targets: Ids) -> float:
    """Nats a token of the training text's unigram model (add-one) on given targets: what "stuck" means."""
    counts = data.unigram + 1.0
    return float(-np.log(counts / counts.sum())[targets].mean())


def _windows(tokens: npt.NDArray[np.integer], starts: Ids, seq_len: int) -> tuple[Ids, Ids]:
    cut = tokens[starts[:, None] + np.arange(seq_len + 1)].astype(np.int64)
    return cut[:, :-1], cut[:, 1:]
