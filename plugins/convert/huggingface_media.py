"""Converts classifiers of images and of recordings, which Hugging Face's folders have with safetensors.

folder ─> transformers, offline ─> samples ─> ONNX           preprocessor_config.json ─> the steps of the version
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from millstream.plugins.convert.base import Imported
from millstream.plugins.convert.huggingface_folder import Folder
from millstream.plugins.convert.huggingface_model import LOGITS, Head, answer_of, load_model
from millstream.plugins.convert.huggingface_processors import PIXELS, SAMPLES, steps_of
from millstream.plugins.convert.onnx_export import CannotExport, Export, export, sample
from millstream.services.errors import invalid
from millstream.services.ingest.importers import Array, Sample, Source
from millstream.services.model.preparation import Preparation, image_plan
from millstream.services.model.signature import TensorSpec

#: what a folder's head takes
GIVEN = {"image-classification": PIXELS, "audio-classification": SAMPLES}
#: height and width where neither the processor nor config.json has one
_SIDE = 224
#: rows of the samples, and lengths of recordings
_ROWS = (3, 1)
_LENGTHS = (8000, 12_000)


def convert_media(torch: Any, transformers: Any, source: Source, folder: Folder, head: Head) -> Imported:
    """Return a classifier of images or recordings as ONNX. Raises Failure(INVALID) with what the owner can do."""
    given = GIVEN[head.task]
    model, notes = load_model(torch, transformers, folder, head)
    prepare, note = steps_of(folder.path, given)
    shapes = _shapes(model.config, given, prepare)
    module = _logits(torch, model)
    generator = np.random.default_rng(1)
    try:
        samples = [_sample(torch, module, given, shape, generator) for shape in shapes]
    except Exception as error:
        text = " ".join(str(error).split())[:300]
        raise invalid(f"the model does not run on {given} of the shape {list(shapes[0])}: {text}") from error
    answer = answer_of(model.config, head.task, samples[0].outputs[LOGITS].shape[-1])
    files = _exported(torch, module, given, shapes[0], source.folder)
    return Imported(
        files[0],
        "onnx",
        samples,
        f"transformers {transformers.__version__}, torch {torch.__version__}",
        (*notes, *([note] if note else []), *answer.notes),
        files=files[1:],
        rtol=1e-3,
        atol=1e-4,
        classes=answer.classes,
        labels=answer.labels,
        prepare=prepare,
    )


def _shapes(config: Any, given: str, prepare: dict[str, Preparation]) -> list[tuple[int, ...]]:
    """Return the shapes of the samples."""
    if given == SAMPLES:
        return [(rows, length) for rows, length in zip(_ROWS, _LENGTHS, strict=True)]
    channels = getattr(config, "num_channels", None) or 3
    size = None
    steps = prepare[given].image if prepare else None
    if steps is not None:
        size = image_plan(steps, TensorSpec(name=given, datatype="FP32", shape=(-1, channels, -1, -1))).size
    if size is None:
        side = getattr(config, "image_size", None) or _SIDE
        size = (side[0], side[1]) if isinstance(side, list | tuple) else (side, side)
    return [(rows, channels, *size) for rows in _ROWS]


def _logits(torch: Any, model: Any) -> Any:
    class Served(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, values: Any) -> Any:
            return self.model(values, return_dict=True).logits

    return Served().eval()


def _sample(torch: Any, module: Any, given: str, shape: Sequence[int], generator: np.random.Generator) -> Sample:
    values: Array = generator.standard_normal(shape).astype(np.float32)
    return sample(torch, module, [given], [LOGITS], [values])


def _exported(torch: Any, module: Any, given: str, shape: Sequence[int], folder: Path) -> list[Path]:
    values = torch.from_numpy(np.random.default_rng(2).standard_normal((2, *shape[1:])).astype(np.float32))
    dynamic = torch.export.Dim.DYNAMIC
    dims = {0: dynamic, 1: dynamic} if given == SAMPLES else {0: dynamic}
    try:
        return export(torch, Export(module, (given,), (LOGITS,), (values,), (dims,)), folder)
    except CannotExport as error:
        raise invalid(f"the model cannot be exported to ONNX: {error}") from error
