"""CUDA graphs: record a stream, make it executable, replay it.

Who may be recorded is asked before, by the session; here is the mechanism, and the promise that a
failed capture leaves no trace.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from typing import Protocol, Self

from nxrt.errors import CaptureError, ClosedError, DriverError, NxrtError
from nxrt.memory.deferral import releases_deferred
from nxrt.runtime import driver
from nxrt.runtime.driver import Handle
from nxrt.runtime.stream import Stream


class Closable(Protocol):
    """Something a graph owns and gives up when it is closed."""

    def close(self) -> None:
        """Give it up; may be repeated."""


class CapturedGraph:
    """Own an executable graph and a handle on everything whose address is baked into it.

    A context manager. Replay takes no lock and allocates nothing.
    """

    def __init__(
        self,
        executable: Handle,
        stream: Stream,
        *,
        owned: ExitStack,
        kept: Sequence[object],
        num_nodes: int,
    ) -> None:
        self._executable = executable
        self._stream = stream
        self._owned = owned
        self._kept = tuple(kept)
        self._is_closed = False
        self.num_nodes = num_nodes
        self.num_replays = 0

    def replay(self) -> None:
        """Launch the whole graph on the stream it was recorded from.

        Raises:
            ClosedError: the graph is closed.
            CaptureError: the stream is being recorded.
            DriverError: the launch was refused.

        Stream: the graph is enqueued; nothing waits.
        """
        if self._is_closed:
            raise ClosedError("captured graph")
        self._stream.refuse_capture("a graph of the stream was replayed")
        with self._stream.device.current():
            driver.call(driver.api.cuGraphLaunch, self._executable, self._stream.handle)
        self.num_replays += 1

    def close(self) -> None:
        """Wait for the last replay, destroy the graph, give up what it owned; once.

        Not while another thread replays it.

        Raises:
            CaptureError: the stream is being recorded; the graph stays open.
            DriverError: a kernel failed; everything was given up all the same.
        """
        if self._is_closed:
            return
        self._stream.refuse_capture("a graph of the stream was closed")
        self._is_closed = True
        with self._owned:
            self._stream.synchronize()
        self._kept = ()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def capture(
    stream: Stream,
    record: Callable[[], None],
    *,
    owned: Sequence[Closable],
    kept: Sequence[object] = (),
) -> CapturedGraph:
    """Record what `record` enqueues on the stream and return it as an executable graph.

    Args:
        stream: must not be capturing.
        record: enqueues the work; runs once.
        owned: closed with the graph; closed here too should the capture fail.
        kept: kept referenced until the graph is closed.

    Raises:
        CaptureError: with the first cause; the stream is usable and `owned` is closed.

    Stream: nothing is executed; the graph is uploaded.
    """
    with releases_deferred(), stream.device.current(), ExitStack() as undo:
        for resource in owned:
            undo.callback(resource.close)
        with ExitStack() as recorded:
            graph = _record(stream, record)
            recorded.callback(driver.call, driver.api.cuGraphDestroy, graph)
            num_nodes = _stage("instantiate", driver.api.cuGraphGetNodes, graph, 0)[1]
            executable = _stage("instantiate", driver.api.cuGraphInstantiate, graph, 0)
            undo.callback(_destroy_executable, stream, executable)
            _stage("upload", driver.api.cuGraphUpload, executable, stream.handle)
        return CapturedGraph(
            executable, stream, owned=undo.pop_all(), kept=kept, num_nodes=num_nodes
        )


def _record(stream: Stream, record: Callable[[], None]) -> Handle:
    if stream.is_capturing:
        raise CaptureError("begin", "the stream is already being recorded; end that capture first")
    mode = driver.api.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
    try:
        stream.is_capturing = True
        _stage("begin", driver.api.cuStreamBeginCapture, stream.handle, mode)
        record()
        graph = _stage("end", driver.api.cuStreamEndCapture, stream.handle)
    except BaseException as error:
        _abandon(stream)
        if isinstance(error, CaptureError) or not isinstance(error, Exception):
            raise
        raise CaptureError("record", str(error)) from error
    finally:
        stream.is_capturing = False
    if graph is None or int(graph) == 0:
        raise CaptureError("end", "the driver returned no graph; a call inside invalidated it")
    return graph


def _abandon(stream: Stream) -> None:
    # Only ending the capture makes the stream usable again. The error it reports is an echo of the
    # first cause, or says that nothing was being recorded.
    with suppress(DriverError):
        graph = driver.call(driver.api.cuStreamEndCapture, stream.handle)
        if graph is not None and int(graph) != 0:
            driver.call(driver.api.cuGraphDestroy, graph)


def _stage(stage: str, function: Callable[..., object], *args: object) -> Handle:
    try:
        return driver.call(function, *args)
    except NxrtError as error:
        raise CaptureError(stage, str(error)) from error


def _destroy_executable(stream: Stream, executable: Handle) -> None:
    with stream.device.current():
        driver.call(driver.api.cuGraphExecDestroy, executable)
