"""Copies between ordinary host arrays and a device, through page-locked slots.

A slot is written again only after its last copy is known to be complete, whatever failed in
between. A thread that records a graph cannot copy; other threads can, meanwhile.
"""

import itertools
from contextlib import ExitStack
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nxrt.errors import ClosedError
from nxrt.locks import new_rlock
from nxrt.memory.allocator import LeasedAllocator
from nxrt.memory.tier import Role
from nxrt.runtime.device import Device
from nxrt.runtime.device_memory import copy_to_device, copy_to_host
from nxrt.runtime.recording import refuse_recording
from nxrt.runtime.stream import Event, Stream
from nxrt.storage import ForeignStorage
from nxrt.tensor import DType, TensorView


class _Slot:
    """Page-locked bytes, and what has to be waited for before they may be touched again."""

    def __init__(self, memory: NDArray[np.uint8], event: Event) -> None:
        self.memory = memory
        self.event = event
        self._unmarked: Stream | None = None

    def begin(self, stream: Stream) -> None:
        """Wait for the last copy; the next one goes to `stream`."""
        self.wait()
        self._unmarked = stream

    def mark(self, stream: Stream) -> None:
        """Remember that the copy was enqueued."""
        self.event.record(stream)
        self._unmarked = None

    def wait(self) -> None:
        """Wait for the last copy: for its event, or for its stream where that was never set."""
        if self._unmarked is None:
            self.event.synchronize()
        elif not self._unmarked.is_closed:
            self._unmarked.synchronize()


class StagingRing:
    """Own page-locked slots that are used in turn; safe to use from any thread.

    Args:
        device: the device of the streams that will be used.
        allocator: charges and delivers the page-locked memory.
        slot_nbytes: size of one slot; larger copies go in pieces.
        num_slots: how many copies may be on their way at once.
    """

    def __init__(
        self,
        device: Device,
        allocator: LeasedAllocator,
        *,
        slot_nbytes: int = 256 * 1024,
        num_slots: int = 4,
    ) -> None:
        self._lock = new_rlock()
        self._is_closed = False
        with ExitStack() as undo:
            total = slot_nbytes * num_slots
            buffer = allocator.allocate(total, role=Role.STAGING, holder="staging")
            undo.callback(buffer.close)
            storage = ForeignStorage(buffer.pointer, buffer.nbytes, buffer.device, buffer)
            memory = TensorView(storage, DType.U8, (num_slots, slot_nbytes)).to_array()
            self._slots: list[_Slot] = []
            for row in memory:
                event = Event(device)
                undo.callback(event.close)
                self._slots.append(_Slot(row, event))
            self._turns = itertools.cycle(self._slots)
            self._undo = undo.pop_all()

    def upload(self, pointer: int, source: NDArray[Any], *, stream: Stream) -> None:
        """Copy a C-contiguous array to device memory, in stream order.

        Raises:
            CaptureError: this thread records a graph.
            ClosedError: the session is closed.
            DriverError: some or nothing of it was copied.

        Stream: the copy is enqueued; the source may be changed as soon as this returns.
        """
        content = _flat_bytes(source)
        with self._lock:
            self._require_usable()
            start = 0
            while start < content.size:
                slot = next(self._turns)
                slot.begin(stream)
                piece = content[start : start + slot.memory.size]
                slot.memory[: piece.size] = piece
                copy_to_device(pointer + start, slot.memory[: piece.size], stream=stream)
                slot.mark(stream)
                start += piece.size

    def download(self, target: NDArray[Any], pointer: int, *, stream: Stream) -> None:
        """Copy device memory into a C-contiguous array, after everything the stream has.

        Raises:
            CaptureError: this thread records a graph.
            ClosedError: the session is closed.
            DriverError: an earlier kernel failed; the target holds some or nothing of it.

        Stream: waits; the target holds the bytes when this returns.
        """
        content = _flat_bytes(target)
        with self._lock:
            self._require_usable()
            start = 0
            while start < content.size:
                slot = next(self._turns)
                slot.begin(stream)
                piece = content[start : start + slot.memory.size]
                copy_to_host(slot.memory[: piece.size], pointer + start, stream=stream)
                slot.mark(stream)
                slot.wait()
                piece[:] = slot.memory[: piece.size]
                start += piece.size

    def close(self) -> None:
        """Give the slots back once their copies are done, without waiting; may be repeated."""
        with self._lock:
            self._is_closed = True
            self._undo.close()

    def _require_usable(self) -> None:
        if self._is_closed:
            raise ClosedError("staging memory of a session")
        refuse_recording("host memory was copied")


def _flat_bytes(array: NDArray[Any]) -> NDArray[np.uint8]:
    return array.reshape(-1).view(np.uint8)
