"""Pickles that have no form in ONNX are served by their own library, if the upload allows code."""

from __future__ import annotations

import io
import os
import pickle
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import joblib
import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer

from millstream.client.client import Client
from millstream.services.errors import Failure
from tests.kit.stack import Stack, running_stack

ROWS = np.random.default_rng(7).random((60, 3))
NAMES = np.where(ROWS.sum(1) > 1.5, "large", "small")


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with running_stack(tmp_path_factory.mktemp("stack"), settings={"check_s_max": 10}) as running:
        yield running


@pytest.fixture
def client(stack: Stack) -> Iterator[Client]:
    with Client(stack.url, key=stack.key) as client:
        yield client


def test_a_pipeline_that_no_converter_knows_answers_as_its_library(client: Client, tmp_path: Path) -> None:
    model = make_pipeline(FunctionTransformer(np.log1p), LogisticRegression()).fit(ROWS, NAMES)
    joblib.dump(model, tmp_path / "model.joblib", compress=3)
    with pytest.raises(Failure, match=r"numpy\.log1p.*push it with --allow-code"):
        client.push("pipeline", tmp_path / "model.joblib", allow_pickle=True)
    pushed = client.push("pipeline", tmp_path / "model.joblib", allow_pickle=True, allow_code=True, wait_s=120)
    assert any("Served as it is" in note and "numpy.log1p" in note for note in pushed["notes"])
    answered = client.predict("pipeline", {"input": ROWS[:9]})
    assert answered["label"].tolist() == model.predict(ROWS[:9]).tolist()
    np.testing.assert_array_equal(answered["probabilities"], model.predict_proba(ROWS[:9]))


def test_what_has_a_form_in_onnx_is_converted_whatever_is_allowed(client: Client, tmp_path: Path) -> None:
    joblib.dump(LogisticRegression().fit(ROWS, NAMES), tmp_path / "model.joblib")
    pushed = client.push("converted", tmp_path / "model.joblib", allow_pickle=True, allow_code=True, wait_s=120)
    assert pushed["imported"] is not None
    assert "skl2onnx" in pushed["imported"]["producer"]


class Calls:
    """What unpickling it calls."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.called = function, arguments

    def __reduce__(self) -> Any:
        return self.called


HOSTILE = {
    (os.system, "touch /tmp/was-here"): "neither predicts nor transforms",
    (os._exit, 3): "its process ended with exit code 3",
    (os.kill, 1, 9): "Operation not permitted",
    (open, "/etc/passwd"): "Permission denied",
    (time.sleep, 3600): "the check took longer than 10 s",
    (bytearray, 1 << 40): "out of memory",
    (exec, "while True: print('x' * 1000)"): "the check took longer than 10 s",
    (exec, "import socket; socket.create_connection(('127.0.0.1', 80))"): "Operation not permitted",
}


@pytest.mark.parametrize("call", HOSTILE, ids=lambda call: f"{call[0].__name__} {call[1]}"[:30])
def test_a_pickle_that_misbehaves_is_refused_and_reaches_nothing(client: Client, tmp_path: Path, call: Any) -> None:
    written = io.BytesIO()
    pickle.dump((Calls(*call), FunctionTransformer()), written)
    (tmp_path / "model.pkl").write_bytes(written.getvalue())
    with pytest.raises(Failure) as refused:
        client.push("hostile", tmp_path / "model.pkl", allow_pickle=True, allow_code=True)
    assert "nor can it be served as it is" in str(refused.value)
    assert HOSTILE[call] in str(refused.value)
    assert not Path("/tmp/was-here").exists()
