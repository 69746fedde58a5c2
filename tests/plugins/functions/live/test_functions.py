"""A function is pushed as any model is, and answers over the protocols that there are, beside models of ONNX."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from millstream.client.client import Client
from millstream.client.errors import ServerError
from tests.kit import models
from tests.kit.archives import mar
from tests.kit.command_line import Millstream
from tests.kit.stack import Stack, running_stack, token_of

EXAMPLE = Path(__file__).parents[4] / "examples" / "python" / "sentiment.py"


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("functions")
    with running_stack(folder, pools="cpu=1", models={"scale": models.scale(folder / "scale.onnx")}) as stack:
        yield stack


def test_the_example_is_pushed_and_answers_over_every_protocol(stack: Stack) -> None:
    millstream = Millstream(stack.home)
    said = millstream.ok("push", "sentiment", EXAMPLE)
    assert "sentiment version 1  ready" in said
    assert "outputs   label BYTES [-1], score FP64 [-1]" in said
    assert "positive" in millstream.ok("predict", "sentiment", "--text", "what a lovely day")
    v2 = {"inputs": [{"name": "text", "datatype": "BYTES", "shape": [2], "data": ["so good", "so bad"]}]}
    outputs = stack.http.post("/v2/models/sentiment/infer", json=v2).json()["outputs"]
    assert outputs[0]["data"] == ["positive", "negative"]
    assert outputs[1]["data"] == pytest.approx([2 / 3, 2 / 3])
    rows = stack.http.post("/v1/models/sentiment:predict", json={"instances": ["so good"]}).json()["predictions"]
    assert rows == [{"label": "positive", "score": pytest.approx(2 / 3)}]
    with Client(f"http://127.0.0.1:{stack.port}", key=token_of(stack.home)) as client:
        assert client.predict("sentiment", ["thanks", "awful"])["label"].tolist() == ["positive", "negative"]
        x = np.ones((1, 2), np.float32)
        assert client.predict("scale", x)["y"].shape == (1, 2), "the model of ONNX in the same worker answers, too"


def test_a_file_that_cannot_be_served_is_refused_with_the_reason(stack: Stack, tmp_path: Path) -> None:
    path = tmp_path / "service.py"
    path.write_text("import nothing_of_this_name\n\ndef predict(text: str) -> str:\n    return text\n")
    with (
        Client(f"http://127.0.0.1:{stack.port}", key=token_of(stack.home)) as client,
        pytest.raises(ServerError) as refused,
    ):
        client.push("broken", path)
    assert "No module named 'nothing_of_this_name' (service.py, line 1)" in str(refused.value)


def test_python_without_a_function_says_what_a_model_of_python_is(stack: Stack, tmp_path: Path) -> None:
    path = tmp_path / "service.py"
    path.write_text("import json\n\nprint(json.dumps({}))\n")
    said = stack.http.post("/admin/v1/models/none/versions", content=path.read_bytes())
    assert said.status_code == 400
    assert "a Python model is a function with type hints, def predict(text: str) -> str: …" in said.json()["error"]


def test_an_error_of_the_function_names_its_line_and_fails_its_request_alone(stack: Stack, tmp_path: Path) -> None:
    path = tmp_path / "service.py"
    path.write_text("def predict(number: int) -> int:\n    return 10 // number\n")
    stack.push("divide", path)

    def ask(*numbers: int) -> tuple[int, str]:
        tensor = {"name": "number", "datatype": "INT64", "shape": [len(numbers)], "data": [*numbers]}
        reply = stack.http.post("/v2/models/divide/infer", json={"inputs": [tensor]})
        return reply.status_code, reply.text

    assert ask(5, 2)[0] == 200
    status, text = ask(0)
    assert status == 500
    assert "ZeroDivisionError: integer division or modulo by zero (service.py, line 2)" in text
    assert ask(1)[0] == 200


def test_documents_are_json_where_the_protocol_is(stack: Stack, tmp_path: Path) -> None:
    path = tmp_path / "service.py"
    path.write_text(
        "from typing import Any\n\ndef predict(order: dict, tax: float = 0.5) -> dict[str, Any]:\n"
        "    return {'total': sum(order['prices']) * (1 + tax), 'of': order}\n"
    )
    stack.push("total", path)
    order = {"prices": [1, 3]}
    body = {"instances": [{"order": order, "tax": 1.0}, {"order": {"prices": []}, "tax": 0.0}]}
    answers = stack.http.post("/v1/models/total:predict", json=body).json()["predictions"]
    assert answers == [{"total": 8.0, "of": order}, {"total": 0.0, "of": {"prices": []}}]
    tensor = {"name": "order", "datatype": "BYTES", "shape": [1], "data": ['{"prices": [2]}']}
    outputs = stack.http.post("/v2/models/total/infer", json={"inputs": [tensor]}).json()["outputs"]
    assert outputs[0]["data"] == ['{"total": 3.0, "of": {"prices": [2]}}'], "v2 has tensors alone: a document is text"
    wrong = stack.http.post("/v1/models/total:predict", json={"instances": [{"order": "{", "tax": 1.0}]})
    assert wrong.status_code == 400
    assert "order: " in wrong.text


def test_a_key_uploads_functions_only_with_the_right_to_code(tmp_path: Path) -> None:
    with running_stack(tmp_path / "stack", pools="cpu=1") as stack:

        def push(name: str, *scopes: str, content: bytes = EXAMPLE.read_bytes()) -> tuple[int, str]:
            made = stack.http.post("/admin/v1/keys", json={"name": name, "scopes": scopes}).raise_for_status().json()
            headers = {"Authorization": f"Bearer {made['key']}"}
            reply = stack.http.post(f"/admin/v1/models/{name}/versions", content=content, headers=headers)
            return reply.status_code, reply.text

        status, text = push("writer", "models:write")
        assert status == 403
        assert "lacks the scope 'models:code', which an upload of Python needs" in text
        assert push("coder", "models:write", "models:code")[0] == 201
        asks = b"# /// script\n# [tool.millstream]\n# network = true\n# ///\n" + EXAMPLE.read_bytes()
        assert "lacks the scope 'models:network'" in push("coder-2", "models:write", "models:code", content=asks)[1]
        assert push("caller", "models:write", "models:code", "models:network", content=asks)[0] == 201
        handler = {"h.py": "def handle(data, context):\n    return data and [1]\n"}
        archive = mar(tmp_path / "h.mar", {"handler": "h.py"}, handler).read_bytes()
        assert (
            "'models:code', which an upload of TorchServe's handler" in push("w-2", "models:write", content=archive)[1]
        )


def test_pre_and_post_run_beside_the_model_in_their_folder(stack: Stack, tmp_path: Path) -> None:
    folder = tmp_path / "double"
    folder.mkdir()
    models.scale(folder / "model.onnx")
    (folder / "service.py").write_text(
        "import numpy as np\n\ndef pre(text: str) -> np.ndarray:\n    return np.array([len(text), 1], np.float32)\n\n"
        "def post(y: np.ndarray) -> list[float]:\n    return [*y]\n"
    )
    millstream = Millstream(stack.home)
    said = millstream.ok("push", "double", folder)
    assert "outputs   output FP64 [-1, -1]" in said
    x = np.array([[4, 1], [2, 1]], np.float32)
    with Client(f"http://127.0.0.1:{stack.port}", key=token_of(stack.home)) as client:
        expected = client.predict("scale", x)["y"].tolist()
        assert client.predict("double", ["four", "bb"])["output"].tolist() == expected
