"""The rig that the tests of graphs share, on a card and on its double."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from nxrt import CudaProvider
from tests.helpers.cuda_toys import ToyStandIns
from tests.helpers.faulty_toys import Trouble
from tests.helpers.graph_rig import Rig, toys_plugin


@pytest.fixture
def rig(request: pytest.FixtureRequest, cache_dir: Path) -> Iterator[Rig]:
    is_fake = request.config.getoption("--fake-driver")
    fake = request.getfixturevalue("fake_driver") if is_fake else None
    if fake is not None:
        ToyStandIns(fake).register()
    trouble = Trouble()
    with CudaProvider(cache_dir=cache_dir) as provider:
        provider.registry.register(toys_plugin(trouble))
        rig = Rig(provider, fake, trouble)
        yield rig
    assert all(tier.used == 0 for tier in rig.governor.snapshot()), "memory is still charged"
