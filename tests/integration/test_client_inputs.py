"""What `predict` takes besides arrays by name, in both clients and the command: tables, texts, lists, files."""

from __future__ import annotations

import asyncio
import io
import json
import subprocess
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers

from millstream import AsyncClient, Client, Code, Failure, ServerError
from tests.kit import models
from tests.kit.blocking import Blocking
from tests.kit.command_line import Millstream
from tests.kit.stack import CALL_S_MAX, Stack

TEXTS = ["the mill turns", "stream"]


@pytest.fixture(scope="module", autouse=True)
def _served(shared_stack: Stack, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("models")
    shared_stack.push("ci-table", models.identities(folder / "table.onnx", ("BYTES", "FP32", "INT64"), columns=1))
    shared_stack.push("ci-matrix", models.scale(folder / "matrix.onnx", columns=3))
    shared_stack.push("ci-column", models.scale(folder / "column.onnx", columns=1))
    shared_stack.push("ci-any", models.variable_length(folder / "any.onnx"))
    shared_stack.push("ci-text", models.identity(folder / "text.onnx", "BYTES", ("N",)))
    shared_stack.push("ci-pixels", models.identity(folder / "pixels.onnx", "UINT8", ("N", 3, 8, 8)))
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"[UNK]": 0, "the": 2, "mill": 3}, unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as packed:
        packed.write(models.embeddings(folder / "tokens.onnx", pooled=True, types=True), "model.onnx")
        packed.writestr("tokenizer.json", made.to_str())
    (folder / "tokens.zip").write_bytes(file.getvalue())
    shared_stack.push("ci-tokens", folder / "tokens.zip")


@pytest.fixture(params=["blocking", "awaiting"])
def client(request: pytest.FixtureRequest, stack: Stack) -> Iterator[Any]:
    """Both clients, behind the interface of the blocking one."""
    if request.param == "blocking":
        with Client(stack.url, key=stack.key, timeout=CALL_S_MAX) as one:
            yield one
        return
    with asyncio.Runner() as runner:
        other = AsyncClient(stack.url, key=stack.key, timeout=CALL_S_MAX)
        yield Blocking(other, runner)
        runner.run(other.close())


