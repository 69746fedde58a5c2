"""The messages and services of TensorFlow Serving, without TensorFlow: names and field numbers alone.

They are in a pool of their own: a process may also import TensorFlow's.
Source: the public API of tensorflow/serving (tensorflow_serving/apis) and of tensorflow/tensorflow (core/framework,
core/example, core/protobuf).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from google.protobuf import any_pb2, descriptor_pool, message_factory, wrappers_pb2
from google.protobuf.descriptor_pb2 import DescriptorProto, FieldDescriptorProto, FileDescriptorProto

PREDICTION_SERVICE = "tensorflow.serving.PredictionService"
MODEL_SERVICE = "tensorflow.serving.ModelService"

#: by full name; a field is its number, its name and its type, which `repeated`, `map` (from strings) or `oneof NAME`
#: may precede. Fields that are not read here are left out: the parser keeps what it does not know apart
_MESSAGES: dict[str, tuple[str, ...]] = {
    "tensorflow.TensorShapeProto": ("2 dim repeated tensorflow.TensorShapeProto.Dim", "3 unknown_rank bool"),
    "tensorflow.TensorShapeProto.Dim": ("1 size int64", "2 name string"),
    "tensorflow.TensorProto": (
        "1 dtype tensorflow.DataType",
        "2 tensor_shape tensorflow.TensorShapeProto",
        "3 version_number int32",
        "4 tensor_content bytes",
        "5 float_val repeated float",
        "6 double_val repeated double",
        "7 int_val repeated int32",
        "8 string_val repeated bytes",
        "10 int64_val repeated int64",
        "11 bool_val repeated bool",
        "13 half_val repeated int32",
        "16 uint32_val repeated uint32",
        "17 uint64_val repeated uint64",
    ),
    "tensorflow.TensorInfo": (
        "1 name oneof encoding string",
        "2 dtype tensorflow.DataType",
        "3 tensor_shape tensorflow.TensorShapeProto",
    ),
    "tensorflow.SignatureDef": (
        "1 inputs map tensorflow.TensorInfo",
        "2 outputs map tensorflow.TensorInfo",
        "3 method_name string",
    ),
    "tensorflow.BytesList": ("1 value repeated bytes",),
    "tensorflow.FloatList": ("1 value repeated float",),
    "tensorflow.Int64List": ("1 value repeated int64",),
    "tensorflow.Feature": (
        "1 bytes_list oneof kind tensorflow.BytesList",
        "2 float_list oneof kind tensorflow.FloatList",
        "3 int64_list oneof kind tensorflow.Int64List",
    ),
    "tensorflow.Features": ("1 feature map tensorflow.Feature",),
    "tensorflow.Example": ("1 features tensorflow.Features",),
    "tensorflow.serving.ModelSpec": (
        "1 name string",
        "2 version oneof version_choice google.protobuf.Int64Value",
        "3 signature_name string",
        "4 version_label oneof version_choice string",
    ),
    "tensorflow.serving.PredictRequest": (
        "1 model_spec tensorflow.serving.ModelSpec",
        "2 inputs map tensorflow.TensorProto",
        "3 output_filter repeated string",
    ),
    "tensorflow.serving.PredictResponse": (
        "1 outputs map tensorflow.TensorProto",
        "2 model_spec tensorflow.serving.ModelSpec",
    ),
    "tensorflow.serving.ExampleList": ("1 examples repeated tensorflow.Example",),
    "tensorflow.serving.ExampleListWithContext": (
        "1 examples repeated tensorflow.Example",
        "2 context tensorflow.Example",
    ),
    "tensorflow.serving.Input": (
        "1 example_list oneof kind tensorflow.serving.ExampleList",
        "2 example_list_with_context oneof kind tensorflow.serving.ExampleListWithContext",
    ),
    "tensorflow.serving.Class": ("1 label string", "2 score float"),
    "tensorflow.serving.Classifications": ("1 classes repeated tensorflow.serving.Class",),
    "tensorflow.serving.ClassificationResult": ("1 classifications repeated tensorflow.serving.Classifications",),
    "tensorflow.serving.ClassificationRequest": (
        "1 model_spec tensorflow.serving.ModelSpec",
        "2 input tensorflow.serving.Input",
    ),
    "tensorflow.serving.ClassificationResponse": (
        "1 result tensorflow.serving.ClassificationResult",
        "2 model_spec tensorflow.serving.ModelSpec",
    ),
    "tensorflow.serving.Regression": ("1 value float",),
    "tensorflow.serving.RegressionResult": ("1 regressions repeated tensorflow.serving.Regression",),
    "tensorflow.serving.RegressionRequest": (
        "1 model_spec tensorflow.serving.ModelSpec",
        "2 input tensorflow.serving.Input",
    ),
    "tensorflow.serving.RegressionResponse": (
        "1 result tensorflow.serving.RegressionResult",
        "2 model_spec tensorflow.serving.ModelSpec",
    ),
    "tensorflow.serving.InferenceTask": ("1 model_spec tensorflow.serving.ModelSpec", "2 method_name string"),
    "tensorflow.serving.InferenceResult": (
        "1 model_spec tensorflow.serving.ModelSpec",
        "2 classification_result oneof result tensorflow.serving.ClassificationResult",
        "3 regression_result oneof result tensorflow.serving.RegressionResult",
    ),
    "tensorflow.serving.MultiInferenceRequest": (
        "1 tasks repeated tensorflow.serving.InferenceTask",
        "2 input tensorflow.serving.Input",
    ),
    "tensorflow.serving.MultiInferenceResponse": ("1 results repeated tensorflow.serving.InferenceResult",),
    "tensorflow.serving.SignatureDefMap": ("1 signature_def map tensorflow.SignatureDef",),
    "tensorflow.serving.GetModelMetadataRequest": (
        "1 model_spec tensorflow.serving.ModelSpec",
        "2 metadata_field repeated string",
    ),
    "tensorflow.serving.GetModelMetadataResponse": (
        "1 model_spec tensorflow.serving.ModelSpec",
        "2 metadata map google.protobuf.Any",
    ),
    "tensorflow.serving.StatusProto": ("1 error_code tensorflow.error.Code", "2 error_message string"),
    "tensorflow.serving.ModelVersionStatus": (
        "1 version int64",
        "2 state tensorflow.serving.ModelVersionStatus.State",
        "3 status tensorflow.serving.StatusProto",
    ),
    "tensorflow.serving.GetModelStatusRequest": ("1 model_spec tensorflow.serving.ModelSpec",),
    "tensorflow.serving.GetModelStatusResponse": (
        "1 model_version_status repeated tensorflow.serving.ModelVersionStatus",
    ),
    "tensorflow.serving.ReloadConfigRequest": (),
    "tensorflow.serving.ReloadConfigResponse": ("1 status tensorflow.serving.StatusProto",),
}

_ENUMS: dict[str, dict[str, int]] = {
    "tensorflow.DataType": {
        "DT_INVALID": 0,
        "DT_FLOAT": 1,
        "DT_DOUBLE": 2,
        "DT_INT32": 3,
        "DT_UINT8": 4,
        "DT_INT16": 5,
        "DT_INT8": 6,
        "DT_STRING": 7,
        "DT_COMPLEX64": 8,
        "DT_INT64": 9,
        "DT_BOOL": 10,
        "DT_BFLOAT16": 14,
        "DT_UINT16": 17,
        "DT_COMPLEX128": 18,
        "DT_HALF": 19,
        "DT_UINT32": 22,
        "DT_UINT64": 23,
    },
    "tensorflow.error.Code": {"OK": 0, "CANCELLED": 1, "UNKNOWN": 2},
    "tensorflow.serving.ModelVersionStatus.State": {
        "UNKNOWN": 0,
        "START": 10,
        "LOADING": 20,
        "AVAILABLE": 30,
        "UNLOADING": 40,
        "END": 50,
    },
}

_SERVICES: dict[str, dict[str, tuple[str, str]]] = {
    PREDICTION_SERVICE: {
        "Predict": ("PredictRequest", "PredictResponse"),
        "Classify": ("ClassificationRequest", "ClassificationResponse"),
        "Regress": ("RegressionRequest", "RegressionResponse"),
        "MultiInference": ("MultiInferenceRequest", "MultiInferenceResponse"),
        "GetModelMetadata": ("GetModelMetadataRequest", "GetModelMetadataResponse"),
    },
    MODEL_SERVICE: {
        "GetModelStatus": ("GetModelStatusRequest", "GetModelStatusResponse"),
        "HandleReloadConfigRequest": ("ReloadConfigRequest", "ReloadConfigResponse"),
    },
}
#: packages in the order of their needs; the rest of a message's name says in which other message it is
_PACKAGES = ("tensorflow.error", "tensorflow.serving", "tensorflow")
_TYPES = {
    name: getattr(FieldDescriptorProto, f"TYPE_{name.upper()}")
    for name in ("bool", "bytes", "double", "float", "int32", "int64", "string", "uint32", "uint64")
}


def _package_of(name: str) -> str:
    return next(package for package in _PACKAGES if name.startswith(f"{package}."))


def _file(package: str, needed: Iterable[str]) -> FileDescriptorProto:
    """Return the file with all of a package."""
    file = FileDescriptorProto(name=f"{package.replace('.', '/')}.proto", package=package, syntax="proto3")
    file.dependency.extend(needed)
    made: dict[str, Any] = {}
    for name, fields in _MESSAGES.items():
        if _package_of(name) == package:
            outer, _, short = name.rpartition(".")
            message = made[name] = (made[outer].nested_type if outer in made else file.message_type).add(name=short)
            for field in fields:
                _add_field(message, name, field)
    for name, values in _ENUMS.items():
        if _package_of(name) == package:
            outer, _, short = name.rpartition(".")
            enum = made.get(outer, file).enum_type.add(name=short)
            for value, number in values.items():
                enum.value.add(name=value, number=number)
    for name, methods in _SERVICES.items():
        if _package_of(name) == package:
            service = file.service.add(name=name.rpartition(".")[2])
            for method, (request, reply) in methods.items():
                service.method.add(name=method, input_type=f".{package}.{request}", output_type=f".{package}.{reply}")
    return file


def _add_field(message: DescriptorProto, full_name: str, text: str) -> None:
    """Add a field that is written as in `_MESSAGES`."""
    number, name, *how, kind = text.split()
    field = message.field.add(name=name, number=int(number), label=FieldDescriptorProto.LABEL_OPTIONAL)
    _set_type(field, kind)
    if how == ["repeated"]:
        field.label = FieldDescriptorProto.LABEL_REPEATED
    elif how == ["map"]:
        entry = message.nested_type.add(name=f"{name.title().replace('_', '')}Entry")
        entry.options.map_entry = True
        entry.field.add(name="key", number=1, label=1, type=FieldDescriptorProto.TYPE_STRING)
        _set_type(entry.field.add(name="value", number=2, label=1), kind)
        field.label = FieldDescriptorProto.LABEL_REPEATED
        _set_type(field, f"{full_name}.{entry.name}")
    elif how:
        names = [one.name for one in message.oneof_decl]
        if how[1] not in names:
            message.oneof_decl.add(name=how[1])
            names.append(how[1])
        field.oneof_index = names.index(how[1])


def _set_type(field: FieldDescriptorProto, kind: str) -> None:
    if kind in _TYPES:
        field.type = _TYPES[kind]
    else:
        field.type = FieldDescriptorProto.TYPE_ENUM if kind in _ENUMS else FieldDescriptorProto.TYPE_MESSAGE
        field.type_name = f".{kind}"


def _pool() -> descriptor_pool.DescriptorPool:
    pool = descriptor_pool.DescriptorPool()
    needed = [any_pb2.DESCRIPTOR.name, wrappers_pb2.DESCRIPTOR.name]
    for file in (any_pb2, wrappers_pb2):
        pool.AddSerializedFile(file.DESCRIPTOR.serialized_pb)
    for package in ("tensorflow.error", "tensorflow", "tensorflow.serving"):
        made = _file(package, needed if package == "tensorflow.serving" else ())
        pool.AddSerializedFile(made.SerializeToString())
        needed.append(made.name)
    return pool


_POOL = _pool()
#: the file with both services
FILE: Any = _POOL.FindServiceByName(PREDICTION_SERVICE).file


def message(name: str) -> Any:
    """Return the class of a message, by its full name."""
    return message_factory.GetMessageClass(_POOL.FindMessageTypeByName(name))


def request_of(service: str, method: str) -> Any:
    """Return the class of a method's request."""
    return message(f"tensorflow.serving.{_SERVICES[service][method][0]}")


def response_of(service: str, method: str) -> Any:
    """Return the class of a method's response."""
    return message(f"tensorflow.serving.{_SERVICES[service][method][1]}")
