"""Archives of TorchServe answer by their handlers, on its route for predictions and on the others."""

from __future__ import annotations

import base64
import json
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from millstream.client.client import Client
from millstream.services.errors import Failure
from tests.kit.archives import mar
from tests.kit.stack import Stack, running_stack

#: a class of its own, as TorchServe's page on custom handlers has it
CLASS = """
import json, os
from ts.utils.util import PredictionException

class Handler:
    def initialize(self, context):
        properties = context.system_properties
        with open(os.path.join(properties["model_dir"], "prefix.txt")) as file:
            self.prefix = file.read()
        self.name = context.manifest["model"]["modelName"]
        context.metrics.add_time("LoadTime", 1.0, None, "ms")

    def handle(self, data, context):
        context.metrics.add_counter("Requests", len(data))
        return [self.answer(row, context, at) for at, row in enumerate(data)]

    def answer(self, row, context, at):
        value = row.get("data") or row.get("body")
        if value == "refuse":
            raise PredictionException("not this one", 400)
        if value == "missing":
            context.set_response_status(404, "Not there", at)
        if value == "picture":
            context.set_response_content_type(at, "image/png")
            return b"\\x89PNG"
        if value == "sent":
            return context.get_request_header(at, "Content-Type")
        return {"prefix": self.prefix, "name": self.name, "type": type(value).__name__, "keys": sorted(row),
                "value": value.decode(errors="replace") if isinstance(value, bytearray) else value}
"""
MODULE = """
seen = []

def handle(data, context):
    if data is None:
        seen.append(context.model_name)
        return None
    return [f"{seen[0]} {len(data)} {row['body']}" for row in data]
"""


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with running_stack(tmp_path_factory.mktemp("stack"), settings={"check_s_max": 10}) as running:
        yield running


@pytest.fixture
def client(stack: Stack) -> Iterator[Client]:
    with Client(stack.url, key=stack.key) as client:
        yield client


@pytest.fixture(scope="module")
def custom(stack: Stack, tmp_path_factory: pytest.TempPathFactory) -> Stack:
    described = {"modelName": "named", "handler": "custom.py", "extraFiles": "prefix.txt"}
    path = mar(tmp_path_factory.mktemp("mar") / "custom.mar", described, {"custom.py": CLASS, "prefix.txt": "a"})
    stack.push("custom", path)
    return stack


def predict(stack: Stack, content: bytes, kind: str | None, model: str = "custom") -> tuple[int, str, bytes]:
    headers = {} if kind is None else {"content-type": kind}
    reply = stack.http.post(f"/predictions/{model}", content=content, headers=headers)
    return reply.status_code, reply.headers["content-type"], reply.content


def test_a_body_becomes_the_row_that_torchserve_makes_of_it(custom: Stack) -> None:
    expected = {"prefix": "a", "name": "named", "keys": ["body"]}
    for content, kind, value in (
        (b'{"a": [1]}', "application/json", {"type": "dict", "value": {"a": [1]}}),
        (b"{broken", "application/json", {"type": "bytearray", "value": "{broken"}),
        (b"hello", "text/plain", {"type": "str", "value": "hello"}),
        (b"\xff\xfe", None, {"type": "bytearray", "value": "\ufffd\ufffd"}),
        (b'{"a": 1}', "application/octet-stream", {"type": "bytearray", "value": '{"a": 1}'}),
    ):
        status, media, answer = predict(custom, content, kind)
        assert (status, media) == (200, "application/json")
        assert json.loads(answer) == expected | value
    form = custom.http.post("/predictions/custom", files={"data": b"\r\n--x", "other": b"2"})
    assert form.json() == expected | {"keys": ["data", "other"], "type": "bytearray", "value": "\r\n--x"}
    plain = custom.http.post("/predictions/custom", data={"data": "a b", "more": "1"})
    assert plain.json() == expected | {"keys": ["data", "more"], "type": "bytearray", "value": "a b"}


def test_an_answer_is_what_the_handler_returned(custom: Stack) -> None:
    assert predict(custom, b"picture", "text/plain") == (200, "image/png", b"\x89PNG")
    assert predict(custom, b"sent", "text/plain") == (200, "text/plain; charset=utf-8", b"text/plain")
    assert predict(custom, b"missing", "text/plain")[0] == 404
    status, _, refused = predict(custom, b"refuse", "text/plain")
    assert status == 400
    assert json.loads(refused)["message"].endswith("not this one")


def test_other_protocols_carry_the_same_bodies(custom: Stack, client: Client) -> None:
    body = {"instances": [{"body": {"b64": base64.b64encode(b"x").decode()}, "content_type": "text/plain"}]}
    (row,) = custom.http.post("/v1/models/custom:predict", json=body).raise_for_status().json()["predictions"]
    assert json.loads(row)["value"] == "x"
    assert list(client.predict("custom", {"body": [b"y"]})) == ["response"]


