"""The captured graphs that a session keeps by itself: one for each binding, and not too many.

It decides which graph may be replayed, which is captured anew, and which has to go. It captures
nothing itself and is used under the session's lock, `ready` excepted.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from typing import Protocol

from nxrt.binding import Binding
from nxrt.errors import InvalidInputError
from nxrt.providers.base import Replayable


class CaptureGraph(Protocol):
    """Capture a binding's graph, and close `reuse` whatever comes of it."""

    def __call__(self, binding: Binding, reuse: Replayable | None) -> Replayable:
        """Return the graph; raises as `Session.capture`."""


@dataclass(frozen=True)
class StepStats:
    """Count what the steps of a session did.

    Args:
        eager: ran without a graph.
        replays: replayed one.
        captures: captured one and made it executable.
        updates: captured one and updated the executable of another that was no longer needed.
        evictions: gave up a graph that was, as there were too many.
    """

    eager: int = 0
    replays: int = 0
    captures: int = 0
    updates: int = 0
    evictions: int = 0


@dataclass
class _Entry:
    """A graph, and what must be as it was for it to be replayed."""

    binding: Binding
    graph: Replayable
    generation: Hashable
    num_replays_seen: int = -1


class GraphCache:
    """Keep up to `max_graphs` graphs, counting those that wait for being updated.

    Args:
        capture: makes a graph.
        audit: raises CaptureDeclinedError where that cannot work; asked before room is made.
        generation: names the memory of the kernels' own that recordings bake in.
        max_graphs: from 1.

    Raises:
        InvalidInputError: `max_graphs` is not such a number.
    """

    def __init__(
        self,
        capture: CaptureGraph,
        audit: Callable[[Binding], None],
        generation: Callable[[], Hashable],
        max_graphs: int,
    ) -> None:
        if not isinstance(max_graphs, int) or isinstance(max_graphs, bool) or max_graphs < 1:
            raise InvalidInputError("max_graphs", found=repr(max_graphs), accepted="from 1")
        self.ready: dict[Binding, Replayable] = {}
        """The graphs that may be replayed as they are. Read without the lock."""
        self.stats = StepStats()
        self._capture = capture
        self._audit = audit
        self._generation = generation
        self._seen: Hashable = None
        self._max_graphs = max_graphs
        self._entries: dict[Binding, _Entry] = {}
        self._idle: list[_Entry] = []  # of closed bindings; good for an update, never replayed

    @property
    def num_graphs(self) -> int:
        """Return how many graphs are kept."""
        return len(self._entries) + len(self._idle)

    @property
    def num_replays(self) -> int:
        """Return how often the graphs kept now and earlier were replayed."""
        entries = (*self._entries.values(), *self._idle)
        return self.stats.replays + sum(entry.graph.num_replays for entry in entries)

    def obtain(self, binding: Binding) -> Replayable:
        """Return the graph of a binding, captured now unless there is one that still holds.

        The binding stands for shapes, dtypes and the addresses of every value; the generation for
        whatever else a recording bakes in.

        Raises: what capturing raises; the cache is then without a graph for this binding.
        """
        self.refresh()
        entry = self._entries.get(binding)
        if entry is not None and entry.generation == self._seen and not entry.graph.is_closed:
            self.ready[binding] = entry.graph
            return entry.graph
        self._audit(binding)
        reuse = self._reusable(binding)
        graph = self._capture(binding, reuse)
        name = "updates" if reuse is not None and graph.is_update else "captures"
        self._count(name)
        self.refresh()
        self._entries[binding] = _Entry(binding, graph, self._seen)
        self.ready[binding] = graph
        return graph

    def refresh(self) -> None:
        """Let graphs be looked at again where the kernels' memory is no longer what it was."""
        now = self._generation()
        if now != self._seen:
            self._seen = now
            self.ready.clear()

    def forget(self, binding: Binding) -> None:
        """Give up what the graph of a binding holds; its executable may serve another."""
        self.ready.pop(binding, None)
        entry = self._entries.pop(binding, None)
        if entry is not None:
            entry.graph.release_memory()
            self._idle.append(entry)

    def drop_idle(self) -> bool:
        """Close the executables that only wait for being updated; say whether there were any."""
        idle, self._idle = self._idle, []
        for entry in idle:
            self._close(entry)
        return bool(idle)

    def clear(self) -> None:
        """Close every graph."""
        self.ready.clear()
        for entry in (*self._entries.values(), *self._idle):
            self._close(entry)
        self._entries.clear()
        self._idle.clear()

    def count_eager(self) -> None:
        """Count a step that ran without a graph."""
        self._count("eager")

    def _reusable(self, binding: Binding) -> Replayable | None:
        """Make room for one graph; return one whose executable the new one may take over."""
        stale = self._entries.pop(binding, None)
        if stale is not None:
            self.ready.pop(binding, None)
            return self._given_up(stale)
        for entry in self._idle:
            if entry.binding.specs == binding.specs:
                self._idle.remove(entry)
                return self._given_up(entry)
        if self.num_graphs < self._max_graphs:
            return None
        if self._idle:
            self._close(self._idle.pop(0))
            return None
        victim = self._least_used()
        self.ready.pop(victim.binding, None)
        del self._entries[victim.binding]
        self._count("evictions")
        if victim.binding.specs == binding.specs:
            return self._given_up(victim)
        self._close(victim)
        return None

    def _least_used(self) -> _Entry:
        # One that was not replayed since the last look, else the oldest. No time is noted at a
        # replay, which would cost every step for the sake of a few.
        entries = list(self._entries.values())
        idle = [entry for entry in entries if entry.num_replays_seen == entry.graph.num_replays]
        for entry in entries:
            entry.num_replays_seen = entry.graph.num_replays
        return (idle or entries)[0]

    def _given_up(self, entry: _Entry) -> Replayable:
        self._count("replays", entry.graph.num_replays)
        return entry.graph

    def _close(self, entry: _Entry) -> None:
        self._given_up(entry).close()

    def _count(self, name: str, number: int = 1) -> None:
        self.stats = replace(self.stats, **{name: getattr(self.stats, name) + number})
