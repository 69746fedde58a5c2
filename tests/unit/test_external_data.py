"""External weights are found in every part of a model, and read only from the uploaded folder."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import onnx
import pytest
from google.protobuf.message import Message
from onnx import TensorProto, helper

from millstream.services.errors import Failure
from millstream.services.ingest.external_data import check_weights, weight_files
from millstream.services.ingest.graph import stored_outside, tensors
from millstream.services.model.onnx_file import external_tensors


def external(location: str, **entries: str) -> onnx.TensorProto:
    tensor = TensorProto(name=f"w {location}", data_type=TensorProto.FLOAT, dims=[1])
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in {"location": location, "length": "4", **entries}.items():
        tensor.external_data.add(key=key, value=value)
    return tensor


def sparse(location: str) -> onnx.SparseTensorProto:
    return onnx.SparseTensorProto(values=external(location), indices=external(f"{location}.indices"), dims=[4])


def everywhere() -> onnx.ModelProto:
    """Return a model with a tensor in every place that the format allows; the model as a whole is not valid."""

    def graph(name: str, depth: int = 1) -> onnx.GraphProto:
        made = onnx.GraphProto(name=name)
        made.initializer.append(external(f"{name}.initializer"))
        made.sparse_initializer.append(sparse(f"{name}.sparse"))
        made.node.append(node(f"{name}.node", depth))
        return made

    def node(name: str, depth: int) -> onnx.NodeProto:
        made = onnx.NodeProto(op_type="Any")
        made.attribute.extend(attributes(name, depth))
        return made

    def attributes(name: str, depth: int) -> list[onnx.AttributeProto]:
        one = onnx.AttributeProto(name="one", t=external(f"{name}.t"), sparse_tensor=sparse(f"{name}.st"))
        many = onnx.AttributeProto(
            name="many", tensors=[external(f"{name}.ts")], sparse_tensors=[sparse(f"{name}.sts")]
        )
        if depth:
            one.g.CopyFrom(graph(f"{name}.g", depth - 1))
            many.graphs.append(graph(f"{name}.gs", depth - 1))
        return [one, many]

    model = onnx.ModelProto(ir_version=10, graph=graph("main", 2))
    function = model.functions.add(name="F", domain="own")
    function.node.append(node("function.node", 1))
    function.attribute_proto.extend(attributes("function.default", 1))
    training = model.training_info.add()
    training.initialization.CopyFrom(graph("training.initialization"))
    training.algorithm.CopyFrom(graph("training.algorithm"))
    return model


def every_tensor(message: Message) -> Iterator[onnx.TensorProto]:
    """Yield all tensors below a message, found by the types of its fields."""
    if isinstance(message, TensorProto):
        yield message
        return
    for field, value in message.ListFields():
        if field.message_type is not None:
            for part in value if field.is_repeated else [value]:
                yield from every_tensor(part)


def test_tensors_are_found_in_every_part_of_a_model() -> None:
    model = everywhere()
    expected = sorted(tensor.name for tensor in every_tensor(model))
    found = sorted(tensor.name for tensor in tensors(model) if tensor.name)
    assert found == expected
    assert len(found) > 100
    assert any("function.default" in name for name in found)


def checked(model: onnx.ModelProto, folder: Path) -> None:
    """Check a model's weights, found by the library's parser and by our own reader: both find the same."""
    found = list(stored_outside(model))
    (folder / "m.onnx").write_bytes(model.SerializeToString())
    assert sorted(map(repr, external_tensors(folder / "m.onnx"))) == sorted(map(repr, found))
    check_weights(weight_files(found), folder)


@pytest.mark.parametrize(
    "place", [f"w {name}" for name in ("main.initializer", "function.default.t", "main.node.g.node.t")]
)
def test_a_path_outside_the_folder_is_rejected_in_every_part_of_a_model(tmp_path: Path, place: str) -> None:
    model = everywhere()
    for tensor in every_tensor(model):
        location = "../../../etc/passwd" if tensor.name == place else "w.bin"
        next(entry for entry in tensor.external_data if entry.key == "location").value = location
    (tmp_path / "w.bin").write_bytes(b"\0" * 4)
    with pytest.raises(Failure, match="not a path below the model's folder"):
        checked(model, tmp_path)


def of(tensor: onnx.TensorProto) -> onnx.ModelProto:
    return onnx.ModelProto(graph=helper.make_graph([], "g", [], [], [tensor]))


@pytest.mark.parametrize(
    "location", ["", "/etc/passwd", "a/../../b", "..", "a\\b", "*/_ORT_MEM_ADDR_/*", "a\nb", "x" * 2000]
)
def test_unsafe_weight_paths_are_rejected(tmp_path: Path, location: str) -> None:
    with pytest.raises(Failure, match="not a path below the model's folder"):
        checked(of(external(location)), tmp_path)
    stored_here = external(location)
    stored_here.data_location = TensorProto.DEFAULT
    with pytest.raises(Failure, match="not a path below the model's folder"):
        checked(of(stored_here), tmp_path)


@pytest.mark.parametrize("entries", [{"offset": "-4"}, {"length": "-1"}, {"offset": "1e3"}, {"length": "9" * 5000}])
def test_malformed_offsets_and_lengths_are_rejected(tmp_path: Path, entries: dict[str, str]) -> None:
    (tmp_path / "w.bin").write_bytes(b"\0" * 4)
    with pytest.raises(Failure, match="external offset or length"):
        checked(of(external("w.bin", **entries)), tmp_path)


def test_links_folders_and_fifos_are_rejected_as_weights(tmp_path: Path) -> None:
    folder, outside = tmp_path / "source", tmp_path / "outside"
    (outside / "deep").mkdir(parents=True)
    (outside / "deep" / "w.bin").write_bytes(b"\0" * 4)
    folder.mkdir()
    (folder / "file").symlink_to(outside / "deep" / "w.bin")
    (folder / "folder").symlink_to(outside / "deep")
    os.mkfifo(folder / "fifo")
    (folder / "real").mkdir()
    for location, why in (
        ("file", "link"),
        ("folder/w.bin", "link"),
        ("fifo", "missing beside"),
        ("real", "missing beside"),
    ):
        with pytest.raises(Failure, match=why):
            checked(of(external(location)), folder)


def test_more_weight_files_than_an_archive_may_have_are_rejected(tmp_path: Path) -> None:
    model = onnx.ModelProto(graph=helper.make_graph([], "g", [], [], [external(f"{n}.bin") for n in range(10_001)]))
    with pytest.raises(Failure, match="more than 10000 files"):
        checked(model, tmp_path)
