"""KServe's InferenceGraph: what its nodes become, and which of it is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from millstream.plugins.graphs.document import Graph
from millstream.plugins.graphs.forms import is_graph_file, read_graph
from millstream.plugins.graphs.inference_graph import resolved
from millstream.plugins.graphs.structure import Structure
from millstream.services.errors import Code, Failure
from millstream.services.model.signature import Signature, TensorSpec

PETS: dict[str, Any] = {
    "root": {
        "routerType": "Sequence",
        "steps": [
            {"serviceName": "cat-dog", "name": "kind"},
            {
                "serviceName": "breeds",
                "name": "breed",
                "data": "$request",
                "condition": '[@this].#(predictions.0=="dog")',
            },
        ],
    }
}


def signature(inputs: dict[str, str], outputs: dict[str, str]) -> Signature:
    def specs(of: dict[str, str]) -> tuple[TensorSpec, ...]:
        return tuple(TensorSpec(name=name, datatype=datatype, shape=(-1, 4)) for name, datatype in of.items())

    return Signature(inputs=specs(inputs), outputs=specs(outputs), batching=True)


ONE = signature({"x": "FP32"}, {"y": "FP32"})


def read(tmp_path: Path, nodes: dict[str, Any]) -> Graph:
    document = {"apiVersion": "serving.kserve.io/v1alpha1", "kind": "InferenceGraph", "spec": {"nodes": nodes}}
    path = tmp_path / "graph.yaml"
    path.write_text(json.dumps(document))
    assert is_graph_file(path)
    return read_graph(path)


def flat(tmp_path: Path, nodes: dict[str, Any], *signatures: Signature) -> Graph:
    graph = read(tmp_path, nodes)
    found = resolved(graph, signatures or [ONE] * len(graph.steps))
    Structure(found)
    return found


def refusal(tmp_path: Path, nodes: dict[str, Any], *signatures: Signature) -> str:
    with pytest.raises(Failure) as caught:
        flat(tmp_path, nodes, *signatures)
    assert caught.value.code is Code.INVALID
    return caught.value.message


def test_a_sequence_ends_where_a_condition_does_not_hold(tmp_path: Path) -> None:
    graph = flat(tmp_path, PETS)
    assert [(name, step.model, step.inputs, step.condition) for name, step in graph.steps.items()] == [
        ("kind", "cat-dog", {"x": ("x",)}, ""),
        ("breed", "breeds", {"x": ("x",)}, '(first("kind.y") == "dog")'),
    ]
    assert graph.outputs == {"y": ("breed.y", "kind.y")}


def test_a_response_goes_on_by_names_or_alone(tmp_path: Path) -> None:
    steps = [{"serviceName": "a"}, {"serviceName": "b", "data": "$response"}]
    nodes = {"root": {"routerType": "Sequence", "steps": steps}}
    two = signature({"p": "FP32", "q": "FP32"}, {"y": "FP32"})
    made = signature({"x": "FP32"}, {"q": "FP32", "p": "FP32", "r": "FP32"})
    assert flat(tmp_path, nodes, made, two).steps["b"].inputs == {"p": ("a.p",), "q": ("a.q",)}
    assert flat(tmp_path, nodes, ONE, signature({"any": "FP32"}, {"z": "FP32"})).steps["b"].inputs == {"any": ("a.y",)}
    says = "node 'root': input 'p' of 'b' is none of what it is given (y): the names have to be equal"
    assert says in refusal(tmp_path, nodes, ONE, two)


def test_a_splitter_draws_by_weight(tmp_path: Path) -> None:
    steps = [{"serviceName": "a", "weight": 30}, {"serviceName": "b", "weight": 70}, {"serviceName": "c", "weight": 0}]
    graph = flat(tmp_path, {"root": {"routerType": "Splitter", "steps": steps}})
    assert {name: step.condition for name, step in graph.steps.items()} == {
        "a": '(draw("1") >= 0.0 and draw("1") < 0.3)',
        "b": '(draw("1") >= 0.3 and draw("1") < 1.0)',
    }
    assert graph.outputs == {"y": ("a.y", "b.y")}


def test_a_switch_asks_the_first_that_matches_and_an_ensemble_all(tmp_path: Path) -> None:
    nodes = {
        "root": {
            "routerType": "Switch",
            "steps": [
                {"serviceName": "texts", "condition": '[@this].#(source=="text")'},
                {"nodeName": "pictures", "condition": '[@this].#(source=="image")'},
            ],
        },
        "pictures": {
            "routerType": "Ensemble",
            "steps": [{"serviceName": "v1.2", "name": "one"}, {"serviceName": "v1.2", "name": "two"}],
        },
    }
    graph = flat(tmp_path, nodes)
    assert list(graph.inputs) == ["source", "x"]
    assert graph.inputs["source"] is not None
    assert graph.inputs["source"].datatype == "BYTES"
    text, image = 'first("source") == "text"', 'first("source") == "image"'
    assert graph.steps["texts"].condition == f"({text})"
    assert graph.steps["two"].condition == f"(not ({text})) and ({image})"
    assert graph.outputs == {"y": ("texts.y",), "one.y": ("one.y",), "two.y": ("two.y",)}


@pytest.mark.parametrize(
    ("nodes", "says"),
    [
        ({}, "the InferenceGraph has no node 'root'"),
        ({"root": {"routerType": "Loop", "steps": [{"serviceName": "a"}]}}, "nodes.root.routerType"),
        ({"root": {"routerType": "Sequence", "steps": []}}, "nodes.root.steps"),
        ({"root": {"routerType": "Sequence", "steps": [{"servicename": "a"}]}}, "did you mean 'serviceName'"),
        ({"root": {"routerType": "Sequence", "steps": [{}]}}, "node 'root': a step has either serviceName or nodeName"),
        ({"root": {"routerType": "Sequence", "steps": [{"serviceUrl": "http://x"}]}}, "no URL is called"),
        ({"root": {"routerType": "Sequence", "steps": [{"nodeName": "b"}]}}, "there is no node 'b'"),
        ({"root": {"routerType": "Sequence", "steps": [{"nodeName": "root"}]}}, "node 'root' leads to itself"),
        ({"root": {"routerType": "Splitter", "steps": [{"serviceName": "a", "weight": 60}]}}, "add up to 100"),
        ({"root": {"routerType": "Switch", "steps": [{"serviceName": "a"}]}}, "each step of a Switch has a condition"),
        (
            {"root": {"routerType": "Switch", "steps": [{"serviceName": "a", "condition": "a.#.b|@reverse"}]}},
            "the condition 'a.#.b|@reverse' is not understood",
        ),
        (
            {"root": {"routerType": "Switch", "steps": [{"serviceName": "a", "condition": "instances.3==1"}]}},
            "only the first element of a tensor can be compared",
        ),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(tmp_path: Path, nodes: dict[str, Any], says: str) -> None:
    assert says in refusal(tmp_path, nodes)


def test_nodes_that_multiply_are_bounded(tmp_path: Path) -> None:
    nodes: dict[str, Any] = {
        f"n{number}": {"routerType": "Ensemble", "steps": [{"nodeName": f"n{number + 1}"}] * 10} for number in range(8)
    }
    nodes["n8"] = {"routerType": "Sequence", "steps": [{"serviceName": "a"}]}
    nodes["root"] = {"routerType": "Sequence", "steps": [{"nodeName": "n0"}]}
    assert "more than 64 services" in refusal(tmp_path, nodes)
    many = [{"serviceName": "a", "condition": f"x=={number}"} for number in range(60)]
    assert "the InferenceGraph has too many ways" in refusal(
        tmp_path, {"root": {"routerType": "Switch", "steps": many}}
    )
    wide = {"root": {"routerType": "Ensemble", "steps": [{"serviceName": "a"}] * 65}}
    assert "nodes.root.steps" in refusal(tmp_path, wide)
