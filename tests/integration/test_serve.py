"""`millstream serve` is ready when the models of its folder are loaded, and ends if none can be."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import httpx2
import onnx
import pytest

from millstream.services.environment import child_environment
from tests.kit import models
from tests.kit.ports import free_port

WAIT_S = 240
SERVE = [sys.executable, "-P", "-m", "millstream.services.cli", "serve"]


def serve(tmp_path: Path, folder: Path) -> subprocess.Popen[str]:
    port = str(free_port())
    return subprocess.Popen(
        [*SERVE, str(folder), "--name", "m", "--http-port", port, "--grpc-port", "-1"],
        env=child_environment({"MILLSTREAM_HOME": str(tmp_path / "home"), "MILLSTREAM_POOLS": "cpu=1,threads=1"}),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def bad_file(folder: Path) -> None:
    (folder / "model.onnx").write_bytes(b"this is no model")


def bad_repository(folder: Path) -> None:
    for name in ("a", "b"):
        (folder / name / "1").mkdir(parents=True)
        (folder / name / "1" / "model.onnx").write_bytes(b"this is no model")


@pytest.mark.parametrize(
    ("write", "says"),
    [
        (bad_file, "model.onnx: this is text, not an ONNX model"),
        (bad_repository, "none of its models can be served: "),
        (lambda folder: None, "there is no model in "),
        (
            lambda folder: [models.scale(folder / f"{name}.onnx") for name in "ab"],
            "there are 2 ONNX files (a.onnx, b.onnx): name the one to serve model.onnx, or push it alone",
        ),
    ],
    ids=["a damaged file", "a repository of damaged files", "an empty folder", "two files"],
)
def test_with_nothing_to_serve_it_ends_and_was_never_ready(tmp_path: Path, write: object, says: str) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    assert callable(write)
    write(folder)
    process = serve(tmp_path, folder)
    output, _ = process.communicate(timeout=WAIT_S)
    assert process.returncode in {1, 2}
    assert says in output.splitlines()[-1], output
    assert "\nready http" not in output


def test_one_of_two_models_is_enough(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    bad_repository(folder)
    models.scale(folder / "b" / "1" / "model.onnx")
    assert answered(tmp_path, folder, "b") == [2.0, 4.0]


def test_a_file_with_its_weights_beside_it_is_served(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    model = onnx.load(models.scale(tmp_path / "m.onnx"))
    onnx.save(model, folder / "model.onnx", save_as_external_data=True, location="model.onnx.data", size_threshold=0)
    assert answered(tmp_path, folder, "m") == [2.0, 4.0]


def test_the_newest_of_the_versions_in_the_folder_is_served(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    for version, factor in (("9", 3.0), ("10", 2.0)):
        (folder / version).mkdir(parents=True)
        models.scale(folder / version / "model.onnx", factor=factor)
    assert answered(tmp_path, folder, "m") == [2.0, 4.0]


def answered(tmp_path: Path, folder: Path, name: str) -> list[float]:
    """Serve a folder, and return what a model answers when the server says that it is ready."""
    process = serve(tmp_path, folder)
    try:
        assert process.stdout is not None
        ready = next((line for line in process.stdout if line.startswith("ready http://")), None)
        assert ready is not None, "it ended"
        url = f"http://127.0.0.1:{ready.strip().rpartition(':')[2]}"
        assert httpx2.get(f"{url}/ping", timeout=WAIT_S, trust_env=False).status_code == 200
        tensor = {"name": "x", "shape": [1, 2], "datatype": "FP32", "data": [1, 2]}
        reply = httpx2.post(f"{url}/v2/models/{name}/infer", json={"inputs": [tensor]}, timeout=WAIT_S, trust_env=False)
        data: list[float] = reply.json()["outputs"][0]["data"]
        return data
    finally:
        process.terminate()
        process.communicate(timeout=WAIT_S)
        assert process.returncode == 0
