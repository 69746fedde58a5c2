"""Models of Triton's Python backend, served from a repository as they are, and called by Triton's own clients."""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

from millstream.client.client import Client
from tests.kit.stack import Stack, running_stack, token_of
from tests.kit.triton_models import DOUBLE, write_model
from tests.kit.wait import wait_until

X = np.array([[1, 2]], np.float32)
BATCH = "dynamic_batching { preferred_batch_size: [4] max_queue_delay_microseconds: 5000000 }"
LIFE = """
@staticmethod
def auto_complete_config(config):
    config.set_max_batch_size(4)
    config.set_dynamic_batching()
    config.add_input({"name": "x", "data_type": "TYPE_FP32", "dims": [2]})
    config.add_output({"name": "y", "data_type": "TYPE_STRING", "dims": [-1]})
    return config

def initialize(self, args):
    config = json.loads(args["model_config"])
    self.said = [args["model_name"], args["model_version"], args["model_instance_kind"], config["max_batch_size"],
                 pb_utils.get_input_config_by_name(config, "x")["data_type"]]
    pb_utils.Logger.log_info("initialized as " + self.said[0])

def execute(self, requests):
    text = np.array([[json.dumps(self.said).encode()]] * len(x_of(requests[0])), dtype=np.object_)
    return [answer(text) for _ in requests]

def finalize(self):
    pb_utils.Logger.log_info("finalized " + self.said[0])
"""
COUNTS = """
def execute(self, requests):
    responses = []
    for number, request in enumerate(requests):
        x = x_of(request)
        if x[0, 0] < 0:
            error = pb_utils.TritonError("negative", pb_utils.TritonError.INVALID_ARG)
            responses.append(pb_utils.InferenceResponse(error=error))
        else:
            responses.append(answer(x * 0 + np.float32(len(requests) * 100 + len(x))))
    return responses
"""
SENDS = """
def execute(self, requests):
    for request in requests:
        self._send(request.get_response_sender(), x_of(request))
    return [None for _ in requests]

def _send(self, sender, x):
    def later():
        time.sleep(0.05)
        sender.send(answer(x + 1), flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
    if x[0, 0] == 1:
        threading.Thread(target=later).start()
    elif x[0, 0] in (2, 4):
        sender.send(answer(x + 2))
    if x[0, 0] == 4:
        raise RuntimeError("after it was sent")
"""
TOLD = """
def execute(self, requests):
    responses = []
    for request in requests:
        names = request.requested_output_names()
        said = json.loads(request.parameters() or "{}")
        text = json.dumps([request.request_id(), request.timeout(), said, sorted(names)]).encode()
        made = [pb_utils.Tensor(name, np.array([[text]], dtype=np.object_)) for name in names]
        responses.append(pb_utils.InferenceResponse(made))
    return responses
"""
TOLD_CONFIG = """
backend: "python"
max_batch_size: 8
input [{ name: "x" data_type: TYPE_FP32 dims: [ 2 ] }]
output [{ name: "y" data_type: TYPE_STRING dims: [ 1 ] }, { name: "z" data_type: TYPE_STRING dims: [ -1 ] }]
"""
COUNTING = """
def initialize(self, args):
    family = pb_utils.MetricFamily("seen_rows", "rows that came", pb_utils.MetricFamily.COUNTER)
    sizes = pb_utils.MetricFamily("seen_sizes", "their sizes", pb_utils.MetricFamily.HISTOGRAM)
    self.rows = family.Metric(labels={"of": 'a "quoted" name'})
    self.sizes = sizes.Metric(labels={}, buckets=[1, 2.5])
    self.families = family, sizes

def execute(self, requests):
    for request in requests:
        self.rows.increment(len(x_of(request)))
        self.sizes.observe(len(x_of(request)))
    try:
        self.rows.increment(-1)
    except pb_utils.TritonModelException:
        return [answer(x_of(request)) for request in requests]
"""
CALLS = """
def execute(self, requests):
    tensors = [pb_utils.Tensor("x", x_of(requests[0]))]
    called = pb_utils.InferenceRequest(model_name="double", requested_output_names=["y"], inputs=tensors)
    return [called.exec()]
"""
CRASHES = """
def execute(self, requests):
    if x_of(requests[0])[0, 0] == 7:
        import os
        os.abort()
    return [answer(x_of(request)) for request in requests]
"""
ENSEMBLE = """
platform: "ensemble"
max_batch_size: 8
input [{ name: "in" data_type: TYPE_FP32 dims: [ 2 ] }]
output [{ name: "out" data_type: TYPE_FP32 dims: [ 2 ] }]
ensemble_scheduling {
  step [
    { model_name: "double" model_version: -1
      input_map { key: "x" value: "in" } output_map { key: "y" value: "doubled" } },
    { model_name: "double" model_version: -1
      input_map { key: "x" value: "doubled" } output_map { key: "y" value: "out" } }
  ]
}
"""
TENSORS = {
    "max_batch_size": 8,
    "input": [{"name": "x", "data_type": "TYPE_FP32", "dims": [2]}],
    "output": [{"name": "y", "data_type": "TYPE_FP32", "dims": [2]}],
}
ODD = """
def execute(self, requests):
    kind = int(x_of(requests[0])[0, 0])
    x = x_of(requests[0])
    if kind == 1:
        return []
    if kind == 2:
        return [answer(x.astype(np.int64))]
    if kind == 3:
        return [pb_utils.InferenceResponse([pb_utils.Tensor("z", x)])]
    if kind == 4:
        return ["text"]
    if kind == 5:
        return [answer(x[0])]
    if kind == 6:
        raise pb_utils.TritonModelException("by itself")
    if kind == 7:
        return [answer(x), answer(x)]
    return [answer(x) for _ in requests]
"""


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("models")
    write_model(folder, "double", DOUBLE)
    write_model(folder, "life", LIFE, config=False)
    write_model(folder, "counts", COUNTS, more=BATCH)
    write_model(folder, "sends", SENDS)
    write_model(folder, "counting", COUNTING)
    write_model(folder, "packages", "import orjson, millstream\n" + DOUBLE)
    write_model(folder, "calls", CALLS)
    write_model(folder, "crashes", CRASHES)
    (folder / "both" / "1").mkdir(parents=True)
    (folder / "both" / "config.pbtxt").write_text(ENSEMBLE)
    write_model(folder, "odd", ODD)
    write_model(folder, "told", TOLD)
    (folder / "told" / "config.pbtxt").write_text(TOLD_CONFIG)
    write_model(folder, "later", "async " + DOUBLE.strip(), datatype="INT64", dims="-1", rows=0)
    write_model(folder, "fails", 'def initialize(self, args):\n    raise ValueError("not today")\n' + DOUBLE)
    write_model(folder, "decoupled", DOUBLE, more="model_transaction_policy { decoupled: true }")
    packed = 'parameters { key: "EXECUTION_ENV_PATH" value { string_value: "$$TRITON_MODEL_DIRECTORY/env.tar.gz" } }'
    write_model(folder, "packed", DOUBLE, more=packed)
    write_model(folder, "no_class", DOUBLE).write_text("class Model:\n    pass\n")
    return folder


