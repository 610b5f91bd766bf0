"""Say what a machine without a usable driver is told, and how long each answer took.

Writes one JSON object: for each use either {"error": class, "text": message} or {"value": text},
with "seconds".
"""

import json
import time
from collections.abc import Callable

_began = time.perf_counter()
import nxrt  # noqa: E402  (its import is timed)

_IMPORT_S = time.perf_counter() - _began

from nxrt.runtime import driver  # noqa: E402
from tests.process.children.world import cpu_is_right, end_where_it_hangs  # noqa: E402


def outcome(use: Callable[[], object]) -> dict[str, object]:
    """Return what a use answered or raised, and after how long."""
    began = time.perf_counter()
    try:
        found: dict[str, object] = {"value": str(use())}
    except nxrt.NxrtError as error:
        found = {"error": type(error).__name__, "text": str(error)}
    return {**found, "seconds": time.perf_counter() - began}


def chosen() -> str:
    """Return what "auto" chooses, and why."""
    choice = nxrt.select_provider("auto")
    choice.provider.close()
    return f"{choice.provider.name}: {choice.reason}"


def opened() -> str:
    """Open the CUDA provider and return what it found."""
    with nxrt.CudaProvider() as provider:
        return provider.capabilities.name


def main() -> None:
    end_where_it_hangs(30)
    answers = {
        "import": {"seconds": _IMPORT_S},
        "device": outcome(opened),
        "device again": outcome(opened),
        "probe": outcome(lambda: driver.probe().reason),
        "auto": outcome(chosen),
        "cuda by name": outcome(lambda: nxrt.select_provider("cuda")),
        "cpu": outcome(cpu_is_right),
    }
    print(json.dumps(answers))


if __name__ == "__main__":
    main()
