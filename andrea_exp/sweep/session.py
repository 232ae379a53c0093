"""One sweep from its plan to its table: run what is missing, show it, say what came out."""

import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from omegaconf import DictConfig
from rich.console import Console
from rich.live import Live

from andrea_exp import data
from andrea_exp.compose import check_overrides, parse
from andrea_exp.config import Device, OpsImpl, PoolConfig, PoolKind
from andrea_exp.errors import UserError
from andrea_exp.index import Index
from andrea_exp.record import Status, open_run, require_writable, run_folder
from andrea_exp.results.choose import choose_tuned
from andrea_exp.sweep import board, local, ray_pool, slurm
from andrea_exp.sweep.plan import Cell, Plan, plan_composed
from andrea_exp.sweep.pool import Detached, FailedFast, Job, Stopped
from andrea_exp.sweep.slots import slots_of, threads_of

LINE_EVERY_S = 60.0
FORCED_OPS = (OpsImpl.triton, OpsImpl.cuda)
LOOKING_SHARE = 20  # times as long as a look at all runs took is waited for the next: they may be ten thousand


def run_sweep(composed: DictConfig, overrides: Sequence[str], only_failed: bool = False) -> NoReturn:
    """Runs every missing cell of a composed sweep, or those alone that failed, then prints its table.

    Ends the process with 1 where a run failed, with 128 + the signal where one asked to stop (130 on Ctrl-C).
    Raises UserError for bad input.
    """
    check_overrides(overrides)
    records, console = Path(composed.records), Console()
    parsed = parse(overrides)

    fingerprints: dict[str, str] = {}
    tried: set[str] = set()

    def planned() -> tuple[Plan, list[Cell]]:
        """The plan as the tuning stands, and what is left of it; a run that failed is tried once a command."""
        plan = plan_composed(composed, parsed, choose_tuned(records), fingerprints)
        left = [cell for cell in _missing(plan, records, only_failed) if cell.signature not in tried]
        return plan, left

    plan, missing = planned()
    if plan.cells[0].config.pool.kind is PoolKind.slurm:  # the marks of jobs that ended while nobody watched
        slurm.forget_gone(run_folder(records, cell.signature) for cell in plan.cells)
        plan, missing = planned()
    if only_failed and not missing:
        console.print(f"{plan.name}: none of its runs has failed")
    try:
        while missing:
            _run_missing(plan, missing, records, plan.cells[0].config.pool, console)
            tried |= {cell.signature for cell in missing}
            plan, missing = planned()
        link_views(plan, records)
    except Detached as detached:
        then = " and submits the runs that wait for these" if plan.waiting else ""
        console.print(f"{detached}; andrea-exp status shows how they stand, the same command prints the table{then}")
        sys.exit(0)
    except (KeyboardInterrupt, Stopped) as ended:
        on_slurm = plan.cells[0].config.pool.kind is PoolKind.slurm
        console.print(
            ("the jobs go on in the cluster" if on_slurm else "stopped") + "; the same command goes on from here"
        )
        sys.exit(128 + (ended.number if isinstance(ended, Stopped) else signal.SIGINT))
    except FailedFast:
        console.print("stopped at the first failed run (pool.fail_fast=true)")
        sys.exit(_report_failures(plan, records, console))
    from andrea_exp.results.leave import leave_results

    leave_results(plan, records, overrides, console)
    sys.exit(_report_failures(plan, records, console))


def _missing(plan: Plan, records: Path, only_failed: bool = False) -> list[Cell]:
    """Cells left to run, each signature once."""
    cells = {c.signature: c for c in plan.cells}
    with Index(records) as index:
        states = {sig: index.look(sig)[0] for sig in cells}
    return [c for s, c in cells.items() if not states[s].finished and not (only_failed and states[s] != Status.failed)]


def _run_missing(plan: Plan, cells: list[Cell], records: Path, pool: PoolConfig, console: Console) -> None:
    if pool.kind is PoolKind.local:
        _require_devices(cells)
    require_writable(records)
    with console.status("preparing the corpus"):
        corpora = _prepare(cells, records)
    if pool.kind is PoolKind.local:
        local.warm_up()
    jobs = [
        Job(
            open_run(records, cell.config, cell.fingerprint).resolve(),
            corpora[cell.fingerprint, cell.config.model.seq_len].resolve(),
            threads_of(cell.config),
            cell.config.train.ranks,
            cell.config.train.device,
            tuple(sys.argv),
        )
        for cell in cells
    ]
    link_views(plan, records)
    _carry(plan, jobs, cells, records, pool, console)


def _prepare(cells: list[Cell], records: Path) -> dict[tuple[str, int], Path]:
    """The token folder of each text and window length."""
    corpora: dict[tuple[str, int], Path] = {}
    for cell in cells:
        needed = (cell.fingerprint, cell.config.model.seq_len)
        if needed not in corpora:
            corpora[needed] = data.prepare(cell.config.data, records / "corpora", needed[1])
            if corpora[needed].name != cell.fingerprint:
                raise UserError(f"data.path={cell.config.data.path}: the text changed since the sweep was planned")
    return corpora


