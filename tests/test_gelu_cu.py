"""The hand-written CUDA GELU: its arithmetic on the CPU through g++, its code through NVRTC; no GPU needed."""

import ctypes
import re
import shutil
import subprocess
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch

from andrea_exp import ops

SOURCE = Path(ops.__file__).with_name("gelu.cu")
FORMS = {0: ops.gelu, 1: ops.gelu_tanh, 2: ops.gelu_tanh}


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    if shutil.which("g++") is None:
        pytest.skip("g++ is not installed")
    library = tmp_path_factory.mktemp("gelu") / "gelu.so"
    words = ["g++", "-x", "c++", "-std=c++17", "-O1", "-Wall", "-Werror", "-shared", "-fPIC", "-o", library, SOURCE]
    subprocess.run(words, check=True)
    return ctypes.CDLL(str(library))


def run(host: ctypes.CDLL, form: int, x: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    out = np.full((2, len(x)), np.nan, dtype=np.float32)
    pointers = (a.ctypes.data_as(ctypes.c_void_p) for a in (x, out[0], out[1]))
    host.gelu_on_cpu(form, *pointers, ctypes.c_longlong(len(x)))
    return torch.from_numpy(out[0]), torch.from_numpy(out[1])


@pytest.mark.parametrize("form", FORMS)
def test_value_and_slope_against_float64(host: ctypes.CDLL, form: int) -> None:
    x = np.linspace(-12, 12, 200_001, dtype=np.float32)
    y, slope = run(host, form, x)
    exact = torch.from_numpy(x).double().requires_grad_()
    value = FORMS[form](exact)
    (derivative,) = torch.autograd.grad(value.sum(), exact)
    assert (y - value).abs().max() < 1e-6
    assert (slope - derivative).abs().max() < 1e-6


@pytest.mark.parametrize("form", [0, 1])
def test_the_negative_tail_keeps_its_digits(host: ctypes.CDLL, form: int) -> None:
    x = np.array([-4, -5, -6], dtype=np.float32)
    exact = FORMS[form](torch.from_numpy(x).double())
    torch.testing.assert_close(run(host, form, x)[0].double(), exact, rtol=2e-5, atol=0)


@pytest.mark.parametrize("form", FORMS)
def test_far_out_it_is_0_or_x_and_nan_stays(host: ctypes.CDLL, form: int) -> None:
    x = np.array([1e18, 1e4, 30, -30, -1e4, -1e18, np.nan], dtype=np.float32)
    y, slope = run(host, form, x)
    given = torch.from_numpy(x)
    torch.testing.assert_close(y, given.relu(), equal_nan=True)
    torch.testing.assert_close(slope[:-1], (given > 0).float()[:-1])
    assert slope[-1].isnan()


@pytest.mark.skipif(find_spec("cuda") is None or find_spec("cuda.core") is None, reason="cuda.core is not installed")
@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100"])
def test_compiles_without_a_gpu(arch: str) -> None:
    """All 18 kernels; none spills, uses double precision or loads less than 128 bits at once where it can."""
    pytest.importorskip("triton", reason="triton is not installed, which brings cuobjdump")
    from ahead_of_time import instructions, resources

    from andrea_exp.ops import cuda_gelu

    cubin = bytes(cuda_gelu.build(arch).code)
    usage, code = resources(cubin), instructions(cubin)
    kinds = ("gelu", "gelu_tanh", "gelu_tanh_approx")
    names = [f"{kind}_{t}{way}" for kind in kinds for t in ("float", "bf16", "f16") for way in ("", "_backward")]
    assert sorted(usage) == sorted(code) == sorted(names)
    for name in names:
        assert usage[name]["STACK"] == usage[name]["LOCAL"] == 0
        assert not re.search(r"\bD(ADD|MUL|FMA|SETP)\b|F2F\S*64", code[name])
        assert "LDG.E.128" in code[name]
        assert "STG.E.128" in code[name]
        assert ("MUFU.TANH" in code[name]) == ("approx" in name)
