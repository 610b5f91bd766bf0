"""How far the filter got: keys that were scored exactly, and rows that fell back to all of them.

On Gaussian data, on real text, and on data made to hurt. Counts, not times: they depend on the data
and the algorithm and not on the machine.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.table import Table

from benchmarks.cases import IndexSelectShape, short_count
from benchmarks.inputs import graph_of
from benchmarks.troubles import TROUBLES, Drawn, drawn
from nxrt import MemoryGovernor, Session
from nxrt.kernels.numerics import narrow
from nxrt.providers.base import ExecutionProvider

_ROOT = Path(__file__).parent.parent
TRACES = (
    _ROOT / "shared" / "data" / "text_indexer_trace_16k.npz",
    _ROOT.parent / "shared" / "data" / "text_indexer_trace_16k.npz",
    _ROOT / "examples" / "data" / "text_indexer_trace_4k.npz",
)
"""Where real text may be; the first that is there is taken."""

_SEED = 31
_DECODE, _PREFILL = (8, 1), (1, 64)
"""Batch and query positions: one shape for the route of few rows, one for that of many."""

Arrays = dict[str, NDArray[Any]]


@dataclass(frozen=True)
class Outcome:
    """Say how the rows of one run were settled.

    Args:
        num_rows: of the run.
        num_scored_exactly: keys, over the rows that did not fall back: the size of their bands.
        num_fallback_rows: rows for which every key was scored exactly.
        max_scored: the largest band of a row that did not fall back.
    """

    num_rows: int
    num_scored_exactly: int
    num_fallback_rows: int
    max_scored: int = 0

    @classmethod
    def of(cls, rows: Sequence[tuple[int, bool]]) -> "Outcome":
        """Return the sums of a kernel's rows."""
        bands = [num_scored for num_scored, is_exact in rows if not is_exact]
        return cls(len(rows), sum(bands), len(rows) - len(bands), max(bands, default=0))


@dataclass(frozen=True)
class OutcomeCase:
    """Name some inputs; they are made when asked for, as they are large.

    Args:
        data: what kind.
        shape: their sizes.
        make: returns them by name, as stored.
    """

    data: str
    shape: IndexSelectShape
    make: Callable[[], Arrays]


@dataclass(frozen=True)
class OutcomeRow:
    """Hold one row of the report; no outcome where the kernel cannot tell."""

    data: str
    rows: int
    keys: int
    outcome: Outcome | None


def outcomes(provider: ExecutionProvider, case: OutcomeCase) -> Outcome | None:
    """Run a case once and return how its rows were settled; None where the kernel cannot tell.

    A kernel tells by a method `outcomes()`: after a synchronised run, for each row how many keys
    it scored exactly, and whether the row took the exact path.
    """
    with ExitStack() as stack:
        session = stack.enter_context(Session(graph_of(case.shape), [provider], MemoryGovernor()))
        tell = getattr(session.kernels[0], "outcomes", None)
        if tell is None:
            return None
        binding = stack.enter_context(session.bind())
        for name, array in case.make().items():
            binding.write(name, array)
        session.run(binding)
        session.provider_session.synchronize()
        return Outcome.of(tell())


def measure_outcomes(provider: ExecutionProvider) -> list[OutcomeRow]:
    """Return a row for every case."""
    return [
        OutcomeRow(case.data, case.shape.num_rows, case.shape.T, outcomes(provider, case))
        for case in outcome_cases()
    ]


def outcome_cases() -> Iterator[OutcomeCase]:
    """Yield Gaussian data, real text and troubles, each for few rows and for many."""
    for shape in (IndexSelectShape(8, 1, 131_072), IndexSelectShape(1, 256, 16_384)):
        yield OutcomeCase("Gaussian", shape, partial(_troubled, shape, None))
    yield from text_cases()
    for batch, num_queries in (_DECODE, _PREFILL):
        yield from troubled_cases(IndexSelectShape(batch, num_queries, 16_384))


def troubled_cases(shape: IndexSelectShape) -> Iterator[OutcomeCase]:
    """Yield every trouble at one size."""
    for name, trouble in TROUBLES.items():
        yield OutcomeCase(name, shape, partial(_troubled, shape, trouble))


def text_cases() -> Iterator[OutcomeCase]:
    """Yield the trace of real text as decode and as prefill; nothing where there is none."""
    path = next((path for path in TRACES if path.is_file()), None)
    if path is None:
        return
    with np.load(path) as trace:
        arrays = {name: trace[name] for name in ("query", "key", "weights")}
    num_queries, num_heads, depth = arrays["query"].shape
    num_keys = len(arrays["key"])
    name = f"text, {short_count(num_keys)} trace"
    few = _DECODE[0]
    decode = IndexSelectShape(few, 1, num_keys, num_heads, depth)
    yield OutcomeCase(name, decode, partial(_text_decode, arrays, few))
    prefill = IndexSelectShape(1, num_queries, num_keys, num_heads, depth)
    yield OutcomeCase(name, prefill, partial(_text_prefill, arrays))


def _text_prefill(arrays: Arrays) -> Arrays:
    """Return the trace's queries as rows of one batch, each seeing what was before it."""
    bias = _causal_bias(len(arrays["query"]), len(arrays["key"]))
    return {**{name: array[None] for name, array in arrays.items()}, "attention_bias": bias}


def _text_decode(arrays: Arrays, few: int) -> Arrays:
    """Return the last queries as rows of a batch each, over the same keys."""
    bias = _causal_bias(len(arrays["query"]), len(arrays["key"]))[:, :, -few:]
    return {
        "query": arrays["query"][-few:, None],
        "key": np.broadcast_to(arrays["key"], (few, *arrays["key"].shape)),
        "weights": arrays["weights"][-few:, None],
        "attention_bias": bias.swapaxes(0, 2),
    }


def _causal_bias(num_queries: int, num_keys: int) -> NDArray[np.float32]:
    """Return [1, 1, S, T]: row i stands at position T - S + i and sees no later key."""
    last = num_keys - num_queries + np.arange(num_queries)
    is_later = np.arange(num_keys) > last[:, None]
    return np.where(is_later, np.float32(-np.inf), np.float32(0))[None, None]


def _troubled(shape: IndexSelectShape, trouble: Callable[[Drawn], None] | None) -> Arrays:
    inputs = drawn(shape.B, shape.S, shape.T, shape.H, shape.D, seed=_SEED)
    if trouble is not None:
        trouble(inputs)
    return {
        "query": narrow(inputs.query, shape.dtype),
        "key": narrow(inputs.key, shape.dtype),
        "weights": narrow(inputs.weights, shape.dtype),
        "attention_bias": inputs.bias,
    }


def as_table(rows: Sequence[OutcomeRow]) -> Table:
    """Return the rows for a person."""
    table = Table(title="what the filter leaves to be scored exactly", title_justify="left")
    table.add_column("data", no_wrap=True)
    for name in ("rows", "keys", "band, mean", "band, most", "rows that fell back"):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(row.data, f"{row.rows:,}", short_count(row.keys), *_cells(row.outcome))
    return table


def _cells(outcome: Outcome | None) -> tuple[str, str, str]:
    if outcome is None:
        return ("not told",) * 3
    num_filtered = outcome.num_rows - outcome.num_fallback_rows
    if num_filtered == 0:
        return "-", "-", f"{outcome.num_fallback_rows:,}"
    mean = outcome.num_scored_exactly / num_filtered
    return f"{mean:,.1f}", f"{outcome.max_scored:,}", f"{outcome.num_fallback_rows:,}"
