"""Asking a run to stop: a signal sets a flag that the step's end looks at. Nothing is ever saved inside a handler."""

import signal
from types import FrameType

# What schedulers, pools and people send: a request to end, a warning before preemption or a time limit.
SIGNALS = (signal.SIGTERM, signal.SIGUSR2)

_asked: list[int] = []


def listen() -> None:
    """Takes the signals over; to be called again after a library has taken them for itself."""
    for number in SIGNALS:
        signal.signal(number, _note)


def asked() -> signal.Signals | None:
    """The first signal that came, or None."""
    return signal.Signals(_asked[0]) if _asked else None


def _note(number: int, _: FrameType | None) -> None:
    _asked.append(number)
