"""What a pickle says of the versions that wrote it."""

from __future__ import annotations

import pickle
from pathlib import Path

import joblib
import numpy as np
import pytest
import sklearn
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from millstream.plugins.functions.stand_ins import written_with

MODEL = make_pipeline(StandardScaler(), LogisticRegression()).fit(np.eye(4), [0, 1, 0, 1])


@pytest.mark.parametrize("compress", [0, ("zlib", 3), ("gzip", 3), ("bz2", 3), ("xz", 3), ("lzma", 3)], ids=str)
def test_the_release_is_read_without_unpickling(
    tmp_path: Path, compress: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    joblib.dump(MODEL, tmp_path / "model", compress=compress)
    assert written_with(tmp_path / "model") == [], "the server has the same"
    monkeypatch.setattr("millstream.plugins.functions.stand_ins._installed", lambda _: "1.0")
    assert written_with(tmp_path / "model") == [f"scikit-learn=={sklearn.__version__}", "numpy>=2"]


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_libraries_that_a_pickle_names_come_along(tmp_path: Path, protocol: int) -> None:
    content = pickle.dumps((MODEL, "xgboost.sklearn"), protocol)
    (tmp_path / "model").write_bytes(content.replace(sklearn.__version__.encode(), b"1.7.2"))
    assert written_with(tmp_path / "model") == ["scikit-learn==1.7.2", "numpy>=2", "xgboost"]


@pytest.mark.parametrize("content", [b"", b"\x1f\x8b\x08broken", b"BZh9broken", b"\xfd7zXZ\0broken", b"x" * 100])
def test_a_file_that_says_nothing_runs_with_the_packages_of_the_server(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model").write_bytes(content)
    assert written_with(tmp_path / "model") == []


def test_a_bomb_is_read_to_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("millstream.plugins.functions.stand_ins._READ_BYTES_MAX", 4 << 20)
    joblib.dump(np.zeros(64 << 20, np.uint8), tmp_path / "model", compress=("zlib", 9))
    assert written_with(tmp_path / "model") == []
