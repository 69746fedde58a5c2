"""What type hints say: inputs, outputs and rows, and values through a real process and back."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from millstream.services.errors import Code, Failure
from tests.plugins.functions.served import answers, check, loaded, texts

ARRAYS = """
from typing import Annotated
import numpy as np
from numpy.typing import NDArray
"""
DOUBLED = """
Matrix = Annotated[NDArray[np.float32], (None, None)]

def double(x: Matrix) -> Matrix:
    return x * 2
"""
NAMED = """
from typing import NamedTuple

class Out(NamedTuple):
    label: str
    score: float

def f(text: str) -> Out:
    return Out(text, 0.5)
"""
ASYNC = """
import asyncio

async def f(text: str) -> int:
    await asyncio.sleep(0)
    return await asyncio.to_thread(len, text)
"""
STATE = """
class Model:
    def load(self):
        self.word = "hello "

    def predict(self, name: str) -> str:
        return self.word + name
"""
DATACLASS = """
from dataclasses import dataclass

@dataclass
class Point:
    x: int
    y: int = 2

def f(point: Point) -> Point:
    return Point(point.y, point.x)
"""
PYDANTIC = """
from pydantic import BaseModel

class Point(BaseModel):
    x: int

def f(points: list[Point]) -> list[Point]:
    return points
