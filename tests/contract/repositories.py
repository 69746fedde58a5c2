"""The implementations of the repository interface that the contract suite runs over."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from millstream.services.model.manifest import Manifest, ModelConfig, SourceFile
from millstream.services.model.signature import Signature, TensorSpec
from millstream.services.repository.folder import FolderRepository

#: name -> opens a repository that keeps everything at, or named after, a folder of the test
FACTORIES: dict[str, Callable[[Path], FolderRepository]] = {"folder": FolderRepository}

FILES = {"source/model.onnx": b"weights" * 1000, "source/data/extra.bin": b"\0" * 4096}


def manifest(model: str = "digits", version: int = 1, digest: str = "d" * 64) -> Manifest:
    """A manifest as the check would write it."""
    spec = TensorSpec(name="x", datatype="FP32", shape=(-1, 4))
    return Manifest(
        model=model,
        version=version,
        created=1_700_000_000.0,
        digest=digest,
        served="source/model.onnx",
        files=tuple(SourceFile(path=p, size_bytes=len(b), sha256="0" * 64) for p, b in FILES.items()),
        signature=Signature(inputs=(spec,), outputs=(spec,), batching=True),
        config=ModelConfig(),
        opset=17,
        ir_version=8,
    )


def publish(repository: FolderRepository, model: str = "digits", version: int = 1, digest: str = "d" * 64) -> None:
    """Stage FILES and make them a version."""
    with repository.open_staging() as staging:
        for path, content in FILES.items():
            target = staging.path / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content)
        repository.publish(staging, manifest(model, version, digest))


def is_whole(repository: FolderRepository, model: str, version: int) -> bool:
    """Whether the version has its manifest and every file with every byte."""
    folder = repository.local_path(model, version)
    stored = repository.manifest(model, version)
    return stored.version == version and all((folder / p).read_bytes() == content for p, content in FILES.items())
