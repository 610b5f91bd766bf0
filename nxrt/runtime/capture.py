"""CUDA graphs: record work, make it executable, replay it, update it, give it up.

Who may be recorded is asked before, by the session; here is the mechanism, and the promise that a
failed capture leaves no trace. Work is recorded from a stream that exists for the recording alone,
so that nothing other threads do on the replaying stream can join or break it.
"""

import itertools
import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from typing import Protocol, Self

from nxrt.errors import (
    AllocationFailedError,
    CaptureError,
    ClosedError,
    DeviceLostError,
    DriverError,
    ForkedProcessError,
    NxrtError,
)
from nxrt.locks import new_lock
from nxrt.memory.allocator import OUT_OF_MEMORY
from nxrt.memory.tier import device_tier
from nxrt.runtime import driver
from nxrt.runtime.driver import Handle
from nxrt.runtime.inside import Inside
from nxrt.runtime.recording import (
    Closable,
    Shared,
    refuse_recording,
    refused,
    this_thread,
    while_recording,
)
from nxrt.runtime.stream import Stream

_log = logging.getLogger(__name__)

_generations = itertools.count(1)
_graph_launch = driver.api.cuGraphLaunch
_UPDATE_REFUSED = 910
_MAX_ATTEMPTS = 8

_stuck: list["CapturedGraph"] = []
"""Graphs that were closed while a replay did not return."""


class Payment(Closable, Protocol):
    """The lease that pays for an executable graph."""

    @property
    def nbytes(self) -> int:
        """Return how many bytes."""


class Executable:
    """Own the driver's executable form of a graph, and the lease that pays for it.

    Raises:
        DriverError: the driver does not take the graph.
        AllocationFailedError: the device has no memory for it, though the budget admits it.
    """

    def __init__(self, stream: Stream, graph: Handle, lease: Payment) -> None:
        self._device = stream.device
        self.lease = lease
        self._is_closed = False
        self.handle: Handle = self._made(graph)

    def _made(self, graph: Handle) -> Handle:
        try:
            return self._device.create(driver.api.cuGraphInstantiate, graph, 0)
        except DriverError as error:
            if error.code != OUT_OF_MEMORY:
                raise
        self._device.releases.drain()  # what was closed while the device still used it
        try:
            return self._device.create(driver.api.cuGraphInstantiate, graph, 0)
        except DriverError as error:
            if error.code != OUT_OF_MEMORY:
                raise
            raise AllocationFailedError(
                str(device_tier(self._device.id.ordinal)),
                requested=self.lease.nbytes,
                holder="captured graph",
                reason=str(error),
            ) from error

    def update(self, graph: Handle) -> bool:
        """Take over addresses, arguments and grids; say no where the shape of the graph differs.

        Raises:
            DriverError: for another reason than the graph's shape.
        """
        try:
            self._device.create(driver.api.cuGraphExecUpdate, self.handle, graph)
        except DriverError as error:
            if error.code != _UPDATE_REFUSED:
                raise
            return False
        return True

    def close(self) -> None:
        """Destroy it; replays that were enqueued still run. May be repeated."""
        if not self._is_closed:
            self._is_closed = True
            destroy, settle = driver.api.cuGraphExecDestroy, self.lease.close
            self._device.releases.submit(destroy, self.handle, settle=settle)

    def hand_over(self) -> Payment:
        """Destroy it, but return the lease, which pays for another from now on."""
        self._is_closed = True
        self._device.releases.submit(driver.api.cuGraphExecDestroy, self.handle)
        return self.lease


