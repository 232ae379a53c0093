"""The transformer and its axes, in plain torch: no Hydra, no Lightning, no files."""

from andrea_exp.model.gpt import GPT

__all__ = ["GPT"]
