"""The Slurm pool on a real Slurm of one host; see tests/slurm.sh."""

import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import Sweep, andrea, wait_until

from andrea_exp.record import Status, read_json, read_metrics, run_folder, write_json

SCRIPT = Path(__file__).with_name("slurm.sh")
NEEDED = ("munged", "slurmctld", "slurmd", "sbatch")
missing = [name for name in NEEDED if shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin") is None]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(missing), reason=f"no Slurm here: apt-get install munge slurmctld slurmd ({missing})"),
    pytest.mark.skipif(os.getuid() != 0, reason="tests/slurm.sh starts its daemons as root"),
]
SLURM = ("pool=slurm", "checkpoint.every_s=0.2")


@pytest.fixture(scope="module")
def slurm() -> Iterator[Path]:
    """A Slurm without accounting whose arrays hold at most three tasks."""
    folder = Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))  # its sockets need a short path
    subprocess.run([SCRIPT, "start", folder, "MaxArraySize=3"], check=True, capture_output=True, text=True)
    before = os.environ.get("SLURM_CONF")
    os.environ["SLURM_CONF"] = str(folder / "slurm.conf")
    yield folder
    subprocess.run([SCRIPT, "stop", folder], check=True, capture_output=True)
    os.environ.pop("SLURM_CONF") if before is None else os.environ.update(SLURM_CONF=before)
    shutil.rmtree(folder)


