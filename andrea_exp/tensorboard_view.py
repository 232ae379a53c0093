"""TensorBoard as a view: event files written from records, never read back."""

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.plugins.hparams import api_pb2, plugin_data_pb2
from tensorboard.plugins.hparams.metadata import PLUGIN_DATA_VERSION, PLUGIN_NAME
from tensorboard.summary.writer.event_file_writer import EventFileWriter

PLACE = ("step", "time")  # where a value stands; all else of a row is a value


class View:
    """One run's event file: all scalars of a step in one event."""

    def __init__(self, folder: Path) -> None:
        self._writer = EventFileWriter(str(folder / "tensorboard"), flush_secs=5)

    def write(self, row: Mapping[str, float | None]) -> None:
        """A row of the metrics, as it is measured or as its file has it (null where there is no number)."""
        named = {k: math.nan if v is None else v for k, v in row.items() if k not in PLACE}
        values = [Summary.Value(tag=k, simple_value=v) for k, v in named.items()]
        self._writer.add_event(Event(wall_time=row["time"], step=int(row["step"] or 0), summary=Summary(value=values)))

    def begin(self, flat: dict[str, Any], wall_time: float, rows: Iterable[Mapping[str, float | None]]) -> None:
        """Fills the HPARAMS tab (what the run is, as name and value), and shows what was measured before a resume."""
        info = plugin_data_pb2.SessionStartInfo(start_time_secs=wall_time)
        for name, value in flat.items():
            if isinstance(value, bool):
                info.hparams[name].bool_value = value
            elif isinstance(value, (int, float)):
                info.hparams[name].number_value = value
            else:
                info.hparams[name].string_value = "null" if value is None else str(value)
        self._plugin("_hparams_/session_start_info", wall_time, session_start_info=info)
        for row in rows:
            self.write(row)

    def close(self, wall_time: float, succeeded: bool) -> None:
        ended = api_pb2.STATUS_SUCCESS if succeeded else api_pb2.STATUS_FAILURE
        info = plugin_data_pb2.SessionEndInfo(status=ended, end_time_secs=wall_time)
        self._plugin("_hparams_/session_end_info", wall_time, session_end_info=info)
        self._writer.close()

    def _plugin(self, tag: str, wall_time: float, **content: Any) -> None:
        data = plugin_data_pb2.HParamsPluginData(version=PLUGIN_DATA_VERSION, **content)
        value = Summary.Value(tag=tag)
        value.metadata.plugin_data.plugin_name = PLUGIN_NAME
        value.metadata.plugin_data.content = data.SerializeToString()
        self._writer.add_event(Event(wall_time=wall_time, summary=Summary(value=[value])))
