"""What the simulated backend adds to the contract: it takes as long, holds as much and fails as its file says."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from millstream.services.errors import Code, Failure
from millstream.services.process.process_memory import resident_bytes
from millstream.workers.backends import get_backend
from millstream.workers.backends.base import Instance, OutOfMemory, Stop
from tests.contract.backend_cases import same, signature

ONE = np.array([[12.0, 14.0]], np.float32)
BYTES = 64 * 2**20


def load(folder: Path, behaviour: object, datatype: str = "FP32", stop: Stop | None = None) -> Instance:
    path = folder / "model.json"
    path.write_text(json.dumps(behaviour))
    return get_backend("simulated").load(path, same(datatype), "cpu", 1, stop)


def test_fails_on_an_element(tmp_path: Path) -> None:
    instance = load(tmp_path, {"fail_if": 13})
    instance.run({"x": ONE})
    with pytest.raises(Failure, match="an element equals 13") as caught:
        instance.run({"x": np.array([[12.0, 13.0]], np.float32)})
    assert caught.value.code is Code.MODEL


def test_fails_on_text(tmp_path: Path) -> None:
    instance = load(tmp_path, {"fail_if": "poison"}, "BYTES")
    instance.run({"x": np.array([[b"poisonous", b""]], dtype=object)})
    with pytest.raises(Failure, match="poison"):
        instance.run({"x": np.array([[b"", b"poison"]], dtype=object)})


@pytest.mark.parametrize(
    ("behaviour", "printed", "killed_by"),
    [
        ({"crash_if": 99}, "98\n", signal.SIGKILL),
        ({"load": "crash"}, "", signal.SIGABRT),
        ({"load": "crash", "load_on": "cuda"}, "98\n99\n", 0),
    ],
)
def test_kills_the_process_as_told(tmp_path: Path, behaviour: object, printed: str, killed_by: int) -> None:
    path = tmp_path / "model.json"
    path.write_text(json.dumps(behaviour))
    code = (
        "import sys, numpy, pathlib; from tests.contract.backend_cases import same\n"
        "from millstream.workers.backends import get_backend\n"
        "instance = get_backend('simulated').load(pathlib.Path(sys.argv[1]), same(), 'cpu', 1)\n"
        "for value in (98, 99): instance.run({'x': numpy.full((1, 2), value, 'f4')}); print(value, flush=True)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(path)], check=False, capture_output=True, text=True)
    assert (done.stdout, done.returncode) == (printed, -killed_by)


def test_a_run_takes_its_time_and_more_for_each_row(tmp_path: Path) -> None:
    waited: list[float | None] = []

    class Recorded(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            waited.append(timeout)
            return False

    instance = load(tmp_path, {"run_s": 5, "row_s": 2})
    instance._terminated = Recorded()  # type: ignore[attr-defined]
    instance.run({"x": np.ones((1, 2), np.float32)})
    instance.run({"x": np.ones((10, 2), np.float32)})
    assert waited == [7, 25]


def test_a_load_takes_its_time_unless_its_end_is_requested(tmp_path: Path) -> None:
    stop = Stop()
    began = threading.Event()
    failures: list[Failure] = []

    def load_long() -> None:
        began.set()
        try:
            load(tmp_path, {"load_s": 600}, stop=stop)
        except Failure as failure:
            failures.append(failure)

    loading = threading.Thread(target=load_long)
    loading.start()
    began.wait()
    stop.request("no longer wanted")
    loading.join(120)
    assert [failure.message for failure in failures] == ["simulated: the load was ended"]


def test_a_load_that_is_to_fail_fails(tmp_path: Path) -> None:
    with pytest.raises(Failure, match="the load fails"):
        load(tmp_path, {"load": "fail"})


def test_more_rows_than_fit_find_no_memory(tmp_path: Path) -> None:
    instance = load(tmp_path, {"rows_fitting": 2})
    instance.run({"x": np.ones((2, 2), np.float32)})
    with pytest.raises(OutOfMemory, match="no memory for 3 rows"):
        instance.run({"x": np.ones((3, 2), np.float32)})


def test_bytes_are_held_if_they_are_to_be_allocated_and_free_after_closing(tmp_path: Path) -> None:
    before = resident_bytes()
    instance = load(tmp_path, {"bytes": BYTES, "allocate": True})
    assert instance.size_bytes == BYTES
    assert resident_bytes() - before > 0.9 * BYTES
    instance.close()
    assert resident_bytes() - before < 0.1 * BYTES


def test_bytes_are_only_claimed_otherwise(tmp_path: Path) -> None:
    before = resident_bytes()
    assert load(tmp_path, {"bytes": 2**40}).size_bytes == 2**40
    assert resident_bytes() - before < BYTES


@pytest.mark.parametrize("behaviour", [{"sleep": 1}, {"run_s": -1}, {"load": "slowly"}, []])
def test_a_behaviour_it_does_not_know_is_refused(tmp_path: Path, behaviour: object) -> None:
    with pytest.raises(Failure) as caught:
        load(tmp_path, behaviour)
    assert caught.value.code is Code.MODEL


def test_outputs_that_no_input_resembles_are_zeros(tmp_path: Path) -> None:
    path = tmp_path / "model.json"
    path.write_text("{}")
    shapes = signature(
        [("x", "FP32", (-1, 2))], [("y", "FP32", (-1, 2)), ("label", "BYTES", (-1, -1)), ("z", "INT64", (-1, 3))]
    )
    copied, labels, zeros = (
        get_backend("simulated").load(path, shapes, "cpu", 1).run({"x": np.ones((5, 2), np.float32)})
    )
    assert copied.tolist() == [[1, 1]] * 5
    assert labels.tolist() == [[b""]] * 5
    assert zeros.tolist() == [[0, 0, 0]] * 5