def _carry(plan: Plan, jobs: list[Job], cells: list[Cell], records: Path, pool: PoolConfig, console: Console) -> None:
    """Hands jobs to the pool, and shows how they stand meanwhile."""
    shares = slots_of([cell.config for cell in cells]) if pool.kind is PoolKind.local else []
    at_once = min(len(shares) or pool.slots or len(cells), len(cells))
    finished = len({c.signature for c in plan.cells}) - len(cells)
    room = f"{at_once} at once" if shares or pool.slots else "as many at once as there is room for"
    console.print(
        f"{plan.name}: {len(cells)} runs to do"
        + (f", {finished} already there" if finished else "")
        + f"; {room}, {_threads(jobs)} each, pool={pool.kind.name}, records in {records}/"
    )
    reader = board.Reader(records, at_once)
    with _display(console, lambda: reader.read(plan)) as tick:
        match pool.kind:
            case PoolKind.local:
                local.run_jobs(jobs, shares, pool, tick, console.print)
            case PoolKind.slurm:
                slurm.run_jobs(jobs, pool, tick, console.print)
            case PoolKind.ray:
                ray_pool.run_jobs(jobs, pool, tick, console.print)


def _threads(jobs: Sequence[Job]) -> str:
    counts = sorted({job.threads for job in jobs})
    if counts == [1]:
        return "1 thread"
    return f"{counts[0]} threads" if len(counts) == 1 else f"{counts[0]} to {counts[-1]} threads"


def _require_devices(cells: list[Cell]) -> None:
    trains = [c.config.train for c in cells]
    wants_gpu = any(t.device is Device.cuda or t.precision.name == "fp16-mixed" for t in trains)
    if wants_gpu:
        import torch  # seconds, so only where the answer matters

        if not torch.cuda.is_available():
            raise UserError("train.device: there is no CUDA GPU here (fp16-mixed needs one too); use device=cpu")
    forced = {(c.config.ops.impl, c.config.train.device) for c in cells if c.config.ops.impl in FORCED_OPS}
    if forced:
        from andrea_exp import ops
        from andrea_exp.run import resolve_device

        for impl, device in forced:
            if why := ops.refusal(impl.name, resolve_device(device)):
                raise UserError(why)


@contextmanager
def _display(console: Console, read: Callable[[], board.Board]) -> Any:
    """Yields the pool's `tick`: a live table on a terminal, a line a minute elsewhere."""
    if console.is_terminal:
        with Live(console=console, auto_refresh=False, transient=False) as live:
            next_look = 0.0

            def show() -> None:
                live.update(board.render(read(), most=max(5, console.height - 6)), refresh=True)

            def show_at_times() -> None:
                nonlocal next_look
                if (began := time.monotonic()) >= next_look:
                    show()
                    next_look = time.monotonic() + LOOKING_SHARE * (time.monotonic() - began)

            yield show_at_times
            show()
        return
    last = time.monotonic()

    def print_line() -> None:
        nonlocal last
        if time.monotonic() - last >= LINE_EVERY_S:
            console.print(board.line(read()), markup=False, highlight=False, soft_wrap=True)
            last = time.monotonic()

    yield print_line
    console.print(board.line(read()), markup=False, highlight=False, soft_wrap=True)


def link_views(plan: Plan, records: Path) -> Path:
    """Readable names for TensorBoard: a folder of links to the event files of exactly this plan's runs."""
    folder = records / "tensorboard" / plan.name
    folder.mkdir(parents=True, exist_ok=True)
    wanted = {cell.slug: run_folder(records, cell.signature) / "tensorboard" for cell in plan.cells}
    for link in folder.iterdir():
        if link.is_symlink() and link.name not in wanted:
            link.unlink()
    for name, target in wanted.items():
        link, relative = folder / name, Path(os.path.relpath(target, folder))
        if link.is_symlink() and link.readlink() == relative:
            continue
        link.unlink(missing_ok=True)
        link.symlink_to(relative)
    return folder


def _report_failures(plan: Plan, records: Path, console: Console) -> int:
    """Says what failed, why and where to look, and what else is not done; returns the exit code."""
    index = Index(records)
    looks = {c.signature: index.look(c.signature) for c in plan.cells}
    states = {sig: state for sig, (state, _) in looks.items()}
    for cell in {c.signature: c for c in plan.cells if states[c.signature] is Status.failed}.values():
        folder = run_folder(records, cell.signature)
        note = (folder / "traceback.txt") if (folder / "traceback.txt").exists() else (folder / "log.txt")
        why = looks[cell.signature][1].get("reason", "no reason recorded")
        console.print(f"failed: {cell.label}: {why}; see {note}", markup=False, soft_wrap=True)
    open_ = Counter(str(s) for s in states.values() if not s.finished and s is not Status.failed)
    if open_:
        counts = ", ".join(f"{count} {state}" for state, count in open_.items())
        console.print(f"not done: {counts}; the same command goes on from here", soft_wrap=True)
    if plan.waiting:
        console.print(f"{plan.waiting} runs wait for tuning runs that have not ended", soft_wrap=True)
    return 1 if plan.waiting or not all(s.finished for s in states.values()) else 0
