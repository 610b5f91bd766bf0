"""Graphs and shapes: padded rows, growing sequences, and everything else that ends a replay."""

from contextlib import ExitStack, closing
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from nxrt import Binding, DType, InvalidInputError, Session
from nxrt.graph_cache import StepStats
from nxrt.kernels.dsa_index_select.spec import INPUT_NAMES
from tests.helpers.cases import OUTPUT, IndexSelectCase, drawn_case
from tests.helpers.graph_rig import Rig, poison
from tests.helpers.sessions import kernel_of, write
from tests.helpers.targets import GuardedOutput, poison_workspace

pytestmark = [pytest.mark.gpu, pytest.mark.fake]

MAX_T, TOP_K = 700, 512
LENGTHS = (40, 300, 511, 512, 513, 700)
MASKED = np.float32(-np.inf)
BIAS = INPUT_NAMES[3]


def decode_case(num_rows: int, num_keys: int, **options: Any) -> IndexSelectCase:
    """Return a case of `num_rows` sequences with one query position each."""
    name = f"{num_rows}x{num_keys}"
    options.setdefault("top_k", TOP_K)
    return drawn_case(name, batch=num_rows, num_queries=1, num_keys=num_keys, **options)


ROWS = decode_case(112, MAX_T)
"""Row r sees its first `length_of(r)` keys."""


def length_of(row: int) -> int:
    return LENGTHS[row % len(LENGTHS)]


def padded(num_real: int, num_rows: int) -> dict[str, NDArray[Any]]:
    """Return the inputs of a graph of `num_rows`, of which only the first are real."""
    inputs = {name: array[:num_rows].copy() for name, array in ROWS.inputs.items()}
    for row in range(num_rows):
        seen = length_of(row) if row < num_real else 0
        inputs[BIAS][row, :, :, seen:] = MASKED
    return inputs


def alone(row: int) -> IndexSelectCase:
    """Return one row as a case of its own length."""
    seen = length_of(row)
    return replace(
        ROWS,
        query=ROWS.query[row : row + 1],
        key=np.ascontiguousarray(ROWS.key[row : row + 1, :seen]),
        weights=ROWS.weights[row : row + 1],
        bias=np.ascontiguousarray(ROWS.bias[row : row + 1, :, :, :seen]),
    )


def selected_alone(rig: Rig, num_rows: int) -> list[bytes]:
    """Return what each row selects when it is run alone and eagerly."""
    with Session(alone(0).graph_of("T"), [rig.provider], rig.governor) as session:
        return [selected(session, alone(row)) for row in range(num_rows)]


def selected(session: Session, case: IndexSelectCase) -> bytes:
    with session.bind({"T": case.key.shape[1]}) as binding:
        write(binding, case)
        session.run(binding)
        return binding.read(OUTPUT).tobytes()


@pytest.mark.timeout(30)
def test_padded_rows_select_nothing_and_real_rows_what_they_do_alone(rig: Rig) -> None:
    expected = selected_alone(rig, 100)
    nothing = np.full(TOP_K, -1, np.int64).tobytes()
    for num_rows, counts in ((112, (100, 5, 8, 1, 0)), (8, (5, 8, 1, 0))):
        case = decode_case(num_rows, MAX_T)
        with Session(case.graph, [rig.provider], rig.governor) as session, ExitStack() as undo:
            output = undo.enter_context(closing(GuardedOutput(session, case.output_shape)))
            output.poison()
            binding = undo.enter_context(session.bind(views={OUTPUT: output.view}))
            write(binding, case)
            session.run(binding)
            graph = session.capture(binding)
            for num_real in counts:
                for name, array in padded(num_real, num_rows).items():
                    binding.write(name, array)
                output.poison()
                poison_workspace(session)
                graph.replay()
                rows = [row.tobytes() for row in output.read()]
                assert rows == expected[:num_real] + [nothing] * (num_rows - num_real)


B, T = 4, 1000
LONGER = (1001, 1023, 1024, 1025, 2048, 2049, 31, 32, 33, 1, 511, 512, 513)
"""Past every size at which a kernel of ours goes another way: tiles, threads of a block, top_k."""


