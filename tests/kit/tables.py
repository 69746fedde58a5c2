"""Every way to send a table whose columns have names to a running product, for tests of each framework's models.

WAYS[name](stack, model, {column: values}, output) -> that output, or the text of the refusal
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from typing import Any

import grpc
import numpy as np
import tritonclient.grpc as triton_grpc
from tritonclient.grpc import service_pb2 as pb
from tritonclient.utils import InferenceServerException

from millstream.services.model.datatypes import encode_elements
from tests.kit.stack import CALL_S_MAX, Stack

Table = Mapping[str, Sequence[Any]]
Way = Callable[[Stack, str, Table, str], Any]

_STRING = 7
_NUMPY_OF_TF = {9: ("int64_val", np.int64), 2: ("double_val", np.float64), 10: ("bool_val", np.bool_)}


def _posted(stack: Stack, path: str, body: Any, output: str, **headers: str) -> Any:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    reply = stack.http.post(path, content=content, headers={"Content-Type": "application/json", **headers})
    if reply.status_code != 200:
        document = reply.json()
        return f"{reply.status_code} {document.get('error', document.get('message'))}"
    document = json.loads(reply.text)
    found = document.get("predictions", document) if isinstance(document, dict) else document
    if isinstance(found, list):  # rows
        return np.array([one[output] if isinstance(one, dict) else one for one in found])
    if "outputs" not in found:
        return np.array(found[output])
    outputs = found["outputs"]
    if isinstance(outputs, list) and isinstance(outputs[0], dict):  # v2
        one = next(one for one in outputs if one["name"] == output)
        return np.array(one["data"]).reshape(one["shape"])
    return np.array(outputs[output] if isinstance(outputs, dict) else outputs)


def _records(table: Table) -> list[dict[str, Any]]:
    return [dict(zip(table, row, strict=True)) for row in zip(*table.values(), strict=True)]


def _to_invocations(body: Callable[[Table], Any], content_type: str = "application/json") -> Way:
    def send(stack: Stack, model: str, table: Table, output: str) -> Any:
        headers = {"X-Amzn-SageMaker-Target-Model": model, "Content-Type": content_type}
        return _posted(stack, "/invocations", body(table), output, **headers)

    return send


def _split(table: Table) -> Any:
    return {"dataframe_split": {"columns": list(table), "data": [list(one.values()) for one in _records(table)]}}


def _csv(table: Table) -> bytes:
    file = io.StringIO()
    csv.writer(file).writerows([list(table), *zip(*table.values(), strict=True)])
    return file.getvalue().encode()


def _to_v1(body: Callable[[Table], Any]) -> Way:
    return lambda stack, model, table, output: _posted(stack, f"/v1/models/{model}:predict", body(table), output)


def _array(values: Sequence[Any]) -> np.ndarray[Any, Any]:
    text = any(isinstance(value, str) for value in values)
    return np.array(values, object) if text else np.array([np.nan if one is None else one for one in values])


def _datatype(array: np.ndarray[Any, Any]) -> str:
    return {"O": "BYTES", "b": "BOOL", "i": "INT64", "f": "FP64"}[array.dtype.kind]


def _v2_json(stack: Stack, model: str, table: Table, output: str) -> Any:
    inputs = []
    for name, values in table.items():
        array = _array(values)
        inputs.append({"name": name, "shape": [len(array)], "datatype": _datatype(array), "data": array.tolist()})
    return _posted(stack, f"/v2/models/{model}/infer", {"inputs": inputs}, output)


def _decoded(found: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    text = found.dtype == object
    return np.array([one.decode() for one in found.ravel()]).reshape(found.shape) if text else found


def _v2_binary(stack: Stack, model: str, table: Table, output: str) -> Any:
    inputs, raws = [], []
    for name, values in table.items():
        array = _array(values)
        raws.append(array.tobytes() if array.dtype != object else encode_elements(one.encode() for one in array))
        size = {"binary_data_size": len(raws[-1])}
        inputs.append({"name": name, "shape": [len(array), 1], "datatype": _datatype(array), "parameters": size})
    text = json.dumps({"inputs": inputs}).encode()
    headers = {"Content-Type": "application/octet-stream", "Inference-Header-Content-Length": str(len(text))}
    return _posted(stack, f"/v2/models/{model}/infer", text + b"".join(raws), output, **headers)


def _triton_http(stack: Stack, model: str, table: Table, output: str) -> Any:
    from tritonclient import http  # not in every environment of the tests

    return _by_triton(http, stack.url.removeprefix("http://"), stack, model, table, output)


def _triton_grpc(stack: Stack, model: str, table: Table, output: str) -> Any:
    return _by_triton(triton_grpc, stack.grpc, stack, model, table, output)


def _by_triton(library: Any, address: str, stack: Stack, model: str, table: Table, output: str) -> Any:
    inputs = []
    for name, values in table.items():
        array = _array(values).reshape(-1, 1)
        inputs.append(library.InferInput(name, list(array.shape), _datatype(array)))
        inputs[-1].set_data_from_numpy(array)
    headers = {name.lower(): value for name, value in stack.headers.items()}
    with library.InferenceServerClient(address) as client:
        try:
            found = client.infer(model, inputs, headers=headers).as_numpy(output)
        except InferenceServerException as error:
            return f"400 {error.message()}"
    return _decoded(found)


def _typed_grpc(stack: Stack, model: str, table: Table, output: str) -> Any:
    """A call with typed contents, as other clients than Triton's send them."""
    request = pb.ModelInferRequest(model_name=model)
    for name, values in table.items():
        array = _array(values)
        made = request.inputs.add(name=name, shape=[len(array)], datatype=_datatype(array))
        field = {"BYTES": "bytes_contents", "BOOL": "bool_contents", "INT64": "int64_contents"}
        elements = [one.encode() for one in array] if array.dtype == object else array.tolist()
        getattr(made.contents, field.get(made.datatype, "fp64_contents")).extend(elements)
    with grpc.insecure_channel(stack.grpc) as channel:
        call = channel.unary_unary(
            "/inference.GRPCInferenceService/ModelInfer",
            pb.ModelInferRequest.SerializeToString,
            pb.ModelInferResponse.FromString,
        )
        try:
            reply = call(request, timeout=CALL_S_MAX, metadata=[("authorization", stack.headers["Authorization"])])
        except grpc.RpcError as error:
            return f"400 {error.details()}"
    return _decoded(triton_grpc.InferResult(reply).as_numpy(output))


