"""Encoded images over every protocol, answered as Pillow, numpy and ONNX Runtime answer in one process."""

from __future__ import annotations

import base64
import io
import json
import struct
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http
from PIL import Image
from tritonclient.utils import InferenceServerException

from millstream import Client
from tests.kit import models
from tests.kit.command_line import ROOT, Millstream
from tests.kit.stack import Stack, token_of

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
STEPS = {"pixel_values": {"image": {"resize": 256, "crop": 224, "mean": MEAN, "std": STD}}}


def photo(seed: int, size: tuple[int, int] = (320, 280)) -> Image.Image:
    coarse = np.random.default_rng(seed).integers(0, 256, (8, 8, 3), np.uint8)
    return Image.fromarray(coarse).resize(size, Image.Resampling.BICUBIC)


def encoded(image: Image.Image, kind: str = "JPEG") -> bytes:
    file = io.BytesIO()
    image.save(file, kind)
    return file.getvalue()


JPEG, PNG = encoded(photo(1)), encoded(photo(2, (256, 300)), "PNG")


def prepared(content: bytes) -> np.ndarray[Any, Any]:
    with Image.open(io.BytesIO(content)) as image:
        scale = 256 / min(image.size)
        width, height = (int(side * scale) if side != min(image.size) else 256 for side in image.size)
        made = image.convert("RGB").resize((width, height), Image.Resampling.BILINEAR)
    left, top = (made.width - 224) // 2, (made.height - 224) // 2
    array = np.asarray(made.crop((left, top, left + 224, top + 224)), np.float32) / 255
    scaled: np.ndarray[Any, Any] = (array - np.array(MEAN, np.float32)) / np.array(STD, np.float32)
    return scaled.transpose(2, 0, 1)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.image_means(tmp_path_factory.mktemp("models") / "means.onnx", "pixel_values")


@pytest.fixture(scope="module", autouse=True)
def _served(shared_stack: Stack, model: Path) -> None:
    shared_stack.push("im-means", model, config=json.dumps({"prepare": STEPS}))
    shared_stack.push("im-tensors", model)


@pytest.fixture(scope="module")
def expected(model: Path) -> np.ndarray[Any, Any]:
    session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    answer: np.ndarray[Any, Any] = session.run(None, {"pixel_values": np.stack([prepared(JPEG), prepared(PNG)])})[0]
    return answer


def b64(content: bytes) -> dict[str, str]:
    return {"b64": base64.b64encode(content).decode()}


def text(content: bytes) -> str:
    return base64.b64encode(content).decode()


def v2(*contents: str) -> dict[str, Any]:
    return {"inputs": [{"name": "image", "datatype": "BYTES", "shape": [len(contents)], "data": list(contents)}]}


def numbers(document: Any) -> Any:
    if isinstance(document, dict):
        return numbers(next(value for value in document.values() if isinstance(value, list)))
    return [numbers(next(iter(row.values()))) if isinstance(row, dict) else row for row in document]


def close(answered: Any, wanted: Any) -> None:
    np.testing.assert_allclose(np.ravel(answered), np.ravel(wanted), rtol=1e-4, atol=1e-5)


def test_v2_over_http(stack: Stack, expected: Any) -> None:
    for data in ([text(JPEG), text(PNG)], [f"data:image/jpeg;base64,{text(JPEG)}", text(PNG)]):
        reply = stack.http.post("/v2/models/im-means/infer", json=v2(*data))
        assert reply.status_code == 200, reply.text
        close(reply.json()["outputs"][0]["data"], expected)
    with triton_http.InferenceServerClient(stack.url.removeprefix("http://")) as client:
        given = triton_http.InferInput("image", [2], "BYTES")
        given.set_data_from_numpy(np.array([JPEG, PNG], np.object_))
        close(client.infer("im-means", [given]).as_numpy("means"), expected)
    raw = stack.http.post("/v2/models/im-means/infer", content=PNG, headers={"Inference-Header-Content-Length": "0"})
    assert raw.status_code == 200, raw.text
    close(np.frombuffer(raw.content[int(raw.headers["Inference-Header-Content-Length"]) :], np.float32), expected[1])


