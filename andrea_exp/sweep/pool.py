"""What all pools share: the job that they carry, how often one is tried, and what a request to stop means."""

import signal
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from andrea_exp.config import Device, PoolConfig
from andrea_exp.record import INTERRUPTED, Status, lease_holder, read_json, status, write_json

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR2)


class Stopped(Exception):
    """A pool was asked to stop, and its runs have saved or ended. `number` is the signal that asked."""

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}")
        self.number = number


class Detached(Exception):
    """The runs are in a cluster's hands, and nobody waits for them here."""

    def __init__(self, count: int) -> None:
        super().__init__(f"{count} runs are in the queue")
        self.count = count


class FailedFast(Exception):
    """A run failed for good, and the sweep was told not to go on."""


@dataclass(frozen=True)
class Job:
    """All that a pool carries to wherever a run happens."""

    folder: Path
    corpus: Path
    threads: int  # of each rank
    ranks: int = 1
    device: Device = Device.auto  # as asked for
    command: tuple[str, ...] = ()  # that the user gave: elsewhere sys.argv is a worker's


class Tries:
    """Counts a job's crashes, and writes the summary that a killed process could not write."""

    def __init__(self, pool: PoolConfig) -> None:
        self.pool = pool
        self.given_up = False  # a run failed for good, and the pool is to fail fast
        self._crashes: Counter[Path] = Counter()

    def again(self, folder: Path, how: str) -> bool:
        """Whether a run that ended without a result is to be tried again; if not, it has failed."""
        if status(folder).finished:
            return False
        self._crashes[folder] += 1
        if self._crashes[folder] <= self.pool.retries:
            return True
        bury(folder, how)
        self.given_up = self.pool.fail_fast
        return False


def bury(folder: Path, how: str) -> None:
    """Marks a run as failed, unless it could say so itself."""
    with suppress(OSError):  # on a full disk the status follows from what is there
        if lease_holder(folder) is None:
            (folder / "lease.json").unlink(missing_ok=True)
        if (read_json(folder / "summary.json") or {}).get("status") not in set(Status):
            write_json(folder / "summary.json", {"status": str(Status.failed), "reason": how})


def told(exitcode: int) -> str:
    """An exit code in words."""
    if exitcode == INTERRUPTED:
        return "asked to stop by a signal"
    return f"killed by {signal.Signals(-exitcode).name}" if exitcode < 0 else f"exit code {exitcode} without a result"


@contextmanager
def patience(announce: Callable[[str], None]) -> Iterator[list[int]]:
    """Within it a first Ctrl-C, or request to end, is noted in the list; a second raises KeyboardInterrupt."""
    asked: list[int] = []

    def note(number: int, _: object) -> None:
        asked.append(number)
        if len(asked) > 1:
            raise KeyboardInterrupt
        announce("stopping: each run finishes its step and saves; once more ends them at once")

    before = {number: signal.signal(number, note) for number in STOP_SIGNALS}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
