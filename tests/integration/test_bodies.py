"""Bodies as people send them to other servers, with exact answers, for every shape of input and each protocol."""

from __future__ import annotations

import json
import math
import re
from typing import Any, NamedTuple

import grpc
import pytest
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc.service_pb2_grpc import GRPCInferenceServiceStub

from tests.kit import models
from tests.kit.stack import Stack

NAN = math.nan
BOM = b"\xef\xbb\xbf"
VOCABULARY = 32  # of models.embeddings
#: name of the model -> datatype and shape of its one input, which it returns
IDENTITIES: dict[str, tuple[str, tuple[Any, ...]]] = {
    "list": ("FP32", ("N",)),
    "column": ("FP32", ("N", 1)),
    "pair": ("FP32", ("N", 2)),
    "free": ("FP32", ("N", "k")),
    "whole": ("INT64", ("N", 1)),
    "flag": ("BOOL", ("N", 1)),
    "half": ("FP16", ("N", 1)),
    "word": ("BYTES", ("N", 1)),
    "words": ("BYTES", ("N",)),
}


@pytest.fixture(scope="module", autouse=True)
def _served(shared_stack: Stack, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("bodies")
    for name, (datatype, shape) in IDENTITIES.items():
        shared_stack.push(f"body-{name}", models.identity(folder / f"{name}.onnx", datatype, shape))
    shared_stack.push("body-ids", models.embeddings(folder / "ids.onnx", types=True))
    shared_stack.push("body-two", models.identities(folder / "two.onnx", ("FP32", "INT64"), columns=1))


class Case(NamedTuple):
    """A body, and what it is answered with: the answer, or status 400 with this text in the error."""

    model: str
    body: Any  # JSON, or the body's bytes
    answer: Any
    kind: str = "application/json"


V1 = [
    *(Case(model, {"instances": [2, 3]}, [2, 3]) for model in ("list",)),
    *(
        Case(model, {"instances": body}, [[2], [3]])
        for model in ("column", "half", "whole")
        for body in ([2, 3], [[2], [3]])
    ),
    Case("list", {"instances": [[2], [3]]}, [2, 3]),
    *(Case("column", {"instances": [{"x": one} for one in body]}, [[2], [3]]) for body in ([2, 3], [[2], [3]])),
    Case("pair", {"instances": [[1, 2], [3, 4]]}, [[1, 2], [3, 4]]),
    Case("pair", {"instances": [{"x": [1, 2]}]}, [[1, 2]]),
    Case(
        "pair", {"instances": [1, 2]}, "unexpected shape for input 'x' for model 'body-pair'. Expected [-1,2], got [2]."
    ),
    Case("free", {"instances": [1, 2]}, "Expected [-1,-1], got [2]."),
    Case("word", {"instances": ["a", {"b64": "Yg=="}]}, [["a"], ["b"]]),
    Case("words", {"instances": [["a"], ["b"]]}, ["a", "b"]),
    Case("flag", {"instances": [True, False]}, [[True], [False]]),
    *(Case(model, {"instances": [[1], [None]]}, [[1], [NAN]]) for model in ("column", "half")),
    Case("pair", {"instances": [[None, 1], [2, None]]}, [[NAN, 1], [2, NAN]]),
    Case("whole", {"instances": [[1], [None]]}, "input 'x' at [1][0]: null where INT64 is expected"),
    Case("flag", {"instances": [None]}, "input 'x' at [0]: null where BOOL is expected"),
    Case("word", {"instances": ["a", None]}, "input 'x' at [1]: null where a string or"),
    Case("pair", BOM + b'{"instances": [[1, 2]]}', [[1, 2]]),
    Case("pair", 2 * BOM + b'{"instances": [[1, 2]]}', "failed to parse the request JSON buffer"),
    # KServe's servers take `inputs` for `instances`
    Case("column", {"inputs": [{"x": 2}, {"x": 3}]}, [[2], [3]]),
    Case(
        "two",
        {"instances": [{"x0": 1.5, "x1": 2}, {"x0": None, "x1": 3}]},
        [{"y0": [1.5], "y1": [2]}, {"y0": [NAN], "y1": [3]}],
    ),
    Case(
        "two",
        {"instances": [{"x0": [1, None], "x1": [2, 3]}, {"x0": [4], "x1": [5]}]},
        [{"y0": [1], "y1": [2]}, {"y0": [NAN], "y1": [3]}, {"y0": [4], "y1": [5]}],
    ),
    Case(
        "two",
        {"instances": [{"x0": {"0": 1, "9": 2}, "x1": {"0": 3, "9": 4}}]},
        [{"y0": [1], "y1": [3]}, {"y0": [2], "y1": [4]}],
    ),
    Case("column", {"inputs": [{"x": [2, 3]}]}, [[2], [3]]),
    Case(
        "two",
        {"instances": [{"x0": [1, 2], "x1": [3]}]},
        "the columns of instances[0] have different numbers of values",
    ),
    Case(
        "two",
        {"instances": [{"x0": {"0": 1}, "x1": {"1": 3}}]},
        "the columns of instances[0] have other indices than its first one",
    ),
    Case(
        "two",
        {"instances": [{"x0": [1, 2], "x1": [3, 4]}, {"x0": 1, "x1": 2}]},
        "instances[1] is a row, and others are tables",
    ),
    Case("two", {"instances": [{"x0": [1, 2], "x1": [3, None]}]}, "input 'x1' at [1]: null where INT64 is expected"),
    Case("pair", {"instances": [{"x": [[1, 2], [3, 4]]}]}, "Expected [-1,2], got [1,2,2]"),
    Case("two", {"instances": [1, 2]}, "the model takes 2 inputs: each instance is an object {input: value}"),
    Case("two", {"instances": [{"x0": 1, "x1": None}]}, "input 'x1' at [0]: null where INT64 is expected"),
]

LISTED = [
    Case("pair", [[1, 2], [3, None]], [[1, 2], [3, NAN]]),
    Case("column", [2, 3], [[2], [3]]),
    Case("pair", b"[1, 2]\n\n[3, null]\n", [[1, 2], [3, NAN]], "application/jsonlines"),
    Case("pair", BOM + b'{"x": [1, 2]}\r\n{"x": [3, 4]}', [[1, 2], [3, 4]], "application/x-ndjson"),
    Case("column", b"2\n3", [[2], [3]], "application/jsonl; charset=utf-8"),
    Case(
        "two",
        b'{"x0": 1, "x1": 2}\n{"x1": 4, "x0": 3}',
        [{"y0": [1], "y1": [2]}, {"y0": [3], "y1": [4]}],
        "application/x-jsonlines",
    ),
    Case("pair", b"[1, 2]\n\n[3, 4", "line 3: failed to parse", "application/jsonlines"),
    Case("pair", b"[1\n2],[3, 4]", "line 1: failed to parse", "application/jsonlines"),
    Case("pair", b"\n", "'instances' is empty", "application/jsonlines"),
    Case("whole", b"[1]\n[null]", "input 'x' at [1][0]: null where INT64", "application/jsonlines"),
    Case("pair", b"1,\n,4\n", [[1, NAN], [NAN, 4]], "text/csv"),
    Case("pair", BOM + b"1,2", [[1, 2]], "text/csv"),
    Case("half", b"1\n2", [[1], [2]], "text/csv"),
    Case("pair", b"a,b\n1,2", [[1, 2]], "text/csv"),
    Case("two", b"x1,x0\n1,2\n3,", [{"y0": [2], "y1": [1]}, {"y0": [NAN], "y1": [3]}], "text/csv"),
    Case("two", b"1,2", "or CSV that begins with a line of their names", "text/csv"),
    Case("list", b"1\n2", [1, 2], "text/csv"),
    Case("word", b"a\n", [["a"]], "text/csv"),
    Case("whole", b'1\n\n""\n', "line 3 of the CSV, column 1: '' is no INT64", "text/csv"),
    Case("flag", b'true\n""\n', "line 2 of the CSV, column 1: '' is no BOOL", "text/csv"),
]


def number(value: Any) -> Any:
    """The value with comparable NaN."""
    return json.loads(json.dumps(value).replace("NaN", '"nan"'))


@pytest.mark.parametrize("case", V1, ids=str)
@pytest.mark.parametrize("path", ["/v1/models/{}:predict", "/endpoints/{}/invocations", "/predictions/{}"])
def test_rows(stack: Stack, path: str, case: Case) -> None:
    content = case.body if isinstance(case.body, bytes) else json.dumps(case.body).encode()
    check(stack, path, case, content)


@pytest.mark.parametrize("case", LISTED, ids=str)
@pytest.mark.parametrize("path", ["/endpoints/{}/invocations", "/predictions/{}"])
def test_lines_and_lists(stack: Stack, path: str, case: Case) -> None:
    content = case.body if isinstance(case.body, bytes) else json.dumps(case.body).encode()
    check(stack, path, case, content)


def check(stack: Stack, path: str, case: Case, content: bytes) -> None:
    reply = stack.http.post(path.format(f"body-{case.model}"), content=content, headers={"content-type": case.kind})
    if isinstance(case.answer, str):
        assert reply.status_code == (424 if "endpoints" in path else 400), reply.text
        assert case.answer in json.dumps(reply.json(), ensure_ascii=False).replace('\\\\"', '"').replace('\\"', '"')
        return
    assert reply.status_code == 200, reply.text
    answer, expected = json.loads(reply.text), case.answer
    if "predictions/" not in path:
        answer = answer["predictions"]
    elif case.model == "two":
        expected = {name: [row[name] for row in expected] for name in ("y0", "y1")}
    assert number(answer) == number(expected)


def test_lines_are_answered_with_lines(stack: Stack) -> None:
    """As SageMaker's batch transform joins them (`AssembleWith: Line`)."""
    for model, lines, answer in (
        ("pair", b"[1,2]\n[3,4]\n", "[1.0,2.0]\n[3.0,4.0]\n"),
        ("list", b"1\n2\n", "1.0\n2.0\n"),
        ("two", b'{"x0":1,"x1":2}\n', '{"y0":[1.0],"y1":[2]}\n'),
    ):
        headers = {"content-type": "application/jsonlines", "accept": "application/jsonlines"}
        reply = stack.http.post(f"/endpoints/body-{model}/invocations", content=lines, headers=headers)
        assert (reply.status_code, reply.text) == (200, answer)
        assert reply.headers["content-type"] == "application/jsonlines"


def tensor(data: list[Any], datatype: str, shape: list[int], **parameters: Any) -> dict[str, Any]:
    one = {"name": "x", "shape": shape, "datatype": datatype, "data": data}
    return {"inputs": [{**one, "parameters": parameters} if parameters else one]}


def v2(stack: Stack, model: str, body: dict[str, Any], begin: bytes = b"") -> Any:
    reply = stack.http.post(f"/v2/models/body-{model}/infer", content=begin + json.dumps(body).encode())
    document = json.loads(reply.text)
    return document["outputs"][0]["data"] if reply.status_code == 200 else (reply.status_code, document["error"])


def test_v2_null_and_byte_order_mark(stack: Stack) -> None:
    body = tensor([1, None], "FP32", [2, 1])
    for begin in (b"", BOM, BOM):
        assert number(v2(stack, "column", body, begin)) == [1.0, "nan"]
    for model, datatype, good in (("whole", "INT64", 1), ("flag", "BOOL", True), ("word", "BYTES", "a")):
        status, error = v2(stack, model, tensor([good, None], datatype, [2, 1]))
        assert (status, "for input 'x': element 1" in error) == (400, True), error


def test_base64_of_mlserver(stack: Stack) -> None:
    for shape, model in (([2], "words"), ([2, 1], "word")):
        body = tensor(["aGk=", ""], "BYTES", shape, content_type="base64")
        assert v2(stack, model, body) == ["hi", ""]
        assert v2(stack, model, tensor(["aGk=", "b"], "BYTES", shape, content_type="str")) == ["aGk=", "b"]
        body = tensor(["aGk=", "%"], "BYTES", shape, content_type="base64")
        assert v2(stack, model, body) == (400, "element 1 for input 'x' is not base64, which its content_type says")
    status, error = v2(stack, "column", tensor([1], "FP32", [1, 1], content_type="base64"))
    assert (status, error) == (400, "the content type base64 is for BYTES for input 'x', which takes FP32")


def test_base64_over_grpc(stack: Stack) -> None:
    request = pb.ModelInferRequest(model_name="body-words")
    given = request.inputs.add(name="x", datatype="BYTES", shape=[2])
    given.parameters["content_type"].string_param = "base64"
    raw = pb.ModelInferRequest()
    raw.CopyFrom(request)
    given.contents.bytes_contents.extend([b"aGk=", b"AA=="])
    raw.raw_input_contents.append(b"\x04\x00\x00\x00aGk=\x04\x00\x00\x00AA==")
    with grpc.insecure_channel(stack.grpc) as channel:
        infer = GRPCInferenceServiceStub(channel).ModelInfer
        for sent in (request, raw):
            assert infer(sent).raw_output_contents == [b"\x02\x00\x00\x00hi\x01\x00\x00\x00\x00"]
        raw.raw_input_contents[0] = b"\x01\x00\x00\x00%\x01\x00\x00\x00%"
        with pytest.raises(grpc.RpcError, match="element 0 for input 'x' is not base64"):
            infer(raw)


def test_a_token_id_beyond_the_vocabulary_is_the_callers_mistake(stack: Stack) -> None:
    def ask(ids: list[list[int]]) -> tuple[int, str]:
        rows = [{"input_ids": row, "attention_mask": [1, 1], "token_type_ids": [0, 0]} for row in ids]
        reply = stack.http.post("/v1/models/body-ids:predict", content=json.dumps({"instances": rows}).encode())
        return reply.status_code, reply.json().get("error", "")

    highest = VOCABULARY - 1
    assert ask([[0, highest]]) == (200, "")
    for row, index in ((0, VOCABULARY), (1, -1), (1, 2**40)):
        where = f"input 'input_ids' at [{row}][1]: {index} is outside of the model's table"
        rows = [[1, 2], [3, 4]]
        rows[row][1] = index
        assert ask(rows) == (400, f"{where}, whose indices are 0 to {highest}")
    status, error = ask([[0, 1]] * 80 + [[0, 99]] + [[0, 1]] * 19)
    part = re.match(r"in rows (\d+) to \d+: input 'input_ids' at \[(\d+)\]\[1\]: 99 is outside", error)
    assert status == 400 and part and int(part[1]) + int(part[2]) == 80, error
    reply = stack.http.post("/v1/embeddings", content=json.dumps({"model": "body-ids", "input": [1, 99_999]}).encode())
    assert (reply.status_code, reply.json()["error"]["type"]) == (400, "invalid_request_error"), reply.text