def ask(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def queue() -> dict[str, str]:
    """State by job, ended ones too."""
    return dict(line.split("|") for line in ask("squeue", "-h", "-r", "-t", "all", "-o", "%i|%T").split())


def job_of(sweep: Sweep, number: int) -> str:
    wait_until(lambda: (sweep.runs[number] / "queued.json").exists())
    return (read_json(sweep.runs[number] / "queued.json") or {})["job"]


def job_of_nobody() -> str:
    return str(max((int(job.split("_")[0]) for job in queue()), default=0) + 10_000)


def attempts(run: Path) -> list[int]:
    """The step that each attempt began at."""
    return [a["from_step"] for a in json.loads((run / "provenance.json").read_text())["attempts"]]


def sweeps(folder: Path, corpus: Path, seeds: str, *words: str, steps: int) -> tuple[Sweep, Sweep]:
    """The same runs for this machine's pool and for Slurm's, in two folders."""
    for name in ("here", "cluster"):
        (folder / name).mkdir()
    here = Sweep(folder / "here", corpus, seeds, *words, steps=steps)
    return here, Sweep(folder / "cluster", corpus, seeds, *SLURM, *words, steps=steps)


def test_more_runs_than_an_array_holds_give_the_bits_and_the_table_of_one_machine(
    slurm: Path, corpus_path: Path, tmp_path: Path
) -> None:
    here, cluster = sweeps(tmp_path, corpus_path, "0,1,2,3", steps=40)
    here.run()
    cluster.run()
    assert cluster.ended() == here.ended()
    assert cluster.table() == here.table()
    before = queue()
    assert sorted(len([j for j in before if j.startswith(f"{a}_")]) for a in {j.split("_")[0] for j in before})[-1] <= 3
    cluster.run()
    assert queue() == before  # nothing is submitted again


def test_a_warned_job_saves_is_requeued_and_ends_with_the_same_bits(
    slurm: Path, corpus_path: Path, tmp_path: Path
) -> None:
    here, cluster = sweeps(tmp_path, corpus_path, "0", steps=500)
    here.run()
    process = cluster.start()
    cluster.pid(0)
    ask("scancel", "--signal=USR2", job_of(cluster, 0))
    out, _ = process.communicate(timeout=200)
    assert process.returncode == 0, out
    first, second = attempts(cluster.runs[0])
    assert (first, second > 0) == (0, True)
    assert cluster.ended() == here.ended()


def test_a_preempted_job_saves_and_comes_back(slurm: Path, corpus_path: Path, tmp_path: Path) -> None:
    here, cluster = sweeps(tmp_path, corpus_path, "0", steps=500)
    here.run()
    process = cluster.start()
    cluster.pid(0)
    ask("sbatch", "--partition=urgent", "--exclusive", "--wrap=sleep 2", f"--output={tmp_path}/urgent.log")
    out, _ = process.communicate(timeout=200)
    assert process.returncode == 0, out
    assert len(attempts(cluster.runs[0])) == 2
    assert cluster.ended() == here.ended()


def test_a_killed_run_is_submitted_again_and_a_failing_one_shows_failed(
    slurm: Path, corpus_path: Path, tmp_path: Path
) -> None:
    here, cluster = sweeps(tmp_path, corpus_path, "0,1,2", steps=500)
    here.run()
    killed, failing, _ = cluster.runs
    failing.mkdir(parents=True)
    (failing / "tensorboard").write_text("a file where the run wants a folder")
    process = cluster.start()
    os.kill(cluster.pid(0), signal.SIGKILL)
    out, _ = process.communicate(timeout=300)
    assert process.returncode == 1, out
    assert cluster.statuses() == [s if i != 1 else Status.failed for i, s in enumerate(here.statuses())]
    assert len(attempts(killed)) == 2
    assert f"runs/{failing.name}/traceback.txt" in out
    assert "FAILED" in queue().values()
    assert [cluster.ended()[i] for i in (0, 2)] == [here.ended()[i] for i in (0, 2)]


def test_jobs_outlive_the_command_that_submitted_them(slurm: Path, corpus_path: Path, tmp_path: Path) -> None:
    _, cluster = sweeps(tmp_path, corpus_path, "0,1", steps=500)
    process = cluster.start()
    wait_until(lambda: all((run / "queued.json").exists() or read_metrics(run) for run in cluster.runs))
    process.kill()
    process.communicate()
    before = queue().keys()
    assert "queue already" in cluster.run() or all(s.finished for s in cluster.statuses())
    assert queue().keys() == before
    assert all(s.finished for s in cluster.statuses())


def test_a_detached_sweep_returns_at_once_and_status_follows_it(slurm: Path, corpus_path: Path, tmp_path: Path) -> None:
    cluster = Sweep(tmp_path, corpus_path, "0,1", *SLURM, "pool.detach=true", steps=500)
    assert "2 runs are in the queue" in cluster.run()

    def counts() -> dict[str, int]:
        return json.loads(andrea("status", *cluster.words, "--json", cwd=cluster.folder).stdout)["counts"]

    assert set(counts()) <= {"queued", "running"}
    wait_until(lambda: all(s.finished for s in cluster.statuses()), seconds=120)
    assert set(counts()) <= {"done", "diverged"}


def test_the_mark_of_a_job_that_is_gone_keeps_no_run_from_retry_and_forget(
    slurm: Path, corpus_path: Path, tmp_path: Path
) -> None:
    """As of a detached sweep whose runs failed while nobody watched."""
    cluster = Sweep(tmp_path, corpus_path, "0", *SLURM, "pool.retries=0", steps=40)
    (failing,) = cluster.runs
    failing.mkdir(parents=True)
    (failing / "tensorboard").write_text("a file where the run wants a folder")
    cluster.run(check=1)
    (failing / "tensorboard").unlink()
    gone = {"job": job_of_nobody(), "since": 0}
    write_json(failing / "queued.json", gone)
    assert cluster.statuses() == [Status.queued]
    assert "none of its runs has failed" not in andrea("retry", *cluster.words, cwd=cluster.folder).stdout
    assert cluster.statuses()[0].finished
    write_json(failing / "queued.json", gone)
    andrea("forget", failing.name, "--yes", cwd=cluster.folder)
    assert not failing.exists()


def test_a_cancelled_job_stays_cancelled_and_the_next_command_goes_on(
    slurm: Path, corpus_path: Path, tmp_path: Path
) -> None:
    here, cluster = sweeps(tmp_path, corpus_path, "0", steps=500)
    here.run()
    process = cluster.start()
    cluster.pid(0)
    job = job_of(cluster, 0)
    ask("scancel", job)
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 1, out
    assert cluster.statuses() == [Status.interrupted]
    time.sleep(8)  # longer than a requeue takes here
    assert queue()[job] == "CANCELLED"
    cluster.run()
    assert attempts(cluster.runs[0])[1] > 0
    assert cluster.ended() == here.ended()


def test_a_run_of_two_ranks_trains_in_one_job(slurm: Path, corpus_path: Path, tmp_path: Path) -> None:
    here, cluster = sweeps(tmp_path, corpus_path, "0", "train.ranks=2", steps=20)
    here.run()
    cluster.run()
    assert cluster.ended() == here.ended()


def test_the_time_limit_of_a_job_does_not_end_its_run(slurm: Path, corpus_path: Path, tmp_path: Path) -> None:
    words = ("pool.time_min=1", "pool.warn_s=40", "log.validate_every=100000", "log.diagnose_every=0", "log.every=50")
    cluster = Sweep(tmp_path, corpus_path, "0", *SLURM, *words, steps=14000)
    cluster.run(timeout=400)
    starts = attempts(run_folder(tmp_path / "records", cluster.plan.cells[0].signature))
    assert len(starts) > 1
    assert starts == sorted(starts)
    assert cluster.statuses()[0].finished


@pytest.mark.parametrize(
    ("word", "message"),
    [("pool.partition=nowhere", "Invalid partition name"), ("pool.mem_gb=999", "node configuration is not available")],
)
def test_what_the_cluster_refuses_ends_in_one_line(
    word: str, message: str, slurm: Path, corpus_path: Path, tmp_path: Path
) -> None:
    done = andrea("sweep", "seed=0", "train.steps=1", f"data.path={corpus_path}", *SLURM, word, cwd=tmp_path, check=2)
    last = done.stderr.splitlines()[-1]  # after what sbatch says itself
    assert last.startswith("andrea-exp: pool=slurm: sbatch: error: ")
    assert message in last
