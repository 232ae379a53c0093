"""How all figures look. It imports nothing, so that what draws only on demand starts fast."""

from typing import Any

# Okabe & Ito 2008.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#F0E442")
STYLE: Any = {
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.25,
    "font.size": 9,
    "figure.dpi": 150,
    "svg.hashsalt": "andrea-exp",  # names inside an SVG, so that the same figure has the same bytes
}
