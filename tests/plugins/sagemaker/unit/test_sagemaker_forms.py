"""Bodies of SageMaker's containers, and the frames of its streams."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from botocore.eventstream import EventStreamBuffer

from millstream.gateway.catalog.snapshot import ModelView, Snapshot
from millstream.gateway.tensors import forms
from millstream.gateway.tensors.input_plans import InputPlans
from millstream.gateway.tensors.outputs import OutputTensor
from millstream.plugins.compat.sagemaker.bodies import (
    PAYLOAD_BYTES_MAX,
    PREFIX,
    accepted_form,
    header_bytes_of,
    is_v2,
    payload_parts,
)
from millstream.plugins.compat.sagemaker.settings import SageMakerSettings
from millstream.plugins.compat.sagemaker.target import default_model, named_model, variant_version
from millstream.services.errors import Code, Failure
from millstream.services.model.signature import Signature, TensorSpec
from millstream.services.settings import read_settings, settings_of


def plans(datatype: str = "FP32", shape: tuple[int, ...] = (-1, 4), count: int = 1) -> InputPlans:
    specs = tuple(TensorSpec(name=f"x{index}", datatype=datatype, shape=shape) for index in range(count))
    return InputPlans("m", Signature(inputs=specs, outputs=specs, batching=True), 8)


NAN = np.nan


def npy(array: np.ndarray[Any, Any], version: tuple[int, int] = (1, 0)) -> bytes:
    file = io.BytesIO()
    np.lib.format.write_array(file, array, version, allow_pickle=False)
    return file.getvalue()


def read(content_type: str, body: bytes, of: InputPlans) -> np.ndarray[Any, Any]:
    tensor = forms.reader(content_type)(of, body).inputs.tensors[0]
    raw = tensor.data.tobytes() if isinstance(tensor.data, np.ndarray) else bytes(tensor.data)
    return np.frombuffer(raw, np.float32).reshape(tensor.shape)


@pytest.mark.parametrize(
    ("body", "shape", "expected"),
    [
        (b"1,2,3,4\n5,6,7,8\n", (-1, 4), [[1, 2, 3, 4], [5, 6, 7, 8]]),
        (b"1,2,3,4\r\n\r\n5, 6,7,nan", (-1, 4), [[1, 2, 3, 4], [5, 6, 7, NAN]]),
        (b"\xef\xbb\xbf1,2,3,4", (-1, 2, 2), [[[1, 2], [3, 4]]]),
        (b"1\n2\n", (-1,), [1, 2]),
        (b"1\n2\n", (-1, 1), [[1], [2]]),
        (b"a,b,c,d\n1,2,3,4\n", (-1, 4), [[1, 2, 3, 4]]),
        (b'"n",i\r\n1,2\r\n', (-1, -1), [[1, 2]]),
        (b"0,1,2,3\n4,5,6,7\n", (-1, 4), [[0, 1, 2, 3], [4, 5, 6, 7]]),
        (b"nan,,-inf,3\n", (-1, 4), [[NAN, NAN, -np.inf, 3]]),
    ],
)
def test_csv(body: bytes, shape: tuple[int, ...], expected: Any) -> None:
    found = read("text/csv; charset=utf-8", body, plans(shape=shape))
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(
    ("datatype", "body", "error"),
    [
        ("FP32", b"a,2,c,d\n1,2,3,4", "line 1 of the CSV, column 1: 'a' is no FP32"),
        ("FP32", b"n/a,b,c,d\n1,2,3,4", "line 1 of the CSV, column 1: 'n/a' is no FP32"),
        ("FP32", b"a,b,c,d\n1,2,x,4", "line 2 of the CSV, column 3: 'x' is no FP32"),
        ("FP32", b"a,b,c,d\n", "no rows after its line of names"),
        ("FP32", b"1,2,3,4\n1,2,3", "line 2 of the CSV has 3 columns, the first has 4"),
        ("FP32", b"1,2,3", r"Expected \[-1,4\], got \[1,3\]"),
        ("INT32", b"1,2,3,4.0", "column 4: '4.0' is no INT32"),
        ("INT32", b"1,2,3," + b"9" * 5000, "is no INT32"),
        ("INT32", b"1,2,3,1_0", "'1_0' is no INT32"),
        ("BOOL", b"1,0,true,2", "'2' is no BOOL"),
        ("FP32", b"", "no rows"),
        ("FP32", b"\xff", "not UTF-8"),
        ("FP32", b'1,2,3,"4', "cannot be read"),
    ],
)
def test_csv_that_is_wrong(datatype: str, body: bytes, error: str) -> None:
    with pytest.raises(Failure, match=error):
        forms.reader("text/csv")(plans(datatype), body)


def test_a_csv_says_whether_it_has_a_header() -> None:
    for said, expected in (("present", [[4, 5]]), ("absent", [[2, 3], [4, 5]]), ("none", [[2, 3], [4, 5]])):
        for content_type in (f"text/csv; header={said}", f'Text/CSV;charset=utf-8; Header="{said.upper()}"'):
            assert read(content_type, b"2,3\n4,5\n", plans(shape=(-1, 2))).tolist() == expected
    texts = plans("BYTES", (-1,))
    with pytest.raises(Failure, match="'x0' in the first line of the CSV may be a name or a text"):
        forms.reader("text/csv")(texts, b"x0\nx1\n")
    for said, rows in (("present", 1), ("absent", 2)):
        assert forms.reader(f"text/csv; header={said}")(texts, b"x0\nx1\n").inputs.rows == rows


def test_a_csv_with_names_is_for_several_inputs() -> None:
    inputs = forms.reader("text/csv")(plans(count=2, shape=(-1, 1)), b"x1,x0\n1,2\n3,\n").inputs
    np.testing.assert_array_equal([np.frombuffer(one.data, np.float32) for one in inputs.tensors], [[2, NAN], [1, 3]])
    for body, error in (
        (b"x1,x0,z\n1,2,3\n", "unexpected inference input 'z'"),
        (b"x1,x1\n1,2\n", "input 'x1' already exists"),
        (b"x1\n1\n", r"missing required input\(s\) \['x0'\]"),
        (b"a,b\n1,2\n", "or CSV that begins with a line of their names"),
        (b"x1,x0\n1,y\n", "line 2 of the CSV, column 2: 'y' is no FP32"),
    ):
        with pytest.raises(Failure, match=error):
            forms.reader("text/csv")(plans(count=2, shape=(-1, 1)), body)


def test_numpys_format() -> None:
    array = np.arange(8.0).reshape(2, 4)
    for body in (npy(array), npy(np.asfortranarray(array)), npy(array.astype(np.int16)), npy(array, (2, 0))):
        assert read("application/x-npy", body, plans()).tolist() == array.tolist()


def lying() -> bytes:
    """A header that claims two million million numbers."""
    return npy(np.arange(4.0)).replace(b"(4,), }            ", b"(2000000000000,), }")


@pytest.mark.parametrize(
    ("body", "error"),
    [
        (b"", "no array in numpy's format"),
        (b"\x93NUMPY\x01\x00\x05\x00junk}", "no array in numpy's format"),
        (b"\x93NUMPY\x07\x00\x05\x00junk}", "numpy's format"),
        (npy(np.arange(4.0))[:-1], "header says 32 bytes, 31 are there"),
        (npy(np.arange(4.0)) + b"x", "header says 32 bytes, 33 are there"),
        (lying(), "header says 16000000000000 bytes, 32 are there"),
        (npy(np.zeros(1, "M8[s]")), "holds datetime64"),
        (npy(np.zeros(1, [("a", "f4")])), "is not taken"),
        (npy(np.zeros((1, 3))), r"got \[1,3\]"),
    ],
)
def test_numpys_format_that_is_wrong(body: bytes, error: str) -> None:
    with pytest.raises(Failure, match=error):
        forms.reader("application/x-npy")(plans(shape=(-1,) if "datetime" in error else (-1, 4)), body)


def test_pickles_are_never_read() -> None:
    file = io.BytesIO()
    np.save(file, np.array([{"a": Path("/")}]), allow_pickle=True)
    with pytest.raises(Failure, match="is not taken"):
        forms.reader("application/x-npy")(plans(), file.getvalue())


def test_other_types_and_more_inputs_are_refused() -> None:
    with pytest.raises(Failure, match="Content-Type 'image/png' is not taken") as refusal:
        forms.reader("image/png")
    assert refusal.value.code is Code.ENCODING
    for content_type, body in (("text/csv", b"1"), ("application/x-npy", npy(np.zeros((1, 4))))):
        with pytest.raises(Failure, match="models of one input"):
            forms.reader(content_type)(plans(count=2), body)


def test_forms_of_the_reply() -> None:
    of = plans()
    output = OutputTensor("FP32", (2, 2), np.array([[0.1, np.nan], [1, 2]], np.float32))
    assert forms.write(of.signature, [output], forms.CSV, row_form=True) == b"0.1,nan\n1.0,2.0\n"
    loaded = np.load(io.BytesIO(forms.write(of.signature, [output], forms.NPY, row_form=True)))
    np.testing.assert_array_equal(loaded, output.array)
    words = OutputTensor("BYTES", (2, 1), [b'a "b"', b"c,d"])
    assert forms.write(of.signature, [words], forms.CSV, row_form=True) == b'"a ""b"""\n"c,d"\n'
    assert np.load(io.BytesIO(forms.write(of.signature, [words], forms.NPY, row_form=True))).tolist() == [
        [b'a "b"'],
        [b"c,d"],
    ]
    two = of.signature.model_copy(update={"outputs": of.signature.outputs * 2})
    for form in (forms.CSV, forms.NPY):
        with pytest.raises(Failure, match="holds one output"):
            forms.write(two, [output, output], form, row_form=True)


