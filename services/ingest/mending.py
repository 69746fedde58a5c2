"""Mends what exporters write by default and ONNX Runtime loads, but the rules of ONNX or the v2 protocol exclude.

ZipMap                                 ─> the tensor of scores that it reads, with the names of its classes
SequenceConstruct before an output     ─> one output for each of its tensors
initializers that are no inputs, IR 3  ─> IR 4, in which they need not be; also IR 1 and 2
nodes in any order, a nameless graph   ─> as ONNX prescribes
StringNormalizer in the default locale ─> in one that every machine has
A mend changes the form of an answer at most, never a value. Imported by the checker process only.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from graphlib import CycleError, TopologicalSorter
from typing import Any, NamedTuple

import onnx
from onnx import helper

from millstream.services.ingest.graph import IR_DEFAULTS, fixed_inputs, nodes
from millstream.services.ingest.report import one_line

#: outputs that one sequence may become, names that a note lists, and notes
_PARTS_MAX, _NAMED_MAX, _NOTES_MAX = 256, 5, 8
_IR_OPSETS = 3
#: in which every IR version has Identity
_IDENTITY_OPSET = 7
#: of StringNormalizer, and one with the same letters that every machine has: slim images lack the default
_DEFAULT_LOCALE, _LOCALE = b"en_US", "C.UTF-8"


class Mends(NamedTuple):
    """What was mended.

    Args:
        changed: whether the model is no longer that of its file.
        notes: what a caller sees of it.
        classes: names of the columns of outputs, by output.
    """

    changed: bool
    notes: tuple[str, ...]
    classes: dict[str, list[str]]


UNMENDED = Mends(False, (), {})


def mend(model: onnx.ModelProto) -> Mends:
    """Mend `model` itself."""
    graph = model.graph
    unseen = [_name(graph), _raise_ir_version(model), _sort(graph), _set_locale(model)]
    classes: dict[str, list[str]] = {}
    notes = [*_replace_zip_maps(graph, classes), *_part_sequences(graph)]
    if notes and not {"", "ai.onnx"} & {entry.domain for entry in model.opset_import}:
        model.opset_import.append(helper.make_opsetid("", _IDENTITY_OPSET))
    return Mends(any(unseen) or bool(notes), tuple(map(one_line, notes[:_NOTES_MAX])), classes)


def _name(graph: onnx.GraphProto) -> bool:
    nameless = not graph.name
    graph.name = graph.name or "graph"
    return nameless


def _raise_ir_version(model: onnx.ModelProto) -> bool:
    """Raise IR 1 and 2, which have no opsets, to 4, and IR 3 if there are initializers that are no inputs.

    All initializers stay constants: none is an input.
    """
    graph = model.graph
    stored = fixed_inputs(graph)
    conforming = model.ir_version == _IR_OPSETS and stored <= {value.name for value in graph.input}
    if model.ir_version >= IR_DEFAULTS or conforming:
        return False
    kept = [value for value in graph.input if value.name not in stored]
    _replace(graph.input, kept)
    model.ir_version = IR_DEFAULTS
    return True


def _sort(graph: onnx.GraphProto) -> bool:
    """Put each node after those whose outputs it reads, unless all are; a graph with a cycle stays as it is."""
    makers = {name: at for at, node in enumerate(graph.node) for name in node.output}
    before = {at: {makers[name] for name in _reads(node) if name in makers} for at, node in enumerate(graph.node)}
    if all(maker < at for at, found in before.items() for maker in found):
        return False
    try:
        order = list(TopologicalSorter(before).static_order())
    except CycleError:
        return False
    _replace(graph.node, [graph.node[at] for at in order])
    return True


def _set_locale(model: onnx.ModelProto) -> bool:
    """Let StringNormalizer change the case of letters in a locale that workers have."""
    changed = False
    for node in nodes(model):
        if node.op_type == "StringNormalizer":
            locales = [item for item in node.attribute if item.name == "locale"]
            if all(item.s == _DEFAULT_LOCALE and not item.ref_attr_name for item in locales):
                _replace(node.attribute, [item for item in node.attribute if item.name != "locale"])
                node.attribute.append(helper.make_attribute("locale", _LOCALE))
                changed = True
    return changed


def _reads(node: onnx.NodeProto) -> Iterator[str]:
    """Yield the names that a node and its graphs read; "" is none."""
    yield from filter(None, node.input)
    for attribute in node.attribute:
        for graph in (attribute.g, *attribute.graphs):
            yield from (output.name for output in graph.output)
            for inner in graph.node:
                yield from _reads(inner)


def _replace(field: Any, messages: Iterable[Any]) -> None:
    """Replace the content of a repeated field, also by messages of its own."""
    copies = [type(message).FromString(message.SerializeToString()) for message in messages]
    del field[:]
    field.extend(copies)


def _replace_zip_maps(graph: onnx.GraphProto, classes: dict[str, list[str]]) -> Iterator[str]:
    """Let outputs that are lists of maps be the scores in these maps. Yields a note for each."""
    for output, node in _made_by(graph, "ZipMap", "ai.onnx.ml"):
        found = next((item for item in node.attribute if item.strings or item.ints), onnx.AttributeProto())
        names = [name.decode(errors="replace") for name in found.strings] or [str(label) for label in found.ints]
        output.CopyFrom(helper.make_tensor_value_info(output.name, onnx.TensorProto.FLOAT, [None, len(names)]))
        node.CopyFrom(helper.make_node("Identity", node.input[:1], [output.name], name=node.name))
        classes[output.name] = names
        listed = ", ".join(name[:40] for name in names[:_NAMED_MAX]) + (", …" if len(names) > _NAMED_MAX else "")
        yield f"Output {output.name[:80]!r} is a tensor instead of a list of maps (ZipMap); its columns are: {listed}."


def _part_sequences(graph: onnx.GraphProto) -> Iterator[str]:
    """Replace each output that is a sequence of certain tensors by these. Yields a note for each."""
    outputs = []
    taken = {name for node in graph.node for name in (*node.input, *node.output)}
    made = {output.name: node for output, node in _made_by(graph, "SequenceConstruct", "")}
    for output in graph.output:
        node = made.get(output.name)
        element = output.type.sequence_type.elem_type
        parts = [f"{output.name}_{part}" for part in range(len(node.input) if node else 0)]
        if (
            node is None
            or not parts
            or not element.HasField("tensor_type")
            or len(parts) > _PARTS_MAX
            or taken & {*parts}
        ):
            outputs.append(output)
            continue
        for part, name in zip(node.input, parts, strict=True):
            graph.node.append(helper.make_node("Identity", [part], [name]))
            outputs.append(onnx.ValueInfoProto(name=name, type=element))
        yield f"Output {output.name[:80]!r}, a list, is {len(parts)} outputs: {parts[0][:90]!r} and so on."
    _replace(graph.output, outputs)


def _made_by(graph: onnx.GraphProto, op: str, domain: str) -> list[tuple[onnx.ValueInfoProto, onnx.NodeProto]]:
    """Return the outputs that are no tensors and made by this operator, with its nodes."""
    makers = {name: node for node in graph.node for name in node.output if (node.op_type, node.domain) == (op, domain)}
    odd = [output for output in graph.output if output.type.WhichOneof("value") == "sequence_type"]
    return [(output, makers[output.name]) for output in odd if output.name in makers]
