"""Measures classification of a photo from its file on, against a loop with Pillow and ONNX Runtime in one process.

python -m tests.bench.images MODEL PHOTO SECONDS     the loop alone: prints photos per second
"""

from __future__ import annotations

import io
import json
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any
from urllib.parse import urlencode
from urllib.request import Request, urlopen

import numpy as np
import onnxruntime
from PIL import Image

from tests.bench import servers
from tests.bench.errors import LoadError
from tests.bench.load import Load, Payload, measure
from tests.bench.result import Figure, Measured, Result
from tests.bench.rounds import Say, medians
from tests.bench.servers import ADMIN, ROOT, Server
from tests.kit import models

CONNECTIONS = 8
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
_STEPS = {"image": {"resize": 256, "crop": 224, "mean": MEAN, "std": STD}}


def photo(path: Path) -> Path:
    """Write a JPEG of 500 x 375 pixels, about 60 KB, as those of ImageNet are."""
    random = np.random.default_rng(8)
    coarse = Image.fromarray(random.integers(0, 256, (47, 63, 3), np.uint8)).resize(
        (500, 375), Image.Resampling.BICUBIC
    )
    noise = random.integers(0, 24, (375, 500, 3), np.uint8)
    Image.fromarray(np.clip(np.asarray(coarse, np.int16) + noise, 0, 255).astype(np.uint8)).save(path, quality=85)
    return path


def prepared(content: bytes) -> np.ndarray[Any, Any]:
    """Return the tensor of a photo as a notebook makes it."""
    with Image.open(io.BytesIO(content)) as image:
        made = image.convert("RGB").resize((341, 256), Image.Resampling.BILINEAR).crop((58, 16, 282, 240))
    array = np.asarray(made, np.float32) / 255
    scaled = (array - np.array(MEAN, np.float32)) / np.array(STD, np.float32)
    return np.ascontiguousarray(scaled.transpose(2, 0, 1))[None]


def loop_rate(model: Path, content: bytes, seconds: float) -> float:
    """Return the photos per second of a loop with one thread, after a second of warm-up."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    name = session.get_inputs()[0].name
    for spell in (1.0, seconds):
        photos, began = 0, time.perf_counter()
        while time.perf_counter() - began < spell:
            session.run(None, {name: prepared(content)})
            photos += 1
    return photos / (time.perf_counter() - began)


def _loop(model: Path, file: Path, seconds: int) -> float:
    command = [sys.executable, "-m", "tests.bench.images", str(model), str(file), str(seconds)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise LoadError(f"the loop with Pillow failed: {done.stderr.strip().splitlines()[-1]}")
    return float(done.stdout)


def _push(server: Server, model: Path) -> None:
    query = urlencode({"config": json.dumps({"prepare": {"data_0": _STEPS}}), "wait": 60})
    url = f"{server.url}/admin/v1/models/photos/versions?{query}"
    urlopen(Request(url, model.read_bytes(), ADMIN)).close()


def image_rows(folder: Path, rounds: int, seconds: int, say: Say) -> Result:
    """Measure SqueezeNet on JPEGs, with a worker of one thread, beside the loop, which takes its turns alone."""
    model, file = models.squeezenet(folder / "photos.onnx"), photo(folder / "photo.jpg")
    payload = Payload(file, ("Inference-Header-Content-Length: 0",))
    alone: list[float] = []
    ours: list[Load] = []
    with servers.millstream(folder, "photos", {}) as server:
        _push(server, model)
        for number in range(rounds):
            say(f"round {number + 1} of {rounds}: photos, the loop")
            alone.append(_loop(model, file, seconds))
            say(f"round {number + 1} of {rounds}: photos, Millstream")
            ours.append(measure(server, "/v2/models/photos/infer", payload, CONNECTIONS, seconds))
    found = medians(ours)
    figure = Figure(
        name="photos classified, from the file on",
        measured=median(load.rate / one for load, one in zip(ours, alone, strict=True)),
        bound=0.9,
        unit="of a loop with Pillow and ONNX Runtime",
        detail=f"{found.rate:.0f}/s of {median(alone):.0f}/s, {file.stat().st_size >> 10} KB each",
    )
    return Result((figure,), (Measured("Millstream, photos", CONNECTIONS, found),))


if __name__ == "__main__":
    print(loop_rate(Path(sys.argv[1]), Path(sys.argv[2]).read_bytes(), float(sys.argv[3])))
