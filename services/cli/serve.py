"""`millrace serve`: what SageMaker runs in a container: its port, and the model where it puts it."""

from __future__ import annotations

from pathlib import Path

from services.cli.up import up
from services.settings import Settings

MODEL_DIR = Path("/opt/ml/model")
_MODEL = "model"
_HTTP_PORT = 8080


def serve() -> None:
    """Start everything as a container of SageMaker.

    Listens on port 8080 (SAGEMAKER_BIND_TO_PORT) of all addresses and serves /opt/ml/model: a Triton model repository, or
    a single ONNX file.
    """
    settings = Settings()
    model, repository = found(MODEL_DIR, settings.sagemaker_model or _MODEL)
    port = settings.sagemaker_port or _HTTP_PORT
    up(host="0.0.0.0", http_port=port, model=model, repository=repository, example=False)  # noqa: S104


def found(folder: Path, name: str) -> tuple[list[str] | None, list[Path] | None]:
    """The models, as `up` takes them, and the repositories, of what lies in `folder`."""
    files = sorted(folder.glob("*.onnx"))
    if files:
        return [f"{name}={files[0]}"], None
    return None, [folder] if folder.is_dir() and any(folder.iterdir()) else None
