"""What the fork server imports before it forks a run: everything slow, and nothing that starts a thread."""

import gc
import importlib
import signal

signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the pool's to hear, in the middle of these imports too

# The entry point is one of them, because a forked child looks at it again.
for name in ("andrea_exp.run", "andrea_exp.train"):
    importlib.import_module(name)

# Children share these objects: keeping the collector off them keeps their pages shared.
gc.freeze()
