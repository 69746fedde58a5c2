"""TensorFlow Serving's own gRPC client, with TensorFlow's messages, against a running product."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import tensorflow as tf
from google.protobuf.descriptor import Descriptor
from tensorflow_serving.apis import (
    classification_pb2,
    get_model_metadata_pb2,
    get_model_status_pb2,
    inference_pb2,
    model_service_pb2,
    model_service_pb2_grpc,
    predict_pb2,
    prediction_service_pb2,
    prediction_service_pb2_grpc,
    regression_pb2,
)

from millstream.plugins.compat.tfserving.grpc import schema
from tests.kit import models
from tests.kit.stack import Stack, running_stack

pytestmark = pytest.mark.frameworks

A = np.arange(8, dtype=np.float32).reshape(2, 4)
B = A * 10 + 1


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("stack")
    with running_stack(folder) as running:
        running.push("add", models.add_sub(folder / "add.onnx"))
        running.push("scores", models.scale(folder / "scores.onnx", columns=2))
        running.push("value", models.scale(folder / "value.onnx", columns=1))
        yield running


@pytest.fixture
def channel(stack: Stack) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(stack.grpc) as channel:
        yield channel


@pytest.fixture
def prediction(channel: grpc.Channel) -> Any:
    return prediction_service_pb2_grpc.PredictionServiceStub(channel)


def example(values: list[float]) -> Any:
    feature = tf.train.Feature(float_list=tf.train.FloatList(value=values))
    return tf.train.Example(features=tf.train.Features(feature={"x": feature}))


def test_predict(prediction: Any) -> None:
    request = predict_pb2.PredictRequest()
    request.model_spec.name = "add"
    request.inputs["a"].CopyFrom(tf.make_tensor_proto(A))
    request.inputs["b"].CopyFrom(tf.make_tensor_proto(B))
    reply = prediction.Predict(request, timeout=300)
    np.testing.assert_array_equal(tf.make_ndarray(reply.outputs["sum"]), A + B)
    np.testing.assert_array_equal(tf.make_ndarray(reply.outputs["difference"]), A - B)
    assert reply.model_spec.version.value == 1


def test_classify_regress_and_both(prediction: Any) -> None:
    request = classification_pb2.ClassificationRequest()
    request.model_spec.name = "scores"
    request.input.example_list.examples.append(example([1, 2]))
    [row] = prediction.Classify(request, timeout=300).result.classifications
    assert [(one.label, one.score) for one in row.classes] == [("0", 2), ("1", 4)]
    regress = regression_pb2.RegressionRequest()
    regress.model_spec.name = "value"
    regress.input.example_list.examples.append(example([3]))
    assert [one.value for one in prediction.Regress(regress, timeout=300).result.regressions] == [6]
    both = inference_pb2.MultiInferenceRequest(input=regress.input)
    both.tasks.add(method_name="tensorflow/serving/regress").model_spec.name = "value"
    [answer] = prediction.MultiInference(both, timeout=300).results
    assert answer.regression_result.regressions[0].value == 6


def test_metadata_and_status(prediction: Any, channel: grpc.Channel) -> None:
    request = get_model_metadata_pb2.GetModelMetadataRequest(metadata_field=["signature_def"])
    request.model_spec.name = "add"
    described = get_model_metadata_pb2.SignatureDefMap()
    assert prediction.GetModelMetadata(request, timeout=300).metadata["signature_def"].Unpack(described)
    signature = described.signature_def["serving_default"]
    assert tf.dtypes.as_dtype(signature.inputs["a"].dtype) is tf.float32
    assert tf.TensorShape(signature.outputs["sum"].tensor_shape).as_list() == [None, 4]
    status = get_model_status_pb2.GetModelStatusRequest()
    status.model_spec.name = "add"
    [found] = model_service_pb2_grpc.ModelServiceStub(channel).GetModelStatus(status, timeout=300).model_version_status
    assert found.state == get_model_status_pb2.ModelVersionStatus.AVAILABLE


def test_an_unknown_model(prediction: Any) -> None:
    request = predict_pb2.PredictRequest()
    request.model_spec.name = "nothing"
    with pytest.raises(grpc.RpcError, match="Servable not found") as caught:
        prediction.Predict(request, timeout=300)
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


def test_every_datatype_as_tensorflow_writes_it(stack: Stack, tmp_path: Path, prediction: Any) -> None:
    kinds = {
        "BOOL": tf.bool,
        "BYTES": tf.string,
        "FP16": tf.float16,
        "FP32": tf.float32,
        "FP64": tf.float64,
        **{f"INT{bits}": getattr(tf, f"int{bits}") for bits in (8, 16, 32, 64)},
        **{f"UINT{bits}": getattr(tf, f"uint{bits}") for bits in (8, 16, 32, 64)},
    }
    stack.push("kinds", models.identities(tmp_path / "kinds.onnx", datatypes=tuple(kinds)))
    request = predict_pb2.PredictRequest()
    request.model_spec.name = "kinds"
    sent = {}
    for number, kind in enumerate(kinds.values()):
        sent[number] = tf.cast([[0, 1, 1]], kind) if kind is not tf.string else tf.constant([["a", "", "é"]])
        request.inputs[f"x{number}"].CopyFrom(tf.make_tensor_proto(sent[number]))
    reply = prediction.Predict(request, timeout=300)
    for number, value in sent.items():
        np.testing.assert_array_equal(tf.make_ndarray(reply.outputs[f"y{number}"]), value.numpy())


def fields_of(kind: Descriptor) -> dict[str, tuple[int, int, bool]]:
    return {one.name: (one.number, one.type, one.is_repeated) for one in kind.fields}


def same(ours: Descriptor, theirs: Descriptor, seen: set[str]) -> None:
    """Check that each field of our message is a field of TensorFlow's, with its number and type."""
    if ours.full_name in seen:
        return
    seen.add(ours.full_name)
    known = fields_of(theirs)
    for field in ours.fields:
        assert fields_of(ours)[field.name] == known[field.name], (ours.full_name, field.name)
        other = theirs.fields_by_name[field.name]
        if field.message_type is not None:
            assert field.message_type.full_name == other.message_type.full_name
            same(field.message_type, other.message_type, seen)
        if field.enum_type is not None:
            numbers = {value.name: value.number for value in other.enum_type.values}
            assert {value.name: value.number for value in field.enum_type.values}.items() <= numbers.items()


def test_our_messages_are_tensorflows() -> None:
    seen: set[str] = set()
    for file in (prediction_service_pb2, model_service_pb2):
        for service in file.DESCRIPTOR.services_by_name.values():
            for method in service.methods:
                same(schema.request_of(service.full_name, method.name).DESCRIPTOR, method.input_type, seen)
                same(schema.response_of(service.full_name, method.name).DESCRIPTOR, method.output_type, seen)
    described = schema.message("tensorflow.serving.SignatureDefMap").DESCRIPTOR
    same(described, get_model_metadata_pb2.SignatureDefMap.DESCRIPTOR, seen)
    assert {"tensorflow.TensorProto", "tensorflow.SignatureDef", "tensorflow.Feature"} <= seen
