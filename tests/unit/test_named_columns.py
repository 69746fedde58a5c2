"""Tables whose columns have names -> the inputs of a version, by hostile and odd callers."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from millstream.gateway.tensors import forms
from millstream.gateway.tensors.input_plans import InputPlans, Inputs
from millstream.gateway.tensors.named_columns import NamedColumns
from millstream.gateway.v2.decode import V2Decoder
from millstream.plugins.compat.sagemaker.dataframes import read_dataframe
from millstream.plugins.compat.torchserve import predictions
from millstream.services.errors import Failure
from millstream.services.model.datatypes import NUMPY
from millstream.services.model.manifest import ColumnCategories
from millstream.services.model.signature import Signature, TensorSpec

ROWS_MAX = 8


def plans(
    names: list[str],
    datatype: str = "FP32",
    *,
    own: str = "input",
    without_null: tuple[str, ...] = (),
    **categories: ColumnCategories,
) -> Any:
    """Plans of a version whose one input is a table."""
    specs = (TensorSpec(name=own, datatype=datatype, shape=(-1, len(names))),)
    made = InputPlans("m", Signature(inputs=specs, outputs=(), batching=True), ROWS_MAX)
    made.columns = NamedColumns(made, names, without_null, categories)
    return made


def plans_of_each(**inputs: str) -> Any:
    """Plans of a version with an input for each column: name and datatype."""
    specs = tuple(TensorSpec(name=name, datatype=datatype, shape=(-1, 1)) for name, datatype in inputs.items())
    made = InputPlans("m", Signature(inputs=specs, outputs=(), batching=True), ROWS_MAX)
    made.columns = NamedColumns(made, list(inputs))
    return made


def table_of(inputs: Any, at: int = 0, dtype: Any = np.float32) -> Any:
    tensor = inputs[at]
    data = tensor.data if isinstance(tensor.data, np.ndarray) else np.frombuffer(tensor.data, dtype)
    return data.reshape(tensor.shape).tolist()


def v2(made: InputPlans, *inputs: dict[str, Any]) -> Any:
    return V2Decoder(made, 1 << 24).decode(json.dumps({"inputs": list(inputs)}).encode(), None).inputs


def item(name: Any, data: Any, datatype: Any = "FP32", shape: Any = None) -> dict[str, Any]:
    return {"name": name, "shape": [len(data)] if shape is None else shape, "datatype": datatype, "data": data}


def refused(call: Any) -> str:
    with pytest.raises(Failure) as caught:
        call()
    assert "\n" not in caught.value.message and len(caught.value.message) < 1500
    return caught.value.message


AB = plans(["a", "b"])


@pytest.mark.parametrize("datatype", sorted({*NUMPY} - {"BOOL", "FP16", "BF16"}))
def test_a_column_of_any_number_becomes_the_model_s(datatype: str) -> None:
    found = v2(AB, item("b", [3, 4], datatype), item("a", [1, 2], datatype, [2, 1]))
    assert table_of(found) == [[1, 3], [2, 4]]


def test_booleans_are_numbers_in_a_table() -> None:
    assert table_of(v2(AB, item("b", [True, False], "BOOL"), item("a", [1, 2]))) == [[1, 1], [2, 0]]


def test_the_version_s_own_input_is_taken_as_before() -> None:
    named = plans(["input", "a"])
    assert table_of(v2(named, item("input", [[1, 2]], shape=[1, 2]))) == [[1, 2]]
    assert table_of(v2(named, item("a", [2]), item("input", [1]))) == [[1, 2]]
    assert "shape" in refused(lambda: v2(AB, item("input", [1, 2, 3], shape=[1, 3])))
    assert "did you mean 'input'" in refused(lambda: v2(AB, item("inputs", [[1, 2]], shape=[1, 2])))


def test_an_envelope_of_columns_is_not_taken_for_one_of_the_input() -> None:
    """Envelopes are remembered for the version's own inputs alone."""
    decoder = V2Decoder(plans(["a"]), 1 << 20)
    for values in ([1, 2], [3, 4], [True, False]):
        datatype = "BOOL" if values[0] is True else "INT64"
        body = json.dumps({"inputs": [item("a", values, datatype)]}).encode()
        assert table_of(decoder.decode(body, None).inputs) == [[float(value)] for value in values]
    wide = plans_of_each(a="FP32")
    decoder = V2Decoder(wide, 1 << 20)
    for number in (1.5, 2.5):
        raw = np.array([number, number]).tobytes()
        head = {"name": "a", "shape": [2], "datatype": "FP64", "parameters": {"binary_data_size": 16}}
        text = json.dumps({"inputs": [head]}).encode()
        assert table_of(decoder.decode(text + raw, len(text)).inputs) == [[number], [number]]


