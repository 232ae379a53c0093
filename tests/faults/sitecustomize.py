"""Makes runs fail on purpose: Python imports this wherever its folder is on PYTHONPATH, in forked servers too.

FAULTS="1:raise,2:segv" says which seed's run meets what at step FAULT_STEP; with FAULT_ONCE=FOLDER only its first time.
"""

import ctypes
import importlib.abc
import importlib.util
import os
import resource
import signal
import sys
import time
from pathlib import Path

FAULTS = {int(seed): kind for seed, kind in (f.split(":") for f in os.environ.get("FAULTS", "").split(",") if f)}
STEP = int(os.environ.get("FAULT_STEP", "5"))
ONCE = os.environ.get("FAULT_ONCE")


def commit(kind):
    if kind == "raise":
        raise RuntimeError("a fault on purpose")
    if kind == "exit":
        sys.exit(3)
    if kind == "exit without a word":
        os._exit(0)
    if kind == "segv":
        ctypes.string_at(0)
    if kind == "memory":
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + 2**26, used + 2**26))
        bytearray(2**30)
    if kind == "clock":
        real = time.time
        time.time = lambda: real() - 86400
    if kind.startswith("SIG"):
        os.kill(os.getpid(), signal.Signals[kind])


def due(config, step):
    kind = FAULTS.get(config.seed)
    if kind is None or step < STEP:
        return None
    if ONCE is None:
        return kind
    try:
        (Path(ONCE) / f"{config.seed}-{kind}").touch(exist_ok=False)
    except FileExistsError:
        return None
    return kind


def arm(lit):
    train = lit.LitGPT.training_step

    def training_step(self, *words):
        if kind := due(self.config, self.step):
            commit(kind)
        return train(self, *words)

    lit.LitGPT.training_step = training_step


class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != "andrea_exp.lit":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        load = spec.loader.exec_module

        def exec_module(module):
            load(module)
            arm(module)

        spec.loader.exec_module = exec_module
        return spec


if FAULTS:
    sys.meta_path.insert(0, Finder())