@pytest.fixture(scope="module")
def stack(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    settings = {"triton_repositories": repository, "open_control": True}
    with running_stack(tmp_path_factory.mktemp("stack"), settings=settings) as running:
        yield running


@pytest.fixture(scope="module")
def client(stack: Stack) -> Iterator[Any]:
    with triton_http.InferenceServerClient(f"127.0.0.1:{stack.port}") as made:
        yield made


def ask(client: Any, model: str, x: np.ndarray[Any, Any] = X, kind: Any = triton_http, **options: Any) -> Any:
    tensor = kind.InferInput("x", x.shape, np_to_triton_dtype(x.dtype))
    tensor.set_data_from_numpy(x)
    return client.infer(model, [tensor], **options).as_numpy("y")


def why(client: Any, model: str) -> str:
    return str(next(one for one in client.get_model_repository_index() if one["name"] == model)["reason"])


def test_models_answer_over_http_and_grpc(stack: Stack, client: Any) -> None:
    assert ask(client, "double").tolist() == [[2, 4]]
    assert ask(client, "later", np.arange(3)).tolist() == [0, 2, 4]
    with triton_grpc.InferenceServerClient(stack.grpc) as grpc:
        assert ask(grpc, "double", np.repeat(X, 3, 0), triton_grpc).tolist() == [[2, 4]] * 3
        config = grpc.get_model_config("double", as_json=True)["config"]
        assert (config["backend"], config["default_model_filename"]) == ("python", "model.py")


def test_a_model_completes_its_configuration_and_is_told_of_it(stack: Stack, client: Any) -> None:
    config = client.get_model_config("life")
    assert config["max_batch_size"] == 4
    assert config["output"][0]["data_type"] == "TYPE_STRING"
    [[said]] = ask(client, "life").tolist()
    assert json.loads(said) == ["life", "1", "CPU", 4, "TYPE_FP32"]
    assert "initialized as life" in stack.logs()
    client.unload_model("life")
    wait_until(lambda: "finalized life" in stack.logs())
    client.load_model("life")
    assert ask(client, "life").shape == (1, 1)


def test_requests_that_share_a_run_stay_requests_and_one_may_fail(stack: Stack) -> None:
    given = [np.full((1, 2), sign, np.float32) for sign in (1, -1, 1, 1)]

    def outcome(x: np.ndarray[Any, Any]) -> Any:
        with triton_http.InferenceServerClient(f"127.0.0.1:{stack.port}") as own:
            try:
                return ask(own, "counts", x).tolist()
            except InferenceServerException as error:
                return error.message()

    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(outcome, given))
    assert found == [[[401.0, 401.0]], "negative", [[401.0, 401.0]], [[401.0, 401.0]]]