@pytest.mark.parametrize(
    ("inputs", "says"),
    [
        ([item("a", [1]), item("a", [1]), item("b", [1])], "input 'a' already exists in request"),
        ([item("a", [1, 2]), item("b", [1])], "batch size does not match"),
        ([item("a", [1]), item("b", [1]), item("", [1])], "leave it out"),
        ([item("a", [1]), item("b", ["x"], "BYTES")], "column 'b' takes FP32, and has text"),
        ([item("a", [1]), item(7, [1])], "it takes the input 'input', or the columns a, b"),
        ([item("a", [1]), item("b", [1], "WORD")], "invalid datatype"),
        ([item("a", [1]), item("b", [1], None)], "datatype"),
        ([item("a", [1]), item("b", [1, 2], shape=[1, 2])], "unexpected shape for input 'b'"),
        ([item("a", [1] * 9), item("b", [1] * 9)], "batch-size must be <= 8"),
        ([item("a", [1]), item("b", [1], shape="x")], "shape"),
        ([item("a", [1]), item("B" * 100_000, [1])], "is unknown"),
        ([item("a", [1]), 7], "unexpected inference input 'a'"),
    ],
)
def test_wrong_columns_of_v2_are_one_line(inputs: list[Any], says: str) -> None:
    assert says in refused(lambda: v2(AB, *inputs))


def test_ten_thousand_columns_in_any_order() -> None:
    names = [f"column {at}" for at in range(10_000)]
    made = plans(names)
    found = v2(made, *[item(name, [at]) for at, name in reversed(list(enumerate(names)))])
    assert table_of(found) == [list(range(10_000))]
    message = refused(lambda: v2(made, *[item(name, [0]) for name in names[1:]]))
    assert "column 'column 0' is missing" in message and "9960 more" in message


def split(made: InputPlans, columns: Any, *lines: Any) -> Inputs:
    return read_dataframe(made, {"dataframe_split": {"columns": columns, "data": list(lines)}})


def test_integer_names() -> None:
    numbered = plans(["0", "1", "2"])
    assert table_of(split(numbered, [2, 1, 0], [3, 2, 1]).tensors) == [[1, 2, 3]]
    assert "'5' is unknown" in refused(lambda: split(numbered, [0, 1, 5], [1, 2, 3]))
    assert table_of(split(AB, [0, 1], [1, 2]).tensors) == [[1, 2]]  # as a DataFrame without names has them
    assert "unknown" in refused(lambda: split(AB, [1, 0], [1, 2]))


def test_null_is_nan_and_refused_where_the_column_has_integers() -> None:
    named = plans(["a", "b"], without_null=("b",))
    assert np.isnan(table_of(split(named, ["b", "a"], [1, None]).tensors)[0][0])
    assert "line 0 has null in column 'b'" in refused(lambda: split(named, ["b", "a"], [None, 1]))
    whole = plans(["a", "b"], "INT64")
    assert "column 'a' takes INT64, and has null in row 1" in refused(
        lambda: split(whole, ["a", "b"], [1, 2], [None, 3])
    )
    assert "numbers with fractions" in refused(lambda: split(whole, ["a", "b"], [1.5, 2]))
    assert "out of the range of INT8" in refused(lambda: split(plans(["a", "b"], "INT8"), ["a", "b"], [1, 300]))
    assert "out of every range" in refused(lambda: split(AB, ["a", "b"], [1, 2**70]))


def test_text_goes_into_inputs_of_text() -> None:
    made = plans_of_each(sex="BYTES", age="FP32")
    inputs = split(made, ["age", "sex"], [1, "é"], [2, "m"]).tensors
    assert inputs[0].data == b"\2\0\0\0\xc3\xa9\1\0\0\0m"
    assert table_of(inputs, 1) == [[1], [2]]
    assert "column 'sex' takes text, and has whole numbers" in refused(lambda: split(made, ["age", "sex"], [1, 2]))
    assert "null in row 0" in refused(lambda: split(made, ["age", "sex"], [1, None]))
    assert "'sex' at [1]" in refused(lambda: split(made, ["age", "sex"], [1, "f"], [2, 3]))


@pytest.mark.parametrize("columns", [["b", "a"], ["a", "b"]])
def test_long_lines_are_read_in_pieces(columns: list[str]) -> None:
    """Of numbers alone: one long line, and many lines."""
    names = [f"c{at}" for at in range(20_000)]
    many = [[at + 0.25, at + 0.5] for at in range(ROWS_MAX)]
    for made, given, lines in (
        (plans(names), names[::-1], [[at + 0.125 for at in range(20_000)]]),
        (AB, columns, many),
    ):
        text = json.dumps({"dataframe_split": {"columns": given, "data": lines}})
        if len(lines) > 1:
            text = text.replace(", ", "," + " " * 10_000)
        document = forms.parse_json(text.encode(), made.json_limits._replace(bytes_max=1 << 30))
        order = [given.index(name) for name in made.columns.names]
        assert table_of(read_dataframe(made, document).tensors) == np.array(lines)[:, order].tolist()


