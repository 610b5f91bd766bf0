"""A callback that stays registered until it is closed, or until its object is gone.

What it is called for, and when, is the business of `pressure` and `watermark`.
"""

import logging
import weakref
from collections.abc import Callable
from typing import Self

from nxrt.memory.account import Account
from nxrt.memory.tier import Tier

logger = logging.getLogger("nxrt.memory")
"""Where refusals, oversubscription, watermarks and failing callbacks are told, with fields."""
logger.addHandler(logging.NullHandler())


class Registration:
    """Keep a callback registered; a context manager whose `close` may be repeated.

    A bound method is held weakly: it leaves with its object. Anything else is held until `close`.
    """

    def __init__(
        self,
        registry: "dict[Registration, None]",
        account: Account,
        tier: Tier,
        callback: Callable[..., object],
        name: str,
    ) -> None:
        self.name = name
        self.tier = tier
        self.account = account
        self._registry = registry
        self._callback: Callable[[], Callable[..., object] | None]
        if hasattr(callback, "__self__") and hasattr(callback, "__func__"):
            self._callback = weakref.WeakMethod(callback, self._forget)
        else:
            self._callback = lambda: callback

    @property
    def callback(self) -> Callable[..., object] | None:
        """Return what is called, None once its object is gone."""
        return self._callback()

    def close(self) -> None:
        """Call it no more; a call that another thread has begun may still be running."""
        self._registry.pop(self, None)

    def _forget(self, _reference: object) -> None:
        self.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