class CapturedGraph:
    """Own an executable graph and a handle on everything whose address is baked into it.

    A context manager. `replay` takes no lock and allocates nothing; any thread may replay, and any
    may close.
    """

    def __init__(
        self,
        executable: Executable,
        stream: Stream,
        *,
        owned: ExitStack,
        kept: Sequence[object],
        num_nodes: int,
        is_update: bool,
    ) -> None:
        self.stream = stream
        self.generation = next(_generations)
        """Names this graph among all of the process; no other has the number."""
        self.num_nodes = num_nodes
        self.num_replays = 0
        self.is_update = is_update
        """Say whether the executable of another graph was updated, and not a new one made."""
        self._executable: Executable | None = executable
        self._handle = executable.handle
        self._stream_handle = stream.native
        self._device = stream.device
        self._owned = owned
        self._kept = tuple(kept)
        self._is_closed = False
        self._is_quiet = False
        self._closing = new_lock()
        self._inside = Inside()

    @property
    def handle(self) -> Handle:
        """Return the driver's executable graph; raises ClosedError."""
        if self._is_closed:
            raise ClosedError("captured graph")
        return self._handle

    @property
    def is_closed(self) -> bool:
        """Say whether it was closed."""
        return self._is_closed

    def replay(self) -> None:
        """Launch the whole graph on the stream it was captured for.

        Raises:
            ClosedError: the graph is closed.
            CaptureError: this thread records a graph.
            DriverError: the launch was refused, or an earlier kernel lost the context.

        Stream: the graph is enqueued; nothing waits.
        """
        marks = self._inside.marks
        try:
            marks.append(None)
            if (
                self._is_closed
                or self._device.fault is not None
                or this_thread.held_back is not None
            ):
                self._refuse()
            try:
                (outcome,) = _graph_launch(self._handle, self._stream_handle)
            except (KeyError, ValueError, RuntimeError) as error:
                outcome = error
            if outcome is not driver.SUCCESS:
                self._device.failed(_graph_launch, outcome)
            self.num_replays += 1
        finally:
            marks.pop()

    def _refuse(self) -> None:
        if self._is_closed:
            raise ClosedError("captured graph")
        if self._device.fault is not None:
            raise self._device.fault()
        refuse_recording("a graph was replayed")

    def close(self) -> None:
        """Destroy the graph, and give up what it owned once the last replay has passed.

        May be repeated. The memory goes back without anybody waiting for it.

        Raises:
            CaptureError: this thread records a graph; the graph stays open.
        """
        refuse_recording("a graph was closed")
        executable = self.retire()
        if executable is not None:
            executable.close()

    def release_memory(self) -> None:
        """End all replaying and give up everything but the executable; may be repeated."""
        self._is_closed = True
        with self._closing:
            if self._is_quiet or not self._inside.wait_until_empty():
                return
            self._is_quiet = True
            self._owned.close()
            kept, self._kept = self._kept, ()
            self._device.releases.drop(kept, after=[self.stream])

    def retire(self) -> Executable | None:
        """Close the graph but hand out its executable, once, for another graph to take over."""
        self.release_memory()
        with self._closing:
            if not self._is_quiet:
                _stuck.append(self)  # a replay goes on: everything it uses stays
                return None
            executable, self._executable = self._executable, None
            return executable

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def capture(
    stream: Stream,
    record: Callable[[Stream], None],
    *,
    lease: Callable[[], Payment],
    resources: Callable[[], Sequence[Shared]],
    kept: Sequence[object] = (),
    reuse: Executable | None = None,
) -> CapturedGraph:
    """Record work and return it as a graph that is replayed on `stream`.

    Args:
        stream: where the graph will be replayed; nothing is enqueued on it.
        record: enqueues the work on the stream it is given; runs once.
        lease: pays for a new executable; not called where `reuse` serves.
        resources: asked after the recording; the graph takes a handle of its own on each.
        kept: kept referenced until the graph is closed.
        reuse: the executable of a retired graph, which is updated where the new graph has its
            shape, and closed otherwise.

    Raises:
        CaptureError: with the first cause; nothing is left behind, and `reuse` is closed.
        LeaseRefusedError: from `lease`; nothing was recorded.
        AllocationFailedError: the device has no memory for the graph; nothing is left behind.
    """
    with ExitStack() as undo:
        unspent = undo.enter_context(ExitStack())
        paid = None
        if reuse is None:
            # Before anything is recorded: a refusal costs next to nothing.
            paid = lease()
            unspent.callback(paid.close)
        else:
            undo.callback(reuse.close)
        owned = undo.enter_context(ExitStack())
        graph = _recorded(stream, record, owned)
        try:
            for resource in resources():
                owned.callback(resource.share().close)
            num_nodes = _stage("instantiate", stream, driver.api.cuGraphGetNodes, graph, 0)[1]
            executable = _executable(stream, graph, paid, reuse)
            unspent.pop_all()
            undo.callback(executable.close)
            _stage("upload", stream, driver.api.cuGraphUpload, executable.handle, stream.handle)
        finally:
            stream.device.releases.submit(driver.api.cuGraphDestroy, graph)
        captured = CapturedGraph(
            executable,
            stream,
            owned=owned.pop_all(),
            kept=kept,
            num_nodes=num_nodes,
            is_update=executable is reuse,
        )
        undo.pop_all()
        return captured


