"""A version that a worker loads again is not measured again: a call waits for the load."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from millstream.services.errors import Code, Failure
from millstream.services.model.profile import Profile
from millstream.services.model.signature import Signature, TensorSpec
from millstream.workers.models import profiler
from millstream.workers.models.profiler import KnownProfiles, runs_as_known

SPEC = TensorSpec(name="x", datatype="FP32", shape=(-1, 2))
SIGNATURE = Signature(inputs=(SPEC,), outputs=(SPEC,), batching=True)
KNOWN = Profile({1: 0.1, 8: 0.2, 64: 0.5})


class _Instance:
    """Notes the rows of each run; more than `rows_max` fail."""

    size_bytes = 0

    def __init__(self, rows_max: int) -> None:
        self.rows: list[int] = []
        self._rows_max = rows_max

    def run(self, inputs: Mapping[str, Any]) -> Sequence[np.ndarray]:
        self.rows.append(len(inputs["x"]))
        if self.rows[-1] > self._rows_max:
            raise Failure(Code.MODEL, "too many rows")
        return [inputs["x"]]

    lost = ""

    def terminate(self) -> None: ...

    def rebuild(self) -> None: ...

    def close(self) -> None: ...


def test_a_known_version_runs_one_row_and_the_most_rows_once() -> None:
    instance = _Instance(64)
    assert runs_as_known(instance, SIGNATURE, KNOWN)
    assert instance.rows == [1, 64]


def test_a_version_whose_memory_is_known_runs_only_one_row() -> None:
    instance = _Instance(64)
    assert runs_as_known(instance, SIGNATURE, KNOWN, whole=False)
    assert instance.rows == [1]
    assert not runs_as_known(_Instance(64), SIGNATURE, Profile({}), whole=False)


def test_a_version_that_no_longer_runs_its_rows_is_measured_again() -> None:
    assert not runs_as_known(_Instance(8), SIGNATURE, KNOWN)
    assert not runs_as_known(_Instance(64), SIGNATURE, Profile({}))
    assert runs_as_known(_Instance(0), SIGNATURE, Profile({}))  # no generated input runs, as before


def test_known_profiles_are_bounded(monkeypatch: Any) -> None:
    monkeypatch.setattr(profiler, "PROFILES_MAX", 2)
    known = KnownProfiles()
    for name in "abac":
        known.keep(name, KNOWN)
    assert [known.get(name) is not None for name in "abc"] == [True, False, True]
