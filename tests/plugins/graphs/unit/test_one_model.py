"""The one model of a graph: it is compared with its steps."""

from __future__ import annotations

from pathlib import Path

import pytest

from millstream.plugins.graphs.document import Graph
from millstream.plugins.graphs.inspection import _compared, _merged, _Steps
from millstream.plugins.graphs.structure import Structure
from millstream.services.errors import Failure
from millstream.services.ingest.graph import read_model, save_model
from millstream.services.ingest.model_io import read_tensors
from millstream.services.ingest.trial_session import Session
from tests.kit import models

CHAIN = Structure(
    Graph.model_validate(
        {
            "merge": True,
            "steps": {
                "a": {"model": "double", "inputs": {"x": "x"}},
                "b": {"model": "triple", "inputs": {"x": "a.y"}},
            },
            "outputs": {"y": "b.y"},
        }
    )
)


def test_one_model_that_answers_something_else_is_not_taken(tmp_path: Path) -> None:
    files = {"a": models.scale(tmp_path / "double.onnx", 2.0, 4), "b": models.scale(tmp_path / "triple.onnx", 3.0, 4)}
    steps = _Steps(CHAIN, files, {name: read_model(path) for name, path in files.items()})
    whole = _merged(CHAIN, {name: read_model(path) for name, path in files.items()})
    right = Session(save_model(whole, [], tmp_path, tmp_path / "whole"), *read_tensors(whole))
    given = _compared(steps, right, *read_tensors(whole))
    assert given["x"].shape == (1, 4)
    other = models.scale(tmp_path / "other.onnx", 6.001, 4)
    tensors = read_tensors(read_model(other))
    with pytest.raises(Failure, match="one model answers something else in 'y' than its steps do"):
        _compared(steps, Session(other, *tensors), *tensors)
