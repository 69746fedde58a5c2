"""Versions put straight into a repository, for tests that are not about the check of an upload."""

from __future__ import annotations

import hashlib

from services.manifest import Manifest, ModelConfig, SourceFile
from services.repository.base import Repository
from services.tensor import Signature, TensorSpec

SIGNATURE = Signature(
    inputs=(TensorSpec(name="x", datatype="FP32", shape=(-1, 4)),),
    outputs=(TensorSpec(name="y", datatype="FP32", shape=(-1, 2)),),
    batching=True,
)


def publish(repository: Repository, model: str, version: int, config: ModelConfig | None = None) -> Manifest:
    """A version with SIGNATURE; what it serves is a file of a few bytes that nobody runs."""
    content = f"{model} {version}".encode()
    digest = hashlib.sha256(content).hexdigest()
    manifest = Manifest(
        model=model,
        version=version,
        created=1_700_000_000.0 + version,
        digest=digest,
        served="source/model.onnx",
        files=(SourceFile(path="source/model.onnx", size_bytes=len(content), sha256=digest),),
        signature=SIGNATURE,
        config=config or ModelConfig(),
        opset=17,
        ir_version=8,
        notes=("made for a test",),
    )
    with repository.stage() as staging:
        (staging.path / "source").mkdir()
        (staging.path / "source" / "model.onnx").write_bytes(content)
        repository.publish(staging, manifest)
    return manifest
