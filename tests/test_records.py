"""Records: no kill spoils them, one process at a time holds a run, and no secret gets into them."""

import json
import math
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from conftest import TINY, andrea, make

from andrea_exp.errors import UserError
from andrea_exp.record import (
    GUARD_STALE_S,
    STALE_S,
    Held,
    Lease,
    MetricsWriter,
    Status,
    find_run,
    go_back,
    last_metrics,
    lease_holder,
    load_config,
    open_run,
    process_mark,
    read_metrics,
    require_writable,
    run_folder,
    status,
    write_json,
)


def python(code: str, *arguments: object) -> subprocess.Popen[str]:
    """A process of its own that runs `code` and talks by lines."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def line_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def kill(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


WRITE_FOREVER = """
import sys
from pathlib import Path
from andrea_exp.record import write_json
path, count = Path(sys.argv[1]), 0
while True:
    count += 1
    write_json(path, {"count": count, "numbers": list(range(60000)), "last": count})
    print(count, flush=True)
"""


def test_a_kill_in_mid_write_leaves_the_last_whole_file(tmp_path: Path):
    path, chance = tmp_path / "summary.json", random.Random(0)
    for _ in range(6):
        writer = python(WRITE_FOREVER, path)
        line_of(writer)  # one whole file is there
        time.sleep(chance.uniform(0, 0.1))  # and the next one is somewhere in the middle
        kill(writer)
        whole = json.loads(path.read_text())
        assert whole["count"] == whole["last"]
        assert len(whole["numbers"]) == 60000


def test_a_reader_never_meets_half_a_file(tmp_path: Path):
    path = tmp_path / "summary.json"
    writer = python(WRITE_FOREVER, path)
    line_of(writer)
    seen, end = set(), time.monotonic() + 30
    while len(seen) < 12 and time.monotonic() < end:
        whole = json.loads(path.read_text())
        assert whole["count"] == whole["last"]
        seen.add(whole["count"])
    kill(writer)
    assert len(seen) == 12


def test_a_value_that_cannot_be_written_leaves_the_old_file(tmp_path: Path):
    path = tmp_path / "summary.json"
    write_json(path, {"a": 1})
    with pytest.raises(TypeError):
        write_json(path, {"a": list(range(100000)), "b": object()})
    assert json.loads(path.read_text()) == {"a": 1}


# metrics.jsonl


def test_a_torn_last_line_is_left_out_and_the_step_before_it_is_there(tmp_path: Path):
    whole = [{"step": 0, "val/loss": 3.5}, {"step": 1, "train/loss": 3.25}]
    text = "".join(json.dumps(row) + "\n" for row in whole)
    torn = json.dumps({"step": 2, "train/loss": 3.125})
    for cut in range(len(torn)):
        (tmp_path / "metrics.jsonl").write_text(text + torn[:cut])
        assert read_metrics(tmp_path) == whole
        assert last_metrics(tmp_path) == whole[-1]


def test_of_a_step_logged_twice_the_last_line_counts(tmp_path: Path):
    rows = [{"step": s, "train/loss": float(s)} for s in range(101)]
    again = [{"step": s, "train/loss": -float(s)} for s in range(80, 151)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows + again))
    assert read_metrics(tmp_path) == rows[:80] + again


def test_what_is_not_finite_is_null_in_strict_json(tmp_path: Path):
    writer = MetricsWriter(tmp_path)
    writer.write({"step": 3, "train/loss": math.nan, "grad_norm/total": math.inf, "lr": -math.inf, "tokens": 8})
    writer.close()

    def refuse(constant: str) -> None:
        raise ValueError(constant)

    row = json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=refuse)
    assert row == {"step": 3, "train/loss": None, "grad_norm/total": None, "lr": None, "tokens": 8}
    assert read_metrics(tmp_path) == [row]


def test_every_one_of_10050_steps_comes_back(tmp_path: Path):
    writer = MetricsWriter(tmp_path)
    rows = [{"step": step, "train/loss": 1 / (step + 3)} for step in range(10_050)]
    for row in rows:
        writer.write(row)
    writer.close()
    assert read_metrics(tmp_path) == rows
    assert last_metrics(tmp_path) == rows[-1]


def test_each_line_is_on_disk_as_soon_as_it_is_written(tmp_path: Path):
    writer = python(
        "import sys; from pathlib import Path; from andrea_exp.record import MetricsWriter\n"
        "w = MetricsWriter(Path(sys.argv[1])); w.write({'step': 7}); print('written', flush=True); input()",
        tmp_path,
    )
    assert line_of(writer) == "written"
    kill(writer)
    assert read_metrics(tmp_path) == [{"step": 7}]


def test_without_metrics_there_is_nothing(tmp_path: Path):
    assert read_metrics(tmp_path) == []
    assert last_metrics(tmp_path) == {}


# Leases

HOLD = """
import sys
from pathlib import Path
from andrea_exp.record import Lease
input()
try:
    with Lease(Path(sys.argv[1])):
        print("held", flush=True)
        input()
