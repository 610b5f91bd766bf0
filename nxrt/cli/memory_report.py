"""`nxrt run --memory-report`: where the report goes, and that it is written whatever happens.

What it shows is drawn by `memory_picture`; the raw events are the governor's own.
"""

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from nxrt.cli.memory_picture import as_html, as_svg
from nxrt.cli.recording import Recording
from nxrt.errors import InvalidInputError
from nxrt.memory.events import write_json_lines

SUFFIXES = (".html", ".svg", ".jsonl")
OPTION = "--memory-report"

ResultT = TypeVar("ResultT")


def check_report_path(path: Path) -> None:
    """Refuse a file of an unknown kind, or one that cannot be written; leave none behind.

    Raises:
        InvalidInputError: saying which of the two it is.
    """
    if path.suffix not in SUFFIXES:
        accepted = f"a file that ends with {', '.join(SUFFIXES[:-1])} or {SUFFIXES[-1]}"
        raise InvalidInputError(OPTION, found=repr(str(path)), accepted=accepted)
    if path.is_dir():
        raise _unwritable(path, "Is a directory")
    partial = _partial(path)
    try:
        partial.touch()
        partial.unlink()
    except OSError as error:
        raise _unwritable(path, error.strerror or str(error)) from error


def run_recorded(run: Callable[[Recording], ResultT], title: str, path: Path | None) -> ResultT:
    """Run something and write the report of it, also of a run that fails.

    Args:
        run: gets the recording to fill.
        title: what runs, for the report.
        path: where the report goes, None for none.

    Raises:
        InvalidInputError: the run ended well and the report could not be written.
        Exception: whatever the run raised, if it did.
    """
    if path is None:
        return run(Recording())
    recording = Recording.of(title)
    try:
        result = run(recording)
    except BaseException as error:
        recording.failure = str(error) or type(error).__name__
        with suppress(InvalidInputError):  # the run's own error is the one to tell
            write_report(recording, path)
        raise
    write_report(recording, path)
    return result


def write_report(recording: Recording, path: Path) -> None:
    """Write the report in the form that the suffix names; the file is whole or not there.

    Raises:
        InvalidInputError: it cannot be written.
    """
    try:
        if path.suffix == ".jsonl":
            write_json_lines(recording.events, path)
            return
        report = as_html(recording) if path.suffix == ".html" else as_svg(recording)
        partial = _partial(path)
        try:
            partial.write_text(report, encoding="utf-8")
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)
    except OSError as error:
        raise _unwritable(path, error.strerror or str(error)) from error


def _partial(path: Path) -> Path:
    return path.with_name(f"{path.name}.{os.getpid()}.part")


def _unwritable(path: Path, reason: str) -> InvalidInputError:
    return InvalidInputError(OPTION, found=f"{path}: {reason}", accepted="a writable file")
