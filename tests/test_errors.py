"""Check the exception tree: fields that survive, built-ins that catch, messages that help."""

import copy
import pickle
import re

import pytest

from nxrt import errors
from nxrt.errors import (
    AllocationFailedError,
    BudgetError,
    CaptureDeclinedError,
    CaptureError,
    ClosedError,
    CompileError,
    DeviceFaultError,
    DeviceLostError,
    DriverError,
    DriverUnavailableError,
    ForkedProcessError,
    InvalidInputError,
    InvalidNodeError,
    JobError,
    LeaseCancelledError,
    LeaseRefusedError,
    LeasesOutstandingError,
    NxrtError,
    PluginError,
    RegistrationError,
    SizeOverflowError,
    StateGroupOutOfMemoryError,
    UnsupportedGraphError,
)

_INPUT = {"found": "what came", "accepted": "what is fine", "remedy": "what to do"}
_REFUSED = LeaseRefusedError(
    "device:0",
    requested=1234,
    available=56,
    limit=1000,
    holder="newcomer",
    largest_holders=[("weights of a", 900), ("cache of b", 44)],
)
_NO_ROOM = StateGroupOutOfMemoryError(7, 1, requested=1234, resident=4000, limit=5000)
_NOT_DELIVERED = AllocationFailedError("pinned", requested=4096, holder="ring", reason="no pages")
_DRIVER = DriverError(code=700, name="CUDA_ERROR_X", call="cuLaunch", explanation="out of bounds")
_COMPILE = CompileError("select.cu", arch="sm_90a", log="line 7: oops\n", remedy="add the header")

EXAMPLES: tuple[NxrtError, ...] = (
    NxrtError("root"),
    InvalidInputError("the subject", **_INPUT),
    SizeOverflowError("the subject", **_INPUT),
    InvalidNodeError("the subject", **_INPUT),
    BudgetError("the subject", **_INPUT),
    JobError("the subject", **_INPUT),
    UnsupportedGraphError(["cpu declines 'a': no", "cuda declines 'b': never"]),
    RegistrationError("acme", ["it lists no kernels", "its name is odd"]),
    PluginError("acme", "create of 'node'", "ValueError('x')"),
    _REFUSED,
    _NO_ROOM,
    LeaseCancelledError("device:0", requested=1234, holder="newcomer"),
    LeasesOutstandingError("process/engine", [("device:0", "graph", "decode", 96)], ["request 7"]),
    _NOT_DELIVERED,
    ClosedError("the session"),
    DriverUnavailableError("no libcuda.so.1", "install the driver"),
    _DRIVER,
    DeviceLostError("cuda:0", _DRIVER),
    ForkedProcessError(),
    DeviceFaultError("append", step=7, bits=3, meaning="a cursor past the end"),
    _COMPILE,
    CaptureError("instantiate", "the driver said no", kernel="select"),
    CaptureDeclinedError([("select", "must grow"), ("attend", "never")]),
)