except BlockingIOError:
    print("blocked", flush=True)
"""


@pytest.fixture
def holders(tmp_path: Path) -> Iterator[list[subprocess.Popen[str]]]:
    """Four processes that each take one folder's lease when told `go`, and give it back at the next line."""
    made = [python(HOLD, tmp_path) for _ in range(4)]
    yield made
    for process in made:
        kill(process)


def tell(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("go\n")
    process.stdin.flush()


def test_one_of_many_gets_the_lease_and_after_its_death_another(holders: list[subprocess.Popen[str]], tmp_path: Path):
    *rivals, heir = holders
    for rival in rivals:
        tell(rival)
    answers = [line_of(rival) for rival in rivals]
    assert sorted(answers) == ["blocked", "blocked", "held"]
    winner = rivals[answers.index("held")]
    assert status(tmp_path) is Status.running
    assert (lease_holder(tmp_path) or {})["pid"] == winner.pid
    winner.kill()
    winner.wait()
    assert (tmp_path / "lease.json").exists()  # a killed holder cannot clean up
    assert lease_holder(tmp_path) is None
    tell(heir)
    assert line_of(heir) == "held"
    tell(heir)
    heir.wait()
    assert not (tmp_path / "lease.json").exists()


def test_many_that_find_a_dead_holder_do_not_all_take_over(holders: list[subprocess.Popen[str]], tmp_path: Path):
    write_lease(tmp_path, pid=dead_pid())
    for rival in holders:
        tell(rival)
    assert sorted(line_of(rival) for rival in holders) == ["blocked", "blocked", "blocked", "held"]


def test_the_holder_that_is_a_zombie_is_dead(tmp_path: Path):
    holder = python(HOLD, tmp_path)
    tell(holder)
    assert line_of(holder) == "held"
    holder.kill()
    os.waitid(os.P_PID, holder.pid, os.WEXITED | os.WNOWAIT)  # ended, and not yet collected
    assert lease_holder(tmp_path) is None
    holder.communicate()


def dead_pid() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def write_lease(folder: Path, pid: int, **other: str) -> None:
    """A lease as process `pid` of this machine would write it, but for `other`."""
    write_json(folder / "lease.json", {**process_mark(pid), "since": time.time(), **other})


def beat(folder: Path, seconds_ago: float) -> None:
    then = time.time() - seconds_ago
    os.utime(folder / "lease.json", (then, then))


def test_a_lease_of_a_dead_process_of_this_host_is_void(tmp_path: Path):
    write_lease(tmp_path, dead_pid())
    assert lease_holder(tmp_path) is None


def test_a_process_that_was_given_a_dead_holders_number_is_not_the_holder(tmp_path: Path):
    write_lease(tmp_path, os.getpid(), started="1")  # long before this process began
    assert lease_holder(tmp_path) is None


def test_a_lease_of_another_host_lives_by_its_heartbeat(tmp_path: Path):
    write_lease(tmp_path, os.getpid(), machine="another boot or container")
    beat(tmp_path, STALE_S / 2)
    assert status(tmp_path) is Status.running
    with pytest.raises(BlockingIOError), Lease(tmp_path):
        pass
    beat(tmp_path, STALE_S + 5)
    assert lease_holder(tmp_path) is None
    with Lease(tmp_path):
        assert (lease_holder(tmp_path) or {})["pid"] == os.getpid()


@pytest.mark.parametrize("shift", [-86400, 86400])
def test_a_clock_that_was_set_neither_kills_a_living_holder_nor_keeps_a_dead_one(
    shift: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    write_lease(tmp_path, os.getpid())
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + shift)
    assert lease_holder(tmp_path) is not None
    write_lease(tmp_path, dead_pid(), machine="another boot or container")
    os.utime(tmp_path / "lease.json", (now, now))
    assert lease_holder(tmp_path) is None


def test_a_holder_that_was_frozen_for_long_knows_that_it_lost_its_lease(tmp_path: Path):
    with Lease(tmp_path) as frozen:
        assert frozen.held()
        write_json(tmp_path / "lease.json", process_mark(os.getpid()))  # another process took over
        assert not frozen.held()
    assert (tmp_path / "lease.json").exists()  # which is not the frozen one's to remove


def test_a_lease_that_was_taken_and_given_up_is_not_held_by_who_had_it_before(tmp_path: Path):
    """File systems give a removed file's number to the next one."""
    with Lease(tmp_path) as frozen:
        for _ in range(20):
            (tmp_path / "lease.json").unlink()
            with Lease(tmp_path) as other:
                assert other.held()
                assert not frozen.held()
            write_lease(tmp_path, os.getpid())
            assert not frozen.held()


def test_a_guard_is_judged_by_the_clock_of_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / ".lease.guard").touch()
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 10 * GUARD_STALE_S)
    with pytest.raises(Held), Lease(tmp_path):
        pass
    assert sorted(p.name for p in tmp_path.iterdir()) == [".lease.guard"]