def test_a_response_may_come_from_a_sender(client: Any) -> None:
    assert ask(client, "sends", np.array([[1, 0]], np.float32)).tolist() == [[2, 1]], "after execute returned"
    assert ask(client, "sends", np.array([[2, 0]], np.float32)).tolist() == [[4, 2]]
    assert ask(client, "sends", np.array([[4, 0]], np.float32)).tolist() == [[6, 2]], "what was sent stands"
    with pytest.raises(InferenceServerException, match="the model gave no response to the request"):
        ask(client, "sends", np.array([[3, 0]], np.float32))


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (1, r"InferenceRequest\(s\) size is:1, and InferenceResponse\(s\) size is:0"),
        (2, "output 'y' is INT64, not FP32"),
        (3, "the response has no output 'y'"),
        (4, "Expected an 'InferenceResponse' object in the execute function return list, found type '<class 'str'>'"),
        (5, "output 'y' has shape"),
        (6, r"Failed to process the request\(s\) for model 'odd_0_0', message: TritonModelException: by itself"),
        (7, r"and InferenceResponse\(s\) size is:2"),
    ],
)
def test_answers_that_are_none_are_errors_in_tritons_words(client: Any, kind: int, words: str) -> None:
    with pytest.raises(InferenceServerException, match=words):
        ask(client, "odd", np.full((1, 2), kind, np.float32))
    assert ask(client, "odd", np.zeros((1, 2), np.float32)).tolist() == [[0, 0]]


def test_models_that_cannot_be_served_say_why(client: Any) -> None:
    assert "ValueError: not today (model.py, line" in why(client, "fails")
    assert "model_transaction_policy.decoupled is not supported" in why(client, "decoupled")
    assert "EXECUTION_ENV_PATH is not supported: a packed environment is not unpacked" in why(client, "packed")
    assert "model.py has no class TritonPythonModel" in why(client, "no_class")


def test_changed_code_is_served_by_the_next_load(repository: Path, client: Any) -> None:
    path = write_model(repository, "changes", DOUBLE)
    client.load_model("changes")
    assert ask(client, "changes").tolist() == [[2, 4]]
    (path.parent / "part.py").write_text("FACTOR = 5\n")
    path.write_text(path.read_text().replace("2 * x_of", "part.FACTOR * x_of").replace("import json", "import part"))
    path.write_text("import sys\n" + path.read_text().replace("import asyncio, json,", "import part, asyncio, json,"))
    client.load_model("changes")
    assert ask(client, "changes").tolist() == [[5, 10]]


def test_an_uploaded_folder_is_served_with_its_configuration(repository: Path, stack: Stack, client: Any) -> None:
    with Client(f"http://127.0.0.1:{stack.port}", key=token_of(stack.home)) as ours:
        ours.push("pushed", repository / "double")
    assert ask(client, "pushed").tolist() == [[2, 4]]
    assert client.get_model_config("pushed")["max_batch_size"] == 8


def test_an_archive_with_a_model_that_fails_is_refused(repository: Path, stack: Stack) -> None:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as archive:
        for name in ("config.pbtxt", "1/model.py"):
            archive.write(repository / "no_class" / name, name)
    reply = stack.http.post("/admin/v1/models/none/versions", content=made.getvalue())
    assert reply.status_code == 400
    assert "model.py has no class TritonPythonModel" in reply.text