INPUT_PARTS = ("the subject", "what came", "what is fine", "what to do")
MESSAGE_PARTS: dict[type[NxrtError], tuple[str, ...]] = {
    InvalidInputError: INPUT_PARTS,
    SizeOverflowError: INPUT_PARTS,
    InvalidNodeError: INPUT_PARTS,
    BudgetError: INPUT_PARTS,
    JobError: INPUT_PARTS,
    UnsupportedGraphError: ("cpu declines 'a': no", "cuda declines 'b': never"),
    RegistrationError: ("'acme'", "it lists no kernels", "its name is odd"),
    PluginError: ("'acme'", "create of 'node'", "ValueError('x')"),
    LeaseRefusedError: (
        "1,234 B", "device:0", "'newcomer'", "56 B", "1,000 B",
        "weights of a 900 B, cache of b 44 B", "raise the device budget",
    ),
    StateGroupOutOfMemoryError: (
        "1,234 B", "request 7", "device:1", "4,000 B", "5,000 B", "release a state group",
    ),
    LeaseCancelledError: ("1,234 B", "device:0", "'newcomer'", "nothing is charged"),
    LeasesOutstandingError: (
        "'process/engine'", "graph of 'decode', 96 B on device:0", "request 7", "close them first",
    ),
    AllocationFailedError: ("pinned", "4,096 B", "'ring'", "no pages", "lower the budget"),
    ClosedError: ("the session is closed", "create a new one"),
    DriverUnavailableError: ("no libcuda.so.1", "install the driver"),
    DriverError: ("cuLaunch", "CUDA_ERROR_X", "700", "out of bounds"),
    DeviceLostError: ("cuda:0 was lost", "cuLaunch", "CUDA_ERROR_X", "start a new one"),
    ForkedProcessError: ("forked", "'spawn'", "before the first use of CUDA"),
    DeviceFaultError: ("'append'", "step 7", "a cursor past the end", "0x3"),
    CompileError: ("select.cu", "sm_90a", "line 7: oops", "add the header"),
    CaptureError: ("instantiate", "'select'", "the driver said no"),
    CaptureDeclinedError: ("select: must grow", "attend: never", "before recording"),
}  # fmt: skip

BUILTINS: dict[type[NxrtError], type[Exception]] = {
    InvalidInputError: ValueError,
    SizeOverflowError: OverflowError,
    InvalidNodeError: ValueError,
    BudgetError: ValueError,
    JobError: ValueError,
    RegistrationError: ValueError,
    PluginError: RuntimeError,
    LeaseRefusedError: MemoryError,
    StateGroupOutOfMemoryError: MemoryError,
    LeaseCancelledError: RuntimeError,
    LeasesOutstandingError: RuntimeError,
    AllocationFailedError: MemoryError,
    ClosedError: RuntimeError,
    DriverUnavailableError: RuntimeError,
    DriverError: RuntimeError,
    DeviceLostError: RuntimeError,
    ForkedProcessError: RuntimeError,
    DeviceFaultError: RuntimeError,
    CompileError: RuntimeError,
    CaptureError: RuntimeError,
    CaptureDeclinedError: RuntimeError,
}

_TREE_LINE = re.compile(r"^ {4}([ │├└─]*)(\w+Error)(?: \((\w+)\))?", re.MULTILINE)


def class_name(value: object) -> str:
    return value.__name__ if isinstance(value, type) else type(value).__name__


def classes_below(root: type[NxrtError]) -> list[type[NxrtError]]:
    found = [root]
    for subclass in root.__subclasses__():
        if subclass.__module__ == errors.__name__:
            found += classes_below(subclass)
    return found


ALL_CLASSES = tuple(classes_below(NxrtError))


def drawn_tree() -> dict[str, tuple[str, str]]:
    """Return (parent, built-in) by class name, as the module docstring draws them."""
    branch: list[str] = []
    tree: dict[str, tuple[str, str]] = {}
    for prefix, name, builtin in _TREE_LINE.findall(errors.__doc__ or ""):
        depth = len(prefix) // 4
        del branch[depth:]
        tree[name] = (branch[-1] if branch else "Exception", builtin)
        branch.append(name)
    return tree


def test_examples_cover_every_class() -> None:
    assert {type(error) for error in EXAMPLES} == set(ALL_CLASSES)


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("error", EXAMPLES, ids=class_name)
def test_error_survives_pickling_with_its_fields(error: NxrtError, protocol: int) -> None:
    back = pickle.loads(pickle.dumps(error, protocol))  # our own bytes
    assert type(back) is type(error)
    assert str(back) == str(error)
    assert vars(back) == vars(error)


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy])
@pytest.mark.parametrize("error", EXAMPLES, ids=class_name)
def test_error_survives_copying_with_its_fields(error: NxrtError, duplicate: object) -> None:
    assert callable(duplicate)
    back = duplicate(error)
    assert back is not error
    assert type(back) is type(error)
    assert (str(back), vars(back)) == (str(error), vars(error))


