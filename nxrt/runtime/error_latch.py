"""Faults that kernels meet in their data: a slot on the device for each node, read by the host.

The device says which node and which step; kernels say what their bits mean. Nothing is read until
the host consumes a result, and nothing is allocated in a session whose kernels report no faults.
"""

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from nxrt.errors import DeviceFaultError, InvalidInputError
from nxrt.locks import new_lock
from nxrt.memory.allocator import LeasedAllocator
from nxrt.memory.tier import Role
from nxrt.runtime.device_memory import fill_bytes
from nxrt.runtime.graph_memory import GraphAllocation
from nxrt.runtime.module import BoundLaunch, LaunchConfig, Module
from nxrt.runtime.staging import StagingRing
from nxrt.runtime.stream import Stream

SOURCE = Path(__file__).with_name("error_latch.cu")

MAX_SLOTS = 4096
"""How many nodes of one session may report faults."""

_WORD_NBYTES = 4
_THREADS = 256


@dataclass(frozen=True)
class FaultSlot:
    """Where one node's kernel reports; pass both addresses to `latch_fault` of the .cuh.

    Args:
        slot: device address of its bits and step, uint32 [2].
        step: device address of the running step, uint32.
    """

    slot: int
    step: int


@dataclass(frozen=True)
class _Reporter:
    node: str
    meanings: Mapping[int, str]


class ErrorLatch:
    """Own the fault words of one session; safe to use from any thread.

    Args:
        allocator: charges and delivers the words.
        staging: brings them to the host.
        stream: the session's.
        module: error_latch.cu, loaded; closed with the latch.

    Raises:
        LeaseRefusedError, AllocationFailedError, DriverError: nothing is kept.
    """

    def __init__(
        self, allocator: LeasedAllocator, staging: StagingRing, stream: Stream, module: Module
    ) -> None:
        self._lock = new_lock()
        self._staging = staging
        self._stream = stream
        self._reporters: list[_Reporter] = []
        self._found: list[DeviceFaultError] = []
        slots_nbytes = 2 * MAX_SLOTS * _WORD_NBYTES
        with ExitStack() as undo:
            undo.callback(module.close)
            self.words = GraphAllocation.allocate(
                allocator, slots_nbytes + _WORD_NBYTES, role=Role.WORKSPACE, holder="error latch"
            )
            undo.callback(self.words.close)
            self._taken = GraphAllocation.allocate(
                allocator, slots_nbytes, role=Role.WORKSPACE, holder="error latch"
            )
            undo.callback(self._taken.close)
            # The first step that is counted makes 0 of it.
            fill_bytes(self.words.pointer, 0, self.words.nbytes, stream=stream)
            fill_bytes(self.words.pointer, 0xFF, _WORD_NBYTES, stream=stream)
            fill_bytes(self._taken.pointer, 0, self._taken.nbytes, stream=stream)
            advance, take = (module.function(f"nxrt_latch_{name}") for name in ("advance", "take"))
            self._take_arguments = take.arguments(["pointer", "pointer", "u32"])
            arguments = advance.arguments(["pointer"])
            arguments.set(self.words.pointer)
            self._advance = BoundLaunch(advance, LaunchConfig((1, 1, 1), (1, 1, 1)), arguments)
            grid = (MAX_SLOTS // _THREADS, 1, 1)
            config = LaunchConfig(grid, (_THREADS, 1, 1))
            self._take = BoundLaunch(take, config, self._take_arguments)
            self._undo = undo.pop_all()

    def slot(self, node: str, meanings: Mapping[int, str]) -> FaultSlot:
        """Return a new slot for a node's kernel.

        Args:
            node: named in the error.
            meanings: what each single bit says.

        Raises:
            InvalidInputError: there are no slots left.
        """
        with self._lock:
            index = len(self._reporters)
            if index == MAX_SLOTS:
                raise InvalidInputError(
                    "nodes that report faults", found=f"{index + 1}", accepted=f"up to {MAX_SLOTS}"
                )
            self._reporters.append(_Reporter(node, dict(meanings)))
        base = self.words.pointer
        return FaultSlot(base + (1 + 2 * index) * _WORD_NBYTES, base)

    def advance(self, stream: Stream) -> None:
        """Enqueue the counting of a step; comes before the step's kernels, in graphs too."""
        self._advance.enqueue(stream)

    def check(self) -> None:
        """Take what was latched by everything enqueued so far; waits.

        A fault is raised once, the one of the earliest step first; what else was taken with it is
        named in the error's notes.

        Raises:
            DeviceFaultError: a kernel met bad data.
            DriverError: an earlier kernel failed.
        """
        with self._lock:
            # Kept until they are raised: an interrupt in between must not lose them.
            taken = self._taken_faults()
            if taken:
                fill_bytes(self._taken.pointer, 0, self._taken.nbytes, stream=self._stream)
                self._found += taken
            faults, self._found = sorted(self._found, key=lambda fault: fault.step), []
        if faults:
            first, *others = faults
            for other in others:
                first.add_note(f"also: {other}")
            raise first

    def _taken_faults(self) -> list[DeviceFaultError]:
        num_slots = len(self._reporters)
        self._take_arguments.set(self.words.pointer, self._taken.pointer, num_slots)
        self._take.enqueue(self._stream)
        words = np.empty((num_slots, 2), np.uint32)
        self._staging.download(words, self._taken.pointer, stream=self._stream)
        return [
            DeviceFaultError(
                reporter.node, step=int(step), bits=int(bits), meaning=_meaning(reporter, int(bits))
            )
            for reporter, (bits, step) in zip(self._reporters, words, strict=True)
            if bits
        ]

    def close(self) -> None:
        """Give the words up; graphs keep them as long as they need. May be repeated."""
        self._undo.close()


def _meaning(reporter: _Reporter, bits: int) -> str:
    said = [text for bit, text in reporter.meanings.items() if bits & bit]
    return "; ".join(said) or "bits that the kernel does not explain"
