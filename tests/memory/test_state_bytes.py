"""Sizes of sparse attention state: by class, by layer, and what cannot be a size."""

from typing import Any

import numpy as np
import pytest

from nxrt.errors import InvalidInputError, SizeOverflowError
from nxrt.memory.state_bytes import MAX_POSITIONS, StateGroupBytes, StateGroupLayout

KIB, MIB, GIB = 2**10, 2**20, 2**30


def layer(ratio: int, *, batch: int = 1, positions: int = MAX_POSITIONS) -> StateGroupBytes:
    window = min(128, positions)
    return StateGroupLayout.of(
        batch=batch, max_positions=positions, window=window, ratio=ratio
    ).bytes()


def test_a_layer_of_ratio_4_at_a_million_positions() -> None:
    state = layer(4)
    assert state.compressed == int(145.75 * MIB)
    assert state.index == 17 * MIB
    assert (state.carry, state.index_carry) == (64 * KIB, 16 * KIB)


def test_a_layer_of_ratio_128_at_a_million_positions() -> None:
    state = layer(128)
    assert (state.compressed, state.carry) == (4664 * KIB, 512 * KIB)
    assert (state.index, state.index_carry) == (0, 0)


def test_a_layer_without_records_has_its_window_only() -> None:
    assert layer(0, batch=2).by_class() == StateGroupBytes(dense_ring=2 * 128 * 583).by_class()


def test_a_whole_stack_at_a_million_positions() -> None:
    layers = [layer(4)] * 21 + [layer(128)] * 20 + [layer(0)] * 2
    total = sum(layers, StateGroupBytes())
    assert (total.compressed + total.index) / GIB == pytest.approx(3.43, abs=0.005)
    assert (total.carry + total.index_carry) / MIB == pytest.approx(11.6, abs=0.05)
    assert total.dense_ring == 43 * 128 * 583


@pytest.mark.parametrize(("positions", "records"), [(1, 1), (4, 1), (5, 2), (1024, 256)])
def test_the_last_record_may_be_unfinished(positions: int, records: int) -> None:
    state = layer(4, batch=2, positions=positions)
    assert (state.compressed, state.index) == (2 * records * 583, 2 * records * 68)


def test_workspaces_are_scratch_of_at_least_a_byte_each() -> None:
    assert StateGroupBytes.workspace_only([0, 5, 0]) == StateGroupBytes(scratch=7)


def test_the_total_is_exact_and_refused_past_63_bits() -> None:
    half = StateGroupBytes(compressed=2**62, carry=2**62 - 1)
    assert half.total == 2**63 - 1
    with pytest.raises(SizeOverflowError, match="state group bytes"):
        _ = StateGroupBytes(compressed=2**62, carry=2**62).total


@pytest.mark.parametrize("nbytes", [-1, 1.5, True, 2**63])
def test_what_is_no_size_is_refused(nbytes: Any) -> None:
    with pytest.raises(InvalidInputError, match="nbytes"):
        StateGroupBytes(carry=nbytes)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"batch": 0}, "batch"),
        ({"batch": True}, "batch"),
        ({"max_positions": 0}, "max_positions"),
        ({"max_positions": 2**20 + 1}, "max_positions"),
        ({"window": 0}, "window"),
        ({"window": 2**20, "max_positions": 2**19}, "window"),
        ({"ratio": 2}, "ratio"),
        ({"ratio": 4.5}, "ratio"),
    ],
)
def test_what_is_no_layout_is_refused(change: dict[str, Any], name: str) -> None:
    values: dict[str, Any] = {"batch": 1, "max_positions": 2**20, "window": 128, "ratio": 4}
    with pytest.raises(InvalidInputError, match=name):
        StateGroupLayout.of(**(values | change))


def test_a_batch_past_all_memory_is_refused() -> None:
    with pytest.raises(SizeOverflowError, match="compressed bytes"):
        layer(4, batch=2**40)


@pytest.mark.parametrize("name", list(StateGroupBytes().by_class()))
def test_a_class_that_is_no_size_is_named(name: str) -> None:
    with pytest.raises(InvalidInputError, match=rf"nbytes of {name}: got -1"):
        StateGroupBytes(**{name: -1})
    with pytest.raises(SizeOverflowError, match=rf"nbytes of {name}"):
        StateGroupBytes(**{name: 2**63})


def test_classes_come_in_the_order_of_the_contract() -> None:
    names = ["compressed", "carry", "dense_ring", "index", "index_carry", "scratch"]
    assert list(StateGroupBytes().by_class()) == names


