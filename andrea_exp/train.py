"""The Hydra app: one run, a multirun, or a sweep file.

    python -m andrea_exp.train model.norm_placement=post optim.warmup_steps=0
    python -m andrea_exp.train -m model.activation=relu,gelu,swiglu seed=0,1,2
    python -m andrea_exp.train sweeps=demo

It adds to plain Hydra that bad input is one line and exit code 2, and that `--cfg` checks what it shows.
"""

import os
import sys
from collections.abc import Sequence

import hydra
from hydra._internal.utils import get_args_parser
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from andrea_exp.compose import CONF, explain
from andrea_exp.errors import UserError, of_the_machine, refuse_words

MULTIRUN = ("-m", "--multirun")
SHOWS_ONLY = ("--help", "-h", "--hydra-help", "--version", "--info", "-i", "--shell-completion", "-sc")


@hydra.main(version_base="1.3", config_path=str(CONF), config_name="config")
def app(config: DictConfig) -> None:
    """A single run is a sweep of one cell: the same process, records and table."""
    from andrea_exp.sweep.session import run_sweep

    try:
        run_sweep(config, list(HydraConfig.get().overrides.task))
    except UserError as error:
        sys.exit(_refuse(str(error)))  # as an exception, Hydra would announce it in a line of its own


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the app on a command line and returns its exit code: 2 for bad input, without a traceback."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    os.environ["HYDRA_FULL_ERROR"] = "1"  # errors come here instead of ending in Hydra's exit code 1
    try:
        if not any(w.split("=")[0] in SHOWS_ONLY for w in words):
            _check(words)
        if any(w.startswith("sweeps=") for w in words) and not any(w in (*MULTIRUN, "--cfg", "-c") for w in words):
            words.append("-m")
        sys.argv[1:] = words
        app()
    except UserError as error:
        return _refuse(str(error))
    except (HydraException, OmegaConfBaseException) as error:
        return _refuse(explain(error))
    except KeyboardInterrupt:
        return 130
    except OSError as error:
        if (told := of_the_machine(error)) is None:
            raise
        print(f"andrea-exp: {told}", file=sys.stderr)
        return 1
    return 0


def _refuse(why: str) -> int:
    print(f"andrea-exp: {why}", file=sys.stderr)
    return 2


def _check(words: list[str]) -> None:
    """Plans what the words ask for, so that a bad value stops `--cfg` too, before anything starts."""
    from andrea_exp.sweep.plan import plan_sweep

    parser = get_args_parser()
    parser.error = refuse_words  # type: ignore[method-assign]  # Hydra's prints its whole usage
    plan_sweep(parser.parse_args(words).overrides)


if __name__ == "__main__":
    sys.exit(main())