CSV = [
    (b"b,a\n2,1\n", [[1, 2]]),
    (b"\xef\xbb\xbfb,a\r\n2,1\r\n", [[1, 2]]),
    (b"1,2\n3,4\n", [[1, 2], [3, 4]]),
    (b"b,a\ntrue,1e2\n", [[100, 1]]),
]


@pytest.mark.parametrize(("body", "rows"), CSV)
def test_csv_with_and_without_a_header(body: bytes, rows: Any) -> None:
    assert table_of(forms.reader(forms.CSV)(AB, body).inputs.tensors) == rows


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"a,b,a\n1,2,3\n", "column 'a' is there twice"),
        (b",a,b\n0,1,2\n", "the index of a DataFrame"),
        (b"ab,ba\n1,2\n", "'ab' is unknown"),
        (b"a,b\n1,x\n", "column 'b' takes numbers, and has 'x' in row 0"),
        (b"a,b\n1,1_0\n", "has '1_0'"),
    ],
)
def test_a_wrong_csv_is_one_line(body: bytes, says: str) -> None:
    assert says in refused(lambda: forms.reader(forms.CSV)(AB, body))


def test_an_empty_field_is_missing() -> None:
    assert np.isnan(table_of(forms.reader(forms.CSV)(AB, b"b,a\n1,\n").inputs.tensors)[0][0])


def test_a_row_of_missing_values_is_no_header() -> None:
    assert np.isnan(table_of(forms.reader(forms.CSV)(AB, b",\n1,2\n").inputs.tensors)[0]).all()


def test_a_header_of_numbers_is_a_row() -> None:
    assert table_of(forms.reader(forms.CSV)(plans(["0", "1"]), b"0,1\n").inputs.tensors) == [[0, 1]]


def test_torchserve_takes_one_row_and_many() -> None:
    one = predictions.read(AB, forms.JSON, b'{"b": 2, "a": 1}')
    assert (table_of(one.inputs.tensors), one.single) == ([[1, 2]], True)
    many = predictions.read(plans_of_each(a="FP32", b="FP32"), forms.JSON, b'{"b": [2, 4], "a": [1, 3]}')
    assert (table_of(many.inputs.tensors, 1), many.single) == ([[2], [4]], False)


def coded(*values: Any, unseen: Any = "missing") -> ColumnCategories:
    return ColumnCategories(values=values, coded=True, unseen=unseen)


def test_categories_become_codes() -> None:
    big = 2**60
    made = plans(["a", "b"], "FP64", a=coded("x", "1", "é"), b=coded(big, big + 1, True))
    found = split(made, ["b", "a"], [big + 1, "é"], [big, "x"], [True, "1"], [3, "y"])
    rows = table_of(found.tensors, dtype=np.float64)
    np.testing.assert_equal(rows, [[2, 1], [0, 0], [1, 2], [np.nan, np.nan]])
    csv = forms.reader(forms.CSV)(made, b"a,b\n1,true\n,\n").inputs
    np.testing.assert_equal(table_of(csv.tensors, dtype=np.float64), [[1, 2], [np.nan, np.nan]])
    assert "send them as integers" in refused(lambda: split(made, ["a", "b"], ["x", big + 1], ["x", None]))
    assert "takes its categories x, 1, é, and has numbers" in refused(lambda: split(made, ["a", "b"], [1, big]))
    assert "and has text" in refused(lambda: split(made, ["a", "b"], ["x", "y"]))
    strict = plans(["a", "b"], a=coded("x", unseen="refused"))
    assert "column 'a' has 'y' in row 1, a category" in refused(lambda: split(strict, ["a", "b"], ["x", 0], ["y", 0]))
    assert table_of(split(strict, [0, 1], [0, 7]).tensors) == [[0, 7]]  # rows without names hold codes
    unknown = plans(["a", "b"], a=coded(unseen="refused"))
    assert "does not say the categories" in refused(lambda: split(unknown, ["a", "b"], ["x", 0]))


def test_the_texts_of_a_closed_column_are_its_categories_in_every_form() -> None:
    """Also where a request gives the version's own inputs."""
    closed = ColumnCategories(values=("f", "m"), unseen="refused", empty_is_missing=True)
    each = plans_of_each(sex="BYTES", age="FP32")
    each.columns = NamedColumns(each, ["sex", "age"], (), {"sex": closed})
    age = item("age", [1, 2], shape=[2, 1])
    assert v2(each, item("sex", ["m", ""], "BYTES", [2, 1]), age)[0].size_bytes == 9
    says = "column 'sex' has 'x' in row 1"
    assert says in refused(lambda: v2(each, item("sex", ["", "x"], "BYTES", [2, 1]), age))
    assert says in refused(lambda: v2(each, item("sex", ["m", "x"], "BYTES"), age))
    assert says in refused(lambda: split(each, ["age", "sex"], [1, None], [2, "x"]))
    table = plans(["a", "b"], "BYTES", b=closed)
    assert says.replace("sex", "b") in refused(lambda: v2(table, item("input", ["q", "f", "q", "x"], "BYTES", [2, 2])))
