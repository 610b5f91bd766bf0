"""What the tests of whole processes share."""

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def child_cache_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a compile cache that only child processes use.

    In this process NVRTC must be loaded by a provider: the stand-ins compile as well, and the
    double refuses what NVRTC calls when it is loaded inside a kernel.
    """
    return tmp_path_factory.mktemp("child-compile-cache")
