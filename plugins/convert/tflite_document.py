"""Reads what a TensorFlow Lite model says about itself, with the standard library alone. Pure.

Source: tensorflow/compiler/mlir/lite/schema/schema.fbs (TFL3): Model, OperatorCode, SubGraph, Tensor, SignatureDef.
"""

from __future__ import annotations

from typing import NamedTuple

from millstream.services.errors import invalid
from millstream.services.model.flatbuffer import CutShort, Data, Foreign, Table

IDENTIFIER = b"TFL3"  # bytes 4 to 8
_CODES, _GRAPHS, _SIGNATURES = 1, 2, 7
_FLEX = "Flex"  # begins the names of TensorFlow's own operators


class TfliteModel(NamedTuple):
    """A model's inputs and outputs.

    Args:
        inputs, outputs: name for clients -> name of the tensor in the file; names of the signature, if it has one.
    """

    inputs: dict[str, str]
    outputs: dict[str, str]


def is_tflite(head: bytes) -> bool:
    """Return whether a file that begins with `head` is a TensorFlow Lite model."""
    return head[4:8] == IDENTIFIER


def read_tflite(data: Data) -> TfliteModel:
    """Return the inputs and outputs. Raises Failure(INVALID) for damaged files and for operators that cannot be run."""
    try:
        model = Table(data)
        _check_operators(model)
        graphs = model.tables(_GRAPHS)
        if not graphs:
            raise invalid("the TensorFlow Lite model has no graph")
        return _read(model, graphs[0])
    except CutShort:
        raise invalid("the TensorFlow Lite model was cut short: copy or download it again") from None
    except (Foreign, IndexError):
        raise invalid("the TensorFlow Lite model is damaged") from None


def _check_operators(model: Table) -> None:
    custom = [name for code in model.tables(_CODES) if (name := code.text(1))]
    flex = [name for name in custom if name.startswith(_FLEX)]
    if flex:
        raise invalid(
            f"the model has operators of TensorFlow itself ({', '.join(flex[:3])[:200]!a}), which no TensorFlow Lite "
            "converter takes: push the SavedModel that it was made from, or convert it without SELECT_TF_OPS"
        )
    if custom:
        raise invalid(
            f"the model has custom operators ({', '.join(custom[:3])[:200]!a}): convert it with built-in ones alone"
        )


def _read(model: Table, graph: Table) -> TfliteModel:
    names = [tensor.text(3) for tensor in graph.tables(0)]
    of_graph = [one for one in model.tables(_SIGNATURES) if one.number(4, "<I") == 0]
    if len(of_graph) > 1:
        keys = ", ".join(one.text(2) for one in of_graph)[:200]
        of_graph = [one for one in of_graph if one.text(2) == "serving_default"]
        if not of_graph:
            raise invalid(f"the model has several signatures ({keys!a}): convert it with one, or serving_default")
    if of_graph:
        inputs, outputs = (
            {one.text(0): names[one.number(1, "<I")] for one in of_graph[0].tables(field)} for field in (0, 1)
        )
    else:
        inputs, outputs = ({names[index]: names[index] for index in graph.numbers(field)} for field in (1, 2))
    return TfliteModel(inputs, outputs)