@dataclass
class Caller(Millstream):
    """Runs commands that call a server."""

    url: str = ""

    def run(self, *arguments: object, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
        return super().run(*arguments, "--endpoint", self.url, stdin=stdin)


@pytest.fixture
def millstream(stack: Stack, tmp_path: Path) -> Caller:
    return Caller(tmp_path / "home", stack.key, stack.url)


def test_columns_and_records_are_inputs_by_name(client: Any) -> None:
    columns = {"x2": [1, 2], "x0": ["ü😀", "b"], "x1": [0.5, None]}
    answer = client.predict("ci-table", columns)
    assert answer["y0"].tolist() == [["ü😀"], ["b"]]
    assert answer["y2"].tolist() == [[1], [2]]
    np.testing.assert_array_equal(answer["y1"], [[0.5], [np.nan]])
    rows = client.predict("ci-table", [{"x2": 1, "x0": "a", "x1": True}, {"x1": 2, "x0": "b", "x2": 3.0}])
    assert rows == [{"y0": "a", "y1": 1.0, "y2": 1}, {"y0": "b", "y1": 2.0, "y2": 3}]
    one = client.predict("ci-table", {"x0": "a", "x1": 1, "x2": 2})  # values instead of columns: one row
    assert (one["y0"].tolist(), one.version) == ([["a"]], 1)
    structured = np.array([(b"a", 1, 2)], [("x0", "S1"), ("x1", "f8"), ("x2", "i4")])
    assert client.predict("ci-table", structured, outputs="y2")["y2"].tolist() == [[2]]


def test_a_table_for_an_input_without_names_is_read_by_position(client: Any) -> None:
    rows = client.predict("ci-matrix", [{"a": 1, "b": 2.5, "c": None}])
    np.testing.assert_array_equal(rows[0]["y"], [2, 5, np.nan])
    assert client.predict("ci-text", [{"review": "a"}, {"review": ""}]) == [{"y": "a"}, {"y": ""}]


def test_a_flat_list_is_a_column_or_a_row_and_never_a_guess(client: Any) -> None:
    assert client.predict("ci-column", [1, 2, 3]).array.tolist() == [[2], [4], [6]]
    assert client.predict("ci-column", 4).array.tolist() == [[8]]
    assert client.predict("ci-matrix", [1, 2, 3]).array.tolist() == [[2, 4, 6]]
    assert client.predict("ci-matrix", []).array.shape == (0, 3)
    assert client.predict("ci-any", [[1, 2]])["total"].tolist() == [[3]]
    with pytest.raises(Failure, match=r"a flat list of 2 values could be one row or one column: write \[\[1, 2, 3\]\]"):
        client.predict("ci-any", [1, 2])


def test_texts(client: Any) -> None:
    assert client.predict("ci-text", "a\0").array.tolist() == ["a\0"]
    assert client.predict("ci-text", [*TEXTS, ""]).array.tolist() == [*TEXTS, ""]
    assert client.predict("ci-text", np.array(TEXTS)).array.tolist() == TEXTS
    wanted = client.predict("ci-tokens", {"text": TEXTS}).array
    for given in (TEXTS, np.array(TEXTS), [{"text": text} for text in TEXTS]):
        answer = client.predict("ci-tokens", given)
        found = answer.array if hasattr(answer, "array") else [row["embedding"] for row in answer]
        np.testing.assert_allclose(found, wanted, rtol=1e-6)
    assert client.predict("ci-tokens", "stream").array.shape == (1, wanted.shape[1])


REFUSED: list[tuple[str, Any, str]] = [
    ("ci-matrix", [[1, 2, 3], [4]], r"\[0\] is a list of 3 and \[1\] is a list of 1"),
    ("ci-matrix", [np.zeros((2, 3)), np.zeros((2, 4))], "its arrays differ in shape"),
    ("ci-matrix", [1, "a", 3], "input 'x': 'a' cannot be sent as FP32: value 1 is no number"),
    ("ci-table", {"x0": ["a", 1], "x1": [1, 2], "x2": [1, 2]}, r"input 'x0': value 1 is no text but 1 \(int\)"),
    ("ci-matrix", [[1, "a", 3]], r"text \(such as '1'\) cannot be sent as FP32"),
    ("ci-matrix", ["a", "b", "c"], r"takes FP32 \[-1, 3\], not text"),
    ("ci-matrix", b"\x89PNG", "not an image or the bytes of a file"),
    ("ci-matrix", {1, 2}, "it is a value of type set"),
    ("ci-matrix", None, "is a single value"),
    ("ci-matrix", np.array(["2020-01-01"] * 3, "M8[D]"), "dates .* cannot be sent as FP32"),
    ("ci-matrix", [[1j, 2, 3]], "values of type complex128"),
    ("ci-matrix", [[10**400, 1, 2]], "beyond the range of FP32"),
    ("ci-matrix", [{"a": 1, "b": 2}], "the table has 2 columns, and input 'x' of ci-matrix takes 3"),
    ("ci-matrix", [{"a": 1}, {"b": 1}], "record 1 has no 'a'|record 1 has 'b'"),
    ("ci-matrix", [{}], "the table has no columns"),
    ("ci-table", {"x0": ["a"], "x1": [1], "X2": [1]}, "there is no input 'X2': did you mean 'x2'"),
    ("ci-table", {"x0": ["a"], "x1": [1], "x2": [None]}, "input 'x2': value 0 is missing"),
    ("ci-table", {"x0": ["a"], "x1": [1], "x2": [float("nan")]}, "input 'x2': value 0 is missing"),
    ("ci-table", {"x0": [5], "x1": [1], "x2": [1]}, r"input 'x0': value 0 is no text but 5 \(int\)"),
    ("ci-table", {"x0": ["a\ud800"], "x1": [1], "x2": [1]}, "half of a surrogate pair"),
    ("ci-table", [1, 2], r"ci-table has 3 inputs: give each by its name \(x0, x1, x2\)"),
    ("ci-tokens", [[1, 2]], r"give each by its name \(.*\), or send texts"),
    ("ci-pixels", "/nowhere.png", "/nowhere.png cannot be read: No such file"),
]


@pytest.mark.parametrize(("model", "inputs", "says"), REFUSED)
def test_what_does_not_fit_is_one_clear_line(stack: Stack, model: str, inputs: Any, says: str) -> None:
    with Client(stack.url, key=stack.key) as client, pytest.raises(Failure, match=says) as failure:
        client.predict(model, inputs)
    assert (failure.value.code, isinstance(failure.value, ServerError)) == (Code.INVALID, False)
    assert "\n" not in failure.value.message


ODD: list[tuple[Callable[[Any], object], str]] = [
    (lambda client: client.predict(5, [1]), "a model name is text, not a value of type int"),
    (lambda client: client.predict("ci-column", [1], request_id=5), "the request id '5' is a text"),
    (
        lambda client: client.predict("ci-column", [1], timeout=float("nan")),
        "a number of seconds, not nan",
    ),
    (
        lambda client: client.predict("ci-column", [1], parameters={"x": object()}),
        "it has no form for a value",
    ),
    (lambda client: client.predict_json("ci-column", {"inputs": {1}}), "the request is not JSON"),
    (lambda client: client.configure("ci-column", labels={"a": object()}), "an argument is not JSON"),
    (lambda client: client.load("ci-column", config={"a": object()}), "the configuration is not JSON"),
    (lambda client: client.keys("make"), "'make' is no action on keys: use create, list, edit, rotate, revoke"),
    (lambda client: client.request("GET", "/v2", headers={"a": "é"}), "a header has characters beyond ASCII"),
]


@pytest.mark.parametrize(("call", "says"), ODD)
def test_an_odd_argument_is_one_clear_line(stack: Stack, call: Callable[[Any], object], says: str) -> None:
    with Client(stack.url, key=stack.key) as client, pytest.raises(Failure, match=says) as failure:
        call(client)
    assert (failure.value.code, "\n" in failure.value.message) == (Code.INVALID, False)


def test_arguments_of_numpy_and_single_names_are_taken(client: Any) -> None:
    assert client.predict("ci-table", {"x0": "a", "x1": 1, "x2": 2}, outputs="y2", timeout=np.float32(50)).keys() == {
        "y2"
    }
    request = {"inputs": [{"name": "x", "datatype": "FP32", "shape": np.array([2, 1]), "data": np.ones((2, 1))}]}
    assert client.predict_json("ci-column", request)["outputs"][0]["data"] == [2, 2]
    assert client.predict("ci-column", [1], timeout=float("inf")).array.tolist() == [[2]]
    assert client.configure("ci-column", pools="cpu", idle_s=np.float64(0))["settings"]["pools"] == ["cpu"]


def test_a_closed_client_says_so(client: Any) -> None:
    client.close()
    with pytest.raises(Failure, match="the client is closed"):
        client.predict("ci-column", [1])


def test_an_answer_that_is_no_table_says_so(stack: Stack, tmp_path: Path) -> None:
    stack.push("ci-whole", models.largest(tmp_path / "whole.onnx"))
    with Client(stack.url, key=stack.key) as client:
        assert client.predict("ci-whole", {"x": [1.0, 5.0]}).array.tolist() == 1
        with pytest.raises(Failure, match=r"output 'y' has shape .*, which is not one row for each row"):
            client.predict("ci-whole", [{"x": 1.0}, {"x": 5.0}])


ROWS = [{"x2": 1, "x0": "ü", "x1": 0.5}, {"x2": 2, "x0": "007", "x1": None}]
FILES: dict[str, bytes] = {
    "t.csv": "x2,x0,x1\n1,ü,0.5\n2,007,\n".encode(),
    "bom.csv": '\ufeffx2;x0;x1\r\n1;ü;0.5\r\n2;"007";\r\n'.encode(),
    "t.tsv": "x2\tx0\tx1\n1\tü\t0.5\n2\t007\t\n".encode(),
    "t.jsonl": '{"x2": 1, "x0": "ü", "x1": 0.5}\n\n{"x2": 2, "x0": "007", "x1": null}\n'.encode(),
    "records.json": json.dumps(ROWS).encode(),
    "columns.json": json.dumps({"x2": [1, 2], "x0": ["ü", "007"], "x1": [0.5, None]}).encode(),
    "pandas.json": json.dumps(
        {"x2": {"0": 1, "1": 2}, "x0": {"0": "ü", "1": "007"}, "x1": {"0": 0.5, "1": None}}
    ).encode(),
    "instances.json": json.dumps({"instances": ROWS}).encode(),
}  # fmt: skip


@pytest.mark.parametrize("name", FILES)
def test_the_command_reads_tables(millstream: Caller, tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(FILES[name])
    for output in ("out.csv", "out.jsonl", "out.npz"):
        millstream.ok("predict", "ci-table", "-i", tmp_path / name, "-o", tmp_path / output)
    assert (tmp_path / "out.csv").read_text() == "y0,y1,y2\nü,0.5,1\n007,nan,2\n"
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert rows[0] == {"y0": "ü", "y1": 0.5, "y2": 1}
    with np.load(tmp_path / "out.npz") as arrays:
        assert arrays["y0"].tolist() == [["ü"], ["007"]]
    if not name.endswith(".tsv"):  # its tabs are seen as well
        said = millstream.ok("predict", "ci-table", stdin=FILES[name].decode())
        assert "ü" in said


def test_the_command_sends_texts(millstream: Caller, tmp_path: Path) -> None:
    said = millstream.ok("predict", "ci-text", "--text", "the mill", "-t", "[1, 2]")
    assert "y  BYTES [2]" in said
    assert "'the mill' '[1, 2]'" in said
    assert "embedding  FP32 [2, " in millstream.ok("predict", "ci-tokens", "--text", TEXTS[0], "--text", TEXTS[1])
    for lines in ("the mill\r\nstream\n", "the mill\nstream"):
        assert "['the mill' 'stream']" in millstream.ok("predict", "ci-text", stdin=lines)
        (tmp_path / "lines.txt").write_text(lines)
        assert "['the mill' 'stream']" in millstream.ok("predict", "ci-text", "-i", tmp_path / "lines.txt")
    assert "['a, b' 'c']" in millstream.ok("predict", "ci-text", stdin='["a, b", "c"]')
    assert "exclude each other" in millstream.fails("predict", "ci-text", "--text", "a", "--example", code=2)


def test_the_command_reads_rows_without_names(millstream: Caller, tmp_path: Path) -> None:
    wanted = "[[ 2.  4.  6.]\n [ 8. nan 12.]]"
    for content in ("1,2,3\n4,,6\n", "1;2;3\n4;;6\n", "a,b,c\n1,2,3\n4,,6\n", "[1,2,3]\n[4,null,6]\n"):
        assert wanted in millstream.ok("predict", "ci-matrix", stdin=content)
    assert "[[2.]\n [4.]]" in millstream.ok("predict", "ci-column", stdin="1\n2\n")


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.csv", b"a,b,c\n1,2\n", "line 2 of the CSV has 2 fields, and line 1 has 3"),
        ("a.csv", b",b,c\n0,1,2\n", "a column of the CSV has no name: is it the index?"),
        ("a.csv", b"a,a,c\n0,1,2\n", "the CSV has two columns 'a'"),
        ("a.csv", b'a,b,c\n"0,1,2\n', "the input is not CSV"),
        ("a.csv", b"", "the CSV has no lines"),
        ("a.csv", b"a,b,c\n1,x,3\n", "input 'b': 'x' cannot be sent as FP32"),
        ("a.csv", "a,b\nü,1".encode("latin-1"), "the input is no UTF-8 text"),
        ("a.csv", b"1,2,3\n4,1_0,6\n", "line 2 of the CSV has text, and line 1 has numbers: 4, 1_0, 6"),
        ("a.csv", b"a,b,c\n" + b"x" * 200_000 + b",1,2\n", "input 'a': 'xxxxx"),
        ("a.json", b"[" * 500 + b"1" + b"]" * 500, "input 'x' is no array"),
        ("a.json", b"9" * 5000, "the input is not JSON: Exceeds the limit"),
        ("a.jsonl", b'{"a": 1}\n{', "the input is not JSON Lines"),
        ("a.json", b"{", "the input is not JSON"),
        ("a.json", b"[" * 100_000, "the input is not JSON"),
        ("a.parquet", b"PAR1 broken", "parquet"),
        ("a.npy", b"\x93NUMPY broken", "not a usable .npy"),
        ("a.png", b"\x89PNG\r\n\x1a\n\xff", "not an image or the bytes of a file"),
        ("a.bin", b"nonsense", "neither JSON nor CSV"),
    ],
)  # fmt: skip
def test_a_file_that_does_not_fit_is_one_clear_line(
    millstream: Caller, tmp_path: Path, name: str, content: bytes, says: str
) -> None:
    (tmp_path / name).write_bytes(content)
    assert says in millstream.fails("predict", "ci-matrix", "-i", tmp_path / name)


def test_the_name_of_an_output_file_says_its_format(millstream: Caller, tmp_path: Path) -> None:
    said = millstream.fails("predict", "ci-column", "-o", tmp_path / "out.xlsx", stdin="[1]", code=2)
    assert "ends with one of .npz, .csv, .jsonl, .parquet" in said
    if find_spec("pyarrow") is None:
        said = millstream.fails("predict", "ci-column", "-o", tmp_path / "out.parquet", stdin="[1]")
        assert "pip install pyarrow" in said
