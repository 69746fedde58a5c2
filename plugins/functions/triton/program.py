"""The process of a model of Triton's Python backend: imports its file, initializes it and executes requests.

{"complete": …} ─> auto_complete_config ─> the configuration that it completed
otherwise ─> initialize ─> execute(requests) of each run ─> one answer for each request ─> finalize
The requests of a run come as arrays of all their rows; each gets its own, as Triton has it.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import sys
import threading
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

from millstream.plugins.children.confined import MODEL, ModelError, located, main
from millstream.plugins.children.message_channel import Message, TensorData, decode_elements, encode_elements
from millstream.plugins.functions.event_loop import PipePolicy

try:
    import numpy as np
except ImportError as error:  # in an environment of its own, which does not declare it
    raise SystemExit("models of Triton's Python backend need numpy: add it to requirements.txt") from error

from millstream.plugins.functions.triton import model_metrics, utils

_CLASS = "TritonPythonModel"
_DATATYPES = {
    "bool": "BOOL", "uint8": "UINT8", "uint16": "UINT16", "uint32": "UINT32", "uint64": "UINT64", "int8": "INT8",
    "int16": "INT16", "int32": "INT32", "int64": "INT64", "float16": "FP16", "float32": "FP32", "float64": "FP64",
}  # fmt: skip
_NUMPY = {datatype: name for name, datatype in _DATATYPES.items()}
BYTES = "BYTES"
#: of Triton's errors, by their numbers, in the words of errors.Code
ERROR_CODES = ("model", "model", "not_found", "invalid", "unavailable", "unsupported", "conflict", "cancelled")


def load(task: dict[str, Any]) -> tuple[dict[str, Any], Any]:
    """Import the model of a task; initialize it, or have it complete its configuration. Raises ModelError."""
    path = Path(task["file"])
    asyncio.set_event_loop_policy(PipePolicy())
    sys.modules["triton_python_backend_utils"] = utils
    sys.argv = [str(path)]  # what is there now is not the model's
    with located(path.parent):
        kind = getattr(_imported(path), _CLASS, None)
        if kind is None:
            raise ModelError(f"{path.name} has no class {_CLASS}")
        if task["complete"]:
            return {"config": _completed(kind, task["config"])}, lambda message: message
        model = _Model(kind, task, path)
    return {"metrics": model_metrics.snapshot()}, model


def _imported(path: Path) -> Any:
    """Import the file as Triton does: as a module of the package that is the version's folder."""
    for folder in (path.parents[1], path.parent):
        sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    return importlib.import_module(f"{path.parent.name}.{path.stem}")


def _completed(kind: Any, config: str) -> dict[str, Any]:
    if not hasattr(kind, "auto_complete_config"):
        return dict(utils.ModelConfig(config).as_dict())
    found = kind.auto_complete_config(utils.ModelConfig(config))
    if not isinstance(found, utils.ModelConfig):
        name = json.loads(config).get("name", "")
        raise ModelError(f"auto_complete_config function in model '{name}' must return a valid pb.ModelConfig object.")
    return dict(found.as_dict())


