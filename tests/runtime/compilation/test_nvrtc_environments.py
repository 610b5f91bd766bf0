"""What compiles in which environment, each in a process of its own: nothing is mixed silently."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from nxrt.kernels.dsa_index_select.cuda import DsaIndexSelectFactory
from nxrt.runtime.compilation.compiler import Compiler, cuda_include_dir

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]

QUICK_SOURCES = ("dsa_index_select.cu", "prefill_norms.cu")
"""One with headers of nxrt's alone, one with some of the folder above; the filters take minutes."""

QUICK_DTYPE = ("NXRT_DTYPE", "BF16")

_OWN_KERNELS = """
import hashlib, sys
from nxrt.kernels.dsa_index_select.cuda import DsaIndexSelectFactory
from nxrt.runtime.compilation.compiler import CompileOptions, Compiler
from nxrt.runtime.compilation.source import load_source
units = DsaIndexSelectFactory().compile_units()
for unit in [units[int(index)] for index in sys.argv[1].split()]:
    options = CompileOptions("sm_90a", unit.defines, unit.flags)
    print(hashlib.sha256(Compiler().compile(load_source(unit.path), options).cubin).hexdigest())
"""

_HALF = """
import sys, hashlib
from cuda.pathfinder._headers import find_nvidia_headers as search
if sys.argv[1] == "no wheels":
    steps = tuple(step for step in search.FIND_STEPS if step is search.find_in_cuda_path)
    search.FIND_STEPS = steps
from nxrt.errors import CompileError
import nxrt.providers.cuda
from nxrt.runtime.compilation.compiler import CompileOptions, Compiler
from nxrt.runtime.compilation.compile_cache import CompileCache
from nxrt.runtime.compilation.source import KernelSource
text = '#include <cuda_fp16.h>\\nextern "C" __global__ void k(__half* a) { *a = __half(1.f); }'
source = KernelSource("half.cu", text, system_headers=("cuda_fp16.h",))
print("imported")
try:
    cubin = CompileCache(Compiler(), None).get(source, CompileOptions("sm_90a"))
    print(hashlib.sha256(cubin).hexdigest())
except CompileError as error:
    print(error)
"""


def run(script: str, argument: str = "", **environ: str) -> str:
    environ = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "HOME": "/nowhere"} | environ
    command = [sys.executable, "-c", script, argument]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environ)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


def toolkit(folder: Path, release: int | None) -> Path:
    """Make a CUDA_PATH: empty, or with headers that say they are of some release."""
    include = folder / "include"
    include.mkdir(parents=True)
    if release is not None:
        (include / "cuda_runtime.h").write_text("")
        (include / "cuda_runtime_api.h").write_text(f"#define CUDART_VERSION {release}\n")
        (include / "cuda_fp16.h").write_text("#error taken\n")
    return folder


@pytest.fixture(scope="module")
def environments(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, str]]:
    folder = tmp_path_factory.mktemp("toolkits")
    return {
        "no CUDA_PATH": {},
        "empty CUDA_PATH": {"CUDA_PATH": str(toolkit(folder / "empty", None))},
        "another release": {"CUDA_PATH": str(toolkit(folder / "other", 12080))},
    }


def test_kernels_of_ours_compile_to_the_same_everywhere(
    environments: dict[str, dict[str, str]],
) -> None:
    units = DsaIndexSelectFactory().compile_units()
    quick = [
        index
        for index, unit in enumerate(units)
        if unit.path.name in QUICK_SOURCES and QUICK_DTYPE in unit.defines
    ]
    assert {units[index].path.name for index in quick} == set(QUICK_SOURCES)
    chosen = " ".join(map(str, quick))
    outputs = {run(_OWN_KERNELS, chosen, **environ) for environ in environments.values()}
    assert len(outputs) == 1
    assert len(outputs.pop().split()) == len(quick)


def test_with_the_wheels_a_wrong_cuda_path_changes_nothing(
    environments: dict[str, dict[str, str]],
) -> None:
    if cuda_include_dir() is None or "site-packages" not in str(cuda_include_dir()):
        pytest.skip("the headers here are not those of the wheels")
    outputs = {run(_HALF, "wheels", **environ) for environ in environments.values()}
    assert len(outputs) == 1
    assert len(outputs.pop().split()) == 2


def test_without_the_wheels_headers_of_another_release_are_refused_at_first_use(
    environments: dict[str, dict[str, str]],
) -> None:
    environ = environments["another release"]
    output = run(_HALF, "no wheels", **environ)
    assert output.startswith("imported\n")
    for part in (environ["CUDA_PATH"], "12.8", Compiler().version, "libnvrtc", "CUDA_PATH"):
        assert part in output
    assert "taken" not in output


@pytest.mark.parametrize("name", ["no CUDA_PATH", "empty CUDA_PATH"])
def test_without_any_headers_the_package_is_named(
    environments: dict[str, dict[str, str]], name: str
) -> None:
    output = run(_HALF, "no wheels", **environments[name])
    assert output.startswith("imported\n")
    assert "cuda_fp16.h ships with the CUDA runtime headers: pip install" in output
