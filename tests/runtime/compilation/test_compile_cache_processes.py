"""Several processes on one cache folder: one compilation, whole entries, and no lock that outlives
its holder.

NXRT_CACHE_STRESS=10 does ten times as much.
"""

import random
import signal
import time
from pathlib import Path

import pytest

from nxrt.runtime.compilation.cache_folder import CacheFolder
from nxrt.runtime.compilation.cache_upkeep import check_entries, tidy
from nxrt.runtime.compilation.compile_cache import CompileCache
from tests.helpers.cache_processes import (
    OPTIONS,
    STRESS,
    Crowd,
    StubCompiler,
    code_of,
    ended,
    source_of,
    start_together,
)

pytestmark = pytest.mark.slow

TEXTS = [f"text{number}" for number in range(20)]


def problems(folder: Path) -> list[str]:
    return [checked.problem for checked in check_entries(CacheFolder(folder)) if checked.problem]


def leftovers(folder: Path) -> list[str]:
    return [file.name for file in CacheFolder(folder).files() if file.kind != "entry"]


def kill_at_random(crowd: Crowd, generator: random.Random) -> bool:
    """Start them all, kill one at some moment, see the others end well; say whether it was hit."""
    processes = crowd.start()
    victim = generator.randrange(crowd.num_processes)
    time.sleep(generator.uniform(0.0, 0.15))
    processes[victim].kill()
    codes = ended(processes)
    is_hit = codes[victim] == -signal.SIGKILL  # or it was done before
    codes[victim] = 0
    assert codes == [0] * crowd.num_processes
    return is_hit


def test_32_processes_with_one_key_compile_once(tmp_path: Path) -> None:
    crowd = Crowd(tmp_path / "cache", ["text"], num_processes=32, elapsed_s=0.2)
    assert crowd.run() == [0] * 32
    assert crowd.compiled() == ["text"]
    assert leftovers(crowd.folder) == []


def test_32_processes_with_32_keys_compile_each_once(tmp_path: Path) -> None:
    texts = [f"text{number}" for number in range(32)]
    crowd = Crowd(tmp_path / "cache", texts, num_processes=32, elapsed_s=0.005)
    assert crowd.run() == [0] * 32
    assert sorted(crowd.compiled()) == sorted(texts)
    assert (problems(crowd.folder), leftovers(crowd.folder)) == ([], [])


def test_cold_processes_and_threads_share_one_entry(tmp_path: Path) -> None:
    crowd = Crowd(tmp_path / "cache", ["text"], num_processes=8, num_threads=8)
    assert crowd.run() == [0] * 8
    assert crowd.compiled() == ["text"]
    again = Crowd(tmp_path / "cache", TEXTS, num_processes=8, num_threads=8)
    assert again.run() == [0] * 8
    assert sorted(again.compiled()) == sorted(["text", *TEXTS])
    assert len(check_entries(CacheFolder(crowd.folder))) == 21
    assert (problems(crowd.folder), leftovers(crowd.folder)) == ([], [])


def test_cold_processes_and_threads_share_what_nvrtc_made(tmp_path: Path) -> None:
    kernels = [f'extern "C" __global__ void k(int* p) {{ *p = {n}; }}' for n in range(3)]
    crowd = Crowd(tmp_path / "cache", kernels, 8, 8, is_nvrtc=True)
    kill_at_random(crowd, random.Random(3))
    assert crowd.run() == [0] * 8
    # Whoever is killed may have been at all of them at once, a thread each.
    assert len(crowd.compiled()) <= 2 * len(kernels)
    assert len(check_entries(CacheFolder(crowd.folder))) == 3
    assert problems(crowd.folder) == []


def test_random_kills_leave_no_wrong_entry_and_no_lock(tmp_path: Path) -> None:
    generator = random.Random(7)
    num_hits = 0
    for number in range(10 * STRESS):
        texts = [f"{text}-{number}" for text in TEXTS[:6]]
        crowd = Crowd(tmp_path / "cache", texts, 8, 8, elapsed_s=0.01, nbytes=200_000)
        num_hits += kill_at_random(crowd, generator)
        assert problems(crowd.folder) == []
        assert crowd.run() == [0] * 8
        assert crowd.compiled().count(texts[0]) <= 2
    assert num_hits > 0
    assert problems(crowd.folder) == []
    tidy(CacheFolder(crowd.folder), min_age_s=0)
    assert leftovers(crowd.folder) == []


def test_the_lock_of_a_killed_process_is_free_at_once(tmp_path: Path) -> None:
    crowd = Crowd(tmp_path / "cache", ["text"], num_processes=1, elapsed_s=60)
    for _ in range(5 * STRESS):
        crowd.journal.unlink(missing_ok=True)
        (holder,) = crowd.start()
        while not crowd.compiled():
            time.sleep(0.01)
        holder.kill()
        ended([holder])
        begin = time.monotonic()
        cache = CompileCache(StubCompiler(crowd.journal, 0), crowd.folder)
        assert cache.get(source_of("text"), OPTIONS) == code_of("text")
        assert time.monotonic() - begin < 5
        assert cache.stats.lock_timeouts == 0
        (entry,) = crowd.folder.glob("*.cubin")
        entry.unlink()
    assert leftovers(crowd.folder) == []


def test_a_lock_that_is_not_given_up_costs_one_compilation(tmp_path: Path) -> None:
    crowd = Crowd(tmp_path / "cache", ["text"], num_processes=1, elapsed_s=60)
    (holder,) = crowd.start()
    while not crowd.compiled():
        time.sleep(0.01)
    cache = CompileCache(StubCompiler(crowd.journal, 0), crowd.folder, lock_timeout_s=0.1)
    assert cache.get(source_of("text"), OPTIONS) == code_of("text")
    assert (cache.stats.lock_timeouts, cache.stats.compilations) == (1, 1)
    holder.kill()
    ended([holder])


def test_four_writers_stay_within_the_limit(tmp_path: Path) -> None:
    limit = 1_000_000
    crowds = [
        Crowd(tmp_path / "cache", [f"{writer}-{n}" for n in range(30)], 4, 1, 0, 50_000, limit)
        for writer in range(4)
    ]
    assert ended(start_together(crowds)) == [0] * 4
    held = sum(path.stat().st_size for path in (tmp_path / "cache").rglob("*") if path.is_file())
    assert 0.5 * limit < held <= 1.1 * limit
    assert (problems(tmp_path / "cache"), leftovers(tmp_path / "cache")) == ([], [])
