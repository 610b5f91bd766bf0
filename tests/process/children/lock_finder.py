"""Find every lock that nxrt's objects hold, wherever it is kept."""

import gc
import sys
import threading
from collections import deque
from types import FunctionType, MethodType, ModuleType
from typing import Any

PACKAGE = "nxrt"
_LOCKS = (type(threading.Lock()), type(threading.RLock()))
_CONTAINERS = (dict, list, tuple, set, frozenset, deque, MethodType)


def locks_of(*roots: object) -> dict[str, Any]:
    """Return the locks that are reachable from some objects, and nxrt's own global ones.

    Args:
        roots: objects of nxrt.

    Returns: each lock by what holds it, with a number.
    """
    modules = [module for name, module in sys.modules.items() if name.startswith(PACKAGE)]
    waiting: deque[tuple[object, str]] = deque((root, "") for root in roots)
    waiting.extend((vars(module), module.__name__) for module in modules)
    seen: set[int] = set()
    found: dict[str, Any] = {}
    while waiting:
        thing, holder = waiting.popleft()
        if id(thing) in seen:
            continue
        seen.add(id(thing))
        if isinstance(thing, _LOCKS):
            found[f"{len(found)}: {holder}"] = thing
        elif _is_searched(thing):
            name = holder if isinstance(thing, _CONTAINERS) else type(thing).__qualname__
            waiting.extend((inside, name) for inside in gc.get_referents(thing))
    return found


def _is_searched(thing: object) -> bool:
    if isinstance(thing, (type, ModuleType, FunctionType)):
        return False
    return isinstance(thing, _CONTAINERS) or type(thing).__module__.startswith(PACKAGE)