class _Model:
    """An initialized model."""

    def __init__(self, kind: Any, task: Mapping[str, Any], path: Path) -> None:
        config = json.loads(task["config"])
        self._name = str(task["name"])
        self._folder = path.parent
        self._inputs = [one["name"] for one in config.get("input", ())]
        self._outputs = [one["name"] for one in config.get("output", ())]
        self._loop: asyncio.AbstractEventLoop | None = None
        self._model = kind()
        if not hasattr(self._model, "execute"):
            raise ModelError(f"Python model {path} does not implement `execute` method.")
        if hasattr(self._model, "initialize"):
            self._model.initialize(
                {
                    "model_config": task["config"],
                    "model_instance_kind": "CPU",
                    "model_instance_name": f"{self._name}_0_0",
                    "model_instance_device_id": "0",
                    "model_repository": str(path.parents[1]),
                    "model_version": path.parent.name,
                    "model_name": self._name,
                }
            )

    def __call__(self, message: Message) -> Message:
        """Execute the requests of a run, and return their answers. Raises ModelError: none has one."""
        requests = self._requests(message)
        answers = [utils.Answer(lambda: False) for _ in requests]
        for request, answer in zip(requests, answers, strict=True):
            request._answer = answer
        failed = ""
        try:
            try:
                with located(self._folder, f"Failed to process the request(s) for model '{self._name}_0_0', message: "):
                    self._execute(requests, answers)
            except ModelError as error:
                if not any(answer.sent for answer in answers):
                    raise
                failed = str(error)  # of the others: what a sender sent stands
            return self._answered(requests, answers, failed)
        finally:
            for answer in answers:
                answer.close()

    def finalize(self) -> None:
        """Have the model end."""
        if hasattr(self._model, "finalize"):
            with located(self._folder):
                self._model.finalize()

    def _requests(self, message: Message) -> list[utils.InferenceRequest]:
        told: Sequence[Mapping[str, Any]] = message.header["requests"]
        bounds = list(pairwise(accumulate((one["rows"] for one in told), initial=0)))
        arrays = [(tensor.name, _array(tensor, copy=message.ends > 0)) for tensor in message.tensors]
        whole = len(told) == 1
        requests = [
            utils.InferenceRequest(
                request_id=one.get("id", ""),
                inputs=[utils.Tensor(name, array if whole else array[a:b]) for name, array in arrays],
                requested_output_names=one.get("outputs", self._outputs),
                model_name=self._name,
                model_version=int(self._folder.name),
                timeout=one.get("timeout", 0),
            )
            for one, (a, b) in zip(told, bounds, strict=True)
        ]
        for request, one in zip(requests, told, strict=True):
            request.told_parameters(one.get("parameters"))
        return requests

    def _execute(self, requests: list[utils.InferenceRequest], answers: Sequence[utils.Answer]) -> None:
        returned = self._model.execute(requests)
        if asyncio.iscoroutine(returned):
            returned = self._awaited(returned)
        if returned is None:
            return
        if not isinstance(returned, list):
            raise ModelError(f"Expected a list in the execute return, found type '{type(returned)}'.")
        if len(returned) != len(requests):
            raise ModelError(
                "Number of InferenceResponse objects do not match the number of InferenceRequest objects. "
                f"InferenceRequest(s) size is:{len(requests)}, and InferenceResponse(s) size is:{len(returned)}"
            )
        for request, answer, response in zip(requests, answers, returned, strict=True):
            if response is None:
                continue
            if request._release == utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE:
                raise ModelError(
                    "Expected a None object in the execute function return list for reschduled request, found type "
                    f"'{type(response)}'."
                )
            if not isinstance(response, utils.InferenceResponse):
                raise ModelError(
                    "Expected an 'InferenceResponse' object in the execute function return list, found type "
                    f"'{type(response)}'."
                )
            answer.send(response, utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    def _awaited(self, coroutine: Any) -> Any:
        """Run a coroutine in the event loop of the model, which runs on in a thread, as in Triton."""
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            threading.Thread(target=self._loop.run_forever, daemon=True, name="event loop").start()
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result()
        finally:
            future.cancel()

    def _answered(
        self, requests: Sequence[utils.InferenceRequest], answers: Sequence[utils.Answer], failed: str
    ) -> Message:
        told: list[dict[str, Any]] = []
        tensors: list[TensorData] = []
        for request, answer in zip(requests, answers, strict=True):
            try:
                response = answer.sent if failed else answer.wait()
                if failed and response is None:
                    raise _AnswerError(failed)
                made = self._tensors(request, response)
            except _AnswerError as error:
                told.append({"error": [error.code, str(error)]})
                continue
            tensors += made
            told.append({"tensors": len(made)})
        header: dict[str, Any] = {"answers": told}
        if metrics := model_metrics.snapshot():
            header["metrics"] = metrics
        return Message(header, tensors)

    def _tensors(self, request: utils.InferenceRequest, response: utils.InferenceResponse | None) -> list[TensorData]:
        """Return the tensors of a response that its request asked for. Raises _AnswerError."""
        if response is None:
            if request._release == utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE:
                raise _AnswerError("a request cannot be rescheduled: iterative sequences are not served")
            raise _AnswerError("the model gave no response to the request")
        error = response.error()
        if error is not None:
            raise _AnswerError(error.message(), ERROR_CODES[error.code()] if 0 <= error.code() < 8 else MODEL)
        given = {one.name(): one for one in response.output_tensors()}
        wanted = request.requested_output_names()
        missing = next((name for name in wanted if name not in given), None)
        if missing is not None:
            raise _AnswerError(f"the response has no output '{missing}'")
        return [_data(name, given[name].as_numpy()) for name in wanted]


class _AnswerError(Exception):
    """One request has an error. `code`: in the words of errors.Code."""

    def __init__(self, text: str, code: str = MODEL) -> None:
        super().__init__(text)
        self.code = code


def _array(tensor: TensorData, *, copy: bool) -> Any:
    if tensor.datatype == BYTES:
        elements = decode_elements(tensor.data)
        array = np.empty(len(elements), dtype=np.object_)
        array[:] = elements
        return array.reshape(tensor.shape)
    numbers = np.frombuffer(tensor.data, _NUMPY[tensor.datatype]).reshape(tensor.shape)
    return numbers.copy() if copy else numbers  # a model may keep what it gets


def _data(name: str, array: Any) -> TensorData:
    if array.dtype.kind in "OSU":
        elements = [one if isinstance(one, bytes) else str(one).encode() for one in array.ravel().tolist()]
        return TensorData(name, BYTES, array.shape, encode_elements(elements))
    ordered = np.ascontiguousarray(array, array.dtype.newbyteorder("="))
    data = ordered.reshape(-1).view(np.uint8).data if ordered.size else b""
    return TensorData(name, _DATATYPES[ordered.dtype.name], array.shape, data)


if __name__ == "__main__":
    main(load)
