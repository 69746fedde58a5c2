"""The handlers of TorchServe that others are made of, where its package is not installed: base, vision, image classes.

initialize: the serialized file, as TorchScript or as weights of the one class in the model file; index_to_name.json
handle: preprocess ─> inference ─> postprocess
Source: pytorch/serve, ts/torch_handler: the names and the behaviour that handlers override and rely on.
"""

from __future__ import annotations

import base64
import importlib
import io
from pathlib import Path
from typing import Any

import torch

from millstream.plugins.functions.torch_serve import HandlerContext, list_classes_from_module, load_label_mapping
from millstream.plugins.functions.torch_serve import map_class_to_label as labelled

#: of the shorter side of an image, and of the square in its middle, of which the default classifier takes the numbers
_SHORTER, _CROP = 256, 224
_MEAN, _STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


class BaseHandler:
    """Loads the archive's model, and runs it on tensors."""

    def __init__(self) -> None:
        self.model: Any = None
        self.mapping: dict[str, str] | None = None
        self.device: Any = None
        self.initialized = False
        self.context: Any = None
        self.model_pt_path: str | None = None
        self.manifest: Any = None
        self.map_location: str | None = None
        self.explain = False
        self.target = 0
        self.profiler_args: dict[str, Any] = {}

    def initialize(self, context: HandlerContext) -> None:
        """Load the serialized file. Raises RuntimeError if it is of no known kind."""
        self.model_yaml_config = context.model_yaml_config
        self.manifest = context.manifest
        self.map_location, self.device = "cpu", torch.device("cpu")
        folder = Path(context.system_properties["model_dir"])
        described = self.manifest["model"]
        name, model_file = described.get("serializedFile"), described.get("modelFile")
        self.model_pt_path = str(folder / name) if name else None
        if model_file:
            self.model = self._load_pickled_model(str(folder), model_file, self.model_pt_path)
            self.model.to(self.device)
        elif self.model_pt_path and self.model_pt_path.endswith(".pt"):
            self.model = self._load_torchscript_model(self.model_pt_path)
        else:
            raise RuntimeError(f"the base handler loads TorchScript (.pt), or weights of a model file, not {name!r}")
        self.model.eval()
        self.mapping = load_label_mapping(str(folder / "index_to_name.json"))
        self.initialized = True

    def _load_torchscript_model(self, model_pt_path: str) -> Any:
        return torch.jit.load(model_pt_path, map_location=self.device)

    def _load_pickled_model(self, model_dir: str, model_file: str, model_pt_path: str | None) -> Any:
        """Return the one class that the model file defines, with the weights."""
        if not (Path(model_dir) / model_file).is_file():
            raise RuntimeError(f"the archive has no {model_file}")
        classes = list_classes_from_module(importlib.import_module(model_file.partition(".")[0]))
        if len(classes) != 1:
            raise ValueError(f"{model_file} defines {len(classes)} classes, and the model is one")
        model: Any = classes[0]()
        if model_pt_path:
            model.load_state_dict(torch.load(model_pt_path, map_location=self.device))
        return model

    def preprocess(self, data: Any) -> Any:
        return torch.as_tensor(data, device=self.device)

    def inference(self, data: Any, *args: Any, **kwargs: Any) -> Any:
        with torch.inference_mode():
            return self.model(data.to(self.device), *args, **kwargs)

    def postprocess(self, data: Any) -> Any:
        return data.tolist()

    def handle(self, data: Any, context: HandlerContext) -> Any:
        """Return an answer for each row."""
        self.context = context
        return self.postprocess(self.inference(self.preprocess(data)))

    def get_device(self) -> Any:
        return self.device


class VisionHandler(BaseHandler):
    """Makes tensors of images: files, their base64, or lists of numbers."""

    image_processing: Any = None

    def preprocess(self, data: Any) -> Any:
        return torch.stack([self._tensor(row.get("data") or row.get("body")) for row in data]).to(self.device)

    def _tensor(self, image: Any) -> Any:
        from PIL import Image

        if isinstance(image, str):
            image = base64.b64decode(image)
        if isinstance(image, bytes | bytearray):
            return self.image_processing(Image.open(io.BytesIO(image)))
        return torch.FloatTensor(image)


def _standard(image: Any) -> Any:
    """Return an image as the default classifier takes it: resized, its middle, as numbers around 0."""
    from PIL import Image

    width, height = image.size
    shorter = min(width, height)
    size = (_SHORTER * width // shorter, _SHORTER * height // shorter)
    image = image.resize(size, Image.Resampling.BILINEAR)
    left, top = round((size[0] - _CROP) / 2), round((size[1] - _CROP) / 2)
    image = image.crop((left, top, left + _CROP, top + _CROP))
    pixels = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8).view(_CROP, _CROP, -1)
    numbers = pixels.permute(2, 0, 1).float() / 255
    return (numbers - torch.tensor(_MEAN).view(-1, 1, 1)) / torch.tensor(_STD).view(-1, 1, 1)


class ImageClassifier(VisionHandler):
    """Answers the probabilities of the best classes, by their labels."""

    topk = 5
    image_processing = staticmethod(_standard)

    def set_max_result_classes(self, topk: int) -> None:
        self.topk = topk

    def get_max_result_classes(self) -> int:
        return self.topk

    def postprocess(self, data: Any) -> Any:
        probabilities, classes = torch.topk(torch.softmax(data, dim=1), self.topk, dim=1)
        return labelled(probabilities.tolist(), self.mapping, classes.tolist())
