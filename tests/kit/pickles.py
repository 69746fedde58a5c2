"""Pickles for tests: harmless ones of estimators, and hostile ones."""

from __future__ import annotations

import io
import os
import pickle
import struct
import zlib

import joblib
import numpy as np
from sklearn.base import BaseEstimator, TransformerMixin
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline


class Squared(TransformerMixin, BaseEstimator):  # type: ignore[misc]
    """A custom transformer, which no server has."""

    def fit(self, rows, labels=None):
        self.n_features_in_ = rows.shape[1]
        return self

    def transform(self, rows):
        return rows**2


class _Calls:
    def __init__(self, function: object, *arguments: object) -> None:
        self._reduced = (function, arguments)

    def __reduce__(self):
        return self._reduced


def estimator_with(function: object, *arguments: object) -> bytes:
    """A fitted estimator whose pickle also calls `function`."""
    model = LogisticRegression().fit([[0.0], [1.0]], [0, 1])
    model.extra_ = _Calls(function, *arguments)
    return pickle.dumps(model)


def dumped(model: object, **options: object) -> bytes:
    """The bytes of a joblib file."""
    file = io.BytesIO()
    joblib.dump(model, file, **options)
    return file.getvalue()


def custom() -> bytes:
    """A pipeline with a transformer of the caller's own."""
    return dumped(make_pipeline(Squared(), LogisticRegression()).fit(np.array([[0.0], [1.0]]), [0, 1]))


#: a pickle's beginning that names an estimator
_HEAD = b"\x80\x04\x8c\x07sklearn0"

HOSTILE: dict[str, tuple[bytes, str]] = {
    "os.system": (estimator_with(os.system, "touch /tmp/millstream-was-here"), "posix.system"),
    "eval": (estimator_with(eval, "1 + 1"), "builtins.eval"),
    "getattr": (estimator_with(getattr, LogisticRegression, "fit"), "builtins.getattr"),
    "in a nested array": (dumped([LogisticRegression(), _Calls(os.system, "true")]), "posix.system"),
    "deep": (_HEAD + b"(" * 3_000_000 + b".", "broken or cut short"),
    "deep lists": (_HEAD + b"]" + b"]" * 200_000 + b"a" * 200_000 + b".", "save the estimator itself"),
    "a length of 2**62": (_HEAD + b"\x8e" + struct.pack("<Q", 1 << 62) + b"x.", "MiB that an import may use"),
    "billion laughs": (
        _HEAD + b"]\x94" + b"".join(b"(h\x00" + b"h\x00" * 9 + b"l\x94" for _ in range(200)) + b".",
        "save the estimator itself",
    ),
    "a constructor": (estimator_with(LogisticRegression), "calls LogisticRegression"),
    "a file as a second pickle": (
        estimator_with(np.lib.npyio.NpzFile, "/proc/self/fd/3", False, True),
        "needs numpy.lib.npyio.NpzFile",
    ),
    "a persistent id": (_HEAD + b"\x8c\x01xQ.", "outside of it"),
    "an extension": (_HEAD + b"\x82\x01.", "extensions"),
    "zeros, compressed": (zlib.compress(_HEAD + b"\x00" * 50_000_000), "broken or cut short"),
}
