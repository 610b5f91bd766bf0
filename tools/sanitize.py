"""Run the GPU tests under compute-sanitizer and count what it finds.

The tests provoke refusals of the driver on purpose, so refused calls are not counted as errors;
wrong memory accesses, races and misused barriers are.
"""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

KERNEL_TESTS = ("tests/kernels", "tests/graphs/test_device_faults.py")
TOOLS: Mapping[str, Sequence[str]] = {
    "memcheck": ("tests/kernels", "tests/graphs", "tests/runtime"),
    "racecheck": KERNEL_TESTS,
    "synccheck": KERNEL_TESTS,
}
"""The tests each tool runs: those that launch kernels of ours, and for memory all that replay."""

_SUMMARY = re.compile(r"(?:ERROR|RACECHECK) SUMMARY: (\d+) (?:error|hazard)")
_PASSED = re.compile(r"(\d+) passed")


@dataclass(frozen=True)
class SanitizerResult:
    """Report one tool: findings, tests that passed under it, and the exit code of the run."""

    tool: str
    num_errors: int
    num_passed: int
    exit_code: int

    @property
    def is_clean(self) -> bool:
        """Say whether tests ran, all passed, and nothing was found."""
        return self.num_errors == 0 and self.exit_code == 0 and self.num_passed > 0


def find_sanitizer() -> str | None:
    """Return the path of compute-sanitizer, None where it is not installed."""
    installed = Path("/usr/local/cuda/bin/compute-sanitizer")
    return shutil.which("compute-sanitizer") or (str(installed) if installed.is_file() else None)


def run_sanitizer(sanitizer: str, tool: str, log: Path, cache: Path) -> SanitizerResult:
    """Run the quick GPU tests under one tool; the whole output goes to `log`.

    Compiled kernels are taken from and kept in `cache`.
    """
    command = [sanitizer, "--tool", tool, "--report-api-errors", "no", "--error-exitcode", "70"]
    # Its backtraces of the host would keep the frames of Python alive, and what they refer to.
    command += ["--show-backtrace", "device"]
    quick = ["-m", "gpu and not slow", "--timeout", "0", "--durations", "20"]
    tests = ["-m", "pytest", "-q", *quick, *TOOLS[tool]]
    environment = os.environ | {
        "NXRT_REQUIRE_CUDA": "1",
        "NXRT_MAX_REPEATS": "2",
        "NXRT_TEST_CACHE_DIR": str(cache),
    }
    with log.open("w", encoding="utf-8") as output:
        run = subprocess.run(
            [*command, sys.executable, *tests],
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            check=False,
        )
    return parse(tool, log.read_text(encoding="utf-8", errors="replace"), run.returncode)


def parse(tool: str, text: str, exit_code: int) -> SanitizerResult:
    """Read a run's output; without a summary the run counts as failed."""
    summaries = [int(number) for number in _SUMMARY.findall(text)]
    passed = _PASSED.search(text)
    return SanitizerResult(
        tool,
        num_errors=sum(summaries),
        num_passed=int(passed[1]) if passed else 0,
        exit_code=exit_code if summaries else exit_code or 1,
    )
