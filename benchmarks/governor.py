"""What a reservation costs, beside the least that one could: a lock and a dictionary.

    python -m benchmarks.governor

Everything takes turns in one run, so that the ratios hold on a busy machine too: of each, the best
of many short batches counts. `--json` prints data.
"""

import dataclasses
import json
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from nxrt.memory.budget import MemoryBudget
from nxrt.memory.governor import MemoryGovernor
from nxrt.memory.tier import Role, device_tier

BATCH = 200
ROUNDS = 400
FEW, MANY = 10, 10_000
DEVICE = device_tier(0)
MAX_PAIR_US = 3.0
MAX_GROWTH = 1.1
"""With 10,000 holders, over the same with 10: nothing may depend on how many there are."""


@dataclass(frozen=True)
class GovernorCost:
    """Report one pair of calls.

    Args:
        name: what was done.
        pair_us: microseconds for taking and giving back.
        ratio: over a lock and a dictionary in the same run.
    """

    name: str
    pair_us: float
    ratio: float


def measure() -> list[GovernorCost]:
    """Return what each pair of calls costs, the bare one first."""
    with ExitStack() as held:
        actions = {
            "lock and dictionary": bare_pair(),
            f"reserve and close, {FEW} holders": governor_pair(held, FEW),
            f"reserve and close, {MANY:,} holders": governor_pair(held, MANY),
            "reserve and close, three levels": governor_pair(held, FEW, depth=2),
            "reserve and close, caps and events": governor_pair(held, FEW, is_rich=True),
            "grow and shrink": grow_and_shrink(held),
        }
        best = taking_turns(actions)
    bare = best["lock and dictionary"]
    return [GovernorCost(name, us, us / bare) for name, us in best.items()]


def bare_pair() -> Callable[[], object]:
    """Return the least that counting can cost: add under a lock, and take off again."""
    lock = threading.Lock()
    used: dict[str, int] = {}

    def pair() -> None:
        with lock:
            used["x"] = used.get("x", 0) + 100
        with lock:
            used["x"] = used["x"] - 100

    return pair


def governor_pair(
    held: ExitStack, num_holders: int, *, depth: int = 0, is_rich: bool = False
) -> Callable[[], object]:
    """Return a reservation and its close, beside others' leases."""
    limits: dict[str, object] = {"limit": "1 GiB"}
    if is_rich:
        limits |= {"watermark": "90%", "roles": {"staging": "50%"}, "requests": {"*": "50%"}}
    budget = MemoryBudget.of(device=limits)
    governor = MemoryGovernor(budget, history=65_536 if is_rich else 0)
    for n in range(num_holders):
        held.enter_context(governor.reserve(DEVICE, 1, role=Role.KV_CACHE, holder=f"holder {n}"))
    for n in range(depth):
        governor = governor.child(f"level {n}", budget)
    request = "7" if is_rich else ""

    def pair() -> None:
        governor.reserve(DEVICE, 100, role=Role.STAGING, holder="x", request=request).close()

    return pair


def grow_and_shrink(held: ExitStack) -> Callable[[], object]:
    """Return growing a lease and shrinking it again."""
    governor = MemoryGovernor(MemoryBudget.of(device="1 GiB"))
    lease = held.enter_context(governor.reserve(DEVICE, 1, role=Role.STAGING, holder="x"))

    def pair() -> None:
        lease.grow(100)
        lease.shrink(100)

    return pair


def taking_turns(actions: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Return the least microseconds of each action, of batches that alternate."""
    best = dict.fromkeys(actions, float("inf"))
    for _ in range(ROUNDS):
        for name, action in actions.items():
            started = time.perf_counter()
            for _ in range(BATCH):
                action()
            best[name] = min(best[name], (time.perf_counter() - started) / BATCH * 1e6)
    return best


def p99_us(num_pairs: int = 50_000) -> float:
    """Return the 99th percentile of one reservation and its close, timed one by one."""
    with ExitStack() as held:
        pair = governor_pair(held, MANY)
        times = []
        for _ in range(num_pairs):
            started = time.perf_counter_ns()
            pair()
            times.append(time.perf_counter_ns() - started)
    return sorted(times)[len(times) * 99 // 100] / 1e3


def main() -> None:
    """Measure and print; the status is 1 where a figure is missed."""
    rows = measure()
    few, many = rows[1], rows[2]
    is_met = few.pair_us <= MAX_PAIR_US and many.pair_us <= few.pair_us * MAX_GROWTH
    if "--json" in sys.argv[1:]:
        print(json.dumps([dataclasses.asdict(row) for row in rows], indent=2))
        sys.exit(not is_met)
    table = Table(title="memory governor", title_justify="left")
    for name in ("pair of calls", "us", "ratio"):
        table.add_column(name, justify="left" if name == "pair of calls" else "right")
    for row in rows:
        table.add_row(row.name, f"{row.pair_us:.2f}", f"{row.ratio:.2f}")
    console = Console()
    console.print(table)
    console.print(f"{MANY:,} holders over {FEW}: {many.pair_us / few.pair_us:.3f}")
    console.print(f"99th percentile of a pair, {MANY:,} holders: {p99_us():.1f} us")
    console.print(f"at most {MAX_PAIR_US} us and {MAX_GROWTH}: {'met' if is_met else 'missed'}")
    sys.exit(not is_met)


if __name__ == "__main__":
    main()
