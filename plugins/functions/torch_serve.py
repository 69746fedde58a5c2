"""What handlers of TorchServe use of it, where its package `ts` is not installed: its context, metrics and modules.

install ─> `import ts.…` finds the modules of _MODULES; others are refused with what to do
Metrics are taken and not kept: the server has metrics of its own for each version.
Sources: pytorch/serve, ts/context.py, ts/metrics, ts/utils/util.py.
"""

from __future__ import annotations

import enum
import inspect
import itertools
import json
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any


class HandlerContext:
    """What a handler gets of its model and of the requests of a run."""

    def __init__(self, name: str, folder: Path, manifest: Mapping[str, Any], config: dict[str, Any]) -> None:
        self.model_name = name
        self.manifest = manifest
        self.model_yaml_config = config
        self.system_properties: dict[str, Any] = {
            "model_dir": str(folder),
            "gpu_id": None,
            "batch_size": int(config.get("batchSize", 1) or 1),
            "server_name": "MMS",
            "server_version": "0.12.0",
            "limit_max_image_pixels": True,
        }
        self.metrics = HandlerMetrics()
        self.request_ids: dict[int, str] = {}
        self.stopping_criteria = None
        self._types: Sequence[str] = ()
        self._statuses: dict[int, tuple[int, str]] = {}
        self._headers: dict[int, dict[str, str]] = {}

    def begin(self, types: Sequence[str]) -> None:
        """Begin a run of requests with these content types."""
        self._types, self._statuses, self._headers = types, {}, {}
        self.request_ids = {at: str(at) for at in range(len(types))}

    def get_request_id(self, idx: int = 0) -> str | None:
        return self.request_ids.get(idx)

    def get_all_request_header(self, idx: int) -> dict[str, str]:
        return {"content-type": self._types[idx]} if idx < len(self._types) and self._types[idx] else {}

    def get_request_header(self, idx: int, key: str) -> str | None:
        return self.get_all_request_header(idx).get(key.lower())

    def set_response_content_type(self, idx: int, value: str) -> None:
        self.set_response_header(idx, "content-type", value)

    def get_response_content_type(self, idx: int) -> str | None:
        return self.get_response_headers(idx).get("content-type")

    def set_response_header(self, idx: int, key: str, value: str) -> None:
        self._headers.setdefault(idx, {})[key.lower()] = value

    def get_response_headers(self, idx: int) -> dict[str, str]:
        return self._headers.get(idx, {})

    def set_response_status(self, code: int = 200, phrase: str = "", idx: int = 0) -> None:
        self._statuses[idx] = code, phrase

    def set_all_response_status(self, code: int = 200, phrase: str = "") -> None:
        self._statuses = dict.fromkeys(range(len(self._types)), (code, phrase))

    def get_response_status(self, idx: int) -> tuple[int, str]:
        return self._statuses.get(idx, (200, ""))


class IgnoredMetric:
    """Takes values."""

    def add_or_update(self, *_: Any, **__: Any) -> None:
        """Do nothing."""

    update = reset = add_or_update


class HandlerMetrics:
    """Takes metrics under any name."""

    def get_metric(self, *_: Any, **__: Any) -> IgnoredMetric:
        return IgnoredMetric()

    add_metric_to_cache = add_metric = add_counter = add_time = add_size = add_percent = add_error = get_metric


class MetricTypes(enum.Enum):
    COUNTER, GAUGE, HISTOGRAM = "counter", "gauge", "histogram"


class Dimension:
    """The name and the value of a label."""

    def __init__(self, name: str, value: str) -> None:
        self.name, self.value = name, value


class PredictionException(Exception):
    """Answers all requests of a run with an error."""

    def __init__(self, message: str, error_code: int = 500) -> None:
        super().__init__(f"{message} : {error_code}")
        self.message, self.error_code = message, error_code


def list_classes_from_module(module: Any, parent_class: type | None = None) -> list[type]:
    """Return the classes that a module defines."""
    own = [one for _, one in inspect.getmembers(module, inspect.isclass) if one.__module__ == module.__name__]
    return [one for one in own if parent_class is None or issubclass(one, parent_class)]


def load_label_mapping(mapping_file_path: str) -> dict[str, str] | None:
    """Return the label of each class in a file of JSON, whose values may be lists that end with it; None: no file."""
    path = Path(mapping_file_path)
    if not path.is_file():
        return None
    found = json.loads(path.read_text(encoding="utf-8"))
    if isinstance(found, dict) and isinstance(found.get("object_type_names"), list):
        return {str(at): label for at, label in enumerate(found["object_type_names"])}
    labels = {key: one[-1] if isinstance(one, list) and one else one for key, one in found.items()}
    if not all(isinstance(label, str) for label in labels.values()):
        raise ValueError("index_to_name.json has a label that is no text")
    return labels


def map_class_to_label(
    probs: Sequence[Sequence[float]], mapping: Mapping[str, str] | None = None, lbl_classes: Any = None
) -> list[dict[str, float]]:
    """Return the probability of each label, for each row."""
    rows = lbl_classes if lbl_classes is not None else itertools.repeat(range(len(probs[0])), len(probs))
    return [
        {mapping[str(one)] if mapping is not None else str(one): prob for one, prob in zip(classes, row, strict=False)}
        for classes, row in zip(rows, probs, strict=False)
    ]


def timed(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function: the server measures runs itself."""
    return function


_HANDLERS = "millstream.plugins.functions.torch_handlers"
_PACKAGES = ("ts", "ts.utils", "ts.handler_utils", "ts.metrics", "ts.torch_handler")
#: module -> where its names are, and these
_MODULES: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "ts.context": (__name__, ("HandlerContext",)),
    "ts.utils.util": (
        __name__,
        ("PredictionException", "list_classes_from_module", "load_label_mapping", "map_class_to_label"),
    ),
    "ts.handler_utils.timer": (__name__, ("timed",)),
    "ts.metrics.dimension": (__name__, ("Dimension",)),
    "ts.metrics.metric_type_enum": (__name__, ("MetricTypes",)),
    "ts.torch_handler.base_handler": (_HANDLERS, ("BaseHandler",)),
    "ts.torch_handler.vision_handler": (_HANDLERS, ("VisionHandler",)),
    "ts.torch_handler.image_classifier": (_HANDLERS, ("ImageClassifier",)),
}


class _Finder(MetaPathFinder, Loader):
    """Finds the modules of TorchServe that are here. Raises ImportError with what to do for others."""

    def find_spec(self, fullname: str, _path: Any, _target: Any = None) -> ModuleSpec | None:
        if fullname in _PACKAGES:
            return ModuleSpec(fullname, self, is_package=True)
        if fullname in _MODULES:
            return ModuleSpec(fullname, self)
        if fullname.partition(".")[0] != "ts":
            return None
        raise ModuleNotFoundError(
            f"{fullname} is a part of TorchServe that is not provided: add torchserve, and what it needs, to the "
            "requirements of the archive",
            name=fullname,
        )

    def exec_module(self, module: types.ModuleType) -> None:
        where, names = _MODULES.get(module.__name__, ("", ()))
        for name in names:
            found = getattr(import_module(where), name)
            if where == _HANDLERS:
                found.__module__ = module.__name__  # by which the handler that an archive names is found
            setattr(module, name.removeprefix("Handler"), found)


def install() -> None:
    """Have `import ts` find what is here."""
    sys.meta_path.append(_Finder())
