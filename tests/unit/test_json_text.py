"""JSON documents: what one parse may cost is bounded, and long lists of numbers mean the same in pieces as at once."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import orjson
import pytest

import millstream.gateway.tensors.json_document
import millstream.gateway.tensors.json_text
import millstream.gateway.tensors.number_list
from millstream.gateway.tensors import forms
from millstream.gateway.tensors.input_plans import InputPlans
from millstream.gateway.tensors.json_text import JsonLimits, parse
from millstream.gateway.tensors.nested_lists import from_lists, row_of_lists
from millstream.gateway.tensors.number_list import NumberList
from millstream.gateway.tensors.rows_json import read_predict
from millstream.gateway.v2.decode import V2Decoder
from millstream.plugins.compat.tfserving.predict import read_document
from millstream.plugins.compat.torchserve.predictions import read as read_prediction
from millstream.plugins.compat.triton.generate import read as read_prompt
from millstream.services.errors import Code, Failure
from millstream.services.model.signature import Signature, TensorSpec

MIB = 1 << 20
SMALL = JsonLimits(bytes_max=4096, values_max=500)
LARGE = JsonLimits(bytes_max=1 << 20, values_max=1_000_000)


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Everything counts as long, so that every kind of cut is seen in texts that a person can read."""
    monkeypatch.setattr(millstream.gateway.tensors.json_text, "UNCOUNTED_BYTES_MAX", 1)
    monkeypatch.setattr(millstream.gateway.tensors.json_text, "LIST_BYTES_MIN", 8)
    monkeypatch.setattr(millstream.gateway.tensors.json_text, "_WINDOW_BYTES", 7)
    monkeypatch.setattr(millstream.gateway.tensors.number_list, "LIST_BYTES_MIN", 8)
    monkeypatch.setattr(millstream.gateway.tensors.number_list, "PIECE_BYTES", 23)
    monkeypatch.setattr(millstream.gateway.tensors.number_list, "_EDGE_BYTES_MAX", 32)
    yield


def refused(text: bytes, limits: JsonLimits = SMALL, **places: Any) -> Failure:
    with pytest.raises(Failure) as error:
        value = parse(text, limits, **places)
        walk(value)
    return error.value


def walk(value: Any) -> Any:
    """The value with its NumberLists read."""
    if type(value) is NumberList:
        rows = [one for some in value.rows() for one in some]
        for _ in range(value.leading_ones):
            rows = [rows]
        return rows
    if type(value) is list:
        return [walk(one) for one in value]
    return {name: walk(one) for name, one in value.items()} if type(value) is dict else value


def flat(value: Any) -> list[Any]:
    return [one for part in value for one in flat(part)] if type(value) is list else [value]


def plans(datatype: str, shape: tuple[int, ...], limits: JsonLimits = SMALL, *, rows_max: int = 10**9) -> InputPlans:
    spec = TensorSpec(name="x", datatype=datatype, shape=shape)
    return InputPlans("m", Signature(inputs=(spec,), outputs=(), batching=True), rows_max, limits)


LISTS: dict[str, Any] = {
    "flat": list(range(900)),
    "one row": [list(range(900))],
    "rows": [[n, n + 1, n / 8] for n in range(300)],
    "one picture": [[[[n, -n, 0.5] for n in range(10)] for _ in range(30)]],
    "singles": [[n] for n in range(700)],
    "empty rows": [[] for _ in range(500)],
    "with NaN": [float("nan"), float("inf"), -float("inf"), *range(800)],
    "wide rows": [list(range(400)), list(range(400))],
}


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize("value", LISTS.values(), ids=LISTS)
@pytest.mark.parametrize("separators", [(",", ":"), (" ,\n ", " : ")], ids=["dense", "spaced"])
def test_long_lists_of_numbers_come_in_pieces(value: Any, separators: tuple[str, str]) -> None:
    text = json.dumps(
        {"a": 'x"[1,2', "inputs": [{"data": value, "n": [1, 2]}], "z": None}, separators=separators
    ).encode()
    document = parse(text, SMALL, number_lists=True)
    numbers = document["inputs"][0]["data"]
    assert type(numbers) is NumberList
    pieces = list(numbers.pieces())
    assert len(pieces) > 10
    np.testing.assert_array_equal([n for piece in pieces for n in flat(piece)], flat(value))
    assert str(walk(document)) == str(json.loads(text))


