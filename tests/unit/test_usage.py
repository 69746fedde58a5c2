"""How versions want to be called, told from their manifests."""

from __future__ import annotations

from typing import Any

import pytest

from millstream.client.cli.inputs import example_of
from millstream.services.model.manifest import (
    ColumnCategories,
    ImportRecord,
    Manifest,
    ModelConfig,
    SourceFile,
    TrialInputs,
)
from millstream.services.model.signature import Signature, TensorSpec
from millstream.services.model.usage import EXAMPLE_COLUMNS_MAX, EXAMPLE_ELEMENTS_MAX, Usage, usage_of

IDS, MASK = ("input_ids", "INT64", (-1, -1)), ("attention_mask", "INT64", (-1, -1))


def usage(
    *inputs: tuple[str, str, tuple[int, ...]],
    columns: tuple[str, ...] = (),
    categories: dict[str, ColumnCategories] | None = None,
    files: tuple[str, ...] = (),
    output: str = "FP32",
    trial: TrialInputs | None = TrialInputs(size=2, fill=1),  # noqa: B008 - frozen
) -> Usage:
    record = ImportRecord(
        importer="",
        producer="",
        rows=1,
        output="",
        difference=0,
        rtol=0,
        atol=0,
        columns=columns,
        categories=categories or {},
    )
    outputs = (TensorSpec(name="y", datatype=output, shape=(-1, 3)),)
    specs = tuple(TensorSpec(name=name, datatype=datatype, shape=shape) for name, datatype, shape in inputs)
    paths = ("source/model.onnx", *files)
    return usage_of(
        Manifest(
            model="m",
            version=1,
            created=1.0,
            digest="0" * 64,
            served=paths[0],
            files=tuple(SourceFile(path=path, size_bytes=1, sha256="0" * 64) for path in paths),
            signature=Signature(inputs=specs, outputs=outputs, batching=True),
            config=ModelConfig(),
            opset=17,
            ir_version=8,
            imported=record if columns else None,
            trial=trial,
        )
    )


def test_texts() -> None:
    found = usage(IDS, MASK, files=("imported/tokenizer.json",), trial=None)
    assert (found.kind, found.input) == ("text", "text")
    assert found.example is not None
    assert found.example["inputs"][0]["name"] == "text"
    found = usage(("words", "BYTES", (-1, 1)))  # its own input takes texts
    assert (found.kind, found.input) == ("text", "words")
    assert found.example == {"inputs": [{"name": "words", "datatype": "BYTES", "shape": [1, 1], "data": ["1"]}]}


def test_token_ids_without_a_tokenizer() -> None:
    found = usage(IDS, MASK)
    assert (found.kind, found.input) == ("tokens", None)
    assert found.example is not None
    assert found.example["inputs"][0] == {"name": "input_ids", "datatype": "INT64", "shape": [1, 2], "data": [1, 1]}
    assert usage(("x", "INT64", (-1, 4))).kind == "tensors"


def test_columns_of_one_input_and_inputs_that_are_columns() -> None:
    found = usage(("input", "FP32", (-1, 3)), columns=("age", "sex", "fare"))
    assert (found.kind, found.input, found.columns) == ("columns", "input", ("age", "sex", "fare"))
    assert found.sentence == "a table with the columns age, sex, fare"
    found = usage(("age", "FP32", (-1, 1)), ("town", "BYTES", (-1, 1)))
    assert (found.kind, found.input, found.columns) == ("columns", None, ("age", "town"))
    assert usage(("age", "FP32", (-1, 1))).kind == "tensors"
    many = usage(("x", "FP32", (-1, 500)), columns=tuple(f"c{number}" for number in range(500)))
    assert many.sentence.endswith("c7 and 492 more")
    assert len(many.columns) == 500


