"""Each rule of tools/check_floors.py with a tree that keeps it and one that breaks it."""

from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import pytest

from tools import check_floors

PACKAGE_FILES = (
    "__init__.py",
    "errors.py",
    "tensor.py",
    "session.py",
    "cli/app.py",
    "memory/__init__.py",
    "memory/allocator.py",
    "memory/governor.py",
    "memory/state_group.py",
    "runtime/__init__.py",
    "runtime/driver.py",
    "runtime/stream.py",
    "kernels/__init__.py",
    "kernels/api.py",
    "kernels/numerics.py",
    "kernels/first/__init__.py",
    "kernels/first/spec.py",
    "kernels/first/reference.py",
    "kernels/first/buffers.py",
    "kernels/first/cuda.py",
    "kernels/second/spec.py",
    "kernels/second/cuda.py",
    "providers/base.py",
    "providers/cpu.py",
    "providers/cuda.py",
)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Return a root with an empty file for everything that the imports below name."""
    for name in PACKAGE_FILES:
        write(tmp_path, f"nxrt/{name}", "")
    return tmp_path


def write(root: Path, name: str, text: str) -> PurePosixPath:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return PurePosixPath(name)


def messages(root: Path, name: str, text: str) -> list[str]:
    found = check_floors.check_file(root, write(root, name, text))
    return [str(violation) for violation in found]


@dataclass(frozen=True)
class ImportCase:
    """Put an import into a file; the fault is part of the message, empty where it is allowed."""

    file: str
    statement: str
    fault: str = ""

    @property
    def id(self) -> str:
        return f"{self.file}: {self.statement}"


NOT_ALLOWED = "may not import"
ANOTHER_OPERATOR = "belongs to another operator"

ALLOWED = [
    ImportCase("errors.py", "import json"),
    ImportCase("errors.py", "from collections.abc import Sequence"),
    ImportCase("tensor.py", "import numpy as np"),
    ImportCase("tensor.py", "from numpy.typing import NDArray"),
    ImportCase("tensor.py", "from nxrt.errors import NxrtError"),
    ImportCase("tensor.py", "from nxrt import errors"),
    ImportCase("memory/governor.py", "from pydantic import BaseModel"),
    ImportCase("memory/governor.py", "from nxrt.memory.allocator import Allocator"),
    ImportCase("memory/governor.py", "from nxrt.tensor import DType"),
    ImportCase("runtime/driver.py", "import cuda.bindings.driver"),
    ImportCase("runtime/driver.py", "from cuda.bindings import nvrtc"),
    ImportCase("runtime/stream.py", "from cuda import pathfinder"),
    ImportCase("runtime/stream.py", "from filelock import FileLock"),
    ImportCase("runtime/stream.py", "from nxrt.runtime import driver"),
    ImportCase("runtime/stream.py", "from nxrt.memory.allocator import Allocator"),
    ImportCase("kernels/api.py", "from nxrt.tensor import DType"),
    ImportCase("kernels/numerics.py", "import ml_dtypes"),
    ImportCase("kernels/first/reference.py", "from nxrt.kernels.first.spec import check_node"),
    ImportCase("kernels/first/reference.py", "from nxrt.kernels import numerics"),
    ImportCase("kernels/first/cuda.py", "from nxrt.runtime.stream import Stream"),
    ImportCase("kernels/first/cuda.py", "from nxrt.memory.allocator import Allocator"),
    ImportCase("kernels/first/cuda.py", "from nxrt.kernels.first.buffers import Buffers"),
    ImportCase("kernels/first/cuda.py", "import nxrt.kernels.api"),
    ImportCase("providers/cpu.py", "from nxrt.kernels.first.reference import Reference"),
    ImportCase("providers/cpu.py", "from nxrt.memory.governor import MemoryGovernor"),
    ImportCase("providers/cpu.py", "from nxrt.providers.base import ExecutionProvider"),
    ImportCase("providers/cuda.py", "from nxrt.kernels.first.cuda import First"),
    ImportCase("providers/cuda.py", "from nxrt.runtime.stream import Stream"),
    ImportCase("session.py", "from nxrt.providers.cuda import CudaProvider"),
    ImportCase("__init__.py", "from nxrt.session import Session"),
    ImportCase("cli/app.py", "import typer"),
    ImportCase("cli/app.py", "from rich.table import Table"),
    ImportCase("cli/app.py", "from nxrt import Session"),
]

REFUSED = [
    ImportCase("errors.py", "import pydantic", NOT_ALLOWED),
    ImportCase("tensor.py", "from nxrt.memory.allocator import Allocator", NOT_ALLOWED),
    ImportCase("tensor.py", "from nxrt import Session", NOT_ALLOWED),
    ImportCase("memory/governor.py", "import nxrt.runtime.stream", NOT_ALLOWED),
    ImportCase("memory/governor.py", "from nxrt.runtime import stream", NOT_ALLOWED),
    ImportCase("memory/governor.py", "from nxrt.kernels.api import OpKey", NOT_ALLOWED),
    ImportCase("memory/governor.py", "from nxrt.providers import base", NOT_ALLOWED),
    ImportCase("memory/governor.py", "from cuda import pathfinder", NOT_ALLOWED),
    ImportCase("runtime/stream.py", "from nxrt.memory.governor import X", "by name"),
    ImportCase("runtime/stream.py", "from nxrt.memory import state_group", "by name"),
    ImportCase("runtime/stream.py", "from nxrt.kernels.api import OpKey", NOT_ALLOWED),
    ImportCase("runtime/stream.py", "import pydantic", NOT_ALLOWED),
    ImportCase("runtime/stream.py", "import cuda.bindings.driver", "only nxrt/runtime/driver.py"),
    ImportCase("runtime/stream.py", "from cuda import bindings", "only nxrt/runtime/driver.py"),
    ImportCase("runtime/stream.py", "import cuda", NOT_ALLOWED),
    ImportCase("kernels/api.py", "from nxrt.memory.allocator import Allocator", NOT_ALLOWED),
    ImportCase("kernels/api.py", "from nxrt.kernels.first.spec import KEY", ANOTHER_OPERATOR),
    ImportCase("kernels/numerics.py", "from nxrt.runtime.stream import Stream", NOT_ALLOWED),
    ImportCase("kernels/first/spec.py", "from nxrt.kernels.first.cuda import First", NOT_ALLOWED),
    ImportCase("kernels/first/spec.py", "from nxrt.kernels.second.spec import K", ANOTHER_OPERATOR),
    ImportCase("kernels/first/cuda.py", "from nxrt.kernels.second.cuda import S", ANOTHER_OPERATOR),
    ImportCase("kernels/first/cuda.py", "from nxrt.providers.base import Allocation", NOT_ALLOWED),
    ImportCase("kernels/first/cuda.py", "from cuda.bindings import driver", "only nxrt/runtime"),
    ImportCase("providers/cpu.py", "from nxrt.runtime.stream import Stream", NOT_ALLOWED),
    ImportCase("providers/cpu.py", "from nxrt.kernels.first.cuda import First", NOT_ALLOWED),
    ImportCase("providers/cpu.py", "from nxrt.providers.cuda import CudaProvider", NOT_ALLOWED),
    ImportCase("providers/cuda.py", "from nxrt.session import Session", NOT_ALLOWED),
    ImportCase("session.py", "from rich import print", "only nxrt/cli/*.py"),
    ImportCase("session.py", "import torch", NOT_ALLOWED),
    ImportCase("cli/app.py", "import requests", NOT_ALLOWED),
    ImportCase("session.py", "from nxrt.nowhere import X", "there is no module nxrt.nowhere"),
]


@pytest.mark.parametrize("case", ALLOWED, ids=lambda case: case.id)
def test_import_that_points_down_is_allowed(tree: Path, case: ImportCase) -> None:
    assert messages(tree, f"nxrt/{case.file}", case.statement) == []


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: case.id)
def test_import_that_climbs_is_refused(tree: Path, case: ImportCase) -> None:
    (message,) = messages(tree, f"nxrt/{case.file}", f"import sys\n{case.statement}")
    assert message.startswith(f"nxrt/{case.file}:2: ")
    assert case.fault in message


def test_two_names_from_one_refused_module_are_one_violation(tree: Path) -> None:
    text = "from nxrt.runtime.stream import (\n    Event,\n    Stream,\n)\n"
    (message,) = messages(tree, "nxrt/memory/governor.py", text)
    assert message.startswith("nxrt/memory/governor.py:1: floor 1 may not import")


def test_refusal_names_both_floors_and_what_is_allowed(tree: Path) -> None:
    (message,) = messages(tree, "nxrt/memory/governor.py", "import nxrt.runtime.stream")
    assert message.endswith(
        "floor 1 may not import nxrt.runtime.stream (floor 2), only floors 0, 1"
    )


@pytest.mark.parametrize(
    "text",
    [
        "def load():\n    import json\n",
        "async def load():\n    import json\n",
        "class Loader:\n    def load(self):\n        if self:\n            import json\n",
        "def load():\n    if TYPE_CHECKING:\n        pass\n    else:\n        import json\n",
    ],
    ids=["function", "coroutine", "method", "else of TYPE_CHECKING"],
)
def test_import_inside_a_function_is_refused(tree: Path, text: str) -> None:
    (message,) = messages(tree, "nxrt/errors.py", text)
    assert message.startswith(f"nxrt/errors.py:{len(text.splitlines())}: import inside a function")


@pytest.mark.parametrize(
    "text",
    [
        "try:\n    import json\nexcept ImportError:\n    raise\n",
        "def load():\n    if TYPE_CHECKING:\n        import json\n",
        "def load():\n    if typing.TYPE_CHECKING:\n        import json\n",
    ],
    ids=["try at module level", "TYPE_CHECKING", "typing.TYPE_CHECKING"],
)
def test_import_that_runs_in_no_function_is_allowed(tree: Path, text: str) -> None:
    assert messages(tree, "nxrt/errors.py", text) == []


def test_import_for_types_alone_may_not_climb_either(tree: Path) -> None:
    text = "if TYPE_CHECKING:\n    from nxrt.session import Session\n"
    (message,) = messages(tree, "nxrt/errors.py", text)
    assert message.startswith("nxrt/errors.py:2: floor 0 may not import nxrt.session (floor 6)")


@pytest.mark.parametrize(
    "statement", ["from . import errors", "from .errors import NxrtError", "from .. import nxrt"]
)
def test_relative_import_is_refused(tree: Path, statement: str) -> None:
    (message,) = messages(tree, "nxrt/tensor.py", statement)
    assert "relative import" in message


def test_star_import_is_refused(tree: Path) -> None:
    (message,) = messages(tree, "nxrt/tensor.py", "from nxrt.errors import *")
    assert "import *" in message


@pytest.mark.parametrize(
    "name", ["nxrt/utils.py", "nxrt/memory/deep/budget.py", "nxrt/kernels/first/helpers.py"]
)
def test_file_that_no_rule_places_is_refused(tree: Path, name: str) -> None:
    (message,) = messages(tree, name, "import nxrt.session\nimport torch\n")
    assert message.startswith(f"{name}:1: no floor: say in tools/check_floors.py which floor")


@pytest.mark.parametrize("suffix", [".py", ".cu", ".cuh"])
def test_file_at_the_limit_passes_and_one_line_more_is_refused(tree: Path, suffix: str) -> None:
    limit = check_floors.MAX_LINES[suffix]
    name = f"nxrt/errors{suffix}"
    assert messages(tree, name, "\n" * limit) == []
    (message,) = messages(tree, name, "\n" * (limit + 1))
    assert message.startswith(f"{name}:{limit + 1}: {limit + 1} lines; {limit} is the limit")


@pytest.mark.parametrize("folder", ["nxrt/memory", "tests/deep/er", "tools", "benchmarks"])
def test_every_folder_of_code_is_measured(tmp_path: Path, folder: str) -> None:
    write(tmp_path, f"{folder}/__init__.py", "\n" * 401)
    write(tmp_path, f"{folder}/notes.txt", "\n" * 1000)
    (path,) = check_floors.measured_files(tmp_path)
    (violation,) = check_floors.check_file(tmp_path, path)
    assert str(path) == f"{folder}/__init__.py"
    assert violation.line == 401


def function(num_lines: int, *, header: str = "def work():") -> str:
    """Return a function of so many lines, its `def` line counted."""
    return "\n".join([header, *["    pass"] * (num_lines - 1), ""])


def test_function_at_the_limit_passes_and_one_line_more_is_refused(tree: Path) -> None:
    limit = check_floors.MAX_FUNCTION_LINES
    assert messages(tree, "nxrt/errors.py", function(limit)) == []
    (message,) = messages(tree, "nxrt/errors.py", "\n" + function(limit + 1))
    assert message == f"nxrt/errors.py:2: work() has {limit + 1} lines; {limit} is the limit"


def test_decorators_and_docstring_do_not_count_as_lines_of_a_function(tree: Path) -> None:
    header = '@one\n@two\nasync def work():\n    """Say.\n\n    More.\n    """'
    limit = check_floors.MAX_FUNCTION_LINES
    assert messages(tree, "nxrt/errors.py", function(limit, header=header)) == []
    (message,) = messages(tree, "nxrt/errors.py", function(limit + 1, header=header))
    assert message.startswith(f"nxrt/errors.py:3: work() has {limit + 1} lines")


def test_long_function_outside_the_package_passes(tree: Path) -> None:
    assert messages(tree, "tests/test_long.py", function(100)) == []


def test_file_that_does_not_parse_is_reported_at_its_line(tree: Path) -> None:
    (message,) = messages(tree, "nxrt/errors.py", "import sys\ndef (:\n")
    assert message.startswith("nxrt/errors.py:2: does not parse")


def test_main_prints_violations_and_their_count_and_fails(
    tree: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tree, "nxrt/errors.py", "import torch\n\nimport pydantic\n")
    assert check_floors.main(tree) == 1
    first, second, last = capsys.readouterr().out.splitlines()
    assert first.startswith("nxrt/errors.py:1: ")
    assert second.startswith("nxrt/errors.py:3: ")
    assert last == f"{len(PACKAGE_FILES)} files, 2 violations"


def test_main_passes_a_clean_tree(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert check_floors.main(tree) == 0
    assert capsys.readouterr().out == f"{len(PACKAGE_FILES)} files, 0 violations\n"


def test_this_repository_keeps_its_floors(capsys: pytest.CaptureFixture[str]) -> None:
    status = check_floors.main()
    assert status == 0, capsys.readouterr().out
