"""Bodies of TensorFlow Serving's REST API, and the status of versions that do not serve."""

from __future__ import annotations

import numpy as np

from millstream.gateway.catalog.snapshot import ModelView, VersionView
from millstream.gateway.tensors.outputs import OutputTensor
from millstream.gateway.tensors.rows_json import write_predict
from millstream.plugins.compat.tfserving.documents import model_status
from millstream.plugins.compat.tfserving.predict import write_classes
from millstream.services.model.manifest import Manifest, ModelConfig
from millstream.services.model.signature import Signature, TensorSpec
from millstream.services.wire.records import State


def test_outputs_whose_name_ends_in_bytes_are_base64() -> None:
    names = ("image_bytes", "caption")
    specs = tuple(TensorSpec(name=name, datatype="BYTES", shape=(-1,)) for name in names)
    signature = Signature(inputs=(), outputs=specs, batching=True)
    outputs = [OutputTensor("BYTES", (1,), [b"\xff"]), OutputTensor("BYTES", (1,), [b"a"])]
    row = b'{"predictions":[{"image_bytes":{"b64":"/w=="},"caption":"a"}]}'
    column = b'{"outputs":{"image_bytes":[{"b64":"/w=="}],"caption":["a"]}}'
    assert write_predict(signature, outputs, row_form=True) == row
    assert write_predict(signature, outputs, row_form=False) == column


def test_classes_have_labels_where_there_are_some() -> None:
    scores = [OutputTensor("FP32", (1, 2), np.array([[0.25, 0.75]], np.float32))]
    assert write_classes(scores, ["cat"]) == b'{"result":[[["cat",0.25],["1",0.75]]]}'


def test_states_in_the_words_of_tensorflow() -> None:
    signature = Signature(inputs=(), outputs=(), batching=False)

    def view(version: int, state: State, reason: str | None = None) -> VersionView:
        manifest = Manifest(
            model="m",
            version=version,
            created=1.5,
            digest="d",
            served="source/model.onnx",
            files=(),
            signature=signature,
            config=ModelConfig(),
            opset=17,
            ir_version=8,
        )
        return VersionView(manifest, state, reason, ())

    views = {1: view(1, State.FAILED, "no such operator"), 2: view(2, State.LOADING)}
    document = model_status(ModelView("m", 2, 2, views), views[2], ready=False, all_versions=True)
    assert document["ready"] is False
    assert document["created"] == 1
    assert document["model_version_status"] == [
        {"version": "2", "state": "LOADING", "status": {"error_code": "OK", "error_message": ""}},
        {"version": "1", "state": "END", "status": {"error_code": "UNKNOWN", "error_message": "no such operator"}},
    ]
