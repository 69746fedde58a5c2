"""Publishes versions directly in a repository, for tests that do not need the check of an upload."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from millstream.services.model.manifest import Batching, Manifest, ModelConfig, SourceFile
from millstream.services.model.signature import Signature, TensorSpec
from millstream.services.repository.folder import FolderRepository

SIGNATURE = Signature(
    inputs=(TensorSpec(name="x", datatype="FP32", shape=(-1, 4)),),
    outputs=(TensorSpec(name="y", datatype="FP32", shape=(-1, 2)),),
    batching=True,
)

#: of `publish_simulated`: the output is the input
COPYING = Signature(
    inputs=(TensorSpec(name="x", datatype="FP32", shape=(-1, 4)),),
    outputs=(TensorSpec(name="y", datatype="FP32", shape=(-1, 4)),),
    batching=True,
)


def publish(repository: FolderRepository, model: str, version: int, config: ModelConfig | None = None) -> Manifest:
    """Publish a version with SIGNATURE, whose model file is a few bytes and never runs."""
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
        batching=Batching(decided="proven"),
        notes=("made for a test",),
    )
    with repository.open_staging() as staging:
        (staging.path / "source").mkdir()
        (staging.path / "source" / "model.onnx").write_bytes(content)
        repository.publish(staging, manifest)
    return manifest


def publish_model(
    repository: FolderRepository, model: str, path: Path, version: int = 1, config: ModelConfig | None = None
) -> Manifest:
    """Publish the ONNX file at `path` unchecked, as the active version: "x" -> "y", both INT64 [N, 1], batching."""
    content = path.read_bytes()
    digest = hashlib.sha256(content).hexdigest()
    manifest = Manifest(
        model=model,
        version=version,
        created=1_700_000_000.0 + version,
        digest=digest,
        served="source/model.onnx",
        files=(SourceFile(path="source/model.onnx", size_bytes=len(content), sha256=digest),),
        signature=Signature(
            inputs=(TensorSpec(name="x", datatype="INT64", shape=(-1, 1)),),
            outputs=(TensorSpec(name="y", datatype="INT64", shape=(-1, 1)),),
            batching=True,
        ),
        config=config or ModelConfig(),
        opset=17,
        ir_version=8,
        batching=Batching(decided="proven"),
    )
    with repository.open_staging() as staging:
        (staging.path / "source").mkdir()
        (staging.path / "source" / "model.onnx").write_bytes(content)
        repository.publish(staging, manifest, activate=True)
    return manifest


def publish_simulated(
    repository: FolderRepository,
    model: str,
    behaviour: dict[str, Any] | None = None,
    version: int = 1,
    config: ModelConfig | None = None,
    signature: Signature = COPYING,
) -> Manifest:
    """Publish a model of the simulated backend as the active version.

    Args:
        behaviour: fields of simulated_backend.worker.Behaviour (tests/kit/plugins).
        config: must name a pool whose workers have that backend.
    """
    content = json.dumps(behaviour or {}).encode()
    config = config or ModelConfig(pools=("simulated",))
    return publish_content(repository, model, content, "simulated", signature, config, version)


def publish_content(
    repository: FolderRepository,
    model: str,
    content: bytes,
    source_format: str,
    signature: Signature,
    config: ModelConfig,
    version: int = 1,
) -> Manifest:
    """Publish a model file of any format, unchecked, as the active version."""
    file = f"source/model.{ {'onnx': 'onnx', 'torch-export': 'pt2'}.get(source_format, 'json') }"
    digest = hashlib.sha256(content).hexdigest()
    manifest = Manifest(
        model=model,
        version=version,
        created=1_700_000_000.0 + version,
        digest=digest,
        source_format=source_format,
        served=file,
        files=(SourceFile(path=file, size_bytes=len(content), sha256=digest),),
        signature=signature,
        config=config,
        opset=0,
        ir_version=0,
        batching=Batching(decided="proven"),
    )
    with repository.open_staging() as staging:
        (staging.path / "source").mkdir()
        (staging.path / file).write_bytes(content)
        repository.publish(staging, manifest, activate=True)
    return manifest
