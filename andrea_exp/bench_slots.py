"""Few runs of many threads, or many of one? A machine's training speed by model size: what `sweep.slots` rests on."""

import json
import multiprocessing
import resource
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import Console

from andrea_exp import data
from andrea_exp.bench import show
from andrea_exp.config import RunConfig
from andrea_exp.data.batches import train_batch
from andrea_exp.model import GPT
from andrea_exp.sweep.plan import plan_sweep
from andrea_exp.sweep.slots import cores, run_bytes

# About 0.25, 1.2, 11 and 43 million parameters; the larger ones in smaller batches, to last as long.
SIZES = {
    "demo": (),
    "cpu": ("scale=cpu",),
    "d=384": ("scale=cpu", "model.d_model=384", "model.n_heads=6", "train.batch_size=8"),
    "d=768": ("scale=cpu", "model.d_model=768", "model.n_heads=12", "train.batch_size=4"),
}
ROUNDS = 3
SECONDS = 6.0


def bench_slots(as_json: bool) -> int:
    """Tokens/s of all cores together, as one run of all threads and as a run a core."""
    console, found = Console(stderr=as_json), dict[str, Any]()
    with console.status("benchmarking: about four minutes"), tempfile.TemporaryDirectory() as folder:
        for name, words in SIZES.items():
            config = plan_sweep(list(words)).cells[0].config
            rounds = [(_speed(config, Path(folder), 1), _speed(config, Path(folder), cores())) for _ in range(ROUNDS)]
            one, many = (median(side) for side in zip(*((o[0], m[0]) for o, m in rounds), strict=True))
            found[f"{name}: tokens/s, 1 run of {cores()} threads"] = one
            found[f"{name}: tokens/s, {cores()} runs of 1 thread"] = many
            found[f"{name}: runs a core / all threads"] = median(m[0] / o[0] for o, m in rounds)
            found[f"{name}: peak memory of a run, MB"] = rounds[-1][1][1]
            found[f"{name}: memory that slots reckon with, MB"] = run_bytes(config) / 2**20
    print(json.dumps(found, indent=2)) if as_json else console.print(show(found))
    return 0


def _speed(config: RunConfig, root: Path, runs: int) -> tuple[float, float]:
    """Tokens/s of `runs` training side by side on all cores, and the largest peak memory of one, in MB."""
    words = [(replace(config, seed=seed), root, cores() // runs) for seed in range(runs)]
    with multiprocessing.get_context("spawn").Pool(runs) as pool:
        ended = pool.starmap(_train, words, chunksize=1)
    return sum(speed for speed, _ in ended), max(memory for _, memory in ended)


def _train(config: RunConfig, root: Path, threads: int) -> tuple[float, float]:
    torch.set_num_threads(threads)
    prepared = data.load(data.prepare(config.data, root / "corpora", config.model.seq_len))
    model = GPT(config.model, config.seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.optim.lr, fused=True)
    began, steps = 0.0, -1
    while steps < 1 or time.perf_counter() - began < SECONDS:
        if steps == 0:  # the first step warms up
            began = time.perf_counter()
        ids = train_batch(prepared, config.seed, steps + 1, 0, config.train.batch_size, config.model.seq_len)
        model.loss(torch.from_numpy(ids[0]), torch.from_numpy(ids[1])).backward()
        optimizer.step()
        optimizer.zero_grad()
        steps += 1
    seconds = time.perf_counter() - began
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return steps * config.train.batch_size * config.model.seq_len / seconds, memory