@pytest.mark.parametrize(
    ("accept", "form"),
    [
        (None, forms.JSON),
        ("*/*", forms.JSON),
        ("application/json; charset=utf-8", forms.JSON),
        ("text/csv", forms.CSV),
        ("image/png, text/*", forms.CSV),
        ("application/x-npy", forms.NPY),
        ("image/png", None),
    ],
)
def test_accept(accept: str | None, form: str | None) -> None:
    assert accepted_form(accept) == form


def test_which_json_is_v2() -> None:
    assert is_v2({"inputs": [{"name": "x", "shape": [1], "datatype": "FP32", "data": [1]}]})
    assert is_v2({"inputs": []}), "no inputs at all are what the reference container reads there"
    others: list[Any] = [[1], {"inputs": [[1]]}, {"inputs": {"x": 1}}, {"inputs": [{"name": "a"}]}]
    for other in others:
        assert not is_v2(other)


def test_frames_are_read_by_botocore() -> None:
    for body in (b"", b"hello", b"x" * (PAYLOAD_BYTES_MAX + 1)):
        buffer = EventStreamBuffer()
        buffer.add_data(payload_parts(body))
        events = list(buffer)
        assert b"".join(event.payload for event in events) == body
        assert all(event.headers[":event-type"] == "PayloadPart" for event in events)