def test_a_module_with_handle_gets_no_data_first(stack: Stack, tmp_path: Path) -> None:
    files = {"module.py": MODULE, "config.yaml": "batchSize: 2\nmaxBatchDelay: 50\n"}
    described = {"modelName": "m", "handler": "module:handle", "configFile": "config.yaml"}
    stack.push("module", mar(tmp_path / "m.mar", described, files))
    assert predict(stack, b"hi", "text/plain", "module")[2] == b"m 1 hi"
    tensor = {"name": "body", "datatype": "BYTES", "shape": [3], "data": ["a", "b", "c"]}
    outputs = stack.http.post("/v2/models/module/infer", json={"inputs": [tensor]}).raise_for_status().json()["outputs"]
    assert [one.split()[:2] for one in outputs[0]["data"]] == [["m", "2"], ["m", "2"], ["m", "1"]], "two rows a call"


HANDLER = "def handle(data, context):\n    {}\n"
WRONG = {
    "if data is None: return None\n    return [1, 2]": "the handler returned 2 answers for 1 requests",
    "if data is None: return None\n    return {}": "the handler returned dict, and a list of answers is expected",
    "if data is None: return None\n    return [object()]": "the handler's answer is neither bytes, text nor JSON",
    "if data is None: return None\n    return [1 / 0]": "ZeroDivisionError: division by zero (h.py, line 3)",
    "if data is None: return None\n    context.set_response_status(99)\n    return [1]": "set the status 99",
}


@pytest.mark.parametrize("does", WRONG)
def test_a_wrong_answer_is_an_error_that_says_so(stack: Stack, tmp_path: Path, does: str) -> None:
    path = mar(tmp_path / "h.mar", {"modelName": "m", "handler": "h.py"}, {"h.py": HANDLER.format(does)})
    stack.push("wrong", path)
    status, _, answer = predict(stack, b"x", None, "wrong")
    assert status == 500
    assert json.loads(answer)["type"] == "PredictionException"
    assert WRONG[does] in json.loads(answer)["message"]


REFUSED = {
    "import time; time.sleep(3600)": "the check took longer than 10 s",
    "while True: print('x' * 1000)": "the check took longer than 10 s",
    "import os; os._exit(4)": "its process ended with exit code 4",
    "import ts.torch_handler.object_detector": "add torchserve, and what it needs, to the requirements of the archive",
    "import nothing_of_this_name": "No module named 'nothing_of_this_name'",
    "open('/etc/passwd')": "Permission denied: '/etc/passwd'",
    "raise RuntimeError('no weights')": "RuntimeError: no weights (h.py, line 2)",
}


@pytest.mark.parametrize("does", REFUSED)
def test_a_handler_that_does_not_load_is_refused(client: Client, tmp_path: Path, does: str) -> None:
    path = mar(tmp_path / "h.mar", {"modelName": "m", "handler": "h.py"}, {"h.py": HANDLER.format(does)})
    with pytest.raises(Failure) as refused:
        client.push("refused", path)
    assert REFUSED[does] in str(refused.value)


def test_archives_that_are_none_are_refused(client: Client, tmp_path: Path) -> None:
    plain = {"h.py": HANDLER.format("return [1]")}
    for name, files, says in (
        ("outside", {**plain, "../../evil.py": "x"}, "evil.py"),
        ("absolute", {**plain, "/tmp/evil.py": "x"}, "evil.py"),
        ("manifest", {**plain, "MAR-INF/MANIFEST.json": " " * (2 << 20)}, "more than 1048576 bytes"),
        ("list", {**plain, "MAR-INF/MANIFEST.json": "[]"}, "it has no object 'model'"),
        ("deep", {**plain, "MAR-INF/MANIFEST.json": "[" * 100_000}, "is not JSON"),
    ):
        path = tmp_path / f"{name}.mar"
        with zipfile.ZipFile(path, "w") as archive:
            for member, content in {"MAR-INF/MANIFEST.json": '{"model": {"handler": "h.py"}}', **files}.items():
                archive.writestr(member, content)
        with pytest.raises(Failure) as refused:
            client.push("refused", path)
        assert says in str(refused.value), name


def test_a_bomb_is_refused_before_it_is_unpacked(tmp_path: Path) -> None:
    with running_stack(tmp_path / "stack", settings={"upload_bytes_max": 8 << 20}) as stack:
        files: dict[str, str | bytes] = {"h.py": HANDLER.format("return [1]"), "weights.bin": bytes(64 << 20)}
        path = mar(tmp_path / "bomb.mar", {"handler": "h.py"}, files)
        assert path.stat().st_size < 1 << 20
        reply = stack.http.post("/admin/v1/models/bomb/versions", content=path.read_bytes())
        assert reply.status_code == 413
        assert "unpack" in reply.text or "limit" in reply.text
