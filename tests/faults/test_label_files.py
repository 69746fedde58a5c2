"""A version whose label file is not what it was: its own requests are refused, and nothing else notices."""

from __future__ import annotations

import os
from pathlib import Path

from millstream.services.model.manifest import ModelConfig
from millstream.services.repository.folder import FolderRepository
from tests.kit import models
from tests.kit.stack import running_stack
from tests.kit.versions import publish


def _post(document: dict[str, object]) -> dict[str, object]:
    return {"inputs": [{"name": "x", "shape": [1, 2], "datatype": "FP32", "data": [1.0, 2.0]}], **document}


def test_a_fifo_and_paths_that_lead_out_stop_neither_a_start_nor_other_models(tmp_path: Path) -> None:
    repository = FolderRepository(tmp_path / "home" / "repository")
    fifo = publish(repository, "fifo", 1, ModelConfig(labels={"y": "source/labels.txt"}))
    os.mkfifo(repository.folder_of(fifo) / "source" / "labels.txt")
    publish(repository, "outside", 1, ModelConfig(labels={"y": "../../../../../../../etc/passwd"}))
    with running_stack(tmp_path) as stack:
        stack.push("good", models.scale(tmp_path / "scale.onnx"))
        assert stack.http.post("/v2/models/good/infer", json=_post({})).status_code == 200
        for name in ("fifo", "outside"):
            document = {"inputs": [{"name": "x", "shape": [1, 4], "datatype": "FP32", "data": [0.0] * 4}]}
            reply = stack.http.post(f"/v2/models/{name}/versions/1/infer", json=document)
            assert reply.status_code == 503, reply.text
            assert "root:" not in reply.text


def test_an_upload_cannot_name_files_of_the_server(tmp_path: Path) -> None:
    with running_stack(tmp_path) as stack:
        onnx = models.scale(tmp_path / "scale.onnx").read_bytes()
        for path in ("../../../../etc/passwd", "/proc/self/environ", "source/absent.txt"):
            config = f'{{"labels": {{"y": "{path}"}}}}'
            reply = stack.http.put("/admin/v1/models/m/versions/1", params={"config": config}, content=onnx)
            assert reply.status_code == 400, reply.text
            assert "config.labels" in reply.json()["error"]
        assert stack.http.get("/v2/models").json()["models"] == [], "nothing of it was published"
