"""Whether the tensors of steps fit, and which signature a graph has."""

from __future__ import annotations

from typing import Any

import pytest

from millstream.plugins.graphs.forms import parse
from millstream.plugins.graphs.graph_plan import GraphPlan
from millstream.plugins.graphs.structure import Structure
from millstream.services.errors import Code, Failure
from millstream.services.model.manifest import VersionPart
from millstream.services.model.signature import Signature, TensorSpec


def spec(name: str, *shape: int, datatype: str = "FP32", optional: bool = False) -> TensorSpec:
    return TensorSpec(name=name, datatype=datatype, shape=shape, optional=optional)


def signature(inputs: list[TensorSpec], outputs: list[TensorSpec], *, batching: bool = True) -> Signature:
    return Signature(inputs=tuple(inputs), outputs=tuple(outputs), batching=batching)


SAME = signature([spec("x", -1, 4)], [spec("y", -1, 4)])
#: by model
KNOWN = {
    "same": SAME,
    "wide": signature([spec("x", -1, 8)], [spec("y", -1, 8)]),
    "any": signature([spec("x", -1, -1)], [spec("y", -1, -1)]),
    "texts": signature([spec("x", -1, 4, datatype="BYTES")], [spec("y", -1, 4, datatype="BYTES")]),
    "alone": signature([spec("x", -1, 4)], [spec("y", -1, 4)], batching=False),
    "rank": signature([spec("x", -1, 4, 4)], [spec("y", -1, 4, 4)]),
    "two": signature([spec("a", -1, 4), spec("b", -1, 4)], [spec("y", -1, 4), spec("z", -1, 2)]),
    "option": signature([spec("x", -1, 4), spec("bias", -1, 4, optional=True)], [spec("y", -1, 4)]),
}


def plan(document: dict[str, Any]) -> GraphPlan:
    graph = parse(document)
    parts = [
        VersionPart(step=name, model=step.model, version=2, content_id=f"{step.model}:2:0")
        for name, step in graph.steps.items()
    ]
    return GraphPlan(Structure(graph), parts, [KNOWN[step.model] for step in graph.steps.values()])


def chain(*names: str) -> dict[str, Any]:
    steps = {f"s{n}": {"model": name, "inputs": {"x": f"s{n - 1}.y" if n else "x"}} for n, name in enumerate(names)}
    return {"steps": steps, "outputs": {"y": f"s{len(names) - 1}.y"}}


def refusal(document: dict[str, Any]) -> str:
    with pytest.raises(Failure) as caught:
        plan(document)
    assert caught.value.code is Code.INVALID
    return caught.value.message


def test_the_signature_of_a_graph_is_that_of_its_ends():
    assert plan(chain("same", "any", "same")).signature == SAME
    assert plan(chain("same", "alone")).signature == SAME.model_copy(update={"batching": False})
    assert plan(chain("any", "same")).signature.inputs == (spec("x", -1, -1),)


@pytest.mark.parametrize(
    ("names", "says"),
    [
        (("same", "wide"), "step 's1' (model wide v2), input 'x' takes the shape [-1, 8], and 's0.y' has [-1, 4]"),
        (("same", "rank"), "takes the shape [-1, 4, 4], and 's0.y' has [-1, 4]"),
        (("same", "texts"), "step 's1' (model texts v2), input 'x' takes BYTES, and 's0.y' is FP32"),
    ],
)
def test_types_and_shapes_that_do_not_fit_are_named(names, says):
    assert says in refusal(chain(*names))


def test_tensors_that_no_version_has_are_named():
    document = chain("same", "same")
    document["steps"]["s1"]["inputs"]["x"] = "s0.why"
    assert "step 's1' (model same v2), input 'x': 'why' is no output of step 's0' (model same v2)" in refusal(document)
    document = chain("same")
    document["outputs"]["y"] = "s0.z"
    assert "output 'y': 'z' is no output of step 's0' (model same v2); it has y" in refusal(document)
    document = chain("same")
    document["steps"]["s0"]["inputs"]["w"] = "x"
    assert "step 's0' (model same v2) has no input 'w'" in refusal(document)
    document = {"steps": {"a": {"model": "two", "inputs": {"a": "x"}}}, "outputs": {"y": "a.y"}}
    assert "step 'a' (model two v2), input 'b' is missing" in refusal(document)


def test_an_input_that_two_steps_read_fits_both():
    document: dict[str, Any] = {
        "steps": {"a": {"model": "any", "inputs": {"x": "x"}}, "b": {"model": "same", "inputs": {"x": "x"}}},
        "outputs": {"p": "a.y", "q": "b.y"},
    }
    assert plan(document).signature.inputs == (spec("x", -1, 4),)
    document["steps"]["a"]["model"] = "wide"
    assert "input 'x' of the graph is input 'x' of step 'b' (model same v2)" in refusal(document)


def test_an_input_is_optional_if_no_step_needs_it():
    document: dict[str, Any] = {
        "steps": {"a": {"model": "option", "inputs": {"x": "x", "bias": "bias"}}},
        "outputs": {"y": "a.y"},
    }
    assert plan(document).signature.inputs == (spec("x", -1, 4), spec("bias", -1, 4, optional=True))
    document["steps"]["a"]["if"] = "max(bias) > 0"
    assert plan(document).signature.inputs[1].optional is False


def test_what_a_graph_declares_has_to_fit():
    document = chain("any")
    document["inputs"] = {"x": {"datatype": "FP32", "shape": [-1, 3]}}
    assert plan(document).signature.inputs == (spec("x", -1, 3),)
    document["inputs"] = {"x": {"datatype": "INT64"}}
    assert "input 'x' of the graph is declared as INT64, and its steps have FP32" in refusal(document)
    document["inputs"] = {"x": {"shape": [3]}}
    assert "declared as [3], and its steps have [-1, -1]" in refusal(document)
    document["inputs"] = {"x": {"shape": [1, 3]}}
    assert plan(document).signature.batching is False, "its rows are fixed"


def test_an_output_has_one_type_from_all_its_sources():
    steps = {"a": {"model": "same", "inputs": {"x": "x"}}, "b": {"model": "any", "inputs": {"x": "x"}}}
    document: dict[str, Any] = {"steps": steps, "outputs": {"y": ["a.y", "b.y"]}}
    assert plan(document).signature.outputs == (spec("y", -1, -1),)
    document = {"steps": steps | {"b": {"model": "texts", "inputs": {"x": "t"}}}, "outputs": {"y": ["a.y", "b.y"]}}
    assert "output 'y' would be FP32 [-1, 4] or BYTES [-1, 4]" in refusal(document)


def test_rows_are_asked_for_or_refused():
    assert plan(chain("same") | {"batching": False}).signature.batching is False
    assert "step 's0' (model alone v2) has none" in refusal(chain("alone") | {"batching": True})


def test_what_outputs_need():
    document: dict[str, Any] = {
        "steps": {
            "a": {"model": "same", "inputs": {"x": "x"}},
            "b": {"model": "same", "inputs": {"x": "a.y"}},
            "c": {"model": "same", "inputs": {"x": "x"}, "if": "max(a.y) > 0"},
            "d": {"model": "same", "inputs": {"x": "x"}},
        },
        "outputs": {"b": "b.y", "c": ["c.y", "d.y"]},
    }
    found = plan(document)
    names = [step.part.step for step in found.steps]
    assert {names[one] for one in found.needed([0])} == {"a", "b"}
    assert {names[one] for one in found.needed([1])} == {"a", "c", "d"}
    assert found.needed([]) == frozenset()
