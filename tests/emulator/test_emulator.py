"""Check that the emulation runs what is right, in every order, and names what is wrong."""

import ctypes
from collections.abc import Callable
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.helpers.emulated import NUM_ORDERS, EmulatedModule, EmulationError

SOURCE = Path(__file__).with_name("emulated_toys.cu")
BUILT = Path(__file__).parents[2] / ".pytest_cache" / "emulator"

Launch = Callable[..., None]
Defines = tuple[tuple[str, str], ...]


HERE: Defines = ()
EVERYWHERE: Defines = (("EMULATOR_PORTABLE", "1"),)


@cache
def toys(defines: Defines) -> EmulatedModule:
    return EmulatedModule(SOURCE, defines, BUILT)


@pytest.fixture(params=[HERE, EVERYWHERE], ids=["here", "everywhere"])
def launch(request: pytest.FixtureRequest) -> Launch:
    """Launch a kernel on arrays: by name, then grid and block in one dimension."""

    def run(
        name: str,
        num_blocks: int,
        num_threads: int,
        *arrays: np.ndarray[Any, Any],
        shared_nbytes: int = 0,
    ) -> None:
        pointers = [ctypes.c_uint64(array.ctypes.data) for array in arrays]
        params = (ctypes.c_void_p * max(1, len(arrays)))(*map(ctypes.addressof, pointers))
        grid, block = ((ctypes.c_uint * 3)(count, 1, 1) for count in (num_blocks, num_threads))
        toys(request.param).launch(name, params, grid, block, shared_nbytes)

    return run


@pytest.mark.parametrize("num_threads", [1, 31, 32, 33, 1024])
def test_a_block_with_its_barriers_is_right_in_every_order(
    launch: Launch, num_threads: int
) -> None:
    values = np.arange(7, 7 + num_threads, dtype=np.uint32)
    for _ in range(NUM_ORDERS):
        target = np.zeros(num_threads, np.uint32)
        launch("block_sums", 1, num_threads, values, target)
        assert target.tolist() == np.cumsum(values).tolist()


def test_a_missing_barrier_gives_other_values_in_some_order(launch: Launch) -> None:
    values = np.arange(128, dtype=np.uint32)
    results = set()
    for _ in range(NUM_ORDERS):
        target = np.zeros(128, np.uint32)
        launch("without_a_barrier", 1, 128, values, target)
        results.add(target.tobytes())
    assert len(results) > 1


def test_blocks_may_wait_for_each_other(launch: Launch) -> None:
    for _ in range(NUM_ORDERS):
        arrived, target = np.zeros(1, np.uint32), np.full(9, 99, np.uint32)
        launch("meet", 9, 64, arrived, target)
        assert sorted(target.tolist()) == list(range(9))


def test_warps_exchange_words(launch: Launch) -> None:
    words, below, above = (np.zeros(32, np.uint32) for _ in range(3))
    for _ in range(NUM_ORDERS):
        launch("warp_words", 1, 32, words, below, above)
        ballot = sum(1 << lane for lane in range(0, 32, 3))
        assert words[:5].tolist() == [ballot, 1, 0, 31 * 16, 31]
        assert below.tolist() == [0, *range(31)]
        assert above.tolist() == [lane + 4 if lane % 8 < 4 else lane for lane in range(32)]


@pytest.mark.parametrize(
    ("name", "num_threads", "message"),
    [
        ("wait_for_nobody", 32, "every thread waits for another"),
        ("two_barriers", 128, "have ended or wait elsewhere"),
        ("shuffle_with_the_ended", 32, "have ended or wait elsewhere"),
        ("shuffle_outside_the_mask", 32, "not in the mask"),
        ("keep_a_word", 32, "asked for no dynamic shared memory"),
        ("trapped", 32, r"trapped \(block 0,0,0 thread 3,0,0\)"),
    ],
)
def test_what_would_hang_or_be_undefined_is_named(
    launch: Launch, name: str, num_threads: int, message: str
) -> None:
    target = np.zeros(32, np.uint32)
    for _ in range(NUM_ORDERS):
        with pytest.raises(EmulationError, match=f"{name}, in order [012]: .*{message}"):
            launch(name, 1, num_threads, target, target)
    test_blocks_may_wait_for_each_other(launch)  # the next launch is none the worse


def test_blocks_have_shared_memory_of_their_own(launch: Launch) -> None:
    for _ in range(NUM_ORDERS):
        arrived, target = np.zeros(1, np.uint32), np.zeros(5, np.uint32)
        launch("keep_a_word", 5, 64, arrived, target, shared_nbytes=256)
        assert target.tolist() == [10 * block + 63 for block in range(5)]


def test_atomics_return_what_was_there(launch: Launch) -> None:
    returned, left = np.zeros(6, np.uint32), np.zeros(6, np.uint32)
    launch("atomics", 1, 1, returned, left)
    assert returned.tolist() == [12, 12, 12, 12, 12, 24]
    assert left.tolist() == [15, 15, 20, 12, 5, 7]


def test_bits_are_counted(launch: Launch) -> None:
    counts = np.zeros(9, np.uint32)
    launch("bit_counts", 1, 1, counts)
    assert counts.tolist() == [0, 32, 0, 1, 31, 1, 5, 16, 5]


def test_a_block_votes(launch: Launch) -> None:
    for _ in range(NUM_ORDERS):
        counted = np.zeros(3, np.uint32)
        launch("block_votes", 1, 77, counted)
        assert counted.tolist() == [39, 1, 0]


def test_directed_rounding_is_that_of_the_real_number(launch: Launch) -> None:
    rng = np.random.default_rng(3)
    count = 512
    a, b, c = (
        np.ldexp(rng.standard_normal(count), rng.integers(-60, 60, count)).astype(np.float32)
        for _ in range(3)
    )
    a[:4], b[:4], c[:4] = [0, 1, -1, 0], [0, 0, 0, 5], [0, 0, 0, 0]
    found = np.zeros((5, count), np.float32)
    launch("directed", 1, count, a, b, c, found)
    for i in range(count):
        x, y, z = (Fraction(float(values[i])) for values in (a, b, c))
        assert found[0, i] == rounded_up(x + y)
        assert found[1, i] == -rounded_up(-(x + y))
        assert found[2, i] == rounded_up(x * y)
        assert found[3, i] == rounded_up(x * y + z)
        root = Fraction(float(found[4, i]))
        below = Fraction(float(np.nextafter(found[4, i], np.float32(-1))))
        assert root * root >= abs(z)
        assert root == 0 or below * below < abs(z)


def rounded_up(exact: Fraction) -> np.float32:
    """Return the least float32 that is not below."""
    with np.errstate(over="ignore", under="ignore"):
        near = np.float32(float(exact))
        while np.isfinite(near) and Fraction(float(near)) < exact:
            near = np.nextafter(near, np.float32(np.inf))
        while Fraction(float(below := np.nextafter(near, np.float32(-np.inf)))) >= exact:
            near = below
    return near


def test_letters_are_those_of_the_parameters() -> None:
    assert toys(HERE).letters("meet") == "PP"
    assert toys(HERE).letters("trapped") == ""
