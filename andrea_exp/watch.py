"""The callback that writes what a run shows: one row a logged step, validation and diagnosis included."""

import math
import resource
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import torch
from lightning.pytorch.plugins.precision import Precision
from torch import Tensor

from andrea_exp import accounting
from andrea_exp.config import RunConfig
from andrea_exp.data.batches import unigram_loss, val_batch, val_parts
from andrea_exp.diagnostics import Metrics, diagnose
from andrea_exp.lit import LitGPT
from andrea_exp.record import MetricsWriter
from andrea_exp.tensorboard_view import View


class Watch(L.Callback):
    """Measures at steps, never at batches: `step` counts optimizer steps done, 0 is the untrained model."""

    def __init__(self, config: RunConfig, folder: Path | None, resumed: dict[str, Any] | None = None) -> None:
        """`folder` is None in the ranks that only measure along; `resumed` is what `state` gave to a checkpoint."""
        self.config, self._resumed = config, resumed
        self.writer = MetricsWriter(folder) if folder else None
        self.view = View(folder) if folder and config.tensorboard else None
        self.non_finite_step: int | None = None
        self.first_step_at: float | None = resumed["first_step_at"] if resumed else None  # wall time
        self.training_s = resumed["training_s"] if resumed else 0.0
        self._logged_step, self._since = resumed["logged_step"] if resumed else 0, 0.0
        self._before: list[Tensor] | None = None
        self._val: tuple[Tensor, Tensor] | None = None

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        lit = _lit(pl_module)
        self.prepare(lit, trainer.precision_plugin)
        if self._resumed:
            rank = trainer.global_rank
            lit.losses = list(self._resumed["losses"][rank].to(lit.device))
            lit.clip_coefs = list(self._resumed["clip_coefs"][rank].to(lit.device))
        else:
            self.measure_untrained(lit)
            self.first_step_at = time.time()
        self._since = time.perf_counter() - (self._resumed or {}).get("interval_s", 0.0)

    def state(self, lit: LitGPT) -> dict[str, Any]:
        """What a checkpoint needs of the steps since the last logged row; losses (ranks, steps x micro-steps)."""
        own = (torch.stack(found) if found else torch.empty(0) for found in (lit.losses, lit.clip_coefs))
        all_ranks = (torch.as_tensor(lit.all_gather(t.to(lit.device))) for t in own)
        losses, coefs = (t.reshape(self.config.train.ranks, -1).cpu() for t in all_ranks)
        return {
            "losses": losses,
            "clip_coefs": coefs,
            "logged_step": self._logged_step,
            "training_s": self.training_s,
            "interval_s": time.perf_counter() - self._since,  # of the row that is still to be logged
            "first_step_at": self.first_step_at,
        }

    def prepare(self, lit: LitGPT, precision: Precision) -> None:
        """Fetches what every measurement needs."""
        self._precision = precision
        ids = val_batch(lit.prepared, self.config.data.val_windows, self.config.model.seq_len)
        tokens, targets = (torch.from_numpy(a).to(lit.device) for a in ids)
        self._val = (tokens, targets)
        self._val_parts = val_parts(lit.prepared, self.config.data.val_windows, self.config.model.seq_len)
        self.val_bytes = int(lit.prepared.token_bytes[ids[1]].sum())
        self.unigram = unigram_loss(lit.prepared, ids[1])
        name = torch.cuda.get_device_name(lit.device) if lit.device.type == "cuda" else ""
        self.peak_flops = accounting.peak_flops(name, self.config.train.precision)

    def measure_untrained(self, lit: LitGPT) -> None:
        """The row of step 0; all that a run of no steps has."""
        self._write({"step": 0, "tokens": 0, **self._validate(lit), **self._diagnose(lit, 0)})

    def on_before_optimizer_step(
        self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        lit = _lit(pl_module)
        if self._diagnosed(lit.step + 1):
            self._before = [p.detach().clone() for p in lit.model.parameters()]

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if (batch_idx + 1) % self.config.train.accumulate:
            return
        c, lit = self.config, _lit(pl_module)
        step = lit.step
        if step % c.log.every and step != c.train.steps and not self._diagnosed(step) and not self._validated(step):
            return
        now = time.perf_counter()
        row = self._training_row(lit, step, now - self._since)
        self.training_s += now - self._since
        if self.non_finite_step is None:
            if self._validated(step):
                row |= self._validate(lit)
            row |= self._diagnose(lit, step)
        else:
            trainer.should_stop = True
        self._write(row)
        self._logged_step, self._since = step, time.perf_counter()

    def _training_row(self, lit: LitGPT, step: int, seconds: float) -> Metrics:
        c = self.config
        losses = torch.stack(lit.losses).view(-1, c.train.accumulate).mean(1)
        values = lit.trainer.strategy.reduce(losses, reduce_op="mean").tolist()
        bad = [i for i, loss in enumerate(values) if not math.isfinite(loss)]
        if bad:
            self.non_finite_step = self._logged_step + 1 + bad[0]
        per_step = c.train.batch_size * c.model.seq_len
        row: Metrics = {
            "step": step,
            "tokens": step * per_step,
            "train/loss": sum(values) / len(values),
            "lr": lit.optimizers().param_groups[0]["lr"],  # type: ignore[union-attr]
            "tokens_per_s": len(values) * per_step / seconds,
            "memory_mb": _peak_memory_mb(lit.device),
        }
        if self.peak_flops:
            row["mfu"] = row["tokens_per_s"] * accounting.flops_per_token(c.model) / self.peak_flops
        assert lit.grad_norms is not None
        row |= lit.norms_of.named("grad_norm", lit.grad_norms)
        if lit.clip_coefs:
            coefs = torch.stack(lit.clip_coefs)
            row["clip/coef"] = coefs[-1].item()
            row["clip/fraction"] = (coefs < 1).float().mean().item()
        lit.losses.clear()
        lit.clip_coefs.clear()
        return row

    @torch.no_grad()
    def _validate(self, lit: LitGPT) -> Metrics:
        """Mean loss on the fixed windows, its standard error over windows, and bits a byte."""
        assert self._val is not None
        tokens, targets = self._val
        size = max(1, self.config.train.batch_size // self.config.train.accumulate)
        lit.model.eval()
        with self._precision.forward_context():
            pairs = zip(tokens.split(size), targets.split(size), strict=True)
            losses = torch.cat([lit.model.loss(x, y, reduction="none").double() for x, y in pairs])
        lit.model.train()
        windows = losses.mean(1)
        error = windows.std() / math.sqrt(len(windows)) if len(windows) > 1 else torch.tensor(math.nan)
        parts = zip(lit.prepared.parts, windows.split(self._val_parts), strict=True)
        return {
            **{f"val/loss/{part.name}": own.mean().item() for part, own in parts if part.name},
            "val/loss": windows.mean().item(),
            "val/loss_stderr": error.item(),
            "val/bits_per_byte": losses.sum().item() / math.log(2) / self.val_bytes,
        }

    def _diagnose(self, lit: LitGPT, step: int) -> Metrics:
        if not self._diagnosed(step):
            return {}
        assert self._val is not None
        tokens, targets = (t[: accounting.DIAGNOSIS_WINDOWS] for t in self._val)
        metrics = diagnose(lit.model, tokens, targets)
        if self._before is not None:
            after = list(lit.model.parameters())
            moved = lit.norms_of([a.detach() - b for a, b in zip(after, self._before, strict=True)])
            size = lit.norms_of([a.detach() for a in after])
            metrics |= lit.norms_of.named("update/ratio", moved / size.clamp(min=1e-30))
            self._before = None
        if step:  # the row already holds the norms of the step's own gradients
            metrics = {k: v for k, v in metrics.items() if not k.startswith("grad_norm/")}
        return metrics

    def _diagnosed(self, step: int) -> bool:
        every = self.config.log.diagnose_every
        return bool(every) and (step % every == 0 or step == self.config.train.steps)

    def _validated(self, step: int) -> bool:
        return step % self.config.log.validate_every == 0 or step == self.config.train.steps

    def _write(self, row: Mapping[str, float]) -> None:
        timed = {**row, "time": time.time()}
        if self.writer:
            self.writer.write(timed)
        if self.view:
            self.view.write(timed)


def _lit(module: L.LightningModule) -> LitGPT:
    assert isinstance(module, LitGPT)
    return module


def _peak_memory_mb(device: torch.device) -> float:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