@pytest.mark.usefixtures("short")
def test_lists_of_numbers_elsewhere_count_like_everything_else() -> None:
    text = json.dumps({"a": [{"b": list(range(300))}], "c": {"d": list(range(900))}}).encode()
    assert refused(text).code is Code.TOO_LARGE
    assert type(parse(text, SMALL, number_lists=True)["c"]["d"]) is NumberList
    text = json.dumps({"a": [{"b": [list(range(500)), ""]}]}).encode()
    assert refused(text, number_lists=True).code is Code.TOO_LARGE


BROKEN = {
    "a comma at the end": (b"[%b,]", 0),
    "a comma before": (b"[,%b]", 0),
    "two commas": (b"[%b,,1]", 0),
    "a bracket too many": (b"[%b]]", 0),
    "a bracket too few": (b"[[%b]", 0),
    "brackets in the wrong order": (b"[%b][1,2,3]", 0),
    "lists without a comma": (b"[[%b][1,2,3]]", 0),
    "an empty place at a cut": (b"[%b, ,2]", 0),
    "a bare minus": (b"[%b,-]", 0),
    "a leading zero": (b"[%b,01]", 0),
    "letters of words that are known": (b"[%b,Nay]", 0),
    "a list as a key": (b'{"a":1,[%b]:2}', 1),
    "no end": (b'{"a":[%b]', 1),
    "a string without end": (b'{"a":[%b],"b', 1),
    "an escaped end": (b'{"a":[%b],"b\\"}', 1),
}


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize("case", BROKEN.values(), ids=BROKEN)
@pytest.mark.parametrize("count", range(1, 60))
def test_what_is_no_json_is_none_in_pieces(case: tuple[bytes, int], count: int) -> None:
    template, depth = case
    text = template % b",".join([b"%d" % (n % 7) for n in range(count)])
    assert refused(text, LARGE, number_lists=True).code is Code.INVALID
    try:
        numbers = parse(text, LARGE, number_lists=True)
    except Failure:
        return
    with pytest.raises(Failure, match="failed to parse"):
        list((numbers if depth == 0 else numbers["a"]).pieces())


@pytest.mark.usefixtures("short")
def test_any_document_means_what_it_means_at_once() -> None:
    random_state = random.Random(10)

    def some(depth: int) -> Any:
        kind = random_state.randrange(7 if depth else 4)
        if kind == 0:
            return random_state.choice(["", "a,b]", '"', "\\", '\\"[1,2,3,4,5,6', "[1,2,3,4,5,6,7,8,9]", "é"])
        if kind == 1:
            return random_state.choice([None, True, False, -1, 2.5e-7, 10**15])
        if kind in {2, 3}:
            return [random_state.randrange(9) for _ in range(random_state.randrange(30))]
        if kind == 4:
            inner = random_state.randrange(4)
            return [[random_state.randrange(9) for _ in range(inner)] for _ in range(random_state.randrange(12))]
        if kind == 5:
            return [some(depth - 1) for _ in range(random_state.randrange(4))]
        return {str(n): some(depth - 1) for n in range(random_state.randrange(4))}

    for _ in range(3000):
        value = {"v": some(3)}
        text = orjson.dumps(value)
        for number_lists in (False, True):
            assert walk(parse(text, LARGE, number_lists=number_lists)) == value


HOSTILE = {
    "objects": b"{}",
    "lists": b'[],""',
    "lists in lists": b"[[[[[[[[null]]]]]]]]",
    "members": b'{"a":{"b":{}}}',
    "strings": b'"a"',
    "words": b"true,null,false",
    "words without commas": b"true null",
    "garbage": b"x",
    "garbage between": b"1x",
    "escapes": b'"\\"\\\\"',
}


