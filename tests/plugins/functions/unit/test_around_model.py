"""`pre` and `post` of a file beside an ONNX model: real processes with a session, as workers run them."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest
from PIL import Image

from millstream.services.errors import Code, Failure
from millstream.workers.backends.base import OutOfMemory
from tests.plugins.functions.served import Served, answers, check, loaded, texts

HEAD = """
from typing import Annotated, Any, NamedTuple
import numpy as np
from numpy.typing import NDArray
Array = NDArray[np.float32]
"""
MEAN = (
    "mean (float[N, 3, H, W] pixels) => (float[N, 3] means) { means = ReduceMean<axes = [2, 3], keepdims = 0>(pixels) }"
)
TWO = """two (float[N, 2] a, float[N, 2] b) => (float[N, 2] sum, float[N, 2] difference)
{ sum = Add(a, b) difference = Sub(a, b) }"""
ONE_ROW = "one (float[1, 2] x) => (float[1, 2] y) { y = Add(x, x) }"
#: says how many rows its run had
COUNT = """count (float[N, 1] x) => (float[N, 1] y)
{ n = Shape(x) c = Cast<to = 1>(n) r = ReduceMax(c) z = Sub(x, x) y = Add(z, r) }"""
#: answers as many values as it is told
LARGE = """large (int64[N, 1] n) => (float[N, M] y) <int64[1] one = {1}, int64[1] zero = {0}>
{ size = Squeeze(n) r = Reshape(size, one) f = ConstantOfShape(r) y = Unsqueeze(f, zero) }"""
COLOURS = """
from PIL import Image

def pre(image: Image.Image) -> Array:
    return np.asarray(image.convert("RGB"), np.float32).transpose(2, 0, 1) / 255

class Answer(NamedTuple):
    colour: str
    share: float

def post(means: Array) -> Answer:
    at = int(means.argmax())
    return Answer(("red", "green", "blue")[at], float(means[at]))
