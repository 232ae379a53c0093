"""What the runs say: records -> statistics -> tables, figures, claims. Never imports the trainer.

The names below are loaded when they are first used, so that a table need not wait for pandas and matplotlib.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from andrea_exp.results.figures import (
        branch_ratio,
        figures_of,
        gradient_norms_by_depth,
        last_mlp_gradient,
        loss_by_block,
        loss_by_lr,
        loss_by_size,
        loss_curves,
        published_differences,
        stability,
        stream_by_depth,
        token_cosine,
    )
    from andrea_exp.results.frames import load_claims, load_metrics, load_runs
    from andrea_exp.results.layers import layers_frame
    from andrea_exp.results.load import plan_of
    from andrea_exp.results.table import ablation_table

__all__ = [
    "ablation_table",
    "branch_ratio",
    "figures_of",
    "gradient_norms_by_depth",
    "last_mlp_gradient",
    "layers_frame",
    "load_claims",
    "load_metrics",
    "load_runs",
    "loss_by_block",
    "loss_by_lr",
    "loss_by_size",
    "loss_curves",
    "plan_of",
    "published_differences",
    "stability",
    "stream_by_depth",
    "token_cosine",
]

# What does not draw; all else is in figures.
_HOMES = {
    "ablation_table": "table",
    "layers_frame": "layers",
    "load_claims": "frames",
    "load_metrics": "frames",
    "load_runs": "frames",
    "plan_of": "load",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__} has no attribute {name}")
    return getattr(import_module(f"{__name__}.{_HOMES.get(name, 'figures')}"), name)
