"""What the fork server imports before it forks a run: everything slow, and nothing that starts a thread."""

import gc

import andrea_exp.run
import andrea_exp.train  # noqa: F401  the entry point, which a forked child looks at again

# Children share these objects: keeping the collector off them keeps their pages shared.
gc.freeze()
