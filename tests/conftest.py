"""What tests share: tiny configs, a small corpus on disk, the command line as a user calls it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from andrea_exp import data
from andrea_exp.config import RunConfig
from andrea_exp.sweep.plan import plan_sweep

# Forked runs and the parallel suite share two cores: one thread each, and no fight.
os.environ.setdefault("OMP_NUM_THREADS", "1")

TINY = (
    "model.d_model=16",
    "model.n_layers=2",
    "model.n_heads=2",
    "model.seq_len=16",
    "train.batch_size=4",
    "train.steps=6",
    "train.device=cpu",
    "log.validate_every=3",
    "log.diagnose_every=3",
    "data.val_windows=8",
)


def make(*overrides: str) -> RunConfig:
    """The resolved config of a tiny run; later words win over the tiny defaults."""
    given = {o.split("=")[0] for o in overrides}
    return plan_sweep([*(t for t in TINY if t.split("=")[0] not in given), *overrides]).cells[0].config


@pytest.fixture(scope="session")
def corpus_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of small text files with some structure to learn."""
    folder = tmp_path_factory.mktemp("text")
    words = ["stream", "norm", "block", "branch", "residual", "gate", "depth", "width", "the", "of", "and"]
    for document in range(24):
        picks = (words[(i * i + 3 * i * document + document) % len(words)] for i in range(400))
        (folder / f"doc{document:02d}.txt").write_text(" ".join(picks) + ".\n")
    return folder


@pytest.fixture(scope="session")
def prepared(corpus_path: Path, tmp_path_factory: pytest.TempPathFactory) -> data.Prepared:
    """The small corpus as byte tokens."""
    config = make(f"data.path={corpus_path}")
    return data.load(data.prepare(config.data, tmp_path_factory.mktemp("corpora"), config.model.seq_len))


def andrea(*words: str, cwd: Path, check: int | None = 0, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    """Runs `andrea-exp WORDS` in a folder; fails the test unless the exit code is `check`."""
    done = subprocess.run(
        [sys.executable, "-m", "andrea_exp.cli", *words], cwd=cwd, capture_output=True, text=True, timeout=timeout
    )
    if check is not None:
        assert done.returncode == check, f"{words}: exit {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done