class FrontDoor:
    """Step a session through cases; every result must be what an eager run of its own gives."""

    def __init__(self, rig: Rig, template: IndexSelectCase, undo: ExitStack) -> None:
        self._undo = undo
        graph = template.graph_of("T")
        self.session = undo.enter_context(Session(graph, [rig.provider], rig.governor))
        self._eager = undo.enter_context(Session(graph, [rig.provider], rig.governor))

    def bind(self, case: IndexSelectCase) -> Binding:
        binding = self._undo.enter_context(self.session.bind({"T": case.key.shape[1]}))
        write(binding, case)
        return binding

    def step(self, binding: Binding, case: IndexSelectCase) -> dict[str, int]:
        """Return which of the session's counts changed, and by how much."""
        poison(self.session, binding, OUTPUT)
        poison_workspace(self.session)
        before = self.session.step_stats
        self.session.step(binding)
        result = binding.read(OUTPUT).tobytes()
        assert result == selected(self._eager, case) == case.expected().tobytes()
        return changed(before, self.session.step_stats)


def changed(before: StepStats, after: StepStats) -> dict[str, int]:
    pairs = {name: getattr(after, name) - getattr(before, name) for name in vars(after)}
    return {name: change for name, change in pairs.items() if change}


def graph_memory(session: Session) -> int:
    """Return what names the workspace of graphs."""
    block = kernel_of(session).workspace.graph_block
    return 0 if block is None else block.identity


def test_a_growing_sequence_is_never_replayed_stale(rig: Rig) -> None:
    with ExitStack() as undo:
        first = decode_case(B, T)
        door = FrontDoor(rig, first, undo)
        binding = door.bind(first)
        assert door.step(binding, first) == {"eager": 1}
        assert door.step(binding, first) == {"captures": 1, "replays": 1}
        assert door.step(binding, first) == {"replays": 1}
        for length in LONGER:
            case = decode_case(B, length, seed=length)
            other = door.bind(case)
            memory = graph_memory(door.session)
            made = door.step(other, case)
            if made == {"eager": 1}:
                assert door.step(binding, first) == {"replays": 1}
                made = door.step(other, case)
            assert made.pop("evictions", 0) <= 1
            assert made == {"captures": 1, "replays": 1}
            is_stale = graph_memory(door.session) != memory
            expected = {"updates": 1, "replays": 1} if is_stale else {"replays": 1}
            assert door.step(binding, first) == expected
            assert door.step(other, case) == {"replays": 1}


def test_inputs_at_other_addresses_are_captured_for_themselves(rig: Rig) -> None:
    with ExitStack() as undo:
        first, second = decode_case(B, T), decode_case(B, T, seed=2)
        door = FrontDoor(rig, first, undo)
        there, elsewhere = door.bind(first), door.bind(second)
        door.session.run(there)
        assert door.step(there, first) == {"captures": 1, "replays": 1}
        assert door.step(elsewhere, second) == {"captures": 1, "replays": 1}
        assert door.step(there, first) == {"replays": 1}
        there.close()
        third = decode_case(B, T, seed=3)
        assert door.step(door.bind(third), third) == {"updates": 1, "replays": 1}
        assert door.step(elsewhere, second) == {"replays": 1}


def test_a_larger_eager_run_between_replays_changes_no_result(rig: Rig) -> None:
    with ExitStack() as undo:
        first, larger = decode_case(B, T), decode_case(B, 3 * T)
        door = FrontDoor(rig, first, undo)
        binding, other = door.bind(first), door.bind(larger)
        door.session.run(binding)
        assert door.step(binding, first) == {"captures": 1, "replays": 1}
        door.session.run(other)
        assert door.step(binding, first) == {"replays": 1}
        memory = graph_memory(door.session)
        assert door.step(other, larger) == {"captures": 1, "replays": 1}
        assert graph_memory(door.session) != memory
        assert door.step(binding, first) == {"updates": 1, "replays": 1}
        assert door.step(other, larger) == {"replays": 1}


@pytest.mark.parametrize(
    "other",
    [
        decode_case(B, T, dtype=DType.F16),
        decode_case(B, T, dtype=DType.BF16),
        decode_case(B, T, top_k=7),
        decode_case(B, T, scale=0.25),
    ],
    ids=["f16", "bf16", "top_k", "scale"],
)
def test_another_dtype_or_attribute_has_graphs_of_its_own(rig: Rig, other: IndexSelectCase) -> None:
    with ExitStack() as undo:
        first = decode_case(B, T)
        doors = [(FrontDoor(rig, case, undo), case) for case in (first, other)]
        bindings = [door.bind(case) for door, case in doors]
        for expected in ({"eager": 1}, {"captures": 1, "replays": 1}, {"replays": 1}):
            for (door, case), binding in zip(doors, bindings, strict=True):
                assert door.step(binding, case) == expected
        with pytest.raises(InvalidInputError, match="another session"):
            doors[0][0].session.step(bindings[1])
