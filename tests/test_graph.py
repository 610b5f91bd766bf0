"""Check nodes and graphs: what they store, what they refuse."""

from dataclasses import FrozenInstanceError
from typing import Any

import pytest

from nxrt.errors import InvalidInputError
from nxrt.graph import Graph, Node, normalized_domain
from nxrt.tensor import DType, TensorSpec

X = TensorSpec(DType.F32, ("N",))


def graph_of(*nodes: Node, outputs: tuple[str, ...] = (), **imports: Any) -> Graph:
    return Graph(nodes, {"x": X}, outputs, imports)


@pytest.mark.parametrize(("domain", "expected"), [("ai.onnx", ""), ("", ""), ("a.b", "a.b")])
def test_domain_has_one_spelling(domain: str, expected: str) -> None:
    assert normalized_domain(domain) == expected
    assert Node("Add", (), (), domain=domain).domain == expected


@pytest.mark.parametrize(
    ("domain", "expected"), [("", "ai.onnx::Add"), ("ai.onnx", "ai.onnx::Add"), ("p", "p::Add")]
)
def test_operator_is_spoken_of_with_its_domain(domain: str, expected: str) -> None:
    assert Node("Add", (), (), domain=domain).qualified_op == expected


@pytest.mark.parametrize("op", ["", None, 5])
def test_node_needs_an_operator(op: Any) -> None:
    with pytest.raises(InvalidInputError, match=r"node op: got .* accepted: an operator's name"):
        Node(op, (), ())


@pytest.mark.parametrize("inputs", [("x", "", "y"), ("x", None, "y")], ids=["empty string", "None"])
def test_omitted_input_is_none(inputs: tuple[str | None, ...]) -> None:
    assert Node("Op", inputs, ()).inputs == ("x", None, "y")


def test_node_stores_lists_as_tuples() -> None:
    names: Any = ["x"]
    node = Node("Op", names, names)
    assert (node.inputs, node.outputs) == (("x",), ("x",))


@pytest.mark.parametrize("slots", [("xy", ("z",)), (("x",), "zw")], ids=["inputs", "outputs"])
def test_node_refuses_one_string_for_many_names(slots: tuple[Any, Any]) -> None:
    """A string is a sequence of its letters: a forgotten comma must not become many values."""
    with pytest.raises(InvalidInputError, match=r"node (inputs|outputs): got '(xy|zw)'"):
        Node("Op", *slots)


def test_node_is_named_after_its_operator() -> None:
    assert Node("Op", (), ()).name == "Op"
    assert Node("Op", (), (), name="first").name == "first"


def test_attributes_cannot_be_changed() -> None:
    attributes: Any = Node("Op", (), (), attributes={"k": 1}).attributes
    with pytest.raises(TypeError):
        attributes["k"] = 2


def test_attributes_do_not_follow_the_callers_objects() -> None:
    axes = [0, 1]
    given: Any = {"axes": axes}
    node = Node("Op", (), (), attributes=given)
    axes.append(2)
    given["more"] = 1
    assert dict(node.attributes) == {"axes": (0, 1)}


def test_node_cannot_be_changed() -> None:
    node = Node("Op", (), ())
    with pytest.raises(FrozenInstanceError):
        node.op = "Other"  # type: ignore[misc]


def test_graph_may_read_inputs_and_earlier_outputs() -> None:
    graph = graph_of(
        Node("A", ("x",), ("y",)), Node("B", ("x", "y", None), ("z",)), outputs=("z", "y")
    )
    assert [node.op for node in graph.nodes] == ["A", "B"]


@pytest.mark.parametrize(
    "nodes",
    [
        (Node("A", ("nowhere",), ("y",)),),
        (Node("B", ("y",), ("z",)), Node("A", ("x",), ("y",))),
        (Node("A", ("y",), ("y",)),),
    ],
    ids=["unknown", "defined later", "own output"],
)
def test_graph_refuses_a_name_that_is_read_before_it_is_defined(nodes: tuple[Node, ...]) -> None:
    with pytest.raises(InvalidInputError, match=r"input '\w+' of node '\w+': got a name nobody"):
        graph_of(*nodes)


@pytest.mark.parametrize(
    "nodes",
    [
        (Node("A", ("x",), ("x",)),),
        (Node("A", ("x",), ("y", "y")),),
        (Node("A", ("x",), ("y",)), Node("B", ("x",), ("y",))),
    ],
    ids=["graph input", "twice in one node", "by two nodes"],
)
def test_graph_refuses_a_name_that_is_defined_twice(nodes: tuple[Node, ...]) -> None:
    with pytest.raises(InvalidInputError, match=r"output '\w' of node '\w': got a name that is"):
        graph_of(*nodes)


def test_graph_refuses_an_output_that_is_nobodys() -> None:
    with pytest.raises(InvalidInputError, match="graph output 'y': got a name nobody defines"):
        graph_of(outputs=("y",))


@pytest.mark.parametrize("version", [0, -1, True, 1.0, "1", None])
def test_graph_refuses_what_is_no_opset_version(version: Any) -> None:
    with pytest.raises(InvalidInputError, match=r"opset import of ai.onnx: got .* from 1"):
        Graph((), {}, (), {"": version})


def test_domain_that_is_not_imported_counts_as_version_1() -> None:
    assert graph_of().opset_version("pkg.other") == 1


@pytest.mark.parametrize("spelled", ["", "ai.onnx"])
@pytest.mark.parametrize("asked", ["", "ai.onnx"])
def test_onnx_domain_is_imported_under_either_spelling(spelled: str, asked: str) -> None:
    assert Graph((), {}, (), {spelled: 18}).opset_version(asked) == 18


def test_graph_refuses_two_versions_of_one_domain() -> None:
    with pytest.raises(InvalidInputError, match=r"opset import of ai.onnx"):
        Graph((), {}, (), {"": 18, "ai.onnx": 17})


def test_graph_does_not_follow_the_callers_dictionaries() -> None:
    inputs, imports = {"x": X}, {"p": 2}
    graph = Graph((), inputs, (), imports)
    inputs.clear()
    imports.clear()
    assert dict(graph.inputs) == {"x": X}
    assert graph.opset_version("p") == 2


@pytest.mark.parametrize("field", ["inputs", "opset_imports"])
def test_graph_dictionaries_cannot_be_changed(field: str) -> None:
    mapping = getattr(graph_of(), field)
    with pytest.raises(TypeError):
        mapping["new"] = 1
