"""How all runs of a records folder stand, at the cost of one look at each: the summaries of ended runs in one file.

`records/index.json` is a copy and never the truth: an entry counts only while its summary file is the one that it was
made from, so the file can be lost, old or wrong, and is made again.
"""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from andrea_exp.record import Status, read_json, run_folder, status, write_json

Summary = dict[str, Any]


class Index:
    """The index of one records folder, as a context manager: what was read anew is kept when it closes."""

    def __init__(self, records: Path) -> None:
        self.records = records
        self._path = records / "index.json"
        self._known: dict[str, tuple[list[int], Summary]] = {}
        self._grew = False
        with suppress(OSError, ValueError, TypeError):
            self._known = {sig: (mark, summary) for sig, (mark, summary) in json.loads(self._path.read_text()).items()}

    def __enter__(self) -> "Index":
        return self

    def __exit__(self, *_: object) -> None:
        if self._grew:
            with suppress(OSError):  # records may be read-only: then the index only saves no time
                write_json(self._path, self._known, compact=True)
            self._grew = False

    def look(self, sig: str) -> tuple[Status, Summary]:
        """A run's status, and its summary unless it is running or has none."""
        folder = run_folder(self.records, sig)
        mark = _mark(folder / "summary.json")
        if mark and sig in self._known and self._known[sig][0] == mark:
            summary = self._known[sig][1]
            return Status(summary["status"]), summary
        state = status(folder)
        summary = (read_json(folder / "summary.json") or {}) if state is not Status.running else {}
        if state.finished and mark:
            self._known[sig] = (mark, summary)
            self._grew = True
        return state, summary

    def summaries(self) -> list[Summary]:
        """Of all ended runs that the index knows, of whatever sweep."""
        return [summary for _, summary in self._known.values()]


def _mark(path: Path) -> list[int] | None:
    """What changes whenever a file does: it is only ever replaced as a whole."""
    try:
        found = path.stat()
    except OSError:
        return None
    return [found.st_mtime_ns, found.st_size, found.st_ino]