def test_a_model_is_told_what_the_caller_said(stack: Stack, client: Any) -> None:
    said = {"mine": "text", "number": 3, "flag": True, "share": 0.5}
    wanted = [triton_http.InferRequestedOutput("y")]
    options: dict[str, Any] = {"request_id": "r-1", "timeout": 5_000_000, "outputs": wanted}
    [[text]] = ask(client, "told", parameters=said, **options).tolist()
    assert json.loads(text) == ["r-1", 5_000_000, said, ["y"]]
    tensor = {"name": "x", "datatype": "FP32", "shape": [1, 2], "data": [1, 2]}
    for wrong in (r'"\ud800"', "1" + "0" * 40, json.dumps("x" * 70_000)):
        body = f'{{"parameters": {{"mine": {wrong}}}, "inputs": [{json.dumps(tensor)}]}}'
        status = stack.http.post("/v2/models/told/infer", content=body).status_code
        assert status in {200, 400}, "an error of its own, or a number that became another kind"
    assert ask(client, "told").shape == (1, 1)
    with triton_grpc.InferenceServerClient(stack.grpc) as grpc:
        options = {"request_id": "r-2", "outputs": [triton_grpc.InferRequestedOutput("y")]}
        [[text]] = ask(grpc, "told", X, triton_grpc, parameters=said, **options).tolist()
        assert json.loads(text) == ["r-2", 0, said, ["y"]]
        [[text]] = ask(grpc, "told", X, triton_grpc).tolist()
        assert json.loads(text) == ["", 0, {}, ["y", "z"]]


def test_metrics_of_a_model_are_on_the_page(stack: Stack, client: Any) -> None:
    for rows in (1, 2, 3):
        ask(client, "counting", np.repeat(X, rows, 0))
    page = stack.http.get("/metrics").text
    assert "# HELP seen_rows rows that came\n# TYPE seen_rows counter\n" in page
    assert r'seen_rows{of="a \"quoted\" name"} 6' in page
    assert 'seen_sizes_bucket{le="2.5"} 2\nseen_sizes_bucket{le="+Inf"} 3\nseen_sizes_sum 6\nseen_sizes_count 3' in page
    client.unload_model("counting")
    wait_until(lambda: "seen_rows" not in stack.http.get("/metrics").text)


def test_a_model_has_the_packages_of_the_server_unless_it_declares_its_own(client: Any) -> None:
    assert ask(client, "packages").tolist() == [[2, 4]]


def test_an_ensemble_runs_them_as_any_step(client: Any) -> None:
    tensor = triton_http.InferInput("in", X.shape, "FP32")
    tensor.set_data_from_numpy(X)
    assert client.infer("both", [tensor]).as_numpy("out").tolist() == [[4, 8]]


def test_a_call_of_another_model_is_refused_with_what_to_do(client: Any) -> None:
    with pytest.raises(InferenceServerException, match=r"exec of 'double': calls .* \(BLS\) are not served; connect"):
        ask(client, "calls")


def test_a_crash_fails_its_request_alone(client: Any) -> None:
    with pytest.raises(InferenceServerException, match="its process was ended by SIGABRT"):
        ask(client, "crashes", np.full((1, 2), 7, np.float32))
    wait_until(lambda: client.is_model_ready("crashes"))
    assert ask(client, "crashes").tolist() == [[1, 2]]
    assert ask(client, "double").tolist() == [[2, 4]]


def test_files_of_a_load_are_code_only_with_the_right_to_it(repository: Path, tmp_path: Path) -> None:
    with (
        running_stack(tmp_path / "stack") as stack,
        triton_http.InferenceServerClient(f"127.0.0.1:{stack.port}") as own,
    ):
        files = {"file:1/model.py": (repository / "double" / "1" / "model.py").read_bytes()}
        config = json.dumps({"backend": "python", **TENSORS})

        def load(name: str, *scopes: str) -> None:
            made = stack.http.post("/admin/v1/keys", json={"name": name, "scopes": scopes}).raise_for_status().json()
            headers = {"Authorization": f"Bearer {made['key']}"}
            own.load_model(name, headers=headers, config=config, files=files)

        with pytest.raises(InferenceServerException, match="lacks the scope 'models:code'"):
            load("writer", "models:write")
        load("coder", "models:write", "models:code")
