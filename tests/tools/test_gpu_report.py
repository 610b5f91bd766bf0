"""The evidence of a GPU machine: digests, counts and verdicts that can say no."""

import hashlib
from pathlib import Path

import pytest

from tools import gpu_report
from tools.sanitize import SanitizerResult, parse
from tools.source_digest import source_digest

CLEAN = SanitizerResult("memcheck", 0, 10, 0)


def test_the_digest_covers_paths_and_bytes_in_order(tmp_path: Path) -> None:
    (tmp_path / "nxrt" / "a").mkdir(parents=True)
    files = {"nxrt/a/k.cu": b"1", "nxrt/a/k.cuh": b"2", "nxrt/b.py": b"3", "nxrt/c.txt": b"4"}
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    expected = hashlib.sha256(b"nxrt/a/k.cu1nxrt/a/k.cuh2nxrt/b.py3").hexdigest()
    assert source_digest(tmp_path) == expected


def junit(tmp_path: Path, counts: str) -> Path:
    path = tmp_path / "tests.xml"
    path.write_text(f"<testsuites><testsuite {counts}/></testsuites>")
    return path


def test_counts_separate_passes_failures_and_skips(tmp_path: Path) -> None:
    path = junit(tmp_path, 'tests="10" failures="1" errors="2" skipped="3"')
    assert gpu_report.counts(path) == {"passed": 4, "failed": 3, "skipped": 3}


def test_a_run_that_left_no_counts_has_failed(tmp_path: Path) -> None:
    assert gpu_report.counts(tmp_path / "none.xml")["failed"] == 1


@pytest.mark.parametrize(
    ("passed", "failed", "skipped", "sanitizers", "code"),
    [
        (5, 0, 0, [CLEAN], 0),
        (5, 0, 0, [], 0),
        (0, 0, 0, [CLEAN], 1),
        (5, 1, 0, [CLEAN], 1),
        (5, 0, 1, [CLEAN], 1),
        (5, 0, 0, [SanitizerResult("racecheck", 1, 10, 0)], 1),
        (5, 0, 0, [SanitizerResult("racecheck", 0, 0, 0)], 1),
        (5, 0, 0, [SanitizerResult("racecheck", 0, 10, 70)], 1),
    ],
)
def test_only_complete_evidence_is_good(
    passed: int, failed: int, skipped: int, sanitizers: list[SanitizerResult], code: int
) -> None:
    tests = {"passed": passed, "failed": failed, "skipped": skipped}
    assert gpu_report.exit_code(tests, sanitizers) == code


def test_a_sanitizers_findings_are_counted() -> None:
    text = "3 passed in 1s\n========= ERROR SUMMARY: 2 errors\n"
    assert parse("memcheck", text, 70) == SanitizerResult("memcheck", 2, 3, 70)


def test_a_racechecks_hazards_are_counted() -> None:
    text = "3 passed\n========= RACECHECK SUMMARY: 4 hazards displayed (4 errors, 0 warnings)\n"
    assert parse("racecheck", text, 0).num_errors == 4


def test_a_sanitizer_that_said_nothing_is_not_clean() -> None:
    assert not parse("memcheck", "3 passed in 1s", 0).is_clean
