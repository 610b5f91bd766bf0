"""Every exception nxrt raises, in one tree.

It holds no logic beyond composing messages. Each class carries fields, derives from the matching
built-in where one exists, and its message says what was asked, what was found, and what to do.

    NxrtError
    ├── InvalidInputError (ValueError)      an argument, tensor or attribute that is not accepted
    │   ├── SizeOverflowError (OverflowError)  a count or a byte size past the 63-bit range
    │   ├── InvalidNodeError                a node that the operator's contract refuses
    │   ├── BudgetError                     a memory budget that cannot be used as written
    │   └── JobError                        a job file, or an option that overrides it
    ├── UnsupportedGraphError               no provider takes every node of the graph
    ├── RegistrationError (ValueError)      a plug-in that the registry refuses
    ├── PluginError (RuntimeError)          a plug-in that raised in claim or in create
    ├── LeaseRefusedError (MemoryError)     the governor said no: over a limit
    ├── StateGroupOutOfMemoryError (MemoryError)  a state group that the governor has no room for
    ├── LeaseCancelledError (RuntimeError)  a wait for memory that its token ended
    ├── LeasesOutstandingError (RuntimeError)  a governor closed while somebody holds its leases
    ├── AllocationFailedError (MemoryError) the driver said no, after the lease was granted
    ├── ClosedError (RuntimeError)          an object that was closed before this use
    ├── DriverUnavailableError (RuntimeError)  no CUDA driver, or no device
    ├── DriverError (RuntimeError)          a driver call that failed
    │   └── DeviceLostError                 an earlier failure took the device's context with it
    ├── ForkedProcessError (RuntimeError)   CUDA used in the forked child of a process that uses it
    ├── DeviceFaultError (RuntimeError)     a kernel met bad data and said so, on the device
    ├── CompileError (RuntimeError)         a kernel that did not compile
    └── CaptureError (RuntimeError)         a graph that could not be recorded or instantiated
        └── CaptureDeclinedError            refused before recording began, every offender listed
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

_SHOWN = 300
"""Characters of what came that a message repeats; `found` holds it whole."""


def _rebuild(cls: type["NxrtError"], args: tuple[Any, ...]) -> "NxrtError":
    return Exception.__new__(cls, *args)


def _sentences(*parts: str) -> str:
    return "; ".join(part for part in parts if part)


class NxrtError(Exception):
    """Be the root of everything nxrt raises on purpose.

    Instances survive pickling with their fields, so that a worker process can report them.
    """

    def __reduce__(self) -> tuple[Callable[..., "NxrtError"], tuple[Any, ...], dict[str, Any]]:
        return _rebuild, (type(self), self.args), self.__dict__.copy()


class InvalidInputError(NxrtError, ValueError):
    """Report an input that is not accepted: what came, what is accepted, what to do.

    Args:
        subject: the name of the argument, tensor, attribute or key.
        found: what came.
        accepted: what is accepted.
        remedy: what to do, where that is not obvious.
    """

    def __init__(self, subject: str, *, found: str, accepted: str, remedy: str = "") -> None:
        self.subject = subject
        self.found = found
        self.accepted = accepted
        self.remedy = remedy
        shown = found if len(found) <= _SHOWN else f"{found[:_SHOWN]}... ({len(found)} characters)"
        super().__init__(_sentences(f"{subject}: got {shown}", f"accepted: {accepted}", remedy))


class SizeOverflowError(InvalidInputError, OverflowError):
    """Report a count or byte size past 2**63 - 1, before anything was computed with it."""


class InvalidNodeError(InvalidInputError):
    """Report a node, or the tensors given to it, that the operator's contract refuses."""


class BudgetError(InvalidInputError):
    """Report a memory budget that cannot be used as written; `subject` is the key."""


class JobError(InvalidInputError):
    """Report a job file, or an option that overrides it; `subject` is the key or the file."""


class UnsupportedGraphError(NxrtError):
    """Report that no provider takes every node.

    Args:
        declines: one line for each provider and node: who declined, and why.
    """

    def __init__(self, declines: Sequence[str]) -> None:
        self.declines = tuple(declines)
        super().__init__("no provider takes every node of the graph; " + "; ".join(self.declines))


class RegistrationError(NxrtError, ValueError):
    """Report a plug-in registration that was refused; the registry is as it was before.

    Args:
        plugin: the name of the plug-in.
        problems: everything that is wrong with it.
    """

    def __init__(self, plugin: str, problems: Sequence[str]) -> None:
        self.plugin = plugin
        self.problems = tuple(problems)
        super().__init__(f"plug-in {plugin!r} was not registered: " + "; ".join(self.problems))


