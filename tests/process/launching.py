"""Start the scripts in `children`, wait a bounded time for them, and say how they ended."""

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
SEARCH_PATH = os.pathsep.join([str(ROOT), *filter(None, sys.path)])
"""What a child imports from: whatever this process does, wherever it was installed."""
CHILDREN = Path(__file__).parent / "children"
TIMEOUT_S = 60

NUM_RUNS = int(os.environ.get("NXRT_PROCESS_RUNS", "1"))
"""How often each way to end a process is tried."""


@dataclass(frozen=True)
class Ended:
    """Say how a child ended: what it returned, and what it wrote."""

    code: int
    out: str
    err: str


def run_child(
    script: str,
    *args: object,
    options: Sequence[str] = (),
    environ: Mapping[str, str] | None = None,
    when_ready: signal.Signals | None = None,
) -> Ended:
    """Run a script of `children` to its end.

    Args:
        script: its name without the ending.
        args: what it is given.
        options: the interpreter's.
        environ: the whole environment; this process's when left out.
        when_ready: a signal that is sent once the child has written its first line.
    """
    path = str(CHILDREN / f"{script}.py")
    return run_python(path, *args, options=options, environ=environ, when_ready=when_ready)


def run_python(
    *args: object,
    options: Sequence[str] = (),
    environ: Mapping[str, str] | None = None,
    when_ready: signal.Signals | None = None,
) -> Ended:
    """Run the interpreter to its end; as `run_child`."""
    command = [sys.executable, *options, *map(str, args)]
    whole = {**(os.environ if environ is None else environ), "PYTHONPATH": SEARCH_PATH}
    with subprocess.Popen(
        command,
        cwd=ROOT,
        env=whole,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        first = ""
        if when_ready is not None:
            assert process.stdout is not None
            first = process.stdout.readline()
            process.send_signal(when_ready)
        try:
            out, err = process.communicate(timeout=TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            out, err = process.communicate()
            raise AssertionError(f"a child hangs; it wrote:\n{out}\n{err}") from None
    return Ended(process.returncode, first + out, err)


def run_often(count: int, *args: object, **options: object) -> list[Ended]:
    """Run a child `count` times, as many at once as there are cores."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        runs = [pool.submit(run_child, *args, **options) for _ in range(count)]  # type: ignore[arg-type]
        return [run.result() for run in runs]
