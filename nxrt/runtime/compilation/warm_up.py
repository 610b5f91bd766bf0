"""Compiling ahead of time: many sources into one cache, several at a time.

It loads nothing and needs no driver; who wants what compiled is the caller's matter.
"""

import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

from nxrt.errors import NxrtError
from nxrt.runtime.compilation.compile_cache import CompileCache
from nxrt.runtime.compilation.compiler import CompileOptions
from nxrt.runtime.compilation.source import load_source


@dataclass(frozen=True)
class WarmUpJob:
    """Name one thing to compile.

    Args:
        path: the .cu file.
        options: what it is compiled for.
    """

    path: Path
    options: CompileOptions


@dataclass(frozen=True)
class WarmUpResult:
    """Report one job.

    Args:
        job: what was asked for.
        origin: "compiler", or "disk" or "memory" where it was there; empty where it failed.
        nbytes: of the code.
        elapsed_ms: from its start to its end.
        error: why there is no code, empty where there is.
    """

    job: WarmUpJob
    origin: str
    nbytes: int
    elapsed_ms: float
    error: str = ""


def warm_up(
    cache: CompileCache,
    jobs: Sequence[WarmUpJob],
    *,
    num_workers: int | None = None,
    on_done: Callable[[WarmUpResult], None] = lambda _: None,
) -> list[WarmUpResult]:
    """Compile what is not there yet; one that fails does not stop the others.

    Threads are enough: NVRTC compiles several sources at a time, and Python is not held up. Two
    threads on two cores took half the time of one (NVRTC 13.0.88, 2026-12-01).

    Args:
        cache: where it goes.
        jobs: what to compile.
        num_workers: threads; one for each core when left out.
        on_done: called on this thread after each job, in the order of their ends.

    Returns:
        The results, in the order of the jobs.
    """
    pool = ThreadPoolExecutor(num_workers or usable_cores())
    try:
        futures = [pool.submit(_compiled, cache, job) for job in jobs]
        for future in as_completed(futures):
            on_done(future.result())
        return [future.result() for future in futures]
    finally:
        # An interrupted command waits for what is being compiled, and not for what is not begun.
        pool.shutdown(cancel_futures=True)


def usable_cores() -> int:
    """Return how many cores this process may run on."""
    return len(os.sched_getaffinity(0))


def _compiled(cache: CompileCache, job: WarmUpJob) -> WarmUpResult:
    start = time.perf_counter()
    origin, nbytes, problem = "", 0, ""
    try:
        fetched = cache.fetch(load_source(job.path), job.options)
        origin, nbytes = fetched.origin, len(fetched.code)
    except NxrtError as error:
        problem = str(error)
    elapsed_ms = (time.perf_counter() - start) * 1e3
    return WarmUpResult(job, origin, nbytes, elapsed_ms, problem)