"""


def model(text: str) -> bytes:
    """Return an ONNX file."""
    made: bytes = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["": 13]> {text}').SerializeToString()
    return made


def around(tmp_path: Path, source: str, text: str, name: str = "model.onnx") -> Served:
    """Check a file with a model beside it."""
    return check(tmp_path, HEAD + source, files={name: model(text)})


def picture(mode: str, size: tuple[int, int], colour: Any, kind: str = "PNG") -> bytes:
    file = io.BytesIO()
    Image.new(mode, size, colour).save(file, kind)
    return file.getvalue()


def test_an_image_becomes_a_label_in_one_process(tmp_path: Path) -> None:
    served = around(tmp_path, COLOURS, MEAN)
    signature = served.document.signature
    assert [(one.name, one.datatype, one.shape) for one in signature.inputs] == [("image", "BYTES", (-1,))]
    assert [(one.name, one.shape) for one in signature.outputs] == [("colour", (-1,)), ("share", (-1,))]
    files = texts(picture("RGB", (4, 4), "red"), picture("P", (8, 2), 3, "GIF"), picture("RGB", (4, 4), "blue"))
    with loaded(served) as instance:
        colours, shares = answers(instance, {"image": files})
        assert (colours[0], colours[2], shares[0]) == (b"red", b"blue", 1.0), "images of other sizes run alone"
        bomb = picture("1", (9000, 9000), 0)
        for file, why in ((b"no image", "it is of no known format"), (bomb, "81000000 pixels: at most 67108864")):
            with pytest.raises(Failure) as refused:
                instance.run({"image": texts(file)})
            assert refused.value.code is Code.INVALID
            assert why in refused.value.message
        assert answers(instance, {"image": files[:1]})[0] == [b"red"]


def test_rows_of_a_run_are_one_run_of_the_session(tmp_path: Path) -> None:
    served = around(tmp_path, "def pre(x: float) -> Any: return [x]\ndef post(y: Array) -> float: return y[0]", COUNT)
    with loaded(served) as instance:
        assert answers(instance, {"x": np.arange(5.0)}) == [[5.0] * 5]


@pytest.mark.parametrize("source", [
    ("def pre(left: float, right: float) -> Any: return {'b': [right, 0], 'a': [left, 1], 'more': 3, 'k': left}\n"
    "def post(difference: Array, k: float, sum: Array) -> list[float]: return [*sum, *difference, k]"),
    ("def pre(left: list[float], right: list[float]) -> Any:\n"
    "    return [[one, 1] for one in left], [[one, 0] for one in right]\n"
    "def post(sums: Annotated[Array, (None, 2)], differences: list[Array]) -> list[list[float]]:\n"
    "    return [[*s, *d, (s + d)[0] / 2] for s, d in zip(sums, differences)]"),
    ("class Made(NamedTuple):\n    a: Array\n    b: Array\n    k: float\n"
    "def pre(left: float, right: float) -> Made: return Made([left, 1], np.array([[right, 0]]), left)\n"
    "def post(first: Array, second: Array, k: float) -> Annotated[Array, (5,)]: return np.array([*first, *second, k])"),
])  # fmt: skip
def test_values_go_to_the_model_and_to_post_by_name_or_in_order(tmp_path: Path, source: str) -> None:
    with loaded(around(tmp_path, source, TWO, name="other.onnx")) as instance:
        found = answers(instance, {"left": np.array([1.0, 2.0]), "right": np.array([3.0, 5.0])})
    assert found == [[[4, 1, -2, 1, 1], [7, 1, -3, 1, 2]]]


def test_either_alone_leaves_the_other_side_to_the_model(tmp_path: Path) -> None:
    served = around(tmp_path, "def post(sum: Array, difference: Array) -> float: return sum[0] * difference[0]", TWO)
    assert [(one.name, one.datatype, one.shape) for one in served.document.signature.inputs] == [
        ("a", "FP32", (-1, 2)), ("b", "FP32", (-1, 2)),
    ]  # fmt: skip
    assert served.document.batching.decided == "requested", "its rows were tried, alone and together"
    pair = np.array([[3, 0], [4, 0]], np.float32)
    with loaded(served) as instance:
        assert answers(instance, {"a": pair, "b": np.ones((2, 2), np.float32)}) == [[8.0, 15.0]]
    served = around(tmp_path, "def pre(number: int) -> Any: return ([number, 0], [1, 1])", TWO)
    with loaded(served) as instance:
        assert answers(instance, {"number": np.array([2, 3])}) == [[[3, 1], [4, 1]], [[1, -1], [2, -1]]]


def test_a_model_of_one_row_runs_for_each(tmp_path: Path) -> None:
    served = around(
        tmp_path, "def pre(n: int) -> Any: return [[n, n]]\ndef post(y: Array) -> int: return int(sum(y))", ONE_ROW
    )
    with loaded(served) as instance:
        assert answers(instance, {"n": np.array([1, 2, 3])}) == [[4, 8, 12]]


def test_an_output_with_a_count_of_its_own_is_whole(tmp_path: Path) -> None:
    text = "found (float[N, W] x) => (int64[R, M] at) { at = NonZero(x) }"
    source = "def pre(n: list[list[float]]) -> Any: return n\ndef post(at: Any) -> list[int]: return [*at[1]]"
    with loaded(around(tmp_path, source, text)) as instance:
        assert answers(instance, {"n": np.array([[1.0, 0, 2], [0, 3, 1]])}) == [[[0, 2], [1, 2]]]


@pytest.mark.parametrize(("source", "why"), [
    ("def pre(x: int) -> Any: return [x, x, x]\ndef post(sum: Array) -> int: return 1",
     "pre returned 1 values, and model.onnx takes 'a', 'b'"),
    ("def pre(x: int) -> Any: return {'a': [x, x]}\ndef post(sum: Array) -> int: return 1",
     "pre returned no 'b', which model.onnx takes, but 'a'"),
    ("def pre(x: int) -> Any: return [x, x, x], [x, x]\ndef post(sum: Array) -> int: return 1",
     "a row of 'a' has the shape [3], and model.onnx takes [2]"),
    ("def pre(x: int) -> Any: return ['1', '2'], [x, x]\ndef post(sum: Array) -> int: return 1",
     "'a' is <U1, and model.onnx takes float32"),
    ("def pre(x: int) -> Any: return [[x], [x, x]], [x, x]\ndef post(sum: Array) -> int: return 1",
     "'a' is no array for model.onnx"),
    ("def pre(x: list[int]) -> Any: return [[1, 1]] * (len(x) + 1), [[1, 1]]\ndef post(sum: Array) -> int: return 1",
     "pre returned 2 rows of 'a' for 1 rows"),
    ("def pre(x: int) -> Any: return [x, x], [x, x]\ndef post(sum: Annotated[Array, ('n', 2)]) -> list[int]: return []",
     "returned 0 rows of 'output' for 1 rows"),
    ("def pre(x: int) -> Any: return [x, x], [x, x]\ndef post(sum: Array, scale: float) -> int: return 1",
     "post takes 'scale', which is no output of model.onnx ('sum', 'difference'), and which pre does not return"),
    ("def pre(x: int) -> Any: return [x, x], [x, x]\ndef post(sum: Array) -> tuple[int, int]: return (1,)",
     "post returned 1 results, and 2 were declared"),
    ("def pre(x: int) -> Any: return [x, x], [x, x]\ndef post(sum: Array) -> int: return 1 // 0",
     "ZeroDivisionError: integer division or modulo by zero (service.py, line 7)"),
])  # fmt: skip
def test_what_does_not_fit_fails_its_request_and_says_why(tmp_path: Path, source: str, why: str) -> None:
    served = around(tmp_path, source, TWO)
    with loaded(served) as instance:
        for _ in range(2):
            with pytest.raises(Failure) as failed:
                instance.run({"x": np.array([1])})
            assert why in failed.value.message


@pytest.mark.parametrize(("source", "text", "why"), [
    ("def pre(x: int): return x", "m (float[4] x) => (float[4] y) { y = Neg(x) }",
     "input 'x' [4] has no dimension of rows"),
    ("def pre(x, y: int): return x", TWO, "pre: parameter 'x' has no type hint"),
    ("def pre(x: list[int], y: int): return x", TWO, "pre has all rows in one place, and one row in another"),
    ("def post(sum: Array): return 1", TWO, "post: it has no type hint of what it returns"),
    ("async def pre(x: int): return x", TWO, "'pre' is async or a generator"),
    ("def post(x: list[Array]) -> int: return 1", TWO, "the result of post has all rows in one place"),
])  # fmt: skip
def test_what_cannot_be_served_is_refused_at_the_upload(tmp_path: Path, source: str, text: str, why: str) -> None:
    with pytest.raises(Failure) as refused:
        around(tmp_path, source, text)
    assert refused.value.code is Code.INVALID
    assert why in refused.value.message


def test_a_file_that_is_no_model_and_none_at_all_are_refused(tmp_path: Path) -> None:
    source = "def pre(x: int) -> list[int]: return [x]\ndef post(y: list[int]) -> int: return y[0]"
    with pytest.raises(Failure) as broken:
        check(tmp_path, source, files={"model.onnx": b"\x08\x08garbage"})
    assert broken.value.message.startswith("model.onnx: ")
    with pytest.raises(Failure) as missing:
        check(tmp_path, source)
    assert "put it beside them, as model.onnx" in missing.value.message


def test_predict_is_served_though_a_model_and_pre_are_there(tmp_path: Path) -> None:
    source = "def pre(x: int) -> int: return x + 1\ndef predict(x: int) -> int: return pre(x)"
    with loaded(around(tmp_path, source, TWO)) as instance:
        assert answers(instance, {"x": np.array([1])}) == [[2]]


def test_a_session_that_finds_no_memory_fails_its_run_alone(tmp_path: Path) -> None:
    source = "def pre(n: int) -> Any: return [n]\ndef post(y: Array) -> int: return len(y)"
    served = around(tmp_path, source, LARGE)
    with loaded(served) as instance:
        with pytest.raises((OutOfMemory, Failure)):
            instance.run({"n": np.array([1 << 44])})
        assert answers(instance, {"n": np.array([7])}) == [[7]]
