"""Checkpoints: all that a run needs to go on bit for bit, in files that no crash can spoil.

checkpoints/STEP-HASH.pt    while it runs, the two newest       weights.pt    the model as it ended

Batches, init and dropout are functions of seed and step, so weights, optimizer and what was measured since the
last logged row are all there is. Plain containers and tensors: `torch.load(weights_only=True)` opens them.
"""

import hashlib
import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import torch
from lightning.pytorch.plugins.precision import MixedPrecision

from andrea_exp import stop
from andrea_exp.config import Keep, RunConfig
from andrea_exp.lit import LitGPT
from andrea_exp.record import HELD_ELSEWHERE, Lease, metrics_bytes
from andrea_exp.watch import Watch

KEPT = 2  # the newest may turn out torn
LARGEST_SHARE = 0.02  # of the time, for saving

GO_ON, SAVE, STOP = range(3)  # the largest of all ranks' wishes is done

State = dict[str, Any]


class Keeper(L.Callback):
    """Saves at steps' ends, now and then and when asked to stop; takes a run up where `resumed` left it."""

    def __init__(
        self, config: RunConfig, folder: Path, watch: Watch, lease: Lease | None, resumed: State | None
    ) -> None:
        self.config, self.folder, self.watch, self.lease, self.resumed = config, folder, watch, lease, resumed
        self.interrupted = False
        self._saved_at, self._took = time.monotonic(), 0.0

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        stop.listen()  # Lightning's own handler raises, and of a distributed run communicates
        if self.resumed:
            trainer.optimizers[0].load_state_dict(self.resumed["optimizer"])
            if scaler := _scaler(trainer):
                scaler.load_state_dict(self.resumed["scaler"])

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        assert isinstance(pl_module, LitGPT)
        if (batch_idx + 1) % self.config.train.accumulate:
            return
        if self.lease and not self.lease.held():
            sys.exit(HELD_ELSEWHERE)  # whoever has the run now must not meet another's writing
        if pl_module.step == self.config.train.steps or trainer.should_stop:
            return
        wanted = self._wanted(trainer)
        if wanted:
            self._save(trainer, pl_module)
        if wanted == STOP:
            self.interrupted = trainer.should_stop = True

    def _wanted(self, trainer: L.Trainer) -> int:
        """GO_ON, SAVE or STOP: the same in all ranks."""
        own = STOP if stop.heard() else SAVE if self._due() else GO_ON
        if self.config.train.ranks == 1:
            return own
        told = trainer.strategy.reduce(torch.tensor(own, device=trainer.strategy.root_device), reduce_op="max")
        return int(told)

    def _due(self) -> bool:
        every_s = self.config.checkpoint.every_s
        wait = max(every_s, self._took / LARGEST_SHARE) if every_s else 0.0
        return self.watch.writer is not None and time.monotonic() - self._saved_at >= wait

    def _save(self, trainer: L.Trainer, lit: LitGPT) -> None:
        began = time.monotonic()
        measured = self.watch.state(lit)  # of all ranks
        if self.watch.writer is not None:
            self.watch.writer.sync()
            scaler = _scaler(trainer)
            state = {
                "step": lit.step,
                "model": lit.model.state_dict(),
                "optimizer": trainer.optimizers[0].state_dict(),
                "scaler": scaler.state_dict() if scaler else None,
                "watch": measured,
                "metrics_bytes": metrics_bytes(self.folder),
                "threads": torch.get_num_threads(),
            }
            save(self.folder, state, keep_all=self.config.checkpoint.keep is Keep.all)
        self._saved_at = time.monotonic()
        self._took = self._saved_at - began


def save(folder: Path, state: State, keep_all: bool = False) -> Path:
    """Writes a checkpoint and drops all but the newest; raises OSError where the disk is full or read-only."""
    home = folder / "checkpoints"
    home.mkdir(exist_ok=True)
    partial = home / ".partial"
    try:
        _write(partial, state)
    except OSError:  # a full disk must not stay full of this
        partial.unlink(missing_ok=True)
        raise
    path = home / f"{state['step']:09d}-{_digest(partial)}.pt"
    partial.rename(path)
    _sync_folder(home)
    if not keep_all:
        for old in _newest_first(folder)[KEPT:]:
            old.unlink()
    return path


def newest(folder: Path) -> State | None:
    """The newest checkpoint that is whole and whose rows are all in the metrics; None where there is none.

    Raises OSError where all that there might be cannot be read: to start over would delete what a later try may read.
    """
    unread: OSError | None = None
    for path in _newest_first(folder):
        try:
            if _digest(path) != path.stem.split("-")[1]:
                continue
            state = torch.load(path, map_location="cpu", weights_only=True)
            if state["metrics_bytes"] <= metrics_bytes(folder):
                return state
        except OSError as error:
            unread = error
    if unread:
        raise unread
    return None


def finish(folder: Path, model: torch.nn.Module, keep: Keep) -> str | None:
    """Leaves of a run's weights what is to be kept, and returns 16 hex digits of their file's SHA-256."""
    if keep is Keep.none:
        return None
    partial = folder / ".weights.partial"
    _write(partial, model.state_dict())
    partial.rename(folder / "weights.pt")
    return _digest(folder / "weights.pt")


def clear(folder: Path, keep: Keep) -> None:
    """Drops the checkpoints of a run that has ended."""
    if keep is not Keep.all:
        shutil.rmtree(folder / "checkpoints", ignore_errors=True)


def _newest_first(folder: Path) -> list[Path]:
    return sorted((folder / "checkpoints").glob("[0-9]*-*.pt"), reverse=True)


def _write(path: Path, content: State) -> None:
    with path.open("wb") as file:
        torch.save(content, file)  # to an open file, since a path's name would become part of the bytes
        file.flush()
        os.fsync(file.fileno())


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:16]


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _scaler(trainer: L.Trainer) -> Any:
    plugin = trainer.precision_plugin
    return plugin.scaler if isinstance(plugin, MixedPrecision) else None
