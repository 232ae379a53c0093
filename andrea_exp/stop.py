"""Asking a run to stop: a signal sets a flag that the step's end looks at. Nothing is ever saved inside a handler."""

import signal
from types import FrameType

# What schedulers, pools and people send: a request to end, a warning before preemption or a time limit.
SIGNALS = (signal.SIGTERM, signal.SIGUSR2)

_heard: set[int] = set()


def listen() -> None:
    """Takes the signals over; to be called again after a library has taken them for itself."""
    for number in SIGNALS:
        signal.signal(number, _note)


def heard() -> set[int]:
    """The signals that came; the run is to end once there is any."""
    return _heard


def _note(number: int, _: FrameType | None) -> None:
    _heard.add(number)
