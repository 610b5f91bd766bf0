"""What the README and the guides show is what runs."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PROGRAMS = sorted((ROOT / "examples").glob("[0-9]*.py"))
README = (ROOT / "README.md").read_text(encoding="utf-8")


def run(program: str) -> str:
    command = [sys.executable, "-c", program]
    done = subprocess.run(
        command, check=True, capture_output=True, text=True, cwd=ROOT, timeout=120
    )  # fmt: skip
    return done.stdout


def run_file(path: Path) -> str:
    command = [sys.executable, str(path)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(
        command, check=True, capture_output=True, text=True, timeout=120, env=environment
    )
    return done.stdout


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: path.name)
def test_example_runs(path: Path) -> None:
    assert run_file(path)


@pytest.mark.gpu
def test_the_cuda_plugin_runs_and_replays() -> None:
    printed = run_file(ROOT / "examples" / "02_cuda_plugin.py")
    assert printed.startswith("[12.0, 14.0, 16.0] StepStats(eager=1, replays=2, captures=1")


def test_the_embedding_guide_works_as_written() -> None:
    guide = (ROOT / "docs" / "embedding.md").read_text(encoding="utf-8")
    assert "[" in run(re.findall(r"```python\n(.*?)```", guide, re.DOTALL)[0])


def test_readme_shows_the_first_example_and_what_it_prints() -> None:
    program = re.findall(r"```python\n(.*?)```", README, re.DOTALL)[0]
    example = PROGRAMS[0].read_text(encoding="utf-8")
    assert program.strip() == example.split('"""', maxsplit=2)[2].strip()
    selection = run(program).split(" on ", maxsplit=1)[0]
    assert selection in README


@pytest.mark.parametrize("target", ["run", "test", "check", "bench", "gpu"])
def test_readme_names_the_targets_of_the_makefile(target: str) -> None:
    assert f"`make {target}`" in README
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)


def test_the_plugin_guide_works_as_written() -> None:
    guide = (ROOT / "docs" / "adding-a-kernel.md").read_text(encoding="utf-8")
    snippet = re.findall(r"```python\n(.*?)```", guide, re.DOTALL)[0]
    program = f"""
import numpy as np
from nxrt import CpuProvider, Graph, MemoryGovernor, Node, Session

provider = CpuProvider()
{snippet}
graph = Graph(
    (Node("Double", ("x",), ("y",), "com.acme"),), {{"x": TensorSpec(DType.F32, (3,))}}, ("y",)
)
with Session(graph, [provider], MemoryGovernor()) as session, session.bind() as binding:
    binding.write("x", np.arange(3, dtype=np.float32))
    session.run(binding)
    print(binding.read("y").tolist())
"""
    assert run(program).strip() == "[0.0, 2.0, 4.0]"