def test_writers_with_one_process_number_do_not_meet(tmp_path: Path):
    """As in two containers: here threads, which have one number too."""
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda i: write_json(tmp_path / "x.json", {"i": i}, durable=False), range(400)))
    assert [p.name for p in tmp_path.iterdir()] == ["x.json"]


def test_a_name_that_two_sweeps_have_names_no_run(tmp_path: Path):
    for sweep, run in (("one", "aa"), ("two", "bb"), ("three", "bb"), ("gone", "cc")):
        folder = tmp_path / "tensorboard" / sweep
        folder.mkdir(parents=True)
        (folder / "gelu,seed=0").symlink_to(f"../../runs/{run}/tensorboard")
        (folder / f"own-{sweep}").symlink_to(f"../../runs/{run}/tensorboard")
        (folder / ".DS_Store").write_text("")
    for run in ("aa", "bb"):
        (tmp_path / "runs" / run).mkdir(parents=True)
    with pytest.raises(UserError, match="the name of 2 runs: aa, bb"):
        find_run(tmp_path, "gelu,seed=0")
    assert find_run(tmp_path, "own-three").name == "bb"
    for word in ("own-gone", ".DS_Store"):
        with pytest.raises(UserError, match="no such run"):
            find_run(tmp_path, word)


def test_a_guard_left_by_a_killed_process_is_cleared_once_it_is_old(tmp_path: Path):
    guard = tmp_path / ".lease.guard"
    guard.touch()
    with pytest.raises(BlockingIOError), Lease(tmp_path):
        pass
    os.utime(guard, (time.time() - GUARD_STALE_S - 5,) * 2)
    with Lease(tmp_path):
        pass
    assert not guard.exists()


