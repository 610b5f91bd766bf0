"""What every command shares in talking to a terminal, a file or a pipe.

No command is here, and nothing of what they print.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

READER_LEFT = 141


class Output(Console):
    """Leave a reader that went away to `reader_may_leave`; rich would exit with 1 by itself."""

    def on_broken_pipe(self) -> None:
        """Hand the matter on."""
        self.quiet = True
        raise BrokenPipeError


@contextmanager
def reader_may_leave() -> Iterator[None]:
    """End quietly, as a program that SIGPIPE ended, where nobody reads the output any more."""
    try:
        yield
    except BrokenPipeError:
        drop_output()
        raise typer.Exit(READER_LEFT) from None


def drop_output() -> None:
    """Send what is still buffered nowhere."""
    # It would fail once more when the interpreter ends, and change its code.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def progress_bar() -> Progress:
    """Return a bar that shows only where somebody watches."""
    # On the error stream, so that --json can be piped.
    console = Console(stderr=True)
    return Progress(
        TextColumn("{task.description:>6}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
