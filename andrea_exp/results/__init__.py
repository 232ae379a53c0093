"""What the runs say: records -> tidy frames -> tables and figures. Never imports the trainer."""

from andrea_exp.results.load import load_metrics, load_runs
from andrea_exp.results.table import ablation_table

__all__ = ["ablation_table", "load_metrics", "load_runs"]
