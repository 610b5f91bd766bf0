"""Use sessions on drivers that lack one function, each in a process of its own; print problems.

Run as a module: the double's library, the compile cache, then the functions to leave out, one after
the other. The driver is first called in the forked children, so that each looks functions up anew.
"""

import json
import os
import sys
from contextlib import suppress
from pathlib import Path

from nxrt import DriverError, DriverUnavailableError, NxrtError
from tests.helpers.cuda_toys import ToyStandIns
from tests.helpers.fake_driver import FakeDriver, load
from tests.helpers.fake_kernels import register_all
from tests.helpers.fault_scenarios import SCENARIOS, Subject

_EXPECTED = (DriverError, DriverUnavailableError)


def problems_without(call: str, fake: FakeDriver, cache_dir: Path) -> list[str]:
    """Go through every scenario on a driver without the function; return what is wrong."""
    os.environ["NXRT_FAKE_MISSING"] = call
    problems = []
    for scenario in SCENARIOS:
        subject = Subject(fake, cache_dir)
        try:
            scenario.prepare(subject)
            scenario.act(subject)
        except NxrtError as error:
            if not _is_explained(error, call):
                problems.append(f"{scenario.id}: {error!r} does not name {call}")
        except Exception as error:  # noqa: BLE001  (any other is what is looked for)
            problems.append(f"{scenario.id}: {error!r} escaped")
        with suppress(NxrtError):  # closing waits, and says so where it cannot
            subject.close()
    return problems + fake.violations


def _is_explained(error: BaseException, call: str) -> bool:
    link: BaseException | None = error
    while link is not None:
        if isinstance(link, _EXPECTED) and f"{call} failed with FUNCTION_NOT_FOUND" in str(link):
            return True
        link = link.__cause__ or link.__context__
    return False


def main(library: str, cache_dir: str, *calls: str) -> None:
    """Print one line for each function."""
    fake = load(Path(library))
    register_all(fake)
    ToyStandIns(fake).register()
    for call in calls:
        child = os.fork()
        if child == 0:
            found = problems_without(call, fake, Path(cache_dir))
            print(json.dumps({"missing": call, "problems": found}), flush=True)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if status:
            print(json.dumps({"missing": call, "problems": [f"status {status}"]}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
