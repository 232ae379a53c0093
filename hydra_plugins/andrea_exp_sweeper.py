"""The one Hydra plug-in: a sweeper that composes once and hands cells to a pool, and where sweeps are found."""

from pathlib import Path
from typing import Any

from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra.core.config_search_path import ConfigSearchPath
from hydra.plugins.search_path_plugin import SearchPathPlugin
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig

from andrea_exp import ROOT


class SweepsSource(FileConfigSource):
    """The parent of a sweeps/ folder, of which Hydra sees that folder alone.

    As a plain search path each neighbour would be a config group: with a folder records/, `records=x` fails.
    """

    @staticmethod
    def scheme() -> str:
        return "sweeps"

    def is_group(self, config_path: str) -> bool:
        return config_path == "" or (config_path.split("/")[0] == "sweeps" and super().is_group(config_path))

    def is_config(self, config_path: str) -> bool:
        return config_path.startswith("sweeps/") and super().is_config(config_path)


class AndreaSearchPath(SearchPathPlugin):
    """Makes `sweeps=NAME` an ordinary config group: sweeps/ in the current folder, then the project's."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        for folder in dict.fromkeys((Path.cwd(), ROOT)):
            search_path.append("andrea-exp", f"sweeps://{folder}")


class AndreaSweeper(Sweeper):
    """Expands `-m a=1,2` and a sweep file's roles into cells, and runs those that are missing."""

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self.config, self.hydra_context, self.task_function = config, hydra_context, task_function

    def sweep(self, arguments: list[str]) -> Any:
        # Imported late: Hydra loads every plug-in whenever it starts, for `--help` too.
        from andrea_exp.sweep.session import run_sweep

        assert self.config is not None
        return run_sweep(self.config, arguments)
