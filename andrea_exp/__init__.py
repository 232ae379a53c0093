"""Experiment sweeps over the transformer block."""

from pathlib import Path

PACKAGE = Path(__file__).resolve().parent
# In a wheel conf/ and sweeps/ lie inside the package; in a checkout they lie beside it.
ROOT = PACKAGE if (PACKAGE / "conf").is_dir() else PACKAGE.parent

# Raised by hand whenever a change alters the numbers of a run; it is part of every signature.
NUMERICS_VERSION = 1