class PluginError(NxrtError, RuntimeError):
    """Report a plug-in that broke its contract; the first cause is `__cause__`."""

    def __init__(self, plugin: str, action: str, problem: str) -> None:
        self.plugin = plugin
        self.action = action
        self.problem = problem
        super().__init__(f"plug-in {plugin!r} failed in {action}: {problem}")


class LeaseRefusedError(NxrtError, MemoryError):
    """Report that a reservation does not fit its limit; nothing was changed.

    Args:
        tier: the tier's name, such as "device:0".
        requested: bytes asked for.
        available: bytes that would have been granted.
        limit: the tier's limit in bytes.
        holder: who asked.
        largest_holders: (holder, bytes) of the largest live holders, largest first.
        level: the path of the governor whose limit it is; "process/engine", say.
        cap: the cap inside the tier that refused, "role kv_cache", say; empty for the tier's limit.
        reason: "limit"; "queue", where earlier requests wait for the same memory; or "timeout".
        asked: (reclaimer, what came of it) for everybody who was asked to give memory back.
    """

    def __init__(
        self,
        tier: str,
        *,
        requested: int,
        available: int,
        limit: int,
        holder: str,
        largest_holders: Sequence[tuple[str, int]],
        level: str = "",
        cap: str = "",
        reason: str = "limit",
        asked: Sequence[tuple[str, str]] = (),
    ) -> None:
        self.tier, self.holder = tier, holder
        self.requested, self.available, self.limit = requested, available, limit
        self.largest_holders = tuple(largest_holders)
        self.level, self.cap, self.reason = level, cap, reason
        self.asked = tuple(asked)
        super().__init__(_sentences(*self._parts()))

    def _parts(self) -> Iterator[str]:
        yield (
            f"cannot reserve {self.requested:,} B on {self.tier} for {self.holder!r}:"
            f" {self.available:,} B of {self.limit:,} B available"
        )
        held = ", ".join(f"{name} {nbytes:,} B" for name, nbytes in self.largest_holders)
        yield f"held by: {held or 'nobody'}"
        if self.reason != "limit":
            yield {"queue": "earlier requests wait for it", "timeout": "waited in vain"}[
                self.reason
            ]
        if self.asked:
            yield "asked " + ", ".join(f"{name}: {outcome}" for name, outcome in self.asked)
        of_level = f" of {self.level}" if self.level else ""
        cap = f"the cap of {self.cap} in " if self.cap else ""
        kind = self.tier.split(":", maxsplit=1)[0]
        yield f"raise {cap}the {kind} budget{of_level} or ask for less"


class StateGroupOutOfMemoryError(NxrtError, MemoryError):
    """Report a state group that a limit does not admit; the governor's refusal is `__cause__`.

    Bytes: `requested`, in an exchange what it lacks; `resident`, what everybody has of the `limit`.
    """

    def __init__(
        self, request: int, device: int, *, requested: int, resident: int, limit: int
    ) -> None:
        self.request, self.device = request, device
        self.requested, self.resident, self.limit = requested, resident, limit
        super().__init__(
            f"cannot charge {requested:,} B for the state of request {request} on device:{device}:"
            f" {resident:,} B of {limit:,} B in use; release a state group or raise the budget"
        )


class LeaseCancelledError(NxrtError, RuntimeError):
    """Report a wait of `holder` for memory that its token ended; nothing was charged.

    Args:
        tier: the tier's name.
        requested: bytes asked for.
    """

    def __init__(self, tier: str, *, requested: int, holder: str) -> None:
        self.tier, self.requested, self.holder = tier, requested, holder
        super().__init__(
            f"the wait of {holder!r} for {requested:,} B on {tier} was cancelled; nothing is"
            " charged"
        )


class LeasesOutstandingError(NxrtError, RuntimeError):
    """Report a governor that was closed while somebody held its leases; it is still open.

    Args:
        level: the governor's path.
        holders: (tier, role, holder, bytes) of each open lease, the largest first.
        children: the names of the levels below that are still open.
    """

    _SHOWN_HOLDERS = 8

    def __init__(
        self, level: str, holders: Sequence[tuple[str, str, str, int]], children: Sequence[str] = ()
    ) -> None:
        self.level = level
        self.holders = tuple(holders)
        self.children = tuple(children)
        shown = [
            f"{role} of {holder!r}, {nbytes:,} B on {tier}"
            for tier, role, holder, nbytes in self.holders[: self._SHOWN_HOLDERS]
        ]
        more = len(self.holders) - len(shown)
        open_leases = ", ".join(shown) + (f" and {more:,} more" if more else "")
        super().__init__(
            _sentences(
                f"governor {level!r} cannot close",
                f"open leases: {open_leases}" if shown else "",
                f"open children: {', '.join(self.children)}" if self.children else "",
                "close them first",
            )
        )


