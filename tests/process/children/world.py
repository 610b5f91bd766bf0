"""What the child scripts share: stand-ins where they are needed, and everything open at once.

A child is started with the tests' root as its folder, and imports what the tests import.
"""

import ctypes
import faulthandler
import signal
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import nxrt
from nxrt.kernels.dsa_index_select import reference
from nxrt.providers.base import Replayable
from tests.helpers import fake_kernels
from tests.helpers.cases import OUTPUT, IndexSelectCase, drawn_case
from tests.helpers.fake_driver import SONAME, FakeDriver, Shape3

HANGS_AFTER_S = 40

_kept: list[FakeDriver] = []
"""Stand-ins must outlive every launch."""


def use_stand_ins() -> FakeDriver | None:
    """Register stand-ins where the driver is the double; make no driver call."""
    end_where_it_hangs()
    if _kept:
        return _kept[0]
    try:
        library = ctypes.CDLL(SONAME)
    except OSError:
        return None
    if not hasattr(library, "fake_register_kernel"):
        return None
    fake = FakeDriver(library)
    fake_kernels.register_all(fake)
    fake.register(fake_kernels.SELECT, "Q" * 6, partial(quick_select, fake))
    _kept.append(fake)
    return fake


def quick_select(
    fake: FakeDriver,
    scores: int,
    allowed: int,
    selected: int,
    num_rows: int,
    num_keys: int,
    top_k: int,
    *_shape: Shape3,
) -> None:
    """Select as the kernel does, whose thousand threads would leave an interrupt little to hit."""
    values = fake.array(scores, np.float32, (num_rows, num_keys))
    flags = fake.array(allowed, np.uint8, (num_rows, num_keys))
    positions = fake.array(selected, np.int64, (num_rows, top_k))
    positions[...] = -1
    for row in range(num_rows):
        chosen = reference._select_row(values[row], flags[row] != 0, top_k)
        positions[row, : chosen.size] = chosen


def end_where_it_hangs(seconds: int = HANGS_AFTER_S) -> None:
    """Say where this process is and end it, should it live longer than some seconds from now.

    Forked children call it again: they inherit no alarm.
    """
    faulthandler.register(signal.SIGALRM, chain=True)
    signal.alarm(seconds)


def case_of(seed: int) -> IndexSelectCase:
    """Return a case whose result depends on its seed; all have the same graph."""
    return drawn_case(f"seed-{seed}", num_queries=2, num_keys=24, top_k=4, seed=seed)


@dataclass
class Opened:
    """Hold a provider and all that hangs on it, written to, run and captured, nothing closed."""

    cache_dir: Path
    governor: nxrt.MemoryGovernor = field(default_factory=nxrt.MemoryGovernor)

    def __post_init__(self) -> None:
        self.case = case_of(1)
        self.provider = nxrt.CudaProvider(cache_dir=self.cache_dir)
        self.session = nxrt.Session(self.case.graph, [self.provider], self.governor)
        self.binding = self.session.bind()
        self.lease = self.governor.reserve(
            nxrt.device_tier(0), 4096, role=nxrt.Role.ACTIVATION, holder="the child's own"
        )
        write(self.binding, self.case)
        self.session.run(self.binding)
        self.graph: Replayable = self.session.capture(self.binding)
        self.session.step(self.binding)

    def is_right(self) -> bool:
        """Say whether the binding holds what the reference selects."""
        return same(self.binding.read(OUTPUT), self.case)

    def use_all(self) -> None:
        """Run, step, replay and read."""
        self.session.run(self.binding)
        self.session.step(self.binding)
        self.graph.replay()
        assert self.is_right()

    def close(self) -> None:
        """Close everything, in an order that the owners allow."""
        self.graph.close()
        self.binding.close()
        self.session.close()
        self.lease.close()
        self.provider.close()


def write(binding: nxrt.Binding, case: IndexSelectCase) -> None:
    """Write a case's inputs."""
    for name, array in case.inputs.items():
        binding.write(name, array)


def same(selected: NDArray[Any], case: IndexSelectCase) -> bool:
    """Say whether a result is what the reference selects."""
    return bool(np.array_equal(selected, case.expected()))


def cpu_is_right() -> bool:
    """Run DsaIndexSelect on the CPU."""
    return _is_right_on(nxrt.CpuProvider())


def cuda_is_right(cache_dir: Path) -> bool:
    """Run DsaIndexSelect on CUDA, in a provider of its own, and close everything."""
    with nxrt.CudaProvider(cache_dir=cache_dir) as provider:
        return _is_right_on(provider)


def _is_right_on(provider: Any) -> bool:
    case = case_of(2)
    governor = nxrt.MemoryGovernor()
    with nxrt.Session(case.graph, [provider], governor) as session, session.bind() as binding:
        write(binding, case)
        session.run(binding)
        return same(binding.read(OUTPUT), case)