def test_the_example_of_a_table_names_its_columns() -> None:
    coded = {"sex": ColumnCategories(values=("female", "male"), coded=True)}
    found = usage(("input", "FP32", (-1, 2)), columns=("age", "sex"), categories=coded)
    assert found.example == {
        "inputs": [
            {"name": "age", "datatype": "FP32", "shape": [1], "data": [1.0]},
            {"name": "sex", "datatype": "BYTES", "shape": [1], "data": ["female"]},
        ]
    }
    closed = {"town": ColumnCategories(values=("Basel",), unseen="refused")}
    town, age = ("town", "BYTES", (-1, 1)), ("age", "FP32", (-1, 1))
    found = usage(town, age, columns=("town", "age"), categories=closed)
    assert found.example is not None
    assert [one["data"] for one in found.example["inputs"]] == [["Basel"], [1.0]]
    for used in ([town, age], [age]):  # not the other columns that the model was fitted with
        found = usage(*used, columns=("town", "not used", "age"), categories=closed)
        assert found.columns == ("town", "not used", "age")
        assert found.example is not None
        assert [one["name"] for one in found.example["inputs"]] == [name for name, _, _ in used]
    unknown = {"sex": ColumnCategories(coded=True)}  # codes alone, which have no names
    assert usage(("input", "FP32", (-1, 2)), columns=("age", "sex"), categories=unknown).example is None
    many = tuple(f"c{number}" for number in range(EXAMPLE_COLUMNS_MAX + 1))
    assert usage(("input", "FP32", (-1, len(many))), columns=many).example is None


@pytest.mark.parametrize(
    ("shape", "datatype", "said"),
    [
        ((-1, 3, 224, 160), "FP32", "images of 224 x 160, RGB, channels first, as FP32 (input 'x')"),
        ((1, 28, 28, 1), "UINT8", "images of 28 x 28, grey, as UINT8 (input 'x')"),
        ((-1, -1, -1, 3), "FP32", "images of any size, RGB, channels last, as FP32 (input 'x')"),
        ((-1, 4, -1, 32), "FP16", "images of any x 32, RGBA, channels first, as FP16 (input 'x')"),
    ],
)
def test_images(shape: tuple[int, ...], datatype: str, said: str) -> None:
    found = usage(("x", datatype, shape))
    assert (found.kind, found.input, found.sentence) == ("image", "x", said)
    assert found.image is not None
    sizes = (found.image.channels, found.image.height, found.image.width)
    first = (sizes[0], *sizes[1:]) if found.image.layout == "channels_first" else (*sizes[1:], sizes[0])
    assert first == shape[1:]


@pytest.mark.parametrize(
    ("shape", "datatype"),
    [((-1, 3, 4, 4), "FP32"), ((-1, 2, 64, 64), "FP32"), ((-1, 3, 64, 64), "INT64"), ((3, 64, 64), "FP32")],
)
def test_tensors_that_are_no_images(shape: tuple[int, ...], datatype: str) -> None:
    found = usage(("x", datatype, shape))
    assert (found.kind, found.image) == ("tensors", None)
    assert found.sentence == f"tensors: x {datatype} {list(shape)}"


def test_examples_that_cannot_be_written_as_json_are_left_out() -> None:
    assert usage(("x", "FP32", (-1, EXAMPLE_ELEMENTS_MAX))).example is not None
    assert usage(("x", "FP32", (-1, EXAMPLE_ELEMENTS_MAX + 1))).example is None
    assert usage(("x", "FP32", (-1, 1 << 40))).example is None
    assert usage(("x", "FP16", (-1, 2))).example is None
    assert usage(("x", "FP32", (-1, 2)), output="BF16").example is None
    assert usage(("x", "FP32", (-1, 2)), trial=None).example is None


def test_the_command_line_sends_the_example() -> None:
    metadata: Any = {"name": "m", "inputs": [], "outputs": [], "parameters": {"usage": usage(IDS, MASK).model_dump()}}
    example = example_of(metadata, binary_outputs=True)
    assert example.document == metadata["parameters"]["usage"]["example"]
    assert example.request.header_bytes is None
