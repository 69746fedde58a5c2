"""Model folders in MLflow's layout, as `mlflow.<flavour>.save_model` writes them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml


def column_signature(columns: Sequence[str], integers: Sequence[str] = ()) -> dict[str, str]:
    """The signature of a table of numbers."""
    types = ["long" if name in integers else "double" for name in columns]
    inputs = [{"type": kind, "name": name, "required": True} for kind, name in zip(types, columns, strict=True)]
    return {"inputs": json.dumps(inputs), "outputs": json.dumps([{"type": "long", "required": True}])}


def mlflow_folder(
    folder: Path,
    flavours: Mapping[str, Any],
    files: Mapping[str, bytes],
    signature: Mapping[str, str] | None = None,
) -> Path:
    """Write a model folder and return its path."""
    folder.mkdir(parents=True)
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    (folder / "conda.yaml").write_text("name: mlflow-env\n")
    (folder / "requirements.txt").write_text("mlflow==3.5.0\n")
    document = {
        "artifact_path": "model",
        "flavors": {"python_function": {"loader_module": "mlflow.x", "python_version": "3.11.7"}, **flavours},
        "mlflow_version": "3.5.0",
        "model_uuid": "0a1b2c3d",
        "utc_time_created": "2026-11-20 10:00:00.000000",
    }
    if signature is not None:
        document["signature"] = dict(signature)
    (folder / "MLmodel").write_text(yaml.safe_dump(document))
    return folder
