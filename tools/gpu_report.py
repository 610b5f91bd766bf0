"""Gather the evidence of one GPU machine: `make gpu`. Needs a CUDA device and no network.

Runs the tests marked gpu, the same tests under compute-sanitizer where it is installed, and the
benchmarks; writes benchmarks/results/<device>.json and, beside it, the picture of time against
keys. Logs go to gpu-logs/. A Python package that the machine lacks is taken from wheels/ when that
folder is there.
"""

import dataclasses
import json
import os
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks import host_cost, peers
from benchmarks.suite import RESULTS, WIDTH, file_name, measure_device
from nxrt import CudaProvider
from nxrt.runtime import driver
from nxrt.runtime.compilation.compiler import Compiler
from tools.sanitize import TOOLS, SanitizerResult, find_sanitizer, run_sanitizer
from tools.source_digest import ROOT, source_digest

LOGS = ROOT / "gpu-logs"
CACHE = LOGS / "compile-cache"


def main() -> int:
    """Run everything; return 0 only where every test ran and passed and nothing was found."""
    console = Console(width=WIDTH)
    status = driver.probe()
    if not status.is_available:
        console.print(f"nothing to report: {status.reason}; {status.remedy}")
        return 1
    LOGS.mkdir(exist_ok=True)
    RESULTS.mkdir(exist_ok=True)
    with CudaProvider() as provider:
        name = file_name(provider.capabilities.name)
        day = datetime.now(UTC).date()
        report = {"source_digest": source_digest(), "date": day.isoformat(), **describe(provider)}
        console.rule(f"{provider.capabilities.name}: tests")
        warm_cache()
        tests = run_tests(LOGS / "tests.xml")
        sanitizers = run_sanitizers(console)
        report |= {
            "tests": tests,
            "sanitizers": [dataclasses.asdict(result) for result in sanitizers],
            "sanitizer_errors": sum(result.num_errors for result in sanitizers),
        }
        write(report, name)
        console.rule("benchmarks")
        figures = measure_device(provider, console)
        figures.print(console)
        report |= {**figures.as_json(), "picture": figures.write_picture(day).name}
        write(report, name)
        host = host_cost.measure_host_cost(provider)
        console.print(host_cost.as_table(host))
        cold = host_cost.measure_cold_start()
        console.print(cold)
        costs = [dataclasses.asdict(row) | {"is_met": row.is_met} for row in host]
        report |= {"host_cost": costs, "cold_start": dataclasses.asdict(cold)}
        path = write(report, name, is_complete=True)
    console.print(summary(tests, sanitizers))
    console.print(f"written: {path.relative_to(ROOT)}")
    return exit_code(tests, sanitizers)


def write(report: dict[str, Any], name: str, *, is_complete: bool = False) -> Path:
    """Write what there is so far, so that a failure of a later part costs that part alone."""
    path = RESULTS / f"{name}.json"
    text = json.dumps(report | {"is_complete": is_complete}, indent=2)
    path.write_text(text + "\n", encoding="utf-8")
    return path


def run_tests(junit: Path) -> dict[str, int]:
    """Run the tests marked gpu, with a missing device counting as a failure; return the counts."""
    environment = os.environ | {"NXRT_REQUIRE_CUDA": "1", "NXRT_TEST_CACHE_DIR": str(CACHE)}
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", f"--junitxml={junit}", "tests"]
    junit.unlink(missing_ok=True)
    subprocess.run(command, env=environment, cwd=ROOT, check=False)
    return counts(junit)


def counts(junit: Path) -> dict[str, int]:
    """Return passed, failed and skipped from a JUnit file; without one, one failure."""
    if not junit.is_file():
        return {"passed": 0, "failed": 1, "skipped": 0}
    suite = next(ET.parse(junit).getroot().iter("testsuite"))
    number = {name: int(suite.get(name, 0)) for name in ("tests", "failures", "errors", "skipped")}
    failed = number["failures"] + number["errors"]
    passed = number["tests"] - failed - number["skipped"]
    return {"passed": passed, "failed": failed, "skipped": number["skipped"]}


def run_sanitizers(console: Console) -> list[SanitizerResult]:
    """Run the quick GPU tests under each tool."""
    sanitizer = find_sanitizer()
    if sanitizer is None:
        console.print("compute-sanitizer is not installed: not run")
        return []

    def run(tool: str) -> SanitizerResult:
        started = time.monotonic()
        result = run_sanitizer(sanitizer, tool, LOGS / f"{tool}.log", CACHE)
        console.print(result, f"{time.monotonic() - started:,.0f} s")
        return result

    console.rule("compute-sanitizer")
    names = ", ".join(TOOLS)
    with (
        console.status(f"{names} are running; their output goes to gpu-logs"),
        ThreadPoolExecutor(len(TOOLS)) as pool,
    ):
        return list(pool.map(run, TOOLS))


def warm_cache() -> None:
    """Compile every kernel at once, so that no test waits for it; what fails is shown by tests."""
    command = [sys.executable, "-m", "nxrt", "cache", "warm", "--dir", str(CACHE)]
    subprocess.run(command, cwd=ROOT, check=False)


def describe(provider: CudaProvider) -> dict[str, Any]:
    """Return what the figures were measured on."""
    has = provider.capabilities
    return {
        "device": has.name,
        "arch": has.arch,
        "multiprocessors": has.num_multiprocessors,
        "memory_bytes": has.total_memory,
        "driver": driver.probe().version,
        "nvrtc": Compiler().version,
        "torch": peers.torch_version(),
    }


def summary(tests: dict[str, int], sanitizers: list[SanitizerResult]) -> Table:
    """Return the verdicts for a person."""
    table = Table(title="evidence", title_justify="left", show_header=False)
    table.add_row("tests marked gpu", ", ".join(f"{n} {name}" for name, n in tests.items()))
    for result in sanitizers:
        found = f"{result.num_errors} errors in {result.num_passed} tests"
        table.add_row(result.tool, found if result.is_clean else f"[bold red]{found}, not clean")
    return table


def exit_code(tests: dict[str, int], sanitizers: list[SanitizerResult]) -> int:
    """Return 0 where all is well; a skip is not a pass."""
    is_well = tests["passed"] > 0 and tests["failed"] == tests["skipped"] == 0
    return 0 if is_well and all(result.is_clean for result in sanitizers) else 1


if __name__ == "__main__":
    sys.exit(main())