@pytest.mark.parametrize("element", HOSTILE.values(), ids=HOSTILE)
@pytest.mark.parametrize(
    "around", [b"%b", b"[%b]", b'{"inputs":[{"name":"x","data":[%b]}]}'], ids=["bare", "list", "v2"]
)
def test_documents_of_millions_of_values_are_refused_before_they_are_parsed(
    element: bytes, around: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(text: bytes) -> Any:
        pytest.fail(f"{len(text)} bytes were parsed")

    monkeypatch.setattr(millstream.gateway.tensors.json_text, "loads", never)
    text = around % b",".join([element] * (6 * MIB // (len(element) + 1)))
    assert refused(text, JsonLimits(values_max=100_000), number_lists=True).code is Code.TOO_LARGE


@pytest.mark.parametrize("element", [b"[]", b"1", b"[[[[[[[[1]]]]]]]]", b"[1,2,3]", b"1" * 4000], ids=len)
def test_long_lists_of_numbers_are_never_parsed_at_once(element: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    lists_max = 300_000
    monkeypatch.setattr(millstream.gateway.tensors.number_list, "LISTS_MAX", lists_max)
    at_once = millstream.gateway.tensors.json_document.loads

    def counted(text: bytes) -> Any:
        assert len(text) < 2 * millstream.gateway.tensors.number_list.PIECE_BYTES
        return at_once(text)

    lists = element.count(b"[")
    count = 3 * MIB // 2 // (len(element) + 1)
    if lists:
        assert refused(b"[%b]" % b",".join([element] * (lists_max // lists)), number_lists=True).code is Code.TOO_LARGE
        count = min(count, (lists_max - 1) // lists)
    text = b"[%b]" % b",".join([element] * count)
    monkeypatch.setattr(millstream.gateway.tensors.number_list, "loads", counted)
    numbers = parse(text, number_lists=True)
    assert type(numbers) is NumberList
    assert sum(len(piece) for piece in numbers.pieces()) > 20
    assert sum(len(some) for some in numbers.rows()) == count


def test_text_in_strings_counts_as_bytes_alone() -> None:
    text = orjson.dumps({"x": ["[{,:" * 300_000, 'a\\"' * 100_000]})
    assert parse(text, JsonLimits(4 * MIB, 1000)) == orjson.loads(text)
    with pytest.raises(Failure, match="MILLSTREAM_REQUEST_BYTES_MAX"):
        parse(text, JsonLimits(MIB, 1000))


@pytest.mark.parametrize("depth", [101, 1000, 5000, 300_000])
def test_deep_nesting_is_refused(depth: int) -> None:
    for inside in (b"1", b"1," * 200_000 + b"1"):
        text = b"[" * depth + inside + b"]" * depth
        plan = next(iter(plans("FP32", (-1, 1))))
        with pytest.raises(Failure) as error:
            from_lists(plan, parse(text, number_lists=True))
        assert error.value.code in {Code.INVALID, Code.TOO_LARGE}


@pytest.mark.parametrize("number", ["1e400", "1" * 4000, "-" + "9" * 400, "1" * 100_000, "NaN", "0." + "1" * 5000])
@pytest.mark.parametrize("count", [1, 100, 40_000])
def test_odd_numbers_are_read_or_refused(number: str, count: int) -> None:
    if len(number) * count > 2 * MIB:
        count = 2 * MIB // len(number)
    data = ",".join([number] * count)
    text = f'{{"inputs":[{{"name":"x","shape":[1,{count}],"datatype":"FP64","data":[{data}]}}]}}'.encode()
    try:
        call = V2Decoder(plans("FP64", (-1, -1), JsonLimits()), 64 * MIB).decode(text, None)
    except Failure as failure:
        assert failure.code in {Code.INVALID, Code.TOO_LARGE}
    else:
        got = np.frombuffer(call.inputs[0].data, np.float64)
        assert len(got) == count
        np.testing.assert_array_equal(got, np.full(count, float(number)))


def tensor(datatype: str, size: int) -> np.ndarray[Any, Any]:
    generator = np.random.default_rng(3)
    if datatype.startswith("FP"):
        return generator.normal(size=size).astype({"FP32": np.float32, "FP64": np.float64}[datatype])
    return generator.integers(0, 200, size).astype(datatype.lower())


@pytest.mark.parametrize("datatype", ["FP32", "FP64", "INT64", "UINT8", "INT32"])
@pytest.mark.parametrize("nested", [False, True])
def test_a_tensor_of_more_numbers_than_values_are_allowed_is_what_it_was(datatype: str, *, nested: bool) -> None:
    limits = JsonLimits(values_max=200_000)
    array = tensor(datatype, 300_000).reshape(3, -1)
    assert array.size > limits.values_max
    columns = array.shape[1]
    data = array.tolist() if nested else array.reshape(-1).tolist()
    head = {"name": "x", "shape": list(array.shape), "datatype": datatype}
    v2 = orjson.dumps({"inputs": [{**head, "data": data}]})
    assert len(v2) > 5 * millstream.gateway.tensors.number_list.PIECE_BYTES
    call = V2Decoder(plans(datatype, (-1, columns), limits), 64 * MIB).decode(v2, None)
    assert bytes(call.inputs[0].data) == array.tobytes()
    if nested:
        rows = array.reshape(300, -1)
        width = plans(datatype, (-1, rows.shape[1]), limits)
        for name in ("instances", "inputs"):
            text = orjson.dumps({name: rows.tolist()})
            inputs, row_form = read_predict(width, read_document(text, limits))
            assert (inputs.rows, row_form) == (300, name == "instances")
            assert inputs.tensors[0].data == rows.tobytes()
        named = orjson.dumps({"instances": [{"x": row.tolist()} for row in rows[:9]] + [{"x": [0] * rows.shape[1]}]})
        tall = plans(datatype, (-1, columns), limits)
        long = orjson.dumps({"instances": [{"x": row.tolist()} for row in array]})
        assert (
            read_predict(width, read_document(named, limits))[0].tensors[0].data[: rows[:9].nbytes]
            == rows[:9].tobytes()
        )
        assert read_predict(tall, read_document(long, limits))[0].tensors[0].data == array.tobytes()
        with pytest.raises(Failure, match=r"at \[1\]"):
            mixed = orjson.dumps({"instances": [{"x": array[0].tolist()}, {"x": [1, 2]}]})
            read_predict(tall, read_document(mixed, limits))
        texts = [orjson.dumps({"x": rows.tolist()}), orjson.dumps(rows.tolist())]
        assert read_prompt(width, texts[0]).inputs.tensors[0].data == rows.tobytes()
        assert read_prediction(width, "application/json", texts[1]).inputs.tensors[0].data == rows.tobytes()
        assert read_prediction(width, "application/json", texts[0]).single is False
        assert forms.reader("application/json")(width, texts[1]).inputs.tensors[0].data == rows.tobytes()


def test_mistakes_in_long_lists_are_named_with_their_place() -> None:
    plan = next(iter(plans("INT32", (-1, 2), JsonLimits())))
    rows = [[1, 2] for _ in range(300_000)]
    for at, wrong, message in (
        (299_999, [1, 2.5], r"at \[299999\]\[1\]: a number with a fraction"),
        (150_000, [1], r"at \[150000\]"),
        (200_000, [1, 2**40], "out of the range of INT32"),
    ):
        text = orjson.dumps([*rows[:at], wrong, *rows[at + 1 :]])
        with pytest.raises(Failure, match=message):
            from_lists(plan, parse(text, number_lists=True))
    text = orjson.dumps(rows)
    assert row_of_lists(plan, parse(text, number_lists=True)).extent.shape == (300_000, 2)


def test_one_element_that_is_too_large_for_one_parse_is_refused() -> None:
    limits = JsonLimits()
    picture = orjson.dumps({"instances": [[[n % 10] for n in range(700_000)], [[0] for _ in range(700_000)]]})
    with pytest.raises(Failure, match="one element of a list"):
        read_predict(plans("UINT8", (-1, 700_000, 1), limits), read_document(picture, limits))
