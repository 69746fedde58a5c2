"""TensorFlow Serving's gRPC services. tests/frameworks calls them with TensorFlow's own client."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import grpc
import numpy as np
import pytest

from millstream.plugins.compat.tfserving.grpc import schema
from tests.kit import models
from tests.kit.stack import CALL_S_MAX, Stack, running_stack

A = np.arange(8, dtype=np.float32).reshape(2, 4)
B = A * 10 + 1
FLOAT, STRING = 1, 7
WORDS = [b"one", "zw\u00f6lf".encode(), b"", "\u5343".encode() * 20_000, b"a\nb", b"a\0b"]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("tfserving")
    with running_stack(folder, settings={"admin_key": "k" * 20}) as stack:
        stack.push("tf-add", models.add_sub(folder / "add.onnx"))
        stack.push("tf-add", models.add_sub(folder / "add.onnx"), version=2)
        stack.push("tf-scores", models.scale(folder / "scores.onnx", columns=2))
        stack.push("tf-value", models.scale(folder / "value.onnx", columns=1))
        stack.push("tf-words", models.identities(folder / "words.onnx", datatypes=("BYTES", "FP32")))
        yield stack


class Client:
    """Calls both services. Replies are messages."""

    def __init__(self, channel: grpc.Channel, key: str | None) -> None:
        self._channel = channel
        self._metadata = [("authorization", f"Bearer {key}")] if key else []

    def __call__(self, method: str, *, service: str = schema.PREDICTION_SERVICE, **options: Any) -> Any:
        request = schema.request_of(service, method)(**options)
        call = self._channel.unary_unary(
            f"/{service}/{method}", type(request).SerializeToString, schema.response_of(service, method).FromString
        )
        return call(request, metadata=self._metadata, timeout=CALL_S_MAX)

    def status(self, **options: Any) -> Any:
        return self("GetModelStatus", service=schema.MODEL_SERVICE, **options)


@pytest.fixture
def client(served: Stack) -> Iterator[Client]:
    with grpc.insecure_channel(served.grpc) as channel:
        yield Client(channel, "k" * 20)


def spec(name: str = "tf-add", **fields: Any) -> Any:
    made = schema.message("tensorflow.serving.ModelSpec")(name=name)
    for field, value in fields.items():
        if field == "version":
            made.version.value = value
        else:
            setattr(made, field, value)
    return made


def tensor(array: np.ndarray[Any, Any]) -> Any:
    made = schema.message("tensorflow.TensorProto")(dtype=FLOAT, float_val=array.ravel().tolist())
    for size in array.shape:
        made.tensor_shape.dim.add(size=size)
    return made


def array_of(made: Any) -> Any:
    return np.array(made.float_val, np.float32).reshape([dim.size for dim in made.tensor_shape.dim])


def strings(values: list[bytes], *shape: int) -> Any:
    made = schema.message("tensorflow.TensorProto")(dtype=STRING, string_val=values)
    for size in shape:
        made.tensor_shape.dim.add(size=size)
    return made


def pair() -> dict[str, Any]:
    return {"a": tensor(A), "b": tensor(B)}


def examples(name: str, *rows: list[float]) -> Any:
    made = schema.message("tensorflow.serving.Input")()
    for row in rows:
        made.example_list.examples.add().features.feature[name].float_list.value.extend(row)
    return made


def refused(call: Any, *arguments: Any, **options: Any) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.RpcError) as caught:
        call(*arguments, **options)
    return caught.value.code(), caught.value.details()


@pytest.mark.parametrize(
    ("fields", "version"),
    [
        ({}, 2),
        ({"version": 0}, 2),
        ({"version": 1}, 1),
        ({"version_label": "stable"}, 2),
        ({"signature_name": "serving_default"}, 2),
    ],
)
def test_predict(client: Client, fields: dict[str, Any], version: int) -> None:
    reply = client("Predict", model_spec=spec(**fields), inputs=pair())
    assert (reply.model_spec.name, reply.model_spec.version.value) == ("tf-add", version)
    assert reply.model_spec.signature_name == "serving_default"
    np.testing.assert_array_equal(array_of(reply.outputs["sum"]), A + B)
    np.testing.assert_array_equal(array_of(reply.outputs["difference"]), A - B)


def test_predict_with_more_rows_than_a_run_takes(client: Client) -> None:
    a, b = np.tile(A, (100, 1)), np.tile(B, (100, 1))
    reply = client("Predict", model_spec=spec(), inputs={"a": tensor(a), "b": tensor(b)})
    np.testing.assert_array_equal(array_of(reply.outputs["difference"]), a - b)


def test_predict_returns_the_outputs_that_are_wanted(client: Client) -> None:
    reply = client("Predict", model_spec=spec(), inputs=pair(), output_filter=["sum"])
    assert list(reply.outputs) == ["sum"]
    code, details = refused(client, "Predict", model_spec=spec(), inputs=pair(), output_filter=["other"])
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert "output tensor alias not found in signature: other" in details


def test_predict_with_strings(client: Client) -> None:
    numbers = np.arange(6, dtype=np.float32).reshape(2, 3)
    reply = client("Predict", model_spec=spec("tf-words"), inputs={"x0": strings(WORDS, 2, 3), "x1": tensor(numbers)})
    words = reply.outputs["y0"]
    assert (words.dtype, [dim.size for dim in words.tensor_shape.dim]) == (STRING, [2, 3])
    assert (list(words.string_val), words.tensor_content) == (WORDS, b"")
    np.testing.assert_array_equal(array_of(reply.outputs["y1"]), numbers)


def test_predict_repeats_the_last_string_that_is_given(client: Client) -> None:
    numbers = tensor(np.zeros((2, 3), np.float32))
    reply = client("Predict", model_spec=spec("tf-words"), inputs={"x0": strings([b"a", b"b"], 2, 3), "x1": numbers})
    assert list(reply.outputs["y0"].string_val) == [b"a", b"b", b"b", b"b", b"b", b"b"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (strings([b"a"] * 7, 2, 3), "7 elements in 'string_val' for a tensor_shape with 6"),
        (strings([b"a"], 2, 4), "unexpected shape"),
        (strings([b"\xff"], 2, 3), "UTF-8"),
        (tensor(np.zeros((2, 3), np.float32)), "expects 'BYTES'"),
    ],
)
def test_strings_that_are_wrong(client: Client, words: Any, says: str) -> None:
    inputs = {"x0": words, "x1": tensor(np.zeros((2, 3), np.float32))}
    code, details = refused(client, "Predict", model_spec=spec("tf-words"), inputs=inputs)
    assert (code.name, says in details) == ("INVALID_ARGUMENT", True), details


@pytest.mark.parametrize(
    ("fields", "inputs", "code", "says"),
    [
        ({"name": "nothing"}, pair(), "NOT_FOUND", "Servable not found for request: Latest(nothing)"),
        ({"version": 9}, pair(), "NOT_FOUND", "Servable not found for request: Specific(tf-add, 9)"),
        ({"version_label": "canary"}, pair(), "NOT_FOUND", "Unrecognized servable version label: canary"),
        ({"signature_name": "other"}, pair(), "INVALID_ARGUMENT", 'signature name: "other" not found'),
        ({}, {"a": tensor(A)}, "INVALID_ARGUMENT", "missing required input"),
        ({}, {**pair(), "c": tensor(A)}, "INVALID_ARGUMENT", "unexpected inference input 'c'"),
        ({}, {"a": tensor(A), "b": tensor(B[:1])}, "INVALID_ARGUMENT", "batch size does not match"),
        ({}, {}, "INVALID_ARGUMENT", "missing required input"),
    ],
)
def test_a_predict_that_is_wrong(client: Client, fields: dict[str, Any], inputs: Any, code: str, says: str) -> None:
    found, details = refused(client, "Predict", model_spec=spec(**fields), inputs=inputs)
    assert (found.name, says in details) == (code, True), details


def test_classify_and_regress(client: Client) -> None:
    reply = client("Classify", model_spec=spec("tf-scores"), input=examples("x", [1, 2], [3, 4]))
    found = [[(one.label, one.score) for one in row.classes] for row in reply.result.classifications]
    assert found == [[("0", 2), ("1", 4)], [("0", 6), ("1", 8)]]
    assert reply.model_spec.version.value == 1
    reply = client("Regress", model_spec=spec("tf-value"), input=examples("x", [1], [3]))
    assert [one.value for one in reply.result.regressions] == [2, 6]
    code, details = refused(client, "Regress", model_spec=spec("tf-scores"), input=examples("x", [1, 2]))
    assert (code.name, "cannot regress" in details) == ("INVALID_ARGUMENT", True)


def test_multi_inference(client: Client) -> None:
    tasks = [
        {"model_spec": spec("tf-value"), "method_name": f"tensorflow/serving/{method}"}
        for method in ("regress", "classify")
    ]
    value, classes = client("MultiInference", tasks=tasks, input=examples("x", [1], [3])).results
    assert [one.value for one in value.regression_result.regressions] == [2, 6]
    assert classes.WhichOneof("result") == "classification_result"
    assert (value.model_spec.name, classes.model_spec.version.value) == ("tf-value", 1)
    for wrong in ([], tasks * 9, [{"model_spec": spec("tf-value"), "method_name": "other"}]):
        code, _ = refused(client, "MultiInference", tasks=wrong, input=examples("x", [1]))
        assert code is grpc.StatusCode.INVALID_ARGUMENT


def test_model_metadata(client: Client) -> None:
    reply = client("GetModelMetadata", model_spec=spec(), metadata_field=["signature_def"])
    packed = reply.metadata["signature_def"]
    assert packed.type_url == "type.googleapis.com/tensorflow.serving.SignatureDefMap"
    described = schema.message("tensorflow.serving.SignatureDefMap").FromString(packed.value)
    found = described.signature_def["serving_default"]
    assert sorted(found.inputs) == ["a", "b"]
    assert [dim.size for dim in found.outputs["sum"].tensor_shape.dim] == [-1, 4]
    assert (found.inputs["a"].dtype, found.method_name) == (FLOAT, "tensorflow/serving/predict")
    for fields, code in (([], "INVALID_ARGUMENT"), (["other"], "INVALID_ARGUMENT")):
        assert refused(client, "GetModelMetadata", model_spec=spec(), metadata_field=fields)[0].name == code


def test_model_status(client: Client) -> None:
    for asked in (spec(), spec(version=0)):  # 0: as OpenVINO Model Server's client asks
        every = client.status(model_spec=asked).model_version_status
        assert [(one.version, one.state, one.status.error_code) for one in every] == [(2, 30, 0), (1, 30, 0)]
    assert len(client.status(model_spec=spec(version_label="stable")).model_version_status) == 1
    [one] = client.status(model_spec=spec(version=1)).model_version_status
    assert one.version == 1
    assert refused(client.status, model_spec=spec("nothing"))[0] is grpc.StatusCode.NOT_FOUND


def test_a_reload_of_the_configuration_is_refused(client: Client) -> None:
    code, details = refused(client, "HandleReloadConfigRequest", service=schema.MODEL_SERVICE)
    assert (code.name, "is not supported" in details) == ("UNIMPLEMENTED", True)


def test_a_call_needs_a_key_for_its_model(served: Stack, client: Client) -> None:
    created = served.http.post("/admin/v1/keys", json={"name": "tf", "scopes": ["infer:tf-value"]})
    with grpc.insecure_channel(served.grpc) as channel:
        mine = Client(channel, created.json()["key"])
        assert mine("Regress", model_spec=spec("tf-value"), input=examples("x", [1])).result.regressions
        assert mine.status(model_spec=spec("tf-value")).model_version_status
        task = {"model_spec": spec("tf-scores"), "method_name": "tensorflow/serving/classify"}
        for method, options in (
            ("Predict", {"model_spec": spec(), "inputs": pair()}),
            ("Classify", {"model_spec": spec("tf-scores"), "input": examples("x", [1, 2])}),
            ("MultiInference", {"tasks": [task], "input": examples("x", [1, 2])}),
            ("GetModelMetadata", {"model_spec": spec(), "metadata_field": ["signature_def"]}),
        ):
            assert refused(mine, method, **options)[0] is grpc.StatusCode.PERMISSION_DENIED, method
        assert refused(mine.status, model_spec=spec())[0] is grpc.StatusCode.PERMISSION_DENIED
        assert refused(Client(channel, "wrong").status, model_spec=spec())[0] is grpc.StatusCode.UNAUTHENTICATED
    served.http.delete(f"/admin/v1/keys/{created.json()['id']}")
