"""How long a call takes: on a GPU by its own events, over tensors that no cache holds, with the CPU well ahead.

A round is a pass over several sets of inputs, together some times larger than the L2 cache, so that every call finds
the cache as its predecessor left it: full of other data, written lines among them. A read of a large tensor comes
first and keeps the GPU busy until the round's calls are queued, so that no launch is waited for; a call's time is
that between the events around it. The first call of a round, and the first round, only warm up.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from statistics import median, quantiles
from typing import Any

import torch
from torch import Tensor

CPU_ROUNDS, GPU_ROUNDS = 2, 10
SETS, MOST_SETS = 5, 64  # calls a round
CACHES = 4  # times the L2 cache that the sets together are larger
READ_BYTES = 2**29
Inputs = Sequence[tuple[Sequence[Tensor | None], Sequence[Tensor]]]
Calls = list[Callable[[], Any]]


@dataclass(frozen=True)
class Time:
    """Microseconds of a call. `ahead`: the GPU never waited for the CPU (None on a CPU)."""

    median: float
    p20: float
    p80: float
    calls: int
    ahead: bool | None


class Clock:
    """Times calls on one device."""

    def __init__(self, device: str) -> None:
        self.on_gpu = device == "cuda"
        self._reads = 4
        if self.on_gpu:
            self._idle = torch.empty(READ_BYTES // 4, device=device).normal_()
            self._read_s = min(self._read() for _ in range(3))

    def sets(self, bytes_a_call: int) -> int:
        """How many sets of inputs to rotate."""
        if not self.on_gpu:
            return 2
        cache = torch.cuda.get_device_properties("cuda").L2_cache_size
        return min(MOST_SETS, max(SETS, math.ceil(CACHES * cache / bytes_a_call)))

    def forward(self, op: Callable[..., Any], inputs: Inputs) -> Time:
        """Of the forward pass with gradients asked for, as training has it."""
        leaves = [_leaves(tensors) for tensors, _ in inputs]
        return self.times(lambda: [partial(op, *given) for given in leaves])

    def backward(self, op: Callable[..., Any], inputs: Inputs) -> Time:
        """Of the gradients of all inputs; the forward passes of a round run before it, untimed."""
        leaves = [_leaves(tensors) for tensors, _ in inputs]

        def calls() -> Calls:
            made: Calls = []
            for given, (_, grads) in zip(leaves, inputs, strict=True):
                outputs = op(*given)
                wanted = [t for t in given if t is not None]
                made.append(partial(torch.autograd.grad, outputs, wanted, grads))
            return made

        return self.times(calls)

    def times(self, calls: Callable[[], Calls]) -> Time:
        rounds = [self._round(calls()) for _ in range(1 + (GPU_ROUNDS if self.on_gpu else CPU_ROUNDS))][1:]
        spent = [microseconds for found, _ in rounds for microseconds in found]
        fifths = quantiles(spent, n=5, method="inclusive") if len(spent) > 1 else spent * 4
        ahead = all(a for _, a in rounds) if self.on_gpu else None
        return Time(median(spent), fifths[0], fifths[3], len(spent), ahead)

    def _round(self, calls: Calls) -> tuple[list[float], bool]:
        """Each call's microseconds but the first's, and whether the GPU was still busy when all were queued."""
        if not self.on_gpu:
            stamps = [time.perf_counter()]
            for call in calls:
                call()
                stamps.append(time.perf_counter())
            return [1e6 * (b - a) for a, b in pairwise(stamps)][1:], True
        events = [torch.cuda.Event(enable_timing=True) for _ in range(len(calls) + 1)]
        torch.cuda.synchronize()
        for _ in range(self._reads):
            self._idle.sum()
        began = time.perf_counter()
        events[0].record()
        for call, event in zip(calls, events[1:], strict=True):
            call()
            event.record()
        queued, ahead = time.perf_counter() - began, not events[0].query()
        torch.cuda.synchronize()
        self._reads = 1 + math.ceil(min(1.5 * queued, 0.1) / self._read_s)  # the first round may compile for seconds
        return [1e3 * a.elapsed_time(b) for a, b in pairwise(events)][1:], ahead

    def _read(self) -> float:
        torch.cuda.synchronize()
        began = time.perf_counter()
        self._idle.sum()
        torch.cuda.synchronize()
        return time.perf_counter() - began


def copy_time(clock: Clock, elements: int, dtype: torch.dtype, device: str) -> Time:
    """Of a plain copy on the device: 2 elements moved for each."""
    sets = clock.sets(2 * elements * dtype.itemsize)
    source = torch.randn(sets, elements, device=device, dtype=dtype)
    target = torch.empty_like(source)
    return clock.times(lambda: [partial(t.copy_, s) for s, t in zip(source, target, strict=True)])


def _leaves(tensors: Sequence[Tensor | None]) -> list[Tensor | None]:
    return [None if t is None else t.detach().requires_grad_() for t in tensors]
