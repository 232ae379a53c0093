"""TensorBoard as users meet it: its own readers and its own server show what the records hold, and no more."""

import importlib.util
import json
import math
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from conftest import TINY, andrea
from tensorboard.backend.event_processing import event_accumulator, plugin_event_accumulator
from tensorboard.backend.event_processing.plugin_event_multiplexer import EventMultiplexer
from tensorboard.plugins.hparams import metadata, plugin_data_pb2

from andrea_exp.record import read_metrics, run_folder
from andrea_exp.sweep.plan import Cell, plan_sweep

# The second learning rate ends in NaN, which TensorBoard shows as NaN and JSON as null.
SWEPT = ["optim.lr=1e-3,1e30", "seed=0", "optim.clip=null"]


@pytest.fixture(scope="module")
def words(corpus_path: Path) -> list[str]:
    return [*SWEPT, *TINY, f"data.path={corpus_path}"]


@pytest.fixture(scope="module")
def place(words: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which a sweep of two runs has ended."""
    folder = tmp_path_factory.mktemp("place")
    andrea("sweep", *words, cwd=folder)
    return folder


@pytest.fixture(scope="module")
def cells(words: list[str], place: Path) -> list[Cell]:
    return plan_sweep(words).cells


def views(place: Path) -> Path:
    (folder,) = (place / "records/tensorboard").iterdir()
    return folder


def as_shown(value: float | None) -> float:
    """A recorded value as an event file holds it: single precision, NaN where JSON has null."""
    return math.nan if value is None else float(np.float32(value))


def recorded(place: Path, cell: Cell) -> dict[str, dict[int, float]]:
    """Every metric of a run by tag and step, from its records."""
    found: dict[str, dict[int, float]] = defaultdict(dict)
    for row in read_metrics(run_folder(place / "records", cell.signature)):
        for tag, value in row.items():
            if tag not in ("step", "time"):
                found[tag][int(row["step"])] = as_shown(value)
    return found


@pytest.mark.parametrize("number", [0, 1])
def test_event_files_and_records_agree_in_every_tag_step_and_value(number: int, place: Path, cells: list[Cell]):
    run = event_accumulator.EventAccumulator(
        str(run_folder(place / "records", cells[number].signature) / "tensorboard"), size_guidance={"scalars": 0}
    ).Reload()
    expected = recorded(place, cells[number])
    assert set(run.Tags()["scalars"]) == set(expected)
    for tag, values in expected.items():
        events = run.Scalars(tag)
        assert [e.step for e in events] == sorted(values), tag  # each step once, in order
        np.testing.assert_array_equal([e.value for e in events], [values[e.step] for e in events], tag)


def test_a_diverging_run_is_shown_up_to_its_end(place: Path, cells: list[Cell]):
    losses = recorded(place, cells[1])["train/loss"]
    assert not all(map(math.isfinite, losses.values()))


@pytest.mark.parametrize("number", [0, 1])
def test_hyper_parameters_say_what_the_run_is(number: int, place: Path, cells: list[Cell]):
    cell = cells[number]
    run = plugin_event_accumulator.EventAccumulator(
        str(run_folder(place / "records", cell.signature) / "tensorboard"), size_guidance={"tensors": 0}
    ).Reload()
    sent = run.PluginTagToContent(metadata.PLUGIN_NAME)
    started = plugin_data_pb2.HParamsPluginData.FromString(sent[metadata.SESSION_START_INFO_TAG]).session_start_info
    ended = plugin_data_pb2.HParamsPluginData.FromString(sent[metadata.SESSION_END_INFO_TAG]).session_end_info
    shown = {k: getattr(v, v.WhichOneof("kind")) for k, v in started.hparams.items()}
    assert shown["optim.lr"] == cell.config.optim.lr
    assert shown["seed"] == cell.config.seed
    assert shown["model.norm_placement"] == "pre"
    assert shown["model.bias"] is True
    assert shown["optim.clip"] == "null"
    assert ended.end_time_secs >= started.start_time_secs > 0


def test_readable_names_load_in_tensorboards_own_reader(place: Path, cells: list[Cell]):
    runs = EventMultiplexer().AddRunsFromDirectory(str(views(place))).Reload().Runs()
    assert set(runs) == {cell.slug for cell in cells}


# The real server


class Server:
    """`andrea-exp tensorboard` in a process group of its own, and what it answers."""

    def __init__(self, place: Path, words: list[str]) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        command = [sys.executable, "-m", "andrea_exp.cli", "tensorboard", *words, "--port", str(self.port)]
        pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        self.process = subprocess.Popen(command, cwd=place, start_new_session=True, text=True, **pipes)
        self.family: list[psutil.Process] = []

    def wait_for(self, runs: int) -> dict[str, dict[str, Any]]:
        """The server's scalar tags by run, once it knows so many runs."""
        end, found = time.monotonic() + 60, {}
        while len(found) < runs:
            assert self.process.poll() is None, self.process.communicate()[0]
            assert time.monotonic() < end, f"after a minute the server knows {sorted(found)}"
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/data/plugin/scalars/tags", timeout=5) as got:
                    found = json.load(got)
            except (urllib.error.URLError, ConnectionError, TimeoutError):
                time.sleep(0.1)
        root = psutil.Process(self.process.pid)
        self.family = [root, *root.children(recursive=True)]
        return found

    def scalars(self, run: str, tag: str) -> dict[int, float]:
        query = urllib.parse.urlencode({"run": run, "tag": tag})
        address = f"http://127.0.0.1:{self.port}/data/plugin/scalars/scalars?{query}"
        with urllib.request.urlopen(address, timeout=10) as got:
            points = json.loads(got.read())
        assert len({step for _, step, _ in points}) == len(points)
        return {step: value for _, step, value in points}

    def listening(self) -> set[str]:
        """The addresses at which the server and its helpers listen."""
        sockets = [c for p in self.family for c in p.net_connections("inet") if c.status == psutil.CONN_LISTEN]
        assert self.port in {c.laddr.port for c in sockets}
        return {c.laddr.ip for c in sockets}

    def survivors(self, patience: float = 5) -> list[psutil.Process]:
        end = time.monotonic() + patience
        while (left := [p for p in self.family if living(p)]) and time.monotonic() < end:
            time.sleep(0.05)
        return left

    def clean_up(self) -> None:
        for process in self.survivors(0):
            process.kill()
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.communicate()


def living(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.fixture(scope="module")
def server(place: Path, words: list[str]) -> Iterator[Server]:
    made = Server(place, words)
    yield made
    made.clean_up()


def test_the_server_shows_the_readable_runs_with_every_step(server: Server, place: Path, cells: list[Cell]):
    tags = server.wait_for(runs=2)
    assert set(tags) == {cell.slug for cell in cells}
    for cell in cells:
        expected = recorded(place, cell)
        assert set(tags[cell.slug]) == set(expected)
    assert server.scalars(cells[0].slug, "train/loss") == recorded(place, cells[0])["train/loss"]


@pytest.mark.skipif(
    importlib.util.find_spec("tensorboard_data_server") is None, reason="TensorBoard's fast reader is not installed"
)
def test_the_server_reads_with_the_fast_reader_where_there_is_one(server: Server):
    server.wait_for(runs=2)
    assert any("tensorboard_data_server" in " ".join(p.cmdline()) for p in server.family)


def test_the_server_listens_on_this_machine_only(server: Server):
    server.wait_for(runs=2)
    assert server.listening() <= {"127.0.0.1", "::1"}


@pytest.mark.parametrize("ending", [signal.SIGTERM, signal.SIGINT], ids=lambda s: s.name)
def test_a_server_that_is_ended_leaves_no_process(ending: signal.Signals, place: Path, words: list[str]):
    server = Server(place, words)
    try:
        server.wait_for(runs=2)
        if ending is signal.SIGINT:
            os.killpg(server.process.pid, ending)  # as Ctrl-C does
        else:
            server.process.send_signal(ending)
        server.process.wait(20)
        assert [" ".join(p.cmdline()) for p in server.survivors()] == []
    finally:
        server.clean_up()
