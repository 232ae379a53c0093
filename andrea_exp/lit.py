"""The LightningModule: one step, the optimizer's groups, the schedule, clipping."""

import math
from typing import Any

import lightning.pytorch as L
import numpy as np
import torch
from torch import Tensor

from andrea_exp.config import OptimConfig, RunConfig, Schedule
from andrea_exp.data import Prepared
from andrea_exp.data.batches import train_batch
from andrea_exp.diagnostics import GroupNorms
from andrea_exp.model import GPT


def lr_factor(optim: OptimConfig, steps: int, step: int) -> float:
    """Share of the peak learning rate at optimizer step `step` (from 0) of `steps`."""
    if step < optim.warmup_steps:
        return (step + 1) / optim.warmup_steps
    if optim.schedule is Schedule.constant:
        return 1.0
    assert optim.min_lr_ratio is not None
    if optim.schedule is Schedule.cosine:
        progress = (step - optim.warmup_steps) / max(1, steps - optim.warmup_steps)
        return optim.min_lr_ratio + (1 - optim.min_lr_ratio) * (1 + math.cos(math.pi * progress)) / 2
    assert optim.decay_fraction is not None
    left = (steps - step) / max(1.0, optim.decay_fraction * steps)
    return optim.min_lr_ratio + (1 - optim.min_lr_ratio) * min(1.0, left)


def dropout_seed(*place: int) -> int:
    """A seed for the global generator from (seed, step, micro-step, rank): dropout keeps no state of its own."""
    return int(np.random.SeedSequence(place).generate_state(1, np.uint64)[0] >> 1)


class LitGPT(L.LightningModule):
    """Trains `model`; batches come from (seed, step, micro-step), never from a loader's state."""

    def __init__(self, config: RunConfig, model: GPT, data: Prepared, start: int = 0) -> None:
        """`start` is the optimizer step that a resumed run goes on from."""
        super().__init__()
        self.config, self.model, self.prepared, self.start = config, model, data, start
        self.norms_of = GroupNorms(model)
        self._weights = list(model.parameters())  # walking the modules anew at every step costs 0.1 ms
        # Filled as steps pass, emptied by whoever logs: tensors stay on the device until then.
        self.losses: list[Tensor] = []
        self.grad_norms: Tensor | None = None
        self.clip_coefs: list[Tensor] = []

    @property
    def step(self) -> int:
        """Optimizer steps done, those before a resume among them."""
        return self.start + self.trainer.global_step

    def training_step(self, _: Any, batch_idx: int) -> Tensor:
        c = self.config
        micro = batch_idx % c.train.accumulate
        whole = train_batch(
            self.prepared,
            c.seed,
            self.step,
            micro,
            c.train.batch_size // c.train.accumulate,
            c.model.seq_len,
        )
        ids = (a[self.global_rank :: c.train.ranks] for a in whole)
        if c.model.dropout:
            torch.manual_seed(dropout_seed(c.seed, self.step, micro, self.global_rank))
        tokens, targets = (torch.from_numpy(a).to(self.device) for a in ids)
        loss = self.model.loss(tokens, targets)
        self.losses.append(loss.detach())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        o = self.config.optim
        decayed = [p for p in self.model.parameters() if p.ndim >= 2]
        plain = [p for p in self.model.parameters() if p.ndim < 2]
        return torch.optim.AdamW(
            [{"params": decayed, "weight_decay": o.weight_decay}, {"params": plain, "weight_decay": 0.0}],
            lr=o.lr,
            betas=(o.beta1, o.beta2),
            eps=o.eps,
            # The fused step unscales fp16 gradients itself, behind the back of clipping.
            fused=self.config.train.precision.name != "fp16-mixed",
        )

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        o = self.config.optim
        lr = o.lr * lr_factor(o, self.config.train.steps, self.step)
        for group in optimizer.param_groups:
            group["lr"] = lr

    def configure_gradient_clipping(self, *_: Any, **__: Any) -> None:
        """Norms by group before clipping, and the clip coefficient; Lightning has unscaled the gradients."""
        self.grad_norms = self.norms_of([p.grad for p in self._weights if p.grad is not None])
        if self.config.optim.clip is not None:
            total = self.grad_norms[0]
            torch.nn.utils.clip_grads_with_norm_(self._weights, self.config.optim.clip, total)
            self.clip_coefs.append((self.config.optim.clip / (total + 1e-6)).clamp(max=1.0))