def test_the_tensor_is_taken_as_before(stack: Stack, expected: Any) -> None:
    with triton_http.InferenceServerClient(stack.url.removeprefix("http://")) as client:
        given = triton_http.InferInput("pixel_values", [1, 3, 224, 224], "FP32")
        given.set_data_from_numpy(prepared(JPEG)[None])
        for name in ("im-means", "im-tensors"):
            close(client.infer(name, [given]).as_numpy("means"), expected[0])


def test_grpc(stack: Stack, expected: Any) -> None:
    with triton_grpc.InferenceServerClient(stack.grpc) as client:
        given = triton_grpc.InferInput("image", [2], "BYTES")
        given.set_data_from_numpy(np.array([JPEG, PNG], np.object_))
        close(client.infer("im-means", [given]).as_numpy("means"), expected)
        given = triton_grpc.InferInput("image", [1], "BYTES")
        given.set_data_from_numpy(np.array([JPEG[:500]], np.object_))
        with pytest.raises(InferenceServerException, match="file 0: the image cannot be decoded"):
            client.infer("im-means", [given])


FORMS: list[tuple[str, Any]] = [
    ("/v1/models/im-means:predict", {"instances": [b64(JPEG), b64(PNG)]}),
    ("/v1/models/im-means:predict", {"instances": [{"image": b64(JPEG)}, {"image": b64(PNG)}]}),
    ("/v1/models/im-means:predict", {"inputs": {"image": [b64(JPEG), b64(PNG)]}}),
    ("/v1/models/im-means:predict", {"inputs": {"pixel_values": [b64(JPEG), b64(PNG)]}}),
    ("/endpoints/im-means/invocations", {"instances": [b64(JPEG), b64(PNG)]}),
    ("/endpoints/im-means/invocations", {"inputs": [text(JPEG), text(PNG)]}),
    ("/endpoints/im-means/invocations", v2(text(JPEG), text(PNG))),
    ("/predictions/im-means", {"data": [text(JPEG), text(PNG)]}),
]


@pytest.mark.parametrize(("path", "body"), FORMS)
def test_json_of_other_protocols(stack: Stack, expected: Any, path: str, body: Any) -> None:
    reply = stack.http.post(path, json=body)
    assert reply.status_code == 200, reply.text
    found = reply.json()
    close(found["outputs"][0]["data"] if "model_name" in found else numbers(found), expected)


@pytest.mark.parametrize("path", ["/predictions/im-means", "/endpoints/im-means/invocations"])
def test_a_body_that_is_one_image(stack: Stack, expected: Any, path: str) -> None:
    for content, kind, wanted in ((JPEG, "image/jpeg", expected[0]), (PNG, "image/png", expected[1])):
        reply = stack.http.post(path, content=content, headers={"Content-Type": kind})
        assert reply.status_code == 200, reply.text
        found = reply.json()
        close(found if isinstance(found, list) else numbers(found), wanted)
    refused = stack.http.post(path.replace("means", "tensors"), content=PNG, headers={"Content-Type": "image/png"})
    assert refused.status_code in {400, 415, 424}


def test_forms_and_bodies_of_no_type_on_torchserves_route(stack: Stack, expected: Any) -> None:
    reply = stack.http.post("/predictions/im-means", files={"data": ("cat.jpg", JPEG)})
    close(reply.json(), expected[0])
    reply = stack.http.post("/predictions/im-means", content=JPEG, headers={"Content-Type": "application/octet-stream"})
    close(reply.json(), expected[0])


def test_the_python_client(stack: Stack, expected: Any, tmp_path: Path) -> None:
    file = tmp_path / "cat.jpg"
    file.write_bytes(JPEG)
    with Client(stack.url) as client:
        for inputs in (file, str(file), JPEG, {"image": file}, {"pixel_values": file}):
            close(client.predict("im-means", inputs)["means"], expected[0])
        close(client.predict("im-means", [file, photo(2, (256, 300))])["means"], expected)