def test_every_class_may_be_as_large_as_a_size_can_be() -> None:
    assert StateGroupBytes(scratch=2**63 - 1).total == 2**63 - 1


def test_sums_are_made_class_by_class() -> None:
    left, right = StateGroupBytes(1, 2, 3, 4, 5, 6), StateGroupBytes(10, 20, 30, 40, 50, 60)
    assert left + right == StateGroupBytes(11, 22, 33, 44, 55, 66)
    assert (left + right).total == 231


def test_a_sum_past_63_bits_is_refused() -> None:
    half = StateGroupBytes(index=2**62)
    with pytest.raises(SizeOverflowError, match="nbytes of index"):
        _ = half + half


def test_bytes_are_added_to_bytes_only() -> None:
    with pytest.raises(TypeError):
        _ = StateGroupBytes() + 1


def test_a_numpy_integer_becomes_a_plain_one() -> None:
    """It would wrap around in a sum instead of growing."""
    one = np.int64(2**62)
    nbytes = StateGroupBytes(carry=one, scratch=one)  # type: ignore[arg-type]
    with pytest.raises(SizeOverflowError):
        _ = nbytes.total


def test_no_workspaces_are_no_bytes() -> None:
    assert StateGroupBytes.workspace_only(()) == StateGroupBytes()


@pytest.mark.parametrize("size", [-1, True, 1.5, None])
def test_a_workspace_of_no_size_is_refused(size: Any) -> None:
    with pytest.raises(InvalidInputError, match="nbytes of a workspace"):
        StateGroupBytes.workspace_only([1, size])


def test_workspaces_past_63_bits_together_are_refused() -> None:
    with pytest.raises(SizeOverflowError, match="nbytes of scratch"):
        StateGroupBytes.workspace_only([2**63 - 1, 0])


def test_a_layout_of_two_sequences_with_a_window() -> None:
    state = layer(4, batch=2, positions=1024)
    assert (state.compressed, state.index) == (2 * 256 * 583, 2 * 256 * 68)
    assert (state.carry, state.index_carry) == (2 * 65_536, 2 * 16_384)
    assert state.dense_ring == 2 * 128 * 583
    assert state.scratch == 0


@pytest.mark.parametrize(("positions", "records"), [(1, 1), (128, 1), (129, 2), (2**20, 8192)])
def test_ratio_128_counts_an_unfinished_record_too(positions: int, records: int) -> None:
    layout = StateGroupLayout.of(batch=1, max_positions=positions, window=1, ratio=128)
    assert layout.records == records
    assert layout.bytes().compressed == records * 583


def test_the_window_may_hold_every_position() -> None:
    layout = StateGroupLayout.of(batch=1, max_positions=77, window=77, ratio=0)
    assert layout.records == 0
    assert layout.bytes() == StateGroupBytes(dense_ring=77 * 583)


def test_a_carry_does_not_grow_with_positions() -> None:
    short, long = layer(128, batch=3, positions=1), layer(128, batch=3)
    assert short.carry == long.carry == 3 * 524_288


def test_limits_are_checked_in_order_and_the_first_is_named() -> None:
    values: dict[str, Any] = {"max_positions": 0, "batch": 0, "window": 0, "ratio": 2}
    repairs = {"max_positions": 1, "batch": 1, "window": 1, "ratio": 4}
    for name, repair in repairs.items():
        with pytest.raises(InvalidInputError) as caught:
            StateGroupLayout.of(**values)
        assert caught.value.subject == name
        values[name] = repair
    assert StateGroupLayout.of(**values).records == 1


@pytest.mark.parametrize(
    ("ratio", "positions", "batch", "subject"),
    [
        (4, 2**20, 2**36, "compressed bytes"),
        (128, 1, 2**44, "carry bytes"),
        (0, 2**20, 2**36, "dense_ring bytes"),
    ],
)
def test_the_class_that_passes_63_bits_is_named(
    ratio: int, positions: int, batch: int, subject: str
) -> None:
    layout = StateGroupLayout.of(
        batch=batch, max_positions=positions, window=positions, ratio=ratio
    )
    with pytest.raises(SizeOverflowError, match=subject):
        layout.bytes()


def test_a_batch_that_still_fits_is_exact() -> None:
    batch = (2**63 - 1) // (262_144 * 583)
    assert layer(4, batch=batch).compressed == batch * 262_144 * 583
