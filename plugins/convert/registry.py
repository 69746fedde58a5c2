"""The importers, in the order in which they are asked about an upload."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from millstream.plugins.convert.base import Importer, Source
from millstream.plugins.convert.boosted_trees import CatboostImporter, LightgbmImporter, XgboostImporter
from millstream.plugins.convert.huggingface import HuggingFaceImporter
from millstream.plugins.convert.huggingface_onnx import HuggingFaceOnnxImporter
from millstream.plugins.convert.keras import KerasImporter
from millstream.plugins.convert.mlflow import MlflowImporter
from millstream.plugins.convert.mlserver import MLServerImporter
from millstream.plugins.convert.scikit_learn import PickleImporter, SkopsImporter
from millstream.plugins.convert.tensorflow import SavedModelImporter, TensorFlowLiteImporter
from millstream.plugins.convert.torch_program import TorchProgramImporter
from millstream.plugins.convert.torchscript import TorchScriptImporter
from millstream.plugins.convert.torchserve import TorchServeImporter
from millstream.plugins.convert.versioned_folder import VersionedFolderImporter

#: formats of folders that describe themselves, which may have an ONNX file at their top
_DESCRIBED: tuple[Importer, ...] = (
    MlflowImporter(),
    TorchServeImporter(),
    MLServerImporter(),
    VersionedFolderImporter(),
    HuggingFaceOnnxImporter(),
)
#: asked about a file, and about a folder without an ONNX file at its top
IMPORTERS: tuple[Importer, ...] = (
    XgboostImporter(),
    LightgbmImporter(),
    CatboostImporter(),
    PickleImporter(),
    SkopsImporter(),
    TorchProgramImporter(),
    TorchScriptImporter(),
    KerasImporter(),
    HuggingFaceImporter(),
    SavedModelImporter(),
    TensorFlowLiteImporter(),
)
#: Importers that read numbers and names alone, or run what the model check runs, too. All others load what can name
#: functions, or run a framework's graph.
_OF_DATA = frozenset({"XGBoost", "LightGBM", "CatBoost", "TensorFlow Lite", "Hugging Face ONNX"})


def may_execute(importer: Importer) -> bool:
    """Return whether converting a model may execute what was uploaded."""
    return importer.name not in _OF_DATA


def find_importer(source: Source, without: Collection[str] = ()) -> Importer | None:
    """Return the importer of the file or folder at `source.path`; None: it is ONNX, an archive, or nothing known.

    Args:
        source: the file or folder.
        without: names of importers that are not asked.

    Raises OSError if it cannot be read.
    """
    importer = next(
        (importer for importer in _DESCRIBED if importer.name not in without and importer.recognises(source)), None
    )
    if importer is not None or _has_onnx(source.path):
        return importer
    return next((importer for importer in IMPORTERS if importer.recognises(source)), None)


def importer_named(name: str) -> Importer:
    """Return the importer of this name. Raises KeyError."""
    found = {importer.name: importer for importer in (*_DESCRIBED, *IMPORTERS)}
    return found[name]


def _has_onnx(path: Path) -> bool:
    return path.is_dir() and any(entry.suffix == ".onnx" for entry in path.iterdir())
