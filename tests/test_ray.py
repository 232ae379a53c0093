"""The Ray pool on a real Ray of this machine: its own, and a cluster that runs already."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from conftest import Sweep, andrea, living, wait_until

from andrea_exp.record import Status, process_mark, read_metrics, status, write_json

ray = pytest.importorskip("ray", reason="no Ray here: pip install 'andrea-exp[ray]'")
pytestmark = pytest.mark.slow
RAY = ("pool=ray", "checkpoint.every_s=0.2")


def sweeps(folder: Path, corpus: Path, seeds: str, *words: str, steps: int) -> tuple[Sweep, Sweep]:
    """The same runs for this machine's pool and for Ray's, in two folders."""
    for name in ("here", "cluster"):
        (folder / name).mkdir()
    here = Sweep(folder / "here", corpus, seeds, steps=steps)
    return here, Sweep(folder / "cluster", corpus, seeds, *RAY, *words, steps=steps)


def test_ray_gives_the_bits_and_the_table_of_the_local_pool_whatever_worker_is_lost(
    corpus_path: Path, tmp_path: Path
) -> None:
    here, cluster = sweeps(tmp_path, corpus_path, "0,1,2", steps=400)
    here.run()
    failing = cluster.runs[1]
    process = cluster.start()
    run_pid = cluster.pid(0)
    worker = next(p for p in psutil.Process(run_pid).parents() if "ray::" in " ".join(p.cmdline()))
    worker.kill()  # the run's own processes with it
    os.kill(cluster.pid(2), signal.SIGKILL)  # the run alone
    out, _ = process.communicate(timeout=300)
    assert process.returncode == 0, out
    assert failing.exists()
    assert cluster.ended() == here.ended()
    assert cluster.table() == here.table()


def test_ctrl_c_saves_every_run_and_the_same_command_goes_on(corpus_path: Path, tmp_path: Path) -> None:
    here, cluster = sweeps(tmp_path, corpus_path, "0,1", steps=1000)
    here.run()
    process = cluster.start()
    cluster.pid(0)
    wait_until(lambda: all(len(read_metrics(run)) > 2 for run in cluster.runs))
    family = psutil.Process(process.pid).children(recursive=True)
    os.killpg(process.pid, signal.SIGINT)
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 130, out
    assert set(cluster.statuses()) == {Status.interrupted}
    wait_until(lambda: not any(map(living, family)), seconds=30)
    cluster.run()
    assert cluster.ended() == here.ended()


def test_a_run_that_another_process_holds_is_waited_for(corpus_path: Path, tmp_path: Path) -> None:
    (tmp_path / "cluster").mkdir()
    cluster = Sweep(tmp_path / "cluster", corpus_path, "0", *RAY, steps=40)
    (run,) = cluster.runs
    run.mkdir(parents=True)
    write_json(run / "lease.json", process_mark(os.getpid()))
    process = cluster.start()
    wait_until(lambda: (run / "config.json").exists())
    time.sleep(10)  # longer than Ray takes to start
    pool = psutil.Process(process.pid)
    before = pool.cpu_times().user
    time.sleep(4)
    assert pool.cpu_times().user - before < 2  # it sleeps between looks
    assert process.poll() is None
    assert not read_metrics(run)
    (run / "lease.json").unlink()
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 0, out
    assert status(run).finished


@pytest.fixture(scope="module")
def head() -> Iterator[str]:
    """A Ray cluster that runs already: its address."""
    command = Path(sys.executable).with_name("ray")
    home = tempfile.mkdtemp(prefix="ray-", dir="/tmp")  # its sockets need a short path
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    options = ["--num-cpus=2", "--num-gpus=0", "--include-dashboard=false", "--disable-usage-stats"]
    start = [command, "start", "--head", f"--port={port}", f"--temp-dir={home}", *options]
    subprocess.run(start, check=True, capture_output=True, text=True)
    yield f"127.0.0.1:{port}"
    ours = [p for p in psutil.process_iter() if _belongs(p, home)]
    for process in ours:
        process.kill()
    psutil.wait_procs(ours, timeout=10)
    shutil.rmtree(home, ignore_errors=True)


def _belongs(process: psutil.Process, home: str) -> bool:
    """`ray stop` would end every Ray of this machine."""
    try:
        return home in " ".join(process.cmdline())
    except psutil.Error:
        return False


def test_a_running_cluster_takes_the_runs(head: str, corpus_path: Path, tmp_path: Path) -> None:
    here, cluster = sweeps(tmp_path, corpus_path, "0,1", f"pool.address='{head}'", steps=40)
    here.run()
    cluster.run()
    assert cluster.ended() == here.ended()


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("pool.address='127.0.0.1:9'", "pool.address=127.0.0.1:9: nobody answers there"),
        ("pool.threads=4096", "a run needs 4096 CPU, the cluster has"),
        ("pool.gpus=3", "a run needs 3 GPU, the cluster has 0"),
    ],
)
def test_what_ray_cannot_give_is_one_line(word: str, message: str, corpus_path: Path, tmp_path: Path) -> None:
    done = andrea("sweep", "seed=0", "train.steps=1", f"data.path={corpus_path}", *RAY, word, cwd=tmp_path, check=2)
    assert message in done.stderr.splitlines()[-1]