"""
Specs = list[tuple[str, str, list[int]]]


@pytest.mark.parametrize(("source", "inputs", "outputs", "batching"), [
    ("def f(text: str) -> str: return text", [("text", "BYTES", [-1])], [("output", "BYTES", [-1])], True),
    ("def f(text: str) -> list[float]: return [0.5, 1.0]",
     [("text", "BYTES", [-1])], [("output", "FP64", [-1, -1])], True),
    (ARRAYS + "Array = NDArray[np.float32]\n\n"
     "def f(text: str) -> Annotated[Array, (None, 2)]: return np.zeros((len(text), 2), np.float32)",
     [("text", "BYTES", [-1])], [("output", "FP32", [-1, -1, 2])], True),
    (ARRAYS + "Array = NDArray[np.float32]\n\n"
     "def f(pages: Annotated[Array, ('pages', 2)]) -> Annotated[Array, ('lines', 2)]: return pages[:0]",
     [("pages", "FP32", [-1, 2])], [("output", "FP32", [-1, 2])], False),
    ("def f(texts: list[str]) -> list[float]: return [0.5] * len(texts)",
     [("texts", "BYTES", [-1])], [("output", "FP64", [-1])], True),
    ("def f(texts: list[str]) -> list[list[float]]: return [[1.0, 2.0] for _ in texts]",
     [("texts", "BYTES", [-1])], [("output", "FP64", [-1, -1])], True),
    ("def f(a: int, b: bool = True) -> bytes: return bytes([a])",
     [("a", "INT64", [-1]), ("b", "BOOL", [-1])], [("output", "BYTES", [-1])], True),
    ("def f(texts: list[str], k: int) -> list[str]: return texts[:k]",
     [("texts", "BYTES", [-1]), ("k", "INT64", [1])], [("output", "BYTES", [-1])], False),
    ("def f(text: str) -> tuple[str, float]: return text, 1.0",
     [("text", "BYTES", [-1])], [("output_0", "BYTES", [-1]), ("output_1", "FP64", [-1])], True),
    (ARRAYS + "def f(x: Annotated[NDArray[np.float32], ('rows', 4)]) -> Annotated[NDArray[np.int64], (None,)]:\n"
     "    return x.argmax(axis=1)", [("x", "FP32", [-1, 4])], [("output", "INT64", [-1])], True),
    (ARRAYS + "def f(x: Annotated[NDArray[np.uint8], (2, 3)]) -> Annotated[np.ndarray, 'float16', (3,)]:\n"
     "    return x.mean(axis=0)", [("x", "UINT8", [-1, 2, 3])], [("output", "FP16", [-1, 3])], True),
    (ARRAYS + "def f(x: Annotated[NDArray[np.float32], (None, 2)]) -> float: return float(x.sum())",
     [("x", "FP32", [-1, 2])], [("output", "FP64", [1])], False),
    (NAMED, [("text", "BYTES", [-1])], [("label", "BYTES", [-1]), ("score", "FP64", [-1])], True),
])  # fmt: skip
def test_hints_are_the_signature(tmp_path: Path, source: str, inputs: Specs, outputs: Specs, batching: bool) -> None:
    signature = check(tmp_path, source).document.signature
    assert [(one.name, one.datatype, list(one.shape)) for one in signature.inputs] == inputs
    assert [(one.name, one.datatype, list(one.shape)) for one in signature.outputs] == outputs
    assert signature.batching == batching


@pytest.mark.parametrize(("source", "message"), [
    ("x = 1", "service.py has no public function, and no class with a method 'predict'"),
    ("def f(a: str) -> str: ...\ndef g(a: str) -> str: ...",
     "service.py has 2 public functions (f, g): name the one to serve 'predict', or begin the names of "),
    ("def f(a) -> str: ...", "service.py: f: parameter 'a' has no type hint"),
    ("def f(a: str): ...", "service.py: f: it has no type hint of what it returns (-> …)"),
    ("def f() -> str: ...", "service.py: f: it takes no parameter"),
    ("def f(*a: str) -> str: ...", "service.py: f: parameter 'a' cannot be given by its name"),
    ("def f(a: str) -> str: yield a",
     "service.py: f: a generator's type hint says what it yields: -> Iterator[str], -> AsyncIterator[str]"),
    (ARRAYS + "def f(a: NDArray[np.float32]) -> str: ...",
     "service.py: f: a: an array needs a datatype and a shape: Annotated[NDArray[np.float32], ('rows', 4)]"),
    ("class A: ...\ndef f(a: A) -> str: ...",
     "service.py: f: a: A is no type that can be served: use str, bytes, numbers, arrays, "),
    ("def f(a: Missing) -> str: ...", "NameError: name 'Missing' is not defined (service.py, line 1)"),
    ("import nothing_of_this_name\ndef f(a: str) -> str: ...",
     "ModuleNotFoundError: No module named 'nothing_of_this_name' (service.py, line 1)"),
    ("def f(a: str) -> str:\nreturn a", "IndentationError: expected an indented block after function definition on "),
    ("raise SystemExit(3)", "it called exit(3) (service.py, line 1)"),
])  # fmt: skip
def test_what_cannot_be_served_is_refused_with_what_to_write(tmp_path: Path, source: str, message: str) -> None:
    with pytest.raises(Failure) as refused:
        check(tmp_path, source)
    assert refused.value.code is Code.INVALID
    assert refused.value.message.startswith(message)


def test_predict_is_served_beside_others(tmp_path: Path) -> None:
    served = check(tmp_path, "def other(a: str) -> str: ...\ndef predict(b: str) -> str: return b")
    assert served.document.signature.inputs[0].name == "b"


@pytest.mark.parametrize(("source", "inputs", "expected"), [
    ("def f(text: str) -> str: return text.upper()", {"text": texts("a", "ü", "")}, [[b"A", "Ü".encode(), b""]]),
    (ASYNC, {"text": texts("a", "bc")}, [[1, 2]]),
    ("def f(texts: list[str]) -> list[list[str]]: return [[one, one] for one in texts]",
     {"texts": texts("a", "b")}, [[[b"a", b"a"], [b"b", b"b"]]]),
    ("def f(a: int, b: int = 7) -> int: return a + b", {"a": np.array([1, 2])}, [[8, 9]]),
    ("def f(rows: list[list[float]]) -> list[float]: return [sum(row) for row in rows]",
     {"rows": np.array([[1.0, 2.0], [3.0, 4.0]])}, [[3.0, 7.0]]),
    (STATE, {"name": texts("you")}, [[b"hello you"]]),
    ("def f(document: dict) -> dict: return {'keys': sorted(document)}",
     {"document": texts('{"b": 1, "a": null}')}, [[b'{"keys": ["a", "b"]}']]),
    (DATACLASS, {"point": texts('{"x": 1}')}, [[b'{"x": 2, "y": 1}']]),
    (PYDANTIC, {"points": texts('{"x": "3"}')}, [[b'{"x": 3}']]),
])  # fmt: skip
def test_values_come_and_go(tmp_path: Path, source: str, inputs: dict[str, Any], expected: list[list[Any]]) -> None:
    with loaded(check(tmp_path, source)) as instance:
        assert answers(instance, inputs) == expected


@pytest.mark.parametrize(("source", "inputs", "code", "message"), [
    ("def f(a: int) -> str: raise ValueError(f'not {a}')", {"a": np.array([4])}, Code.MODEL,
     "ValueError: not 4 (service.py, line 1)"),
    ("def f(text: str) -> int: return text", {"text": texts("a")}, Code.MODEL,
     "its result is no int: invalid literal for int() with base 10: 'a'"),
    ("def f(texts: list[str]) -> list[str]: return texts[1:]", {"texts": texts("a", "b")}, Code.MODEL,
     "service.py: f returned 1 rows of 'output' for 2 rows"),
    ("def f(texts: list[str]) -> list[list[float]]: return [[1.0] * len(one) for one in texts]",
     {"texts": texts("a", "bb")}, Code.MODEL, "its lists differ in length"),
    ("def f(document: dict) -> str: return 'a'", {"document": texts("{")}, Code.INVALID, "document: "),
    ("def f(text: str) -> str: return text", {"text": texts(b"\xff")}, Code.INVALID,
     "a text is not UTF-8"),
])  # fmt: skip
def test_errors_say_whose_they_are_and_where(
    tmp_path: Path, source: str, inputs: dict[str, Any], code: Code, message: str
) -> None:
    with loaded(check(tmp_path, source)) as instance:
        with pytest.raises(Failure) as failed:
            instance.run(inputs)
        assert failed.value.code is code
        assert failed.value.message.startswith(f"Python: {message}")


def test_images_are_opened_and_written(tmp_path: Path) -> None:
    source = "from PIL import Image\ndef f(image: Image.Image) -> Image.Image: return image.rotate(180)"
    file = io.BytesIO()
    Image.new("RGB", (2, 1)).save(file, "PNG")
    with loaded(check(tmp_path, source)) as instance:
        (answer,) = instance.run({"image": texts(file.getvalue())})
        assert Image.open(io.BytesIO(answer[0])).size == (2, 1)
        with pytest.raises(Failure, match="an image cannot be read") as refused:
            instance.run({"image": texts(b"no image")})
        assert refused.value.code is Code.INVALID


def test_large_arrays_go_through_shared_memory_and_are_not_changed_by_later_runs(tmp_path: Path) -> None:
    with loaded(check(tmp_path, ARRAYS + DOUBLED)) as instance:
        for side in (10, 700, 300, 1500):
            x = np.random.default_rng(side).random((side, side), np.float32)
            (first,) = instance.run({"x": x})
            (second,) = instance.run({"x": x + 1})
            np.testing.assert_array_equal(first, x * 2)
            np.testing.assert_array_equal(second, (x + 1) * 2)


def test_rows_that_influence_each_other_share_no_run(tmp_path: Path) -> None:
    source = "def f(values: list[int]) -> list[int]: return [sum(values)] * len(values)"
    batching = check(tmp_path, source).document.batching
    assert batching.decided == "unmerged"
    assert batching.reason == "rows answer differently together than alone: output 'output'"


def test_the_check_is_bounded_in_time(tmp_path: Path) -> None:
    with pytest.raises(Failure, match="the check took longer than 1 s"):
        check(tmp_path, "import time\ntime.sleep(3600)\ndef f(a: str) -> str: ...", check_s_max=1)
