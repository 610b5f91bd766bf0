"""Fork from a process that has everything open; the child's uses of CUDA must fail at once.

Arguments: the cache folder, and either how the child ends or what another thread of the parent does
at the fork: "beside run" or "beside each lock".
"""

import os
import sys
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nxrt
from nxrt.errors import ForkedProcessError
from tests.helpers.cases import OUTPUT
from tests.process.children.forking import finish, wait_for
from tests.process.children.lock_finder import locks_of
from tests.process.children.world import Opened, cpu_is_right, end_where_it_hangs, use_stand_ins

AT_ONCE_S = 2.0


class SlowStream:
    """A caller's stream that is asked for its handle and does not answer yet."""

    def __init__(self) -> None:
        self.asked, self.answer = threading.Event(), threading.Event()

    def __cuda_stream__(self) -> tuple[int, int]:
        self.asked.set()
        self.answer.wait()
        return (0, 0)


def uses_of_cuda(opened: Opened, cache_dir: Path) -> dict[str, Callable[[], object]]:
    """Return everything that may be called on what the parent opened."""
    binding, session = opened.binding, opened.session
    query = opened.case.inputs["query"]
    graph, provider, governor = opened.case.graph, opened.provider, nxrt.MemoryGovernor()
    return {
        "new provider": lambda: nxrt.CudaProvider(cache_dir=cache_dir),
        "provider.open": lambda: provider.open(governor),
        "new session": lambda: nxrt.Session(graph, [provider], governor),
        "run": lambda: session.run(binding),
        "step": lambda: session.step(binding),
        "capture": lambda: session.capture(binding),
        "bind": session.bind,
        "write": lambda: binding.write("query", query),
        "read": lambda: binding.read(OUTPUT),
        "synchronize": session.synchronize,
        "replay": opened.graph.replay,
    }


def check_child(opened: Opened, cache_dir: Path) -> None:
    """Use the CPU, be refused CUDA, close everything."""
    end_where_it_hangs(5)
    assert cpu_is_right()
    for name, use in uses_of_cuda(opened, cache_dir).items():
        began = time.monotonic()
        try:
            use()
        except ForkedProcessError:
            assert time.monotonic() - began < AT_ONCE_S, f"{name} took long"
        else:
            raise AssertionError(f"{name} was not refused")
    choice = nxrt.select_provider("auto", cache_dir=cache_dir)
    assert isinstance(choice.provider, nxrt.CpuProvider)
    assert "forked" in choice.reason
    choice.provider.close()
    assert not opened.provider.health.is_ready
    opened.close()
    opened.close()


def forked(opened: Opened, cache_dir: Path, way: str) -> int | None:
    """Fork, check in the child; return the child's exit code, None in a child that goes on."""
    fake = use_stand_ins()
    before = None if fake is None else fake.snapshot()
    with warnings.catch_warnings():
        # Python says that forking beside threads may hang: that it does not is what is tested.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child:
        return wait_for(child)
    check_child(opened, cache_dir)
    if fake is not None:
        assert fake.snapshot() == before, "the child released what is the parent's"
    finish(way)
    return None


def fork_beside_run(opened: Opened, cache_dir: Path) -> None:
    """Fork while another thread is in the middle of `Session.run`."""
    stream = SlowStream()
    runner = threading.Thread(target=lambda: opened.session.run(opened.binding, stream=stream))
    runner.start()
    stream.asked.wait()
    print("child", forked(opened, cache_dir, "os._exit"))
    stream.answer.set()
    runner.join()


def fork_beside_each_lock(opened: Opened, cache_dir: Path) -> None:
    """Fork while another thread holds a lock, for each lock that there is."""
    for name, lock in locks_of(opened.session, opened.provider, opened.graph, opened.lease).items():
        holder = Holder(lock)
        holder.held.wait()
        code = forked(opened, cache_dir, "os._exit")
        holder.leave.set()
        holder.thread.join()
        if code:
            print(f"the child ended with {code} where a thread held the lock of {name}")
            return


class Holder:
    """Hold a lock on a thread of its own until told to leave it."""

    def __init__(self, lock: Any) -> None:
        self.held, self.leave = threading.Event(), threading.Event()
        self.thread = threading.Thread(target=self._hold, args=(lock,))
        self.thread.start()

    def _hold(self, lock: Any) -> None:
        with lock:
            self.held.set()
            self.leave.wait()


def main(cache_dir: Path, way: str) -> None:
    use_stand_ins()
    opened = Opened(cache_dir)
    if way == "beside run":
        fork_beside_run(opened, cache_dir)
    elif way == "beside each lock":
        fork_beside_each_lock(opened, cache_dir)
    else:
        code = forked(opened, cache_dir, way)
        if code is None:
            return
        print("child", code)
    opened.graph.replay()
    assert opened.is_right()
    opened.use_all()
    opened.close()
    assert all(tier.used == 0 for tier in opened.governor.snapshot())


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
