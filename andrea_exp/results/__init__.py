"""What the runs say: records -> statistics -> tables, figures, claims. Never imports the trainer.

The names below are loaded when they are first used, so that a table need not wait for pandas and matplotlib.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from andrea_exp.results.figures import gradient_norms_by_depth, loss_curves
    from andrea_exp.results.frames import load_metrics, load_runs
    from andrea_exp.results.layers import layers_frame, loss_by_block
    from andrea_exp.results.load import plan_of
    from andrea_exp.results.table import ablation_table

__all__ = [
    "ablation_table",
    "gradient_norms_by_depth",
    "layers_frame",
    "load_metrics",
    "load_runs",
    "loss_by_block",
    "loss_curves",
    "plan_of",
]

_HOMES = {
    "ablation_table": "table",
    "gradient_norms_by_depth": "figures",
    "layers_frame": "layers",
    "load_metrics": "frames",
    "load_runs": "frames",
    "loss_by_block": "layers",
    "loss_curves": "figures",
    "plan_of": "load",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__} has no attribute {name}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
