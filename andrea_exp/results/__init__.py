"""What the runs say: records -> tidy frames -> tables and figures. Never imports the trainer."""

from andrea_exp.results.figures import gradient_norms_by_depth, loss_curves
from andrea_exp.results.load import load_metrics, load_runs, plan_of
from andrea_exp.results.table import ablation_table

__all__ = ["ablation_table", "gradient_norms_by_depth", "load_metrics", "load_runs", "loss_curves", "plan_of"]
