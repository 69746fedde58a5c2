"""What loads a framework, in the process that imports are forked from; nothing of an upload is read there.

Loading PyTorch and its exporter takes two thirds of the time of a small import. A child finds them loaded, and the
modules that the first export imports, too. A framework that starts threads when it is loaded, as TensorFlow does, has
no rehearsal: it cannot be forked (`ingest.fork_server`).
"""

from __future__ import annotations

import importlib
import os
from contextlib import suppress

from millstream.plugins.convert.onnx_export import import_torch
from millstream.services.process.threads import NICE


def load_torch() -> None:
    """Load PyTorch and its exporter. Not transformers or Keras: where they write is read when they are loaded."""
    os.nice(NICE)
    tqdm = importlib.import_module("tqdm").tqdm
    tqdm.monitor_interval = 0  # else the exporter's progress bar starts a thread
    torch = import_torch()
    module = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU()).eval()
    rows = ({0: torch.export.Dim("rows")},)
    torch.onnx.export(module, (torch.zeros(2, 2),), dynamo=True, verbose=False, dynamic_shapes=rows)


def load_scikit_learn() -> None:
    """Load scikit-learn and its converter, which the converters of boosted trees use, too."""
    os.nice(NICE)
    _load("sklearn.ensemble", "sklearn.pipeline", "skl2onnx", "onnxmltools", "pandas")


def _load(*modules: str) -> None:
    for module in modules:
        with suppress(ImportError):  # the import that needs it says what to install
            importlib.import_module(module)
