"""The seam to CUDA, with stand-ins for driver functions: no driver is needed."""

import enum
import subprocess
import sys
from typing import Any

import pytest

from nxrt import DriverError, DriverUnavailableError
from nxrt.runtime import driver


class Status(enum.IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_OUT_OF_MEMORY = 2
    CUDA_ERROR_SOMETHING_NEW = 12345


def answering(*result: Any) -> Any:
    def cuSomething(*_: object) -> Any:  # noqa: N802  (named as the driver's functions are)
        return result

    return cuSomething


def raising(error: Exception) -> Any:
    def cuSomething(*_: object) -> Any:  # noqa: N802
        raise error

    return cuSomething


@pytest.mark.parametrize(
    ("outputs", "expected"), [((), None), ((7,), 7), ((7, 8), (7, 8))], ids=["none", "one", "two"]
)
def test_call_returns_the_outputs(outputs: tuple[int, ...], expected: object) -> None:
    assert driver.call(answering(Status.CUDA_SUCCESS, *outputs)) == expected


def test_a_failure_carries_code_name_call_and_explanation() -> None:
    with pytest.raises(DriverError) as failure:
        driver.call(answering(Status.CUDA_ERROR_OUT_OF_MEMORY))
    error = failure.value
    assert (error.code, error.name, error.call) == (2, "CUDA_ERROR_OUT_OF_MEMORY", "cuSomething")
    assert "no free block" in error.explanation


def test_a_code_without_an_explanation_points_to_the_reference() -> None:
    with pytest.raises(DriverError, match="driver API reference"):
        driver.call(answering(Status.CUDA_ERROR_SOMETHING_NEW))


@pytest.mark.parametrize(
    "error",
    [KeyError(123456), ValueError("123456 is not a valid CUresult")],
    ids=["13.0", "13.4"],
)
def test_a_code_the_bindings_do_not_know_is_still_a_driver_error(error: Exception) -> None:
    with pytest.raises(DriverError) as failure:
        driver.call(raising(error))
    assert (failure.value.code, failure.value.name) == (123456, "UNKNOWN")


def test_a_function_the_driver_lacks_is_named() -> None:
    error = RuntimeError("function cuSomething is not found")
    with pytest.raises(DriverError, match="too old") as failure:
        driver.call(raising(error))
    assert failure.value.__cause__ is error


@pytest.mark.parametrize(
    "text", ["Failed to dlopen libcuda.so.1", '"cuda" is an NVIDIA driver library and cannot ...']
)
def test_a_missing_library_is_unavailability(text: str) -> None:
    with pytest.raises(DriverUnavailableError, match="install the NVIDIA driver"):
        driver.call(raising(RuntimeError(text)))


@pytest.mark.parametrize(
    "error",
    [RuntimeError("something else"), ValueError("argument must be of length 16"), KeyError("x9")],
    ids=["runtime", "value", "key"],
)
def test_other_errors_pass_unchanged(error: Exception) -> None:
    with pytest.raises(type(error)) as failure:
        driver.call(raising(error))
    assert failure.value is error
    assert error.__cause__ is None


def test_importing_nxrt_loads_no_driver_and_makes_no_file(tmp_path: Any) -> None:
    script = (
        "import nxrt, os; [getattr(nxrt, name) for name in nxrt.__all__];"
        "maps = open('/proc/self/maps').read();"
        "assert 'libcuda.so' not in maps and 'libnvrtc' not in maps; assert not os.listdir('.')"
    )
    environment = {"HOME": str(tmp_path), "PYTHONPATH": ":".join(filter(None, sys.path))}
    subprocess.run(
        [sys.executable, "-B", "-c", script], check=True, cwd=tmp_path, env=environment
    )  # fmt: skip
    assert not list(tmp_path.iterdir())


def test_importing_nxrt_imports_nothing_heavy() -> None:
    heavy = {"cuda", "numpy", "pydantic", "ml_dtypes", "rich", "typer"}
    script = f"import nxrt, sys; print(sorted({heavy!r} & set(sys.modules)))"
    environment = {"PYTHONPATH": ":".join(filter(None, sys.path))}
    done = subprocess.run(
        [sys.executable, "-c", script], check=True, env=environment, capture_output=True, text=True
    )
    assert done.stdout.strip() == "[]"


def test_a_device_without_a_driver_is_one_error_at_once() -> None:
    if driver.probe().is_available:
        pytest.skip("this machine has a device")
    script = (
        "import nxrt\n"
        "for _ in range(3):\n"
        "    try: nxrt.CudaProvider()\n"
        "    except nxrt.DriverUnavailableError as error: assert 'libcuda' in str(error)\n"
        "    else: raise SystemExit(1)\n"
    )
    environment = {"PYTHONPATH": ":".join(filter(None, sys.path))}
    subprocess.run([sys.executable, "-c", script], check=True, timeout=30, env=environment)
