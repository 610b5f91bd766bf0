"""Fork from a process that has asked for a GPU but not used it; the child uses the CPU and CUDA.

Arguments: the cache folder, and how the child ends: "return", "sys.exit" or "os._exit".
"""

import os
import sys
from pathlib import Path

import nxrt
from nxrt.providers.cuda import KERNELS
from nxrt.runtime import driver
from tests.process.children.forking import finish, wait_for
from tests.process.children.world import cpu_is_right, cuda_is_right, use_stand_ins


def main(cache_dir: Path, way: str) -> None:
    use_stand_ins()
    assert driver.probe().is_available
    registry = nxrt.KernelRegistry()
    registry.register(KERNELS)
    assert [plugin.name for plugin in registry.plugins()] == [KERNELS.name]
    assert cpu_is_right()
    child = os.fork()
    if child == 0:
        assert cpu_is_right()
        assert cuda_is_right(cache_dir)
        finish(way)
        return
    print("child", wait_for(child))
    assert cuda_is_right(cache_dir)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
