"""What tests of graphs start from: a provider with the toy operators, its books, and streams.

Nothing here decides what is right; it opens, counts and closes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self, TypeAlias

import numpy as np
from numpy.typing import NDArray

from nxrt import (
    Binding,
    CudaProvider,
    DType,
    Graph,
    KernelPlugin,
    MemoryGovernor,
    Node,
    OpKey,
    Session,
    TensorSpec,
    device_tier,
)
from nxrt.providers.cuda_session import CudaProviderSession
from nxrt.runtime import driver
from nxrt.runtime.device import Device
from nxrt.runtime.module import LaunchConfig, launch
from nxrt.runtime.stream import Stream
from tests.helpers.cuda_toys import DOMAIN, HONEST_TOYS, SOURCE, toy_node
from tests.helpers.fake_driver import FakeDriver
from tests.helpers.faulty_toys import FaultyFactory, Trouble

Floats: TypeAlias = NDArray[np.float32]

DEVICE = device_tier(0)
SPIN_CYCLES = 10_000_000
"""Some 5 ms on a card: long beside a call."""

LONG_CYCLES = 400_000_000
"""Some 0.2 s: long beside everything that one test does on the host."""

DRIFT_NBYTES = 4 << 20
"""What a card's free memory may move by: the driver takes and gives back whole pools of 2 MiB."""

X = {"x": TensorSpec(DType.F32, ("N",))}
SCALED = (toy_node("Scale", "x", output="y", name="scale"),)
SUMMED = (
    toy_node("Scale", "x", output="scaled", name="scale", factor=3.0),
    toy_node("Accumulate", "scaled", output="y", name="sum"),
)
FAULTY_MIDDLE = (
    toy_node("Scale", "x", output="a", name="first", factor=3.0),
    toy_node("Faulty", "a", output="b", name="second", factor=5.0),
    toy_node("Scale", "b", output="y", name="third", factor=7.0),
)


def floats(count: int, start: int = 0) -> Floats:
    """Return whole numbers, small enough that every sum of theirs is exact."""
    return ((np.arange(count) + start) % 7 - 3).astype(np.float32)


@dataclass
class Rig:
    """Open sessions of toy operators on one device, and read what they hold.

    Args:
        provider: has the toy operators.
        fake: the double's control, None on a card.
        trouble: what the Faulty kernels do.
        governor: charged by all sessions.
    """

    provider: CudaProvider
    fake: FakeDriver | None
    trouble: Trouble
    governor: MemoryGovernor = field(default_factory=MemoryGovernor)

    @property
    def device(self) -> Device:
        """Return the provider's device."""
        return self.provider._device

    @property
    def used(self) -> int:
        """Return the bytes of device memory that are charged."""
        return self.governor.usage(DEVICE).used

    def session(
        self,
        nodes: Sequence[Node] = SCALED,
        inputs: Mapping[str, TensorSpec] = X,
        **options: Any,
    ) -> Session:
        """Return a session of these nodes."""
        graph = Graph(tuple(nodes), inputs, ())
        return Session(graph, [self.provider], self.governor, **options)

    def figures(self) -> dict[str, Any]:
        """Return what is charged and what is live, once nothing is on its way."""
        self.device.releases.poll()
        charged = {str(tier.tier): tier.used for tier in self.governor.snapshot()}
        figures: dict[str, Any] = {"pending": self.device.releases.num_pending, **charged}
        if self.fake is not None:
            figures["live"] = self.fake.snapshot()
        return figures

    def free_nbytes(self) -> int:
        """Return the device's free memory."""
        free, _total = self.device.create(driver.api.cuMemGetInfo)
        return int(free)


def toys_plugin(trouble: Trouble) -> KernelPlugin:
    """Return the toy operators as a plug-in."""
    factories = {**HONEST_TOYS, "Faulty": FaultyFactory(trouble)}
    kernels = tuple((OpKey(DOMAIN, op), factory) for op, factory in factories.items())
    return KernelPlugin("cuda toys", kernels, origin="tests")


def backend_of(session: Session) -> CudaProviderSession:
    """Return what the CUDA provider opened for a session."""
    backend = session.provider_session
    assert isinstance(backend, CudaProviderSession)
    return backend


def is_capturing(session: Session) -> bool:
    """Say whether the driver records what the session's stream is given."""
    stream = backend_of(session).stream
    return int(stream.device.call(driver.api.cuStreamIsCapturing, stream.handle)) != 0


def bound(session: Session, count: int, start: int = 0, **options: Any) -> Binding:
    """Return a binding of `count` elements with an input written."""
    binding = session.bind({"N": count}, **options)
    binding.write("x", floats(count, start))
    return binding


def poison(session: Session, binding: Binding, name: str = "y") -> None:
    """Fill a value with bytes that no toy writes."""
    view = binding.view(name)
    garbage = np.full(view.spec.nbytes(), 0x5A, np.uint8).view(view.dtype.storage)
    backend_of(session).upload(view, 0, garbage.reshape(view.shape))


class Delay:
    """Keep streams busy: for some milliseconds on a card, until waited for on the double.

    Args:
        session: lends its device and compile cache.
        fake: the double's control, lazy inside the with-block; None on a card.
    """

    def __init__(self, session: Session, fake: FakeDriver | None) -> None:
        self._fake = fake
        self._module = backend_of(session)._context.load(SOURCE)
        self._function = self._module.function("toy_spin")
        self._arguments = self._function.arguments(["u64"])

    def __enter__(self) -> Self:
        if self._fake is not None:
            self._fake.set_lazy(True)
        return self

    def __exit__(self, *error: object) -> None:
        if self._fake is not None:
            self._fake.set_lazy(False)
        self._module.close()

    def before(self, stream: Stream, cycles: int = SPIN_CYCLES) -> None:
        """Enqueue something that lasts, before what the stream is given next."""
        self._arguments.set(cycles)
        launch(self._function, LaunchConfig((1, 1, 1), (1, 1, 1)), self._arguments, stream=stream)
