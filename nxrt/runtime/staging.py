"""Copies between ordinary host arrays and a device, through page-locked slots.

A slot is written again only after its last copy is known to be complete. Nothing here is for use
while a stream is recorded.
"""

import itertools
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nxrt.errors import ClosedError
from nxrt.memory.allocator import LeasedAllocator
from nxrt.memory.tier import Role
from nxrt.runtime.device import Device
from nxrt.runtime.device_memory import copy_to_device, copy_to_host
from nxrt.runtime.stream import Event, Stream
from nxrt.storage import ForeignStorage
from nxrt.tensor import DType, TensorView


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
        self._device = device
        # Held while a recording runs too: a copy from another thread waits instead of joining it.
        self._lock = threading.RLock()
        with ExitStack() as undo:
            total = slot_nbytes * num_slots
            buffer = allocator.allocate(total, role=Role.STAGING, holder="staging")
            undo.callback(buffer.close)
            events: list[Event] = []
            for _ in range(num_slots):
                events.append(Event(device))
                undo.callback(events[-1].close)
            storage = ForeignStorage(buffer.pointer, buffer.nbytes, buffer.device, buffer)
            memory = TensorView(storage, DType.U8, (num_slots, slot_nbytes)).to_array()
            self._slots = itertools.cycle(zip(memory, events, strict=True))
            self._events = events
            self._is_closed = False
            self._undo = undo.pop_all()

    @contextmanager
    def held_back(self) -> Iterator[None]:
        """Make copies of other threads wait for the end of the with-block."""
        with self._lock:
            yield

    def upload(self, pointer: int, source: NDArray[Any], *, stream: Stream) -> None:
        """Copy a C-contiguous array to device memory, in stream order.

        Raises:
            CaptureError: the stream is being recorded.
            ClosedError: the session is closed.

        Stream: the copy is enqueued; the source may be changed as soon as this returns.
        """
        content = _flat_bytes(source)
        with self._lock, self._device.current():
            self._require_open(stream)
            start = 0
            while start < content.size:
                slot, event = next(self._slots)
                event.synchronize()
                piece = content[start : start + slot.size]
                slot[: piece.size] = piece
                copy_to_device(pointer + start, slot[: piece.size], stream=stream)
                event.record(stream)
                start += piece.size

    def download(self, target: NDArray[Any], pointer: int, *, stream: Stream) -> None:
        """Copy device memory into a C-contiguous array, after everything the stream has.

        Raises:
            CaptureError: the stream is being recorded.
            ClosedError: the session is closed.

        Stream: waits; the target holds the bytes when this returns.
        """
        content = _flat_bytes(target)
        with self._lock, self._device.current():
            self._require_open(stream)
            start = 0
            while start < content.size:
                slot, event = next(self._slots)
                event.synchronize()
                piece = content[start : start + slot.size]
                copy_to_host(slot[: piece.size], pointer + start, stream=stream)
                event.record(stream)
                event.synchronize()
                piece[:] = slot[: piece.size]
                start += piece.size

    def close(self) -> None:
        """Give the slots back once their copies are done; a second call does nothing."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            with self._undo:
                for event in self._events:
                    event.synchronize()

    def _require_open(self, stream: Stream) -> None:
        if self._is_closed:
            raise ClosedError("staging memory of a session")
        stream.refuse_capture("host memory was read or written through the stream")


def _flat_bytes(array: NDArray[Any]) -> NDArray[np.uint8]:
    return array.reshape(-1).view(np.uint8)
