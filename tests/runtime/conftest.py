"""A device and a stream of a test's own."""

from collections.abc import Iterator

import pytest

from nxrt.runtime.device import Device
from nxrt.runtime.stream import Stream


@pytest.fixture
def device() -> Iterator[Device]:
    opened = Device(0)
    yield opened
    opened.close()


@pytest.fixture
def stream(device: Device) -> Iterator[Stream]:
    with Stream(device) as opened:
        yield opened
