"""Answers the calls of TensorFlow Serving's PredictionService and ModelService.

request ─> version ─> inputs ─> Caller ─> outputs ─> response
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from google.protobuf.json_format import ParseDict

from millstream.gateway.grpc.codec.parse_cost import ANY, Fields
from millstream.gateway.grpc.methods.service import GrpcService, Method
from millstream.gateway.http.deps import Deps
from millstream.gateway.scheduling.caller import RequestOptions, infer_arrays
from millstream.gateway.scheduling.model_route import ModelRoute
from millstream.gateway.tensors.input_plans import InputPlans, Inputs, join
from millstream.gateway.tensors.json_document import excerpt
from millstream.gateway.tensors.named_columns import columns_given, from_columns, plans_of_columns
from millstream.gateway.tensors.outputs import OutputTensor, size_of
from millstream.gateway.tensors.prepared import read_prepared
from millstream.plugins.compat.tfserving import documents
from millstream.plugins.compat.tfserving.grpc.examples import read_input, write_classes, write_values
from millstream.plugins.compat.tfserving.grpc.schema import FILE, message
from millstream.plugins.compat.tfserving.grpc.tensors import form_of, read_tensor, write_tensor
from millstream.plugins.compat.tfserving.lookup import find_route, find_view, version_of_label
from millstream.plugins.compat.tfserving.predict import SIGNATURE_NAME, check_signature_name, of_classes
from millstream.services.access.scopes import Need, Row
from millstream.services.errors import Code, Failure, invalid
from millstream.services.process.threads import run_in_thread_if_large

#: tasks of a MultiInference call; each is a request
TASKS_MAX = 16
_CLASSIFY, _REGRESS = "tensorflow/serving/classify", "tensorflow/serving/regress"
_TYPE_URL = "type.googleapis.com/tensorflow.serving.SignatureDefMap"

_PredictResponse = message("tensorflow.serving.PredictResponse")
_ClassificationResponse = message("tensorflow.serving.ClassificationResponse")
_RegressionResponse = message("tensorflow.serving.RegressionResponse")
_MultiInferenceResponse = message("tensorflow.serving.MultiInferenceResponse")
_GetModelMetadataResponse = message("tensorflow.serving.GetModelMetadataResponse")
_SignatureDefMap = message("tensorflow.serving.SignatureDefMap")
_GetModelStatusResponse = message("tensorflow.serving.GetModelStatusResponse")

Read = Callable[[InputPlans], Inputs]


class PredictionCalls:
    """Handles the calls of PredictionService: each method takes a request message and returns the reply message.

    Args:
        deps: the parts of the gateway.
    """

    def __init__(self, deps: Deps) -> None:
        self._deps = deps
        self._bytes_max = deps.settings.request_bytes_max

    async def predict(self, request: Any, context: Any) -> Any:
        """Run a version. Raises Failure."""
        route = self._route(request.model_spec)
        wanted = _filtered(route, request.output_filter)

        def read(plans: InputPlans) -> Inputs:
            try:
                return self._joined(plans, request.inputs)
            except Failure as failure:
                columns = columns_given(plans, failure, request.inputs)
            sent = plans_of_columns(plans, columns, [(name, *form_of(one)) for name, one in request.inputs.items()])
            return from_columns(columns, sent, self._joined(sent, request.inputs).tensors)

        outputs = await self._run(route, read, request.ByteSize(), context)
        response = _PredictResponse()
        _write_spec(response.model_spec, route)
        named = {spec.name: output for spec, output in zip(route.plans.signature.outputs, outputs, strict=True)}

        def write() -> None:
            for name in wanted:
                write_tensor(named[name], response.outputs[name])

        await run_in_thread_if_large(size_of(outputs), write)
        return response

    def _joined(self, plans: InputPlans, tensors: Any) -> Inputs:
        return join(plans, {name: read_tensor(plans.named(name), tensors[name], self._bytes_max) for name in tensors})

    async def classify(self, request: Any, context: Any) -> Any:
        """Return classes and scores of examples. Raises Failure."""
        response = _ClassificationResponse()
        await self._infer(request.model_spec, _CLASSIFY, request.input, response, response.result, context)
        return response

    async def regress(self, request: Any, context: Any) -> Any:
        """Return a value for each example. Raises Failure."""
        response = _RegressionResponse()
        await self._infer(request.model_spec, _REGRESS, request.input, response, response.result, context)
        return response

    async def multi_inference(self, request: Any, context: Any) -> Any:
        """Classify and regress the same examples, a task after the other. Raises Failure."""
        if not 0 < len(request.tasks) <= TASKS_MAX:
            raise invalid(f"a MultiInferenceRequest has 1 to {TASKS_MAX} tasks")
        response = _MultiInferenceResponse()
        for task in request.tasks:
            made = response.results.add()
            result = made.regression_result if task.method_name == _REGRESS else made.classification_result
            await self._infer(task.model_spec, task.method_name, request.input, made, result, context)
        return response

    async def get_model_metadata(self, request: Any, _: Any) -> Any:
        """Return the signature of a version. Raises Failure."""
        fields = list(request.metadata_field)
        if not fields:
            raise invalid("GetModelMetadataRequest must specify at least one metadata_field")
        for field in fields:
            if field != "signature_def":
                raise invalid(f"Metadata field {excerpt(field)} is not supported")
        manifest = find_view(self._deps, request.model_spec.name, _version(request.model_spec))[1].manifest
        document = documents.model_metadata(manifest)
        response = _GetModelMetadataResponse()
        response.model_spec.name = manifest.model
        response.model_spec.version.value = manifest.version
        packed = response.metadata["signature_def"]
        packed.type_url = _TYPE_URL
        packed.value = ParseDict(document["metadata"]["signature_def"], _SignatureDefMap()).SerializeToString()
        return response

    async def _infer(self, spec: Any, method: str, examples: Any, response: Any, result: Any, context: Any) -> None:
        """Run the examples, and write their results and the version that answered."""
        if method not in {_CLASSIFY, _REGRESS}:
            raise invalid(f"Unsupported signature method_name: {excerpt(method)}")
        route = self._route(spec)
        outputs = await self._run(route, lambda plans: read_input(plans, examples), examples.ByteSize(), context)
        result.SetInParent()
        if method == _CLASSIFY:
            scores, labels = of_classes(route.extensions, outputs)
            write_classes(scores, labels, result)
        else:
            write_values(outputs, result)
        _write_spec(response.model_spec, route)

    def _route(self, spec: Any) -> ModelRoute:
        check_signature_name({"signature_name": spec.signature_name})
        return find_route(self._deps, spec.name, _version(spec))

    async def _run(self, route: ModelRoute, read: Read, size_bytes: int, context: Any) -> list[OutputTensor]:
        caller = self._deps.caller("tfserving")
        with caller.count_rejections(route):
            inputs, prepared = await run_in_thread_if_large(size_bytes, read_prepared, route.plans, read)
            if prepared is not None:
                inputs = await prepared.prepare(inputs.tensors)
        remaining_s = context.time_remaining()
        timeout_s = None if remaining_s is None else min(route.timeout_s, remaining_s)
        return await infer_arrays(caller, route, inputs, RequestOptions(timeout_s))


class ModelCalls:
    """Handles the calls of ModelService.

    Args:
        deps: the parts of the gateway.
    """

    def __init__(self, deps: Deps) -> None:
        self._deps = deps

    async def get_model_status(self, request: Any, _: Any) -> Any:
        """Return the states of a version, or of all versions of a model. Raises Failure."""
        spec = request.model_spec
        version = _version(spec)
        view, wanted = find_view(self._deps, spec.name, version)
        every = version is None and spec.WhichOneof("version_choice") != "version_label"
        document = documents.model_status(view, wanted, ready=wanted.available, all_versions=every)
        states = {"model_version_status": document["model_version_status"]}
        return ParseDict(states, _GetModelStatusResponse())

    async def handle_reload_config_request(self, _: Any, __: Any) -> Any:
        """Refuse: the repository says which models are served."""
        raise Failure(
            Code.UNSUPPORTED, "HandleReloadConfigRequest is not supported: upload models, or load them over /v2"
        )


def _version(spec: Any) -> str | None:
    """Return the version that a ModelSpec names; None: the serving one. Raises Failure(NOT_FOUND)."""
    choice = spec.WhichOneof("version_choice")
    if choice == "version_label":
        return version_of_label(spec.version_label)
    # No version is 0 here; clients of OpenVINO Model Server send it for the serving one.
    return None if choice is None or not spec.version.value else str(spec.version.value)


def _filtered(route: ModelRoute, names: Any) -> list[str]:
    """Return the names of the outputs that a caller wants. Raises Failure(INVALID)."""
    known = [spec.name for spec in route.plans.signature.outputs]
    for name in names:
        if name not in known:
            raise invalid(f"output tensor alias not found in signature: {excerpt(name)}; there are {', '.join(known)}")
    return list(dict.fromkeys(names)) or [spec.name for spec in route.plans.signature.outputs if not spec.on_request]


def _write_spec(spec: Any, route: ModelRoute) -> None:
    manifest = route.lane.manifest
    spec.name = manifest.model
    spec.version.value = manifest.version
    spec.signature_name = SIGNATURE_NAME


_SERVICES = FILE.services_by_name
#: of a PredictRequest: inputs, their shapes and dimensions (2: the value of an entry of a map)
_PREDICT: Fields = {1: {}, 2: {2: {2: {2: {}}}}}
#: of requests with examples: Input, Example, Features, Feature
_EXAMPLE: Fields = {1: {1: {2: {1: {}, 2: {}, 3: {}}}}}
_EXAMPLES: Fields = {1: {}, 2: {1: {1: _EXAMPLE}, 2: {1: _EXAMPLE, 2: _EXAMPLE}}}
_RUN, _DESCRIBE = Row(Need.INFER, "model_spec.name"), Row(Need.DESCRIBE, "model_spec.name")

PREDICTION = GrpcService(
    _SERVICES["PredictionService"],
    lambda deps, _: PredictionCalls(deps),
    {
        "Predict": Method(PredictionCalls.predict, _RUN, _PREDICT),
        "Classify": Method(PredictionCalls.classify, _RUN, _EXAMPLES),
        "Regress": Method(PredictionCalls.regress, _RUN, _EXAMPLES),
        "MultiInference": Method(PredictionCalls.multi_inference, Row(Need.INFER), _EXAMPLES),
        "GetModelMetadata": Method(PredictionCalls.get_model_metadata, _DESCRIBE, ANY),
    },
)
MODEL = GrpcService(
    _SERVICES["ModelService"],
    lambda deps, _: ModelCalls(deps),
    {
        "GetModelStatus": Method(ModelCalls.get_model_status, _DESCRIBE, ANY),
        "HandleReloadConfigRequest": Method(
            ModelCalls.handle_reload_config_request, Row(Need.WRITE, changes=True), ANY
        ),
    },
)
