"""Use CUDA in workers of multiprocessing, started from a process that uses it already.

Arguments: the cache folder and the start method.
"""

import multiprocessing
import sys
from pathlib import Path

from nxrt.errors import ForkedProcessError
from tests.process.children.world import Opened, cpu_is_right, cuda_is_right, use_stand_ins

WORKER_S = 30


def work(cache_dir: Path, is_refused: bool) -> None:
    """Use the CPU and CUDA in a worker; what fails becomes its exit code."""
    use_stand_ins()
    assert cpu_is_right()
    try:
        is_right = cuda_is_right(cache_dir)
    except ForkedProcessError:
        assert is_refused
    else:
        assert is_right
        assert not is_refused


def main(cache_dir: Path, method: str) -> None:
    use_stand_ins()
    opened = Opened(cache_dir)
    context = multiprocessing.get_context(method)
    workers = [context.Process(target=work, args=(cache_dir, method == "fork")) for _ in range(2)]  # type: ignore[attr-defined]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(WORKER_S)
        print(worker.exitcode)
    opened.use_all()
    opened.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