def _executable(
    stream: Stream, graph: Handle, paid: Payment | None, reuse: Executable | None
) -> Executable:
    try:
        if reuse is not None:
            if reuse.update(graph):
                return reuse
            _log.info("a graph of another shape cannot be updated; it is instantiated anew")
            paid = reuse.hand_over()
        assert paid is not None  # one of the two is given
        with ExitStack() as undo:
            undo.callback(paid.close)
            executable = Executable(stream, graph, paid)
            undo.pop_all()
            return executable
    except DriverError as error:
        raise CaptureError("instantiate", str(error)) from error


def _recorded(stream: Stream, record: Callable[[Stream], None], owned: ExitStack) -> Handle:
    """Return the driver's graph of what `record` enqueues; put what it kept into `owned`."""
    graph = while_recording(lambda: _ended(stream, record), kept=owned)
    if graph is None or int(graph) == 0:
        raise CaptureError("end", "the driver returned no graph; a call inside invalidated it")
    return graph


def _ended(stream: Stream, record: Callable[[Stream], None]) -> Handle:
    with ExitStack() as undo:
        source = _source(stream)
        undo.callback(source.close)
        undo.callback(_abandon, source)  # from the very beginning: an interrupt may come anywhere
        mode = driver.api.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        _stage("begin", stream, driver.api.cuStreamBeginCapture, source.handle, mode)
        try:
            record(source)
        except BaseException as error:
            if isinstance(error, CaptureError) or not isinstance(error, Exception):
                raise
            raise CaptureError("record", str(error)) from error
        return _stage("end", stream, driver.api.cuStreamEndCapture, source.handle)


def _source(stream: Stream) -> Stream:
    try:
        return Stream(stream.device, replayed_on=stream)
    except DriverError as error:
        if isinstance(error, DeviceLostError):
            raise
        raise CaptureError("begin", str(error)) from error


def require_recording(stream: Stream) -> None:
    """Raise CaptureError where the recording of this stream is not all that was asked for.

    Something invalidated it, or was refused and hidden: then it is missing in every replay.
    """
    refusal = refused()
    if refusal is not None:
        raise CaptureError("record", refusal.problem) from refusal
    status = int(stream.device.call(driver.api.cuStreamIsCapturing, stream.handle))
    if status != _ACTIVE:
        raise CaptureError(
            "record",
            "it made a driver call that is not permitted while recording (waiting, allocating,"
            " freeing, or a launch that was refused), and the recording is lost",
        )


_NONE, _ACTIVE = 0, 1  # what cuStreamIsCapturing answers


def _abandon(source: Stream) -> None:
    """End a recording that nobody will use; do nothing where none is going on."""
    for _ in range(_MAX_ATTEMPTS):
        # An error is an echo of the first cause, and the recording may be over all the same.
        with suppress(NxrtError):
            status = int(source.device.call(driver.api.cuStreamIsCapturing, source.handle))
            if status == _NONE:
                return
        with suppress(NxrtError):
            graph = source.device.call(driver.api.cuStreamEndCapture, source.handle)
            if graph is not None and int(graph) != 0:
                source.device.releases.submit(driver.api.cuGraphDestroy, graph)
        if source.device.is_lost:
            return


def _stage(stage: str, stream: Stream, function: Callable[..., object], *args: object) -> Handle:
    try:
        return stream.device.create(function, *args)
    except (DeviceLostError, ForkedProcessError):
        raise  # nothing about this capture
    except NxrtError as error:
        raise CaptureError(stage, str(error)) from error
