"""Where a case is run: a provider, eagerly or captured, with guard bands and poisoned memory."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from nxrt import (
    Binding,
    DType,
    MemoryGovernor,
    Role,
    Session,
    TensorView,
)
from nxrt.kernels.dsa_index_select.cuda import DsaIndexSelect
from nxrt.providers.base import ExecutionProvider
from nxrt.runtime.device_memory import fill_bytes
from tests.helpers.cases import OUTPUT, IndexSelectCase

GUARD = 64
"""Elements of the guard band before and after an output."""

POISON = 0x5A

MAX_REPEATS = int(os.environ.get("NXRT_MAX_REPEATS", "1000"))
"""Bounds the repeats of a test; tools/sanitize.py sets it, as its tools slow kernels down a lot."""
_POISON_WORD = np.int64(0x5A5A5A5A5A5A5A5A)


@dataclass(frozen=True)
class Target:
    """Run cases on one provider in one mode, "eager" or "captured"."""

    provider: ExecutionProvider
    mode: str
    max_repeats: int = MAX_REPEATS

    def run(self, case: IndexSelectCase, *, repeats: int = 1) -> NDArray[np.int64]:
        """Return what is selected; every repeat must give the same bytes and keep the guards."""
        governor = MemoryGovernor()
        repeats = min(repeats, self.max_repeats)
        with self.bound(case, governor) as (session, binding, guarded):
            results = [self._once(session, binding, guarded) for _ in range(repeats)]
            if self.mode == "captured" and results[0].size:
                results = self._captured(session, binding, guarded, repeats)
            for result in results:
                assert result.tobytes() == results[0].tobytes(), "a repeat differs"
        assert all(tier.used == 0 for tier in governor.snapshot()), "memory is still charged"
        return results[0]

    @contextmanager
    def bound(
        self, case: IndexSelectCase, governor: MemoryGovernor
    ) -> Iterator[tuple[Session, Binding, "GuardedOutput"]]:
        with Session(case.graph, [self.provider], governor) as session:
            guarded = GuardedOutput(session, case.output_shape)
            try:
                guarded.poison()
                with session.bind(views={OUTPUT: guarded.view}) as binding:
                    for name, array in case.inputs.items():
                        binding.write(name, array)
                    yield session, binding, guarded
            finally:
                guarded.close()

    def _once(
        self, session: Session, binding: Binding, guarded: "GuardedOutput"
    ) -> NDArray[np.int64]:
        guarded.poison()
        poison_workspace(session)
        session.run(binding)
        return guarded.read()

    def _captured(
        self, session: Session, binding: Binding, guarded: "GuardedOutput", repeats: int
    ) -> list[NDArray[np.int64]]:
        graph = session.capture(binding)
        results = []
        for _ in range(repeats):
            guarded.poison()
            poison_workspace(session)
            graph.replay()
            results.append(guarded.read())
        return results


class GuardedOutput:
    """Own an int64 output with guard bands around it, filled with poison, on a session's device."""

    def __init__(self, session: Session, shape: tuple[int, ...]) -> None:
        self._session = session
        self._backend = session._backend
        self.size = int(np.prod(shape))
        nbytes = (self.size + 2 * GUARD) * DType.I64.itemsize
        self._allocation = self._backend.allocate(nbytes, role=Role.ACTIVATION, holder="guarded")
        self._whole = TensorView(self._allocation, DType.I64, (self.size + 2 * GUARD,))
        offset = GUARD * DType.I64.itemsize
        self.view = TensorView(self._allocation, DType.I64, shape, byte_offset=offset)

    def poison(self) -> None:
        everywhere = np.full(self.size + 2 * GUARD, _POISON_WORD)
        self._backend.upload(self._whole, 0, everywhere)

    def read(self) -> NDArray[np.int64]:
        everything = np.empty(self.size + 2 * GUARD, np.int64)
        self._backend.download(everything, self._whole)
        guards = np.concatenate([everything[:GUARD], everything[-GUARD:]])
        assert (guards == _POISON_WORD).all(), "a guard band was written"
        inside = everything[GUARD:-GUARD]
        assert (inside != _POISON_WORD).all(), "an output element was not written"
        return inside.reshape(self.view.shape)

    def close(self) -> None:
        self._allocation.close()


def poison_workspace(session: Session) -> None:
    """Fill the workspace of the session's CUDA kernels with a pattern that is no score."""
    for kernel in session.kernels:
        if isinstance(kernel, DsaIndexSelect):
            for block in (kernel.workspace.block, kernel.workspace.graph_block):
                if block is not None:
                    fill_bytes(block.pointer, POISON, block.nbytes, stream=session._backend.stream)