def test_the_example_of_the_page(stack: Stack, model: Path, expected: Any, tmp_path: Path, monkeypatch: Any) -> None:
    page = (ROOT / "docs" / "text-image-audio.md").read_text()
    code = page.partition("```python\n")[2].partition("```")[0]
    code = code.replace('"http://127.0.0.1:8000"', f'"{stack.url}", key="{token_of(stack.home)}"')
    (tmp_path / "classifier.onnx").write_bytes(model.read_bytes())
    (tmp_path / "cat.jpg").write_bytes(JPEG)
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    try:
        exec(code, names)
        close(names["answer"]["means"], expected[0])
    finally:
        names["client"].close()
    assert "means" in Millstream(stack.home).ok("predict", "photos", tmp_path / "cat.jpg")


def test_a_folder_of_hugging_face_brings_its_steps_and_labels(stack: Stack, model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "folder.zip"
    config = {
        "architectures": ["ResNetForImageClassification"],
        "model_type": "resnet",
        "id2label": {"0": "red", "1": "green", "2": "blue"},
        "transformers_version": "5.0.0",
    }
    processor = {
        "image_processor_type": "ConvNextImageProcessor",
        "crop_pct": 0.875,
        "do_normalize": True,
        "do_rescale": True,
        "do_resize": True,
        "image_mean": MEAN,
        "image_std": STD,
        "resample": 3,
        "rescale_factor": 1 / 255,
        "size": {"shortest_edge": 224},
    }
    graph = onnx.load(model)
    graph.graph.node[0].output[0] = graph.graph.output[0].name = "logits"
    with zipfile.ZipFile(folder, "w") as archive:
        archive.writestr("model.onnx", graph.SerializeToString())
        archive.writestr("config.json", json.dumps(config))
        archive.writestr("preprocessor_config.json", json.dumps(processor))
    stack.push("im-folder", folder)
    for name, colour in (("red", (250, 30, 20)), ("blue", (10, 20, 200))):
        content = encoded(Image.new("RGB", (300, 260), colour), "PNG")
        reply = stack.http.post("/v2/models/im-folder/infer", json=v2(text(content)))
        assert reply.status_code == 200, reply.text
        assert reply.json()["outputs"][0]["data"] == [name]


def giant() -> bytes:
    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", 100_000, 100_000, 8, 0, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(bytes(1000))) + chunk(b"IEND", b"")
    )


@pytest.mark.parametrize(
    ("content", "error"),
    [
        (text(b"no image"), "'image[0]' is no image of a known format, and no base64 of one"),
        ("https://example.com/cat.jpg", "'image[0]' is no image of a known format"),
        (text(giant()), "file 0: the image has 100000 x 100000 pixels: at most 67108864"),
        (text(PNG[:2000]), "file 0: the image cannot be decoded"),
    ],
)
def test_what_is_no_usable_image_is_refused(stack: Stack, expected: Any, content: str, error: str) -> None:
    reply = stack.http.post("/v2/models/im-means/infer", json=v2(content))
    assert reply.status_code == 400
    assert error in reply.json()["error"]
    close(stack.http.post("/v2/models/im-means/infer", json=v2(text(JPEG))).json()["outputs"][0]["data"], expected[0])


def test_metadata_says_how_and_its_example_runs(stack: Stack) -> None:
    usage = stack.http.get("/v2/models/im-means").json()["parameters"]["usage"]
    assert (usage["kind"], usage["encoded"]) == ("image", {"pixel_values": "image"})
    assert stack.http.post("/v2/models/im-means/infer", json=usage["example"]).status_code == 200


def test_steps_that_do_not_fit_refuse_the_upload(stack: Stack, model: Path) -> None:
    config = json.dumps({"prepare": {"pixel_values": {"image": {"crop": 100}}}})
    reply = stack.http.post("/admin/v1/models/im-wrong/versions", params={"config": config}, content=model.read_bytes())
    document = reply.json()
    assert reply.status_code == 400, document
    assert (
        "config.prepare.pixel_values.image.crop: the input has images of 224 x 224 pixels, and 100 x 100 are made"
        in str(document)
    )