# Statuses


@pytest.mark.parametrize("ended", [Status.done, Status.diverged, Status.failed, Status.interrupted])
def test_a_summary_says_how_a_run_ended(ended: Status, tmp_path: Path):
    write_json(tmp_path / "summary.json", {"status": str(ended)})
    (tmp_path / "metrics.jsonl").write_text('{"step":0}\n')
    assert status(tmp_path) is ended


def test_without_a_summary_what_was_logged_decides(tmp_path: Path):
    assert status(tmp_path / "nowhere") is Status.missing
    write_json(tmp_path / "config.json", {})
    assert status(tmp_path) is Status.missing
    (tmp_path / "metrics.jsonl").write_text('{"step":0}\n')
    assert status(tmp_path) is Status.interrupted
    write_lease(tmp_path, dead_pid())
    assert status(tmp_path) is Status.interrupted
    write_lease(tmp_path, os.getpid())
    assert status(tmp_path) is Status.running


def test_only_done_and_diverged_leave_nothing_to_run():
    assert {s for s in Status if s.finished} == {Status.done, Status.diverged}


def test_starting_over_clears_an_attempt_and_keeps_what_the_run_is(tmp_path: Path):
    folder = open_run(tmp_path, make(), "0" * 16)
    for name in ("tensorboard", "checkpoints"):
        (folder / name).mkdir()
    for name in ("metrics.jsonl", "summary.json", "traceback.txt", "tensorboard/events", "checkpoints/1-a.pt"):
        (folder / name).write_text("{}")
    go_back(folder, 0)
    assert sorted(p.name for p in folder.iterdir()) == ["config.json", "identity.json"]


# A run's folder


def test_a_run_is_opened_twice_as_the_same_folder_with_the_same_config(tmp_path: Path):
    config = make("model.expansion_ratio=8/3", "model.d_model=48", "optim.clip=null")
    folder = open_run(tmp_path, config, "0" * 16)
    (folder / "metrics.jsonl").write_text('{"step":0}\n')
    assert open_run(tmp_path, config, "0" * 16) == folder
    assert load_config(folder) == config
    assert len(read_metrics(folder)) == 1


def test_a_folder_that_holds_another_run_is_refused(tmp_path: Path):
    config = make()
    folder = open_run(tmp_path, config, "0" * 16)
    identity = json.loads((folder / "identity.json").read_text())
    write_json(folder / "identity.json", {**identity, "seed": 99})
    with pytest.raises(UserError, match=folder.name):
        open_run(tmp_path, config, "0" * 16)


def test_records_below_a_file_are_the_users_error(tmp_path: Path):
    (tmp_path / "afile").write_text("")
    with pytest.raises(UserError, match="records="):
        require_writable(tmp_path / "afile/x")
    assert status(run_folder(tmp_path / "afile/x", "0" * 16)) is Status.missing


def test_of_the_environment_only_an_allow_list_is_recorded(
    corpus_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    secret = "hunter2-5f4dcc3b5aa765d61d8327deb882cf99"
    for name in ("API_TOKEN", "AWS_SECRET_ACCESS_KEY", "OMP_SECRET", "HYDRA_SECRET"):
        monkeypatch.setenv(name, secret)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    andrea("train", *TINY, f"data.path={corpus_path}", cwd=tmp_path)
    files = [p for p in tmp_path.rglob("*") if p.is_file() and not p.is_symlink()]
    assert len(files) > 10
    assert [p for p in files if secret.encode() in p.read_bytes()] == []
    (recorded,) = (json.loads(p.read_text()) for p in files if p.name == "provenance.json")
    allowed = {"CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "SLURM_JOB_ID", "TRITON_INTERPRET"}
    assert {"CUDA_VISIBLE_DEVICES"} <= set(recorded["environment"]) <= allowed
    assert {"git", "versions", "host", "threads", "data_fingerprint", "numerics_version", "seed"} <= set(recorded)