def test_note_survives_pickling() -> None:
    error = ClosedError("the session")
    error.add_note("while running node 'a'")
    assert pickle.loads(pickle.dumps(error)).__notes__ == ["while running node 'a'"]


def test_changing_a_copy_leaves_the_original() -> None:
    error = ClosedError("the session")
    copy.copy(error).what = "something else"
    assert error.what == "the session"


@pytest.mark.parametrize(("cls", "builtin"), BUILTINS.items(), ids=class_name)
def test_error_derives_from_its_builtin(cls: type[NxrtError], builtin: type[Exception]) -> None:
    assert issubclass(cls, builtin)


@pytest.mark.parametrize("error", EXAMPLES[1:], ids=class_name)
def test_message_tells_everything_it_was_given(error: NxrtError) -> None:
    missing = [part for part in MESSAGE_PARTS[type(error)] if part not in str(error)]
    assert not missing


def test_message_without_a_remedy_ends_with_what_is_accepted() -> None:
    error = InvalidInputError("top_k", found="0", accepted="from 1")
    assert str(error) == "top_k: got 0; accepted: from 1"


def test_refusal_says_nobody_where_nobody_holds_anything() -> None:
    error = LeaseRefusedError(
        "host", requested=2, available=1, limit=1, holder="x", largest_holders=[]
    )
    assert "held by: nobody" in str(error)


def test_refusal_keeps_its_numbers_as_fields() -> None:
    assert (_REFUSED.tier, _REFUSED.holder) == ("device:0", "newcomer")
    assert (_REFUSED.requested, _REFUSED.available, _REFUSED.limit) == (1234, 56, 1000)
    assert _REFUSED.largest_holders == (("weights of a", 900), ("cache of b", 44))


def test_a_state_group_without_room_keeps_its_numbers_as_fields() -> None:
    assert (_NO_ROOM.request, _NO_ROOM.device, _NO_ROOM.requested) == (7, 1, 1234)
    assert (_NO_ROOM.resident, _NO_ROOM.limit) == (4000, 5000)


def test_refusal_names_the_level_the_cap_and_whom_was_asked() -> None:
    error = LeaseRefusedError(
        "device:1",
        requested=2,
        available=1,
        limit=1,
        holder="x",
        largest_holders=[],
        level="process/engine",
        cap="role kv_cache",
        reason="timeout",
        asked=[("prefix cache", "released 1 B")],
    )
    assert str(error).endswith(
        "waited in vain; asked prefix cache: released 1 B; raise the cap of role kv_cache in the"
        " device budget of process/engine or ask for less"
    )


def test_outstanding_leases_beyond_the_eighth_are_counted() -> None:
    error = LeasesOutstandingError("process", [("host", "graph", "x", 1)] * 10)
    assert str(error).count("graph of 'x'") == 8
    assert "and 2 more" in str(error)
    assert len(error.holders) == 10


def test_capture_error_without_a_kernel_names_only_the_stage() -> None:
    assert "failed at end: why" in str(CaptureError("end", "why"))


def test_declined_capture_failed_at_begin() -> None:
    assert CaptureDeclinedError([("a", "b")]).stage == "begin"


@pytest.mark.parametrize("cls", ALL_CLASSES, ids=class_name)
def test_docstring_draws_the_class_under_its_parent(cls: type[NxrtError]) -> None:
    assert drawn_tree()[cls.__name__][0] == cls.__bases__[0].__name__


@pytest.mark.parametrize("cls", ALL_CLASSES[1:], ids=class_name)
def test_docstring_names_the_builtin_the_class_adds(cls: type[NxrtError]) -> None:
    added = [base.__name__ for base in cls.__bases__ if not issubclass(base, NxrtError)]
    assert drawn_tree()[cls.__name__][1] == "".join(added)


def test_docstring_draws_nothing_that_does_not_exist() -> None:
    assert drawn_tree().keys() == {cls.__name__ for cls in ALL_CLASSES}
