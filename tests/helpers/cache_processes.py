"""Processes that use one compile cache folder, with a compiler that writes down what it does."""

import hashlib
import multiprocessing
import os
import random
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path

from nxrt.runtime.compilation.compile_cache import CompileCache
from nxrt.runtime.compilation.compiler import CompiledKernel, CompileOptions, Compiler
from nxrt.runtime.compilation.source import KernelSource

OPTIONS = CompileOptions("sm_90a")

CONTEXT = multiprocessing.get_context("forkserver")
"""Every process is of its own, and the imports are paid once."""
CONTEXT.set_forkserver_preload([__name__])

STRESS = int(os.environ.get("NXRT_CACHE_STRESS", "1"))
"""Multiplies what the stress tests do; 1 is for every day."""


def source_of(text: str) -> KernelSource:
    return KernelSource("k.cu", text)


def code_of(text: str, nbytes: int = 20_000) -> bytes:
    """Return bytes that only this text gives: half of one and half of another would show."""
    digest = hashlib.sha256(text.encode()).digest()
    return (digest * (nbytes // len(digest) + 1))[:nbytes]


class StubCompiler(Compiler):
    """Give each text its code after a while, and append the text to a journal."""

    def __init__(self, journal: Path, elapsed_s: float = 0.02, nbytes: int = 20_000) -> None:
        super().__init__()
        self._journal = journal
        self._elapsed_s = elapsed_s
        self._nbytes = nbytes

    @property
    def version(self) -> str:
        return "13.0"

    @property
    def identity(self) -> str:
        return "stub"

    def compile(self, source: KernelSource, options: CompileOptions) -> CompiledKernel:
        with self._journal.open("a") as journal:
            journal.write(f"{source.text}\n")
        threading.Event().wait(self._elapsed_s)
        assert options.arch == OPTIONS.arch
        return CompiledKernel(code_of(source.text, self._nbytes), "")


class JournalingCompiler(Compiler):
    """Be NVRTC, and append each text to a journal."""

    def __init__(self, journal: Path) -> None:
        super().__init__()
        self._journal = journal

    def compile(self, source: KernelSource, options: CompileOptions) -> CompiledKernel:
        with self._journal.open("a") as journal:
            journal.write(f"{source.name}\n")
        return super().compile(source, options)


@dataclass(frozen=True)
class Crowd:
    """Describe processes that start together and ask one folder for the same sources.

    Args:
        folder: the cache's.
        texts: of the sources; each thread asks for all of them in an order of its own.
        num_processes, num_threads: how many, and in each how many.
        elapsed_s: of one compilation.
        nbytes: of the code of each.
        max_nbytes: the folder's limit.
        is_nvrtc: compile really; then the texts must be CUDA, and the code must be a cubin.
    """

    folder: Path
    texts: Sequence[str]
    num_processes: int
    num_threads: int = 1
    elapsed_s: float = 0.02
    nbytes: int = 20_000
    max_nbytes: int = 256 * 1024**2
    is_nvrtc: bool = False

    def compiler(self) -> Compiler:
        if self.is_nvrtc:
            return JournalingCompiler(self.journal)
        return StubCompiler(self.journal, self.elapsed_s, self.nbytes)

    def is_right(self, text: str, code: bytes) -> bool:
        if self.is_nvrtc:
            return code.startswith(b"\x7fELF")
        return code == code_of(text, self.nbytes)

    @property
    def journal(self) -> Path:
        return self.folder.with_suffix(".journal")

    def compiled(self) -> list[str]:
        """Return the texts that were compiled, by anybody, as often as they were."""
        return self.journal.read_text().split() if self.journal.exists() else []

    def start(self) -> list[BaseProcess]:
        return start_together([self] * self.num_processes)

    def run(self) -> list[int | None]:
        """Let them start, wait for all, and return how they ended."""
        return ended(self.start())


def start_together(crowds: Sequence[Crowd]) -> list[BaseProcess]:
    """Start one process for each crowd given, and let them go when all are there."""
    with tempfile.TemporaryDirectory() as meeting_point:
        place = Path(meeting_point)
        processes: list[BaseProcess] = [
            CONTEXT.Process(target=ask, args=(crowd, place, seed))
            for seed, crowd in enumerate(crowds)
        ]
        for process in processes:
            process.start()
        _wait_for(lambda: len(list(place.iterdir())) == len(crowds))
    return processes


def _wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError("the processes did not start")
        time.sleep(0.002)


def ended(processes: Sequence[BaseProcess]) -> list[int | None]:
    for process in processes:
        process.join(60)
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
        process.join()
        process.close()
    return codes


def ask(crowd: Crowd, meeting_point: Path, seed: int) -> None:
    """Ask from every thread for every source; exit with 1 where an answer is wrong."""
    cache = CompileCache(crowd.compiler(), crowd.folder, max_nbytes=crowd.max_nbytes)
    wrong: list[str] = []

    def ask_all(number: int) -> None:
        texts = list(crowd.texts)
        random.Random(seed * 1000 + number).shuffle(texts)
        for text in texts:
            try:
                if not crowd.is_right(text, cache.get(source_of(text), OPTIONS)):
                    wrong.append(text)
            except BaseException as error:  # noqa: BLE001  (whatever it is, the test must hear of it)
                wrong.append(f"{text}: {error!r}")

    threads = [threading.Thread(target=ask_all, args=(n,)) for n in range(crowd.num_threads)]
    (meeting_point / str(seed)).touch()
    _wait_for(lambda: not meeting_point.exists())
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if cache.stats.compilations > len(crowd.texts):
        wrong.append("one process compiled a source twice")
    if wrong:
        print(*wrong, sep="\n", file=sys.stderr)
        sys.exit(1)
