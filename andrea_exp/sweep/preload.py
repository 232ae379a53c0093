"""What the fork server imports before it forks a run: everything slow, and nothing that starts a thread."""

import gc
import importlib
import signal

from andrea_exp.stop import SIGNALS

# They are the pool's and the runs' to hear, in the middle of these imports too: a signal to the whole group must not
# end the one that knows which runs have ended.
for number in (signal.SIGINT, *SIGNALS):
    signal.signal(number, signal.SIG_IGN)

# The entry point is one of them, because a forked child looks at it again.
for name in ("andrea_exp.run", "andrea_exp.train"):
    importlib.import_module(name)

# Children share these objects: keeping the collector off them keeps their pages shared.
gc.freeze()
