"""The choice of an implementation: explicit, recorded, and never another than was asked for."""

import inspect
import sys
from collections.abc import Iterator
from contextlib import suppress
from importlib.util import find_spec

import pytest
import torch
from conftest import make

from andrea_exp import ops, run
from andrea_exp.errors import UserError
from andrea_exp.ops import reference, tiles


@pytest.fixture(autouse=True)
def definitions_afterwards(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    yield
    ops.use("reference")


def test_every_op_of_the_front_door_is_its_definition_until_another_is_chosen() -> None:
    """Name, signature and words are the definition's too; and no definition is left without a door."""
    for name in ops.NAMES:
        door, definition = getattr(ops, name), getattr(reference, name)
        assert ops._chosen[name] is definition
        assert inspect.signature(door) == inspect.signature(definition)
        assert door.__doc__ == definition.__doc__
    public = {n for n, f in vars(reference).items() if inspect.isfunction(f) and not n.startswith("_")}
    assert public == set(ops.NAMES)


def test_auto_is_the_definition_on_a_cpu_and_in_double_precision() -> None:
    assert set(ops.use("auto", "cpu").values()) == {"reference"}
    assert set(ops.use("auto", "cuda", float64=True).values()) == {"reference"}


@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
def test_auto_is_triton_on_a_gpu_where_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    found = ops.use("auto", "cuda")
    assert {name for name, impl in found.items() if impl == "reference"} == {"identity", "dyt"}
    monkeypatch.setattr(ops, "find_spec", lambda name: None)
    assert set(ops.use("auto", "cuda").values()) == {"reference"}


@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
def test_cuda_is_gelu_cu_for_the_gelus_and_triton_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "_has", lambda name: True)
    found = ops.use("cuda", "cuda")
    assert {name for name, impl in found.items() if impl == "cuda"} == {"gelu", "gelu_tanh"}
    assert found["swiglu"] == found["add_norm"] == "triton"
    assert found["dyt"] == "reference"


@pytest.mark.parametrize("impl", ["triton", "cuda"])
def test_what_cannot_run_is_refused_in_one_line(impl: str, monkeypatch: pytest.MonkeyPatch) -> None:
    reasons = {("cpu", False): "needs a CUDA GPU", ("cuda", True): "float32"}
    for (device, float64), why in reasons.items():
        with pytest.raises(UserError, match=f"ops.impl={impl} .*{why}") as error:
            ops.use(impl, device, float64)
        assert "\n" not in str(error.value)
    monkeypatch.setattr(ops, "_has", lambda name: name == "triton" and impl == "cuda")
    missing = "cuda.core" if impl == "cuda" else "triton"
    with pytest.raises(UserError, match=f"needs {missing}, which is not installed: pip install"):
        ops.use(impl, "cuda")


def test_definitions_run_within_their_block_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ops._chosen, "gelu", lambda x: "another")
    x = torch.ones(3)
    with ops.definitions():
        assert torch.equal(ops.gelu(x), reference.gelu(x))
    assert ops.gelu(x) == "another"
    with suppress(RuntimeError), ops.definitions():
        raise RuntimeError
    assert ops.gelu(x) == "another"


def test_a_run_refuses_at_its_start(prepared: object, tmp_path: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where planning could not know: a device of auto that turns out to be a CPU, on another machine."""
    config = make("ops.impl=triton", "train.device=auto")
    monkeypatch.setattr(run, "load_config", lambda folder: config)
    monkeypatch.setattr(run.data, "load", lambda corpus: prepared)
    monkeypatch.setattr(run, "resolve_device", lambda requested: "cpu")
    with pytest.raises(UserError, match=r"ops\.impl=triton needs a CUDA GPU"):
        run.train(tmp_path, tmp_path)


def test_without_triton_the_rest_works(monkeypatch: pytest.MonkeyPatch) -> None:
    """No module of the package imports it until a run asks."""
    for name in [
        n for n in sys.modules if n.startswith("andrea_exp.ops.fast") or n.startswith("andrea_exp.ops.triton")
    ]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "triton", None)
    assert set(ops.use("auto", "cpu").values()) == {"reference"}
    with pytest.raises(ImportError):
        import andrea_exp.ops.fast  # noqa: F401


def test_persistent_programs_never_outnumber_tiles() -> None:
    for count in (1, 3, 1000):
        assert 1 <= tiles.persistent_programs(torch.device("cpu"), count, warps=4) <= count