def _tensorflow(stack: Stack, model: str, table: Table, output: str) -> Any:
    from millstream.plugins.compat.tfserving.grpc import schema  # the core's tests run without it

    request = schema.request_of(schema.PREDICTION_SERVICE, "Predict")()
    request.model_spec.name = model
    for name, values in table.items():
        array = _array(values)
        tensor = request.inputs[name]
        tensor.tensor_shape.dim.add(size=len(array))
        number = {"O": _STRING, "b": 10, "i": 9, "f": 2}[array.dtype.kind]
        tensor.dtype = number
        if number == _STRING:
            tensor.string_val.extend([one.encode() for one in array])
        else:
            getattr(tensor, _NUMPY_OF_TF[number][0]).extend(array.tolist())
    with grpc.insecure_channel(stack.grpc) as channel:
        call = channel.unary_unary(
            f"/{schema.PREDICTION_SERVICE}/Predict",
            type(request).SerializeToString,
            schema.response_of(schema.PREDICTION_SERVICE, "Predict").FromString,
        )
        try:
            reply = call(request, timeout=CALL_S_MAX, metadata=[("authorization", stack.headers["Authorization"])])
        except grpc.RpcError as error:
            return f"400 {error.details()}"
    found = reply.outputs[output]
    shape = [dim.size for dim in found.tensor_shape.dim]
    fields = {1: found.float_val, 2: found.double_val, 9: found.int64_val, _STRING: found.string_val}
    values = fields[found.dtype]
    return np.array([one.decode() for one in values] if found.dtype == _STRING else values).reshape(shape)


def _torchserve(stack: Stack, model: str, table: Table, output: str) -> Any:
    return _posted(stack, f"/predictions/{model}", {name: list(values) for name, values in table.items()}, output)


WAYS: dict[str, Way] = {
    "dataframe_split": _to_invocations(_split),
    "dataframe_records": _to_invocations(lambda table: {"dataframe_records": _records(table)}),
    "csv": _to_invocations(_csv, "text/csv"),
    "instances": _to_v1(lambda table: {"instances": _records(table)}),
    "columnar inputs": _to_v1(lambda table: {"inputs": {name: list(values) for name, values in table.items()}}),
    "v2": _v2_json,
    "v2 binary": _v2_binary,
    "tritonclient.grpc": _triton_grpc,
    "typed gRPC": _typed_grpc,
    "TensorFlow's gRPC": _tensorflow,
    "TorchServe": _torchserve,
}
if find_spec("geventhttpclient") is not None:
    WAYS["tritonclient.http"] = _triton_http