def test_the_length_in_the_content_type() -> None:
    assert header_bytes_of("application/json") is None
    assert header_bytes_of(f"{PREFIX}17") == 17
    for wrong in ("", "-1", "x", "9" * 5000, "²"):
        with pytest.raises(Failure, match="json-header-size"):
            header_bytes_of(PREFIX + wrong)


def snapshot(*names: str) -> Snapshot:
    return Snapshot({name: ModelView(name, 1, 1, {}) for name in names}, ())


def test_which_model_is_meant() -> None:
    assert default_model(snapshot("a", "b"), "c") == "c"
    assert default_model(snapshot("a"), None) == "a"
    for names, error in (((), "no model yet"), (("a", "b"), r"2 models \(a, b\): set MILLSTREAM_SAGEMAKER_MODEL")):
        with pytest.raises(Failure, match=error):
            default_model(snapshot(*names), None)
    assert named_model(snapshot("a"), {}) is None
    assert named_model(snapshot("a"), {"x-amzn-sagemaker-target-model": "a.tar.gz"}) == "a"
    assert named_model(snapshot("a.tar.gz"), {"x-amzn-sagemaker-target-model": "/a.tar.gz"}) == "a.tar.gz"
    assert named_model(snapshot("a"), {"x-amzn-sagemaker-inference-component": "b"}) == "b"
    assert variant_version({}) is None
    assert variant_version({"x-amzn-sagemaker-target-variant": "3"}) == "3"
    with pytest.raises(Failure, match="is no version"):
        variant_version({"x-amzn-sagemaker-target-variant": "blue"})


@pytest.mark.parametrize("name", ["MILLSTREAM_SAGEMAKER_MODEL", "SAGEMAKER_TRITON_DEFAULT_MODEL_NAME"])
def test_the_default_model_is_configured_under_two_names(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "a")
    assert settings_of(read_settings(), SageMakerSettings).sagemaker_model == "a"
