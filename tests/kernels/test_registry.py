"""Check who serves what: versions, conflicts, replacement; a plug-in is taken whole or not."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nxrt.errors import PluginError, RegistrationError
from nxrt.graph import Node
from nxrt.kernels.api import KernelFactory, KernelMatch, OpKey
from nxrt.kernels.registry import Claim, KernelPlugin, KernelRegistry
from nxrt.tensor import DType, TensorSpec
from tests.helpers.toy_kernels import DOMAIN, StubFactory, ToyFactory, raising, toy_plugin

X = TensorSpec(DType.F32, (4,))
FACTORY = ToyFactory()


def registry_of(*plugins: KernelPlugin) -> KernelRegistry:
    registry = KernelRegistry()
    for plugin in plugins:
        registry.register(plugin)
    return registry


def versions_plugin(*versions: int) -> KernelPlugin:
    return KernelPlugin("toy", tuple((OpKey(DOMAIN, "Op", v), ToyFactory()) for v in versions))


def claim(registry: KernelRegistry, *, op: str = "Op", version: int = 1) -> Claim:
    node = Node(op, ("x",), ("y",), domain=DOMAIN, name="the node")
    return registry.claim(node, [X], opset_version=version)


def problems(registry: KernelRegistry, plugin: Any, *, replace: bool = False) -> tuple[str, ...]:
    """Return why a plug-in is refused; the registry must be as it was."""
    before = registry.plugins()
    with pytest.raises(RegistrationError) as caught:
        registry.register(plugin, replace=replace)
    assert registry.plugins() == before
    return caught.value.problems


def chosen_version(registry: KernelRegistry, version: int) -> int | None:
    key = claim(registry, version=version).key
    return None if key is None else key.since_version


def test_claim_reports_who_answered_and_what() -> None:
    registry = registry_of(toy_plugin({"Op": FACTORY}))
    answer = claim(registry)
    assert answer == Claim(KernelMatch.supported([X]), "toy", OpKey(DOMAIN, "Op"), FACTORY)


def test_decline_of_the_factory_is_passed_on() -> None:
    factory = StubFactory(on_claim=lambda: KernelMatch.declined("too wide"))
    answer = claim(registry_of(toy_plugin({"Op": factory})))
    assert (answer.match.is_supported, answer.match.reason) == (False, "too wide")
    assert answer.plugin == "toy"


@pytest.mark.parametrize(("imported", "chosen"), [(1, 1), (2, 1), (3, 3), (4, 3), (7, 7), (99, 7)])
def test_greatest_version_up_to_the_imported_one_is_chosen(imported: int, chosen: int) -> None:
    assert chosen_version(registry_of(versions_plugin(7, 1, 3)), imported) == chosen


def test_older_version_is_not_asked_where_the_chosen_one_declines() -> None:
    declining = StubFactory(on_claim=lambda: KernelMatch.declined("no"))
    kernels = ((OpKey(DOMAIN, "Op", 1), FACTORY), (OpKey(DOMAIN, "Op", 2), declining))
    answer = claim(registry_of(KernelPlugin("toy", kernels)), version=5)
    assert (answer.match.is_supported, answer.key) == (False, OpKey(DOMAIN, "Op", 2))


@pytest.mark.parametrize("imported", [0, 1, 2])
def test_import_before_the_first_version_is_told_since_when(imported: int) -> None:
    answer = claim(registry_of(versions_plugin(5, 3)), version=imported)
    assert answer.match.reason == (
        f"{DOMAIN}::Op is registered since version 3 and the graph imports version {imported};"
        " import 3 or later"
    )
    assert (answer.plugin, answer.key, answer.factory) == ("", None, None)


def test_unknown_operator_is_told_what_is_known() -> None:
    registry = registry_of(
        toy_plugin({"B": FACTORY, "A": FACTORY}),
        KernelPlugin("onnx", ((OpKey("", "Add", 1), FACTORY), (OpKey("", "Add", 7), FACTORY))),
    )
    reason = claim(registry, op="C").match.reason
    assert reason == (
        f"{DOMAIN}::C is not registered; registered: ai.onnx::Add, {DOMAIN}::A, {DOMAIN}::B"
    )


def test_operator_of_another_domain_is_unknown() -> None:
    registry = registry_of(toy_plugin({"Op": FACTORY}))
    node = Node("Op", ("x",), ("y",), domain="elsewhere")
    assert not registry.claim(node, [X], opset_version=1).match.is_supported


def test_empty_registry_says_so() -> None:
    assert claim(KernelRegistry()).match.reason.endswith("registered: nothing")


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(["A", "B"]), st.integers(1, 12)), unique=True, min_size=1),
    st.sampled_from(["A", "B"]),
    st.integers(0, 13),
)
def test_version_is_the_one_that_a_linear_search_finds(
    keys: list[tuple[str, int]], op: str, imported: int
) -> None:
    kernels = tuple((OpKey(DOMAIN, name, version), FACTORY) for name, version in keys)
    expected = None
    for version in range(1, imported + 1):
        if (op, version) in keys:
            expected = OpKey(DOMAIN, op, version)
    assert claim(registry_of(KernelPlugin("toy", kernels)), op=op, version=imported).key == expected


def test_registering_the_same_plugin_twice_is_harmless() -> None:
    plugin = toy_plugin({"Op": FACTORY})
    assert registry_of(plugin, plugin).plugins() == (plugin,)


def test_plugins_are_listed_oldest_first() -> None:
    plugins = [toy_plugin({name: FACTORY}, name=name) for name in "cab"]
    assert [plugin.name for plugin in registry_of(*plugins).plugins()] == ["c", "a", "b"]


def test_conflict_names_the_operator_and_both_origins() -> None:
    registry = registry_of(toy_plugin({"Op": FACTORY}, name="old", origin="acme 1.0"))
    newer = toy_plugin({"Op": ToyFactory()}, name="new", origin="emca 2.0")
    (problem,) = problems(registry, newer)
    for part in (f"{DOMAIN}::Op v1", "'old'", "acme 1.0", "emca 2.0", "replace=True"):
        assert part in problem


def test_every_conflict_is_listed() -> None:
    registry = registry_of(
        toy_plugin({"A": FACTORY}, name="one"), toy_plugin({"B": FACTORY, "C": FACTORY}, name="two")
    )
    newer = toy_plugin({"A": FACTORY, "B": FACTORY, "D": FACTORY}, name="new")
    assert len(problems(registry, newer)) == 2


def test_same_operator_in_another_version_is_no_conflict() -> None:
    registry = registry_of(versions_plugin(1))
    registry.register(KernelPlugin("new", ((OpKey(DOMAIN, "Op", 2), FACTORY),)))
    assert len(registry.plugins()) == 2


@pytest.mark.parametrize("replace", [False, True])
def test_another_plugin_of_the_same_name_is_refused_naming_both_origins(replace: bool) -> None:
    registry = registry_of(toy_plugin({"A": FACTORY}, origin="acme 1.0"))
    (problem,) = problems(registry, toy_plugin({"B": FACTORY}, origin="emca 2.0"), replace=replace)
    assert "acme 1.0 and emca 2.0" in problem


def test_replacement_serves_and_unregistering_it_brings_back_the_one_before() -> None:
    registry = registry_of(toy_plugin({"Op": FACTORY}, name="old"))
    registry.register(toy_plugin({"Op": ToyFactory()}, name="new"), replace=True)
    assert claim(registry).plugin == "new"
    registry.unregister("new")
    assert claim(registry).plugin == "old"


def test_replaced_plugin_may_leave_without_a_change() -> None:
    registry = registry_of(toy_plugin({"Op": FACTORY}, name="old"))
    registry.register(toy_plugin({"Op": ToyFactory()}, name="new"), replace=True)
    registry.unregister("old")
    assert claim(registry).plugin == "new"


def test_replacement_takes_only_what_it_lists() -> None:
    registry = registry_of(toy_plugin({"Op": FACTORY, "Other": FACTORY}, name="old"))
    registry.register(toy_plugin({"Op": ToyFactory()}, name="new"), replace=True)
    served = {key.op: name for key, (name, _) in registry.serving().items()}
    assert served == {"Op": "new", "Other": "old"}


def test_unregistering_the_unknown_names_the_known() -> None:
    registry = registry_of(toy_plugin({"Op": FACTORY}, name="known"))
    with pytest.raises(RegistrationError, match="not registered; registered: known"):
        registry.unregister("unknown")


def test_plugin_with_nothing_right_has_every_problem_listed() -> None:
    key, not_a_factory = OpKey(DOMAIN, "Op"), object()
    entries: Any = ((key, FACTORY), (key, not_a_factory), ("Op", FACTORY), "entry")
    found = problems(KernelRegistry(), KernelPlugin("", entries))
    assert found == (
        "its name is ''; accepted: a non-empty string",
        f"it lists {DOMAIN}::Op v1 twice",
        f"the factory of {DOMAIN}::Op v1 is a object, not a KernelFactory",
        "'Op' is not an OpKey",
        "entry 'entry' is not (OpKey, KernelFactory)",
    )


@pytest.mark.parametrize("name", ["", None, 5, ["toy"]], ids=repr)
def test_plugin_without_a_usable_name_is_refused(name: Any) -> None:
    (problem,) = problems(KernelRegistry(), toy_plugin({"Op": FACTORY}, name=name))
    assert problem == f"its name is {name!r}; accepted: a non-empty string"


@pytest.mark.parametrize("kernels", [(), None], ids=repr)
def test_plugin_without_kernels_is_refused(kernels: Any) -> None:
    assert problems(KernelRegistry(), KernelPlugin("toy", kernels)) == ("it lists no kernels",)


@pytest.mark.parametrize("factory", [ToyFactory, object(), None], ids=["class", "object", "None"])
def test_plugin_with_a_wrong_factory_is_refused(factory: Any) -> None:
    (problem,) = problems(KernelRegistry(), toy_plugin({"Op": factory}))
    assert "not a KernelFactory" in problem


@pytest.mark.parametrize("plugin", [None, "toy", FACTORY], ids=["None", "name", "factory"])
def test_what_is_no_plugin_is_refused(plugin: Any) -> None:
    (problem,) = problems(KernelRegistry(), plugin)
    assert "accepted: a KernelPlugin" in problem


def test_replacing_does_not_excuse_a_wrong_plugin() -> None:
    assert problems(KernelRegistry(), KernelPlugin("toy", ()), replace=True)


def test_factory_that_raises_in_claim_is_a_plugin_error_that_names_it() -> None:
    cause = KeyError("bug")
    registry = registry_of(toy_plugin({"Op": StubFactory(on_claim=raising(cause))}, name="buggy"))
    with pytest.raises(PluginError) as caught:
        claim(registry)
    assert (caught.value.plugin, caught.value.action) == ("buggy", "claim of 'the node'")
    assert caught.value.__cause__ is cause


@pytest.mark.parametrize("answer", [None, True, (X,)], ids=repr)
def test_factory_that_answers_with_no_match_is_a_plugin_error(answer: Any) -> None:
    registry = registry_of(toy_plugin({"Op": StubFactory(on_claim=lambda: answer)}))
    with pytest.raises(PluginError, match="KernelMatch"):
        claim(registry)


def test_registry_does_not_follow_the_plugins_own_list() -> None:
    """A table that could grow after it was checked would not have been checked."""
    entries: Any = [(OpKey(DOMAIN, "Op"), FACTORY)]
    registry = registry_of(KernelPlugin("toy", entries))
    factory: KernelFactory[Any] = ToyFactory()
    entries.append((OpKey(DOMAIN, "Later"), factory))
    assert [key.op for key in registry.serving()] == ["Op"]