class AllocationFailedError(NxrtError, MemoryError):
    """Report that the budget admitted a size but the allocator could not deliver it.

    The lease has been given back. The allocator's own error is `__cause__`.
    """

    def __init__(self, tier: str, *, requested: int, holder: str, reason: str) -> None:
        self.tier, self.requested = tier, requested
        self.holder, self.reason = holder, reason
        super().__init__(
            f"{tier} could not allocate {requested:,} B for {holder!r} although the budget admits"
            f" it: {reason}; another process may hold the memory: lower the budget to what is free"
        )


class ClosedError(NxrtError, RuntimeError):
    """Report a use of an object after it was closed."""

    def __init__(self, what: str) -> None:
        self.what = what
        super().__init__(f"{what} is closed; create a new one")


class DriverUnavailableError(NxrtError, RuntimeError):
    """Report that this machine has no usable CUDA driver or device.

    Args:
        reason: what was tried and what it answered.
        remedy: what to install or to check.
    """

    def __init__(self, reason: str, remedy: str) -> None:
        self.reason = reason
        self.remedy = remedy
        super().__init__(_sentences(f"no CUDA device can be used: {reason}", remedy))


class DriverError(NxrtError, RuntimeError):
    """Report a driver call that failed.

    Args:
        code: the driver's numeric result.
        name: its symbolic name, "UNKNOWN" for a code the bindings do not know.
        call: the driver function.
        explanation: what that usually means, in plain words.
    """

    def __init__(self, *, code: int, name: str, call: str, explanation: str) -> None:
        self.code = code
        self.name = name
        self.call = call
        self.explanation = explanation
        super().__init__(f"{call} failed with {name} ({code}): {explanation}")


class DeviceLostError(DriverError):
    """Report a use of a device whose context an earlier failure destroyed; the driver is not asked.

    Carries the code, name and call of that first failure.

    Args:
        device: the device's name, such as "cuda:0".
        first: the failure.
    """

    def __init__(self, device: str, first: DriverError) -> None:
        self.device = device
        super().__init__(
            code=first.code, name=first.name, call=first.call, explanation=first.explanation
        )
        lost = f"{device} was lost: {first.args[0]}"
        self.args = (f"{lost}; nothing can run there any more in this process: start a new one",)


class ForkedProcessError(NxrtError, RuntimeError):
    """Report CUDA used in the forked child of a process that had already used it."""

    def __init__(self) -> None:
        super().__init__(
            "this process was forked from one that uses CUDA, and the driver does not work in such"
            " a child; start workers with the 'spawn' or 'forkserver' method, or fork before the"
            " first use of CUDA"
        )


class DeviceFaultError(NxrtError, RuntimeError):
    """Report bad data that a kernel met on the device; its outputs of that step are not valid.

    Args:
        node: the node whose kernel said so.
        step: which run of the session it was, counted from 0.
        bits: the kernel's own fault bits.
        meaning: what the bits say.
    """

    def __init__(self, node: str, *, step: int, bits: int, meaning: str) -> None:
        self.node = node
        self.step = step
        self.bits = bits
        self.meaning = meaning
        super().__init__(f"node {node!r} met bad data in step {step}: {meaning} (bits {bits:#x})")


class CompileError(NxrtError, RuntimeError):
    """Report a kernel that did not compile.

    Args:
        source: the source's name.
        arch: the target, such as "sm_90a".
        log: everything the compiler said.
        remedy: what to do, where the log's cause is known.
    """

    def __init__(self, source: str, *, arch: str, log: str, remedy: str = "") -> None:
        self.source = source
        self.arch = arch
        self.log = log
        self.remedy = remedy
        tail = f"\n{remedy}" if remedy else ""
        super().__init__(f"{source} does not compile for {arch}:\n{log.strip()}{tail}")


class CaptureError(NxrtError, RuntimeError):
    """Report a capture that failed; the stream is usable and every lease is back.

    The first cause is `__cause__`.

    Args:
        stage: "begin", "record", "end", "instantiate" or "upload".
        kernel: the node that was being recorded, where the fault has one.
        problem: what went wrong.
    """

    def __init__(self, stage: str, problem: str, *, kernel: str = "") -> None:
        self.stage = stage
        self.kernel = kernel
        self.problem = problem
        where = f"{stage} of {kernel!r}" if kernel else stage
        super().__init__(f"graph capture failed at {where}: {problem}")


class CaptureDeclinedError(CaptureError):
    """Report that capture was refused before it began.

    Args:
        offenders: (node, reason) for everything that cannot be captured.
    """

    def __init__(self, offenders: Sequence[tuple[str, str]]) -> None:
        self.offenders = tuple(offenders)
        reasons = "; ".join(f"{name}: {reason}" for name, reason in self.offenders)
        super().__init__("begin", f"declined before recording: {reasons}")
