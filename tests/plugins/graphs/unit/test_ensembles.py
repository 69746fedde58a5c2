"""Triton's ensembles: read as Triton reads them, and refused in its words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from millstream.plugins.compat.triton.config.config import from_text
from millstream.plugins.graphs.ensemble import check_models, read_ensemble
from millstream.plugins.graphs.forms import is_graph_file, read_graph
from millstream.plugins.graphs.graph_plan import GraphPlan
from millstream.plugins.graphs.structure import Structure
from millstream.services.errors import Code, Failure
from millstream.services.model.manifest import VersionPart
from millstream.services.model.signature import Signature, TensorSpec

CHAIN = """
name: "chain"
platform: "ensemble"
max_batch_size: 4
input [{ name: "IN" data_type: TYPE_FP32 dims: [ 16 ] }]
output [{ name: "OUT" data_type: TYPE_FP32 dims: [ 16 ] }]
ensemble_scheduling {
  step [
    { model_name: "m.a" model_version: -1 input_map { key: "x" value: "IN" } output_map { key: "y" value: "between" } },
    { model_name: "m.a" model_version: 2 input_map { key: "x" value: "between" } output_map { key: "y" value: "OUT" } }
  ]
}
"""


def config(text: str = CHAIN) -> dict[str, Any]:
    return from_text(text).document()


def signature(*dims: int, datatype: str = "FP32", batching: bool = True, optional: bool = False) -> Signature:
    shape = (-1, *dims) if batching else dims
    tensors = [TensorSpec(name="x", datatype=datatype, shape=shape)]
    more = [TensorSpec(name="more", datatype=datatype, shape=shape, optional=True)] if optional else []
    made = TensorSpec(name="y", datatype=datatype, shape=shape)
    return Signature(inputs=(*tensors, *more), outputs=(made,), batching=batching)


def refusal(text: str) -> str:
    with pytest.raises(Failure) as caught:
        read_ensemble(config(text))
    assert caught.value.code is Code.INVALID
    return caught.value.message


def test_an_ensemble_is_read_into_a_graph(tmp_path: Path) -> None:
    path = tmp_path / "config.pbtxt"
    path.write_text(CHAIN)
    assert is_graph_file(path)
    graph = read_graph(path)
    assert {name: (step.model, step.version, step.inputs) for name, step in graph.steps.items()} == {
        "m_a": ("m.a", None, {"x": ("IN",)}),
        "m_a_2": ("m.a", 2, {"x": ("m_a.y",)}),
    }
    assert graph.outputs == {"OUT": ("m_a_2.y",)}
    parts = [VersionPart(step=name, model="m.a", version=2, content_id="m.a:2:0") for name in graph.steps]
    found = GraphPlan(Structure(graph), parts, [signature(16), signature(16)]).signature
    assert found.batching
    assert [(spec.name, spec.shape) for spec in (*found.inputs, *found.outputs)] == [
        ("IN", (-1, 16)),
        ("OUT", (-1, 16)),
    ]


STEPS = CHAIN[CHAIN.index("ensemble_scheduling") :]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (CHAIN.replace(STEPS, ""), "ensemble scheduling must be set for ensemble chain whose platform is ensemble"),
        (
            CHAIN.replace('platform: "ensemble"', ""),
            "ensemble scheduling cannot be set for model 'chain' whose platform is not ensemble",
        ),
        (f'{CHAIN}\nbackend: "onnxruntime"', "must have platform type 'ensemble' and empty backend type"),
        (f"{CHAIN}\ninstance_group {{ count: 1 }}", "instance group should not be specified for ensemble 'chain'"),
        (f"{CHAIN}\noptimization {{ }}", "optimization should not be specified for ensemble 'chain'"),
        (f'{CHAIN}\nmodel_warmup {{ name: "w" }}', "model_warmup can not be specified for ensemble 'chain'"),
        (CHAIN.replace(STEPS, "ensemble_scheduling { }"), "must specify 'step' for ensemble 'chain'"),
        (CHAIN.replace('model_name: "m.a" model_version: 2', ""), "must specify 'model_name' in step 1 of ensemble"),
        (
            CHAIN.replace('input_map { key: "x" value: "between" }', ""),
            "must specify 'input_map' in step 1 of ensemble 'chain'",
        ),
        (
            CHAIN.replace('value: "OUT"', 'value: "between"'),
            "ensemble tensor 'between' can appear in an output map only once for ensemble 'chain' step 1",
        ),
        (CHAIN.replace('value: "IN"', 'value: "other"'), "ensemble input 'IN' for ensemble chain' is not used"),
        (CHAIN.replace('name: "OUT"', 'name: "OTHER"'), "ensemble output 'OTHER' for ensemble chain' is not used"),
        (
            CHAIN.replace('key: "x" value: "between"', 'key: "x" value: "nowhere"'),
            "output 'OUT' for ensemble 'chain' is not written: at least one of its depending tensors, 'nowhere'",
        ),
    ],
)
def test_what_is_wrong_is_said_in_triton_s_words(text: str, says: str) -> None:
    assert says in refusal(text)


def test_an_ensemble_has_no_unused_tensors() -> None:
    more = 'output_map { key: "z" value: "unused" } output_map { key: "y" value: "OUT" }'
    assert "ensemble tensor 'unused' is unused in ensemble 'chain'" in refusal(
        CHAIN.replace('output_map { key: "y" value: "OUT" }', more)
    )


@pytest.mark.parametrize(
    ("first", "second", "rows_max", "says"),
    [
        (signature(16), signature(16, datatype="INT32"), (4, 4), "inconsistent data type: TYPE_FP32 is inferred from"),
        (signature(16), signature(8), (4, 4), "between: inconsistent shape: [-1,16] is inferred from model m.a while"),
        (signature(16), signature(16), (4, 2), "which only allows maximum batch size to be 2"),
        (
            signature(8),
            signature(8),
            (0, 0),
            "IN: inconsistent shape: [-1,16] is inferred from model chain while [-1,8]",
        ),
    ],
)
def test_models_that_do_not_fit(first: Signature, second: Signature, rows_max: tuple[int, ...], says: str) -> None:
    with pytest.raises(Failure) as caught:
        check_models(read_ensemble(config()), ["m.a", "m.a"], [first, second], rows_max)
    assert says in caught.value.message


def test_models_without_rows_and_optional_inputs_fit() -> None:
    graph = read_ensemble(config())
    check_models(graph, ["m.a", "m.a"], [signature(16, batching=False), signature(16)], (0, 4))
    check_models(graph, ["m.a", "m.a"], [signature(-1), signature(16, optional=True)], (4, 0))
