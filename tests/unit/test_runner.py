"""Leases run together; when a run fails, only the requests at fault are told so. On real backends."""

from __future__ import annotations

import gc
import json
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from millstream.services.errors import Code
from millstream.services.model.manifest import Manifest, ModelConfig
from millstream.services.model.signature import Signature, TensorSpec
from millstream.services.queue.pipeline import RedisClock
from millstream.services.segments.segment import Segments
from millstream.services.wire.batch import BatchHeader, BatchInput, ShmSlice, encode_batch
from millstream.services.wire.records import State
from millstream.workers.backends import get_backend
from millstream.workers.backends.base import Array, Instance, OutOfMemory
from millstream.workers.batches.lease import Lease
from millstream.workers.batches.runner import OutOfMemoryPolicy, RunResult, merge, run
from millstream.workers.models.loaded_models import LoadedModel
from tests.kit import models

SEGMENTS = Segments(Path("/dev/shm"))
CLOCK = RedisClock()
FAR_MS = 1e15
BAD = 13
HUGE = 99


class Counted:
    """An instance that remembers how many rows each run had."""

    def __init__(self, instance: Instance) -> None:
        self._instance = instance
        self.runs: list[int] = []
        self.size_bytes = 0
        self.lost = ""

    def run(self, inputs: Any) -> Sequence[Array]:
        self.runs.append(next(iter(inputs.values())).shape[0])
        return self._instance.run(inputs)

    def terminate(self) -> None:
        self._instance.terminate()

    def rebuild(self) -> None:
        self._instance.rebuild()

    def close(self) -> None:
        self._instance.close()


def signature(batching: bool = True, datatype: str = "FP32", outputs: int = 1) -> Signature:
    spec = TensorSpec(name="x", datatype=datatype, shape=(-1, 1))
    given_ = tuple(spec.model_copy(update={"name": f"x{i}"}) for i in range(outputs))
    return Signature(inputs=given_, outputs=given_, batching=batching)


def holding(instance: Instance | None, of: Signature, rows_max: int = 64) -> LoadedModel:
    manifest = Manifest(
        model="m",
        version=3,
        created=0.0,
        digest="0" * 64,
        served="source/model",
        files=(),
        signature=of,
        config=ModelConfig(rows_max=rows_max),
        opset=17,
        ir_version=8,
    )
    return LoadedModel(manifest, State.READY, instance=instance)


@pytest.fixture(scope="module")
def simulated(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., LoadedModel]:
    """A model whose output is its input, and which fails on BAD."""
    path = tmp_path_factory.mktemp("simulated") / "model.json"
    path.write_text(json.dumps({"fail_if": BAD}))

    def load(of: Signature | None = None) -> LoadedModel:
        of = of or signature()
        return holding(Counted(get_backend("simulated").load(path, of, "cpu", 1)), of)

    return load


def lease(
    *requests: Sequence[float],
    deadlines: Sequence[float] = (),
    lane: str = "m",
    inner: int = 1,
    dtype: Any = np.float32,
) -> Lease:
    """One lease; each request is its rows, each row `inner` times the same number."""
    data = np.repeat(np.array([value for rows in requests for value in rows], dtype), inner)
    rows = [len(values) for values in requests]
    inputs = [BatchInput((inner,), data.nbytes, None, None)]
    header = BatchHeader("b", b"r", 0.0, rows, list(deadlines) or [FAR_MS] * len(rows), inputs, [], "")
    return Lease(lane, b"1-0", encode_batch(header, [data.tobytes()]), 1)


def values(result: RunResult) -> list[float] | None:
    return None if result.outputs is None else result.outputs[0][:, 0].tolist()


def runs(held: LoadedModel) -> list[int]:
    assert isinstance(held.instance, Counted)
    return held.instance.runs


@pytest.mark.parametrize(
    ("sizes", "rows_max", "taken"),
    [
        ([1, 1, 1], 64, 3),
        ([4, 4, 1], 8, 2),
        ([4, 5, 1], 8, 1),  # none overtakes the one that does not fit
        ([9, 1], 8, 1),
        ([8, 0, 1], 8, 2),
        ([1, 1], 1, 1),
        ([3], 64, 1),
    ],
)
def test_leases_merge_up_to_the_limit_in_their_order(sizes, rows_max, taken):
    leases = [lease([1.0] * size) for size in sizes]
    in_hand = list(leases)
    assert merge(in_hand, rows_max) == leases[:taken]
    assert in_hand == leases[taken:]


def test_leases_of_other_lanes_or_shapes_do_not_merge():
    one, other_lane, same = lease([1]), lease([1], lane="n"), lease([1])
    in_hand = [one, other_lane, same]
    assert merge(in_hand, 64) == [one]
    assert in_hand == [other_lane, same]
    one, wide = lease([1]), lease([1], inner=2)
    assert merge([one, wide], 64) == [one]


def test_merged_leases_run_once_and_get_their_own_rows(simulated):
    held = simulated()
    results = run([lease([1], [2, 3]), lease([4]), lease([], [5])], held, SEGMENTS, CLOCK)
    assert [values(result) for result in results] == [[1, 2, 3], [4], [5]]
    assert runs(held) == [5]
    assert {result.cost.rows for result in results} == {5}
    assert all(result.execution_s > 0 and not result.lease.failures for result in results)


def test_rows_of_nothing_run_too(simulated):
    [result] = run([lease([], [])], simulated(), SEGMENTS, CLOCK)
    assert values(result) == []


def test_what_expired_does_not_run(simulated):
    held = simulated()
    half = lease([1], [2, 2], [3], deadlines=[FAR_MS, 1, FAR_MS])
    gone = lease([4], deadlines=[CLOCK.now_ms() - 1])
    results = run([half, gone], held, SEGMENTS, CLOCK)
    assert [values(result) for result in results] == [[1, 3], None]
    assert runs(held) == [2]
    assert [list(one.failures) for one in (half, gone)] == [[1], [0]]
    assert half.failures[1][0] == Code.EXPIRED


def test_only_the_culprit_is_told(simulated):
    held = simulated()
    innocent, guilty = lease([1], [2]), lease([3], [4, BAD, 5], [6])
    results = run([innocent, guilty], held, SEGMENTS, CLOCK)
    assert [values(result) for result in results] == [[1, 2], [3, 6]]
    assert innocent.failures == {}
    assert guilty.failures == {1: [Code.MODEL, "simulated: an element equals 13.0"]}
    assert guilty.live_requests == [0, 2]
    # All, then its two halves, and the half that fails halved until it is one request.
    assert runs(held) == [7, 2, 5, 1, 4, 3, 1]


def test_a_request_that_is_alone_is_not_run_again(simulated):
    held = simulated()
    [result] = run([lease([BAD])], held, SEGMENTS, CLOCK)
    assert (values(result), runs(held)) == (None, [1])
    assert list(result.lease.failures) == [0]


@given(
    st.lists(
        st.lists(st.lists(st.sampled_from([1.0, 2.0, 3.0, BAD]), max_size=3), min_size=1, max_size=4),
        min_size=1,
        max_size=4,
    ),
    st.sets(st.integers(0, 15)),
)
@settings(deadline=None, derandomize=True)
def test_whatever_fails_the_others_are_answered(simulated, batches, late):
    """`late`: numbers of requests, over all leases, that have expired."""
    held = simulated()
    leases, wanted = [], []
    number = 0
    for requests in batches:
        expired = [number + i in late for i in range(len(requests))]
        number += len(requests)
        leases.append(lease(*requests, deadlines=[1 if out else FAR_MS for out in expired]))
        fates = [
            "expired" if out else "model" if BAD in rows else "" for rows, out in zip(requests, expired, strict=True)
        ]
        wanted.append(([v for rows, fate in zip(requests, fates, strict=True) if not fate for v in rows], fates))
    for result, (alive, fates) in zip(run(leases, held, SEGMENTS, CLOCK), wanted, strict=True):
        assert (values(result) or []) == alive
        assert {i: failure[0] for i, failure in result.lease.failures.items()} == {
            i: f for i, f in enumerate(fates) if f
        }
        assert result.lease.live_requests == [i for i, fate in enumerate(fates) if not fate]
        assert (result.outputs is None) == all(fates)


def test_several_outputs_are_split_alike(simulated):
    of = signature(outputs=2)
    held = simulated(of)

    def pair(value: float) -> Lease:
        one, two = np.full((1, 1), value, np.float32), np.full((1, 1), 10 * value, np.float32)
        inputs = [BatchInput((1,), 4, None, None), BatchInput((1,), 4, None, None)]
        header = BatchHeader("b", b"r", 0.0, [1], [FAR_MS], inputs, [], "")
        return Lease("m", b"1-0", encode_batch(header, [one.tobytes(), two.tobytes()]), 1)

    for bad in (False, True):
        results = run([pair(1), pair(2), *([pair(BAD)] if bad else [])], held, SEGMENTS, CLOCK)
        outputs = [[array.tolist() for array in result.outputs or ()] for result in results]
        assert outputs == [[[[1]], [[10]]], [[[2]], [[20]]], *([[]] if bad else [])]


def test_a_real_model_that_fails_on_some_values(tmp_path):
    """Gather: an index out of its range fails the whole run of ONNX Runtime."""
    of = Signature(
        inputs=(TensorSpec(name="index", datatype="INT64", shape=(-1, 1)),),
        outputs=(TensorSpec(name="y", datatype="FP32", shape=(-1, 1)),),
        batching=True,
    )
    path = models.lookup(tmp_path / "lookup.onnx")
    held = holding(get_backend("onnxruntime").load(path, of, "cpu", 1), of)
    leases = []
    for requests in ([1, 2], [99], [3, 99, 4]):
        data = np.array(requests, np.int64)
        header = BatchHeader(
            "b",
            b"r",
            0.0,
            [1] * len(requests),
            [FAR_MS] * len(requests),
            [BatchInput((1,), data.nbytes, None, None)],
            [],
            "",
        )
        leases.append(Lease("m", b"1-0", encode_batch(header, [data.tobytes()]), 1))
    first, second, third = run(leases, held, SEGMENTS, CLOCK)
    assert (values(first), values(second), values(third)) == ([10, 20], None, [30, 40])
    assert (list(second.lease.failures), list(third.lease.failures)) == ([0], [1])
    assert "ONNX Runtime" in third.lease.failures[1][1]


def test_an_index_outside_of_the_table_does_not_run_with_its_neighbours(tmp_path):
    of = Signature(
        inputs=(TensorSpec(name="index", datatype="INT64", shape=(-1, 1)),),
        outputs=(TensorSpec(name="y", datatype="FP32", shape=(-1, 1)),),
        batching=True,
    )
    instance = Counted(get_backend("onnxruntime").load(models.lookup(tmp_path / "lookup.onnx"), of, "cpu", 1))
    held = holding(instance, of)
    held = replace(held, manifest=held.manifest.model_copy(update={"index_ranges": {"index": (0, 7)}}))
    leases = [lease(*rows, dtype=np.int64) for rows in (([1], [2, 3]), ([-1],), ([3], [4, 8], [5]))]
    results = run(leases, held, SEGMENTS, CLOCK)
    assert [values(result) for result in results] == [[10, 20, 30], None, [30, 50]]
    assert instance.runs == [5], "one run of what is left"
    second, third = results[1].lease.failures, results[2].lease.failures
    assert second == {0: [Code.INVALID, outside("[0][0]", -1)]}
    assert third == {1: [Code.INVALID, outside("[1][0]", 8)]}


def outside(where: str, index: int) -> str:
    return f"input 'index' at {where}: {index} is outside of the model's table, whose indices are 0 to 7"


def test_a_version_that_does_not_batch_runs_as_it_is(tmp_path):
    of = Signature(
        inputs=(TensorSpec(name="x", datatype="FP32", shape=(3, 4)),),
        outputs=(TensorSpec(name="y", datatype="FP32", shape=(4, 3)),),
        batching=False,
    )
    held = holding(get_backend("onnxruntime").load(models.transpose(tmp_path / "t.onnx"), of, "cpu", 1), of)
    assert held.rows_max == 1
    data = np.arange(12, dtype=np.float32).reshape(3, 4)
    header = BatchHeader("b", b"r", 0.0, [1], [FAR_MS], [BatchInput((3, 4), data.nbytes, None, None)], [], "")
    [result] = run([Lease("m", b"1-0", encode_batch(header, [data.tobytes()]), 1)], held, SEGMENTS, CLOCK)
    assert result.outputs is not None
    assert result.outputs[0].tolist() == data.T.tolist()
    wrong = structs.replace(header, inputs=[BatchInput((2, 6), data.nbytes, None, None)])
    [result] = run([Lease("m", b"1-0", encode_batch(wrong, [data.tobytes()]), 1)], held, SEGMENTS, CLOCK)
    assert (result.outputs, result.lease.failures[0][0]) == (None, Code.INVALID)


def test_a_model_that_mixes_rows_is_found_out():
    class Summing:
        size_bytes = 0
        lost = ""

        def run(self, inputs: Any) -> Sequence[Array]:
            return [next(iter(inputs.values())).sum(axis=0, keepdims=True)]

        def terminate(self) -> None:
            return

        def rebuild(self) -> None:
            return

        def close(self) -> None:
            return

    held = holding(Summing(), signature())
    one, two = run([lease([1], [2, 3])], held, SEGMENTS, CLOCK), run([lease([4])], held, SEGMENTS, CLOCK)
    assert values(one[0]) == [1]
    assert list(one[0].lease.failures) == [1]
    assert '"batching": false' in one[0].lease.failures[1][1]
    assert values(two[0]) == [4]


def test_leases_whose_tensors_are_gone_do_not_harm_the_others(simulated):
    held = simulated()
    lost = lease([1], [2])
    lost.header.inputs[0] = structs.replace(lost.header.inputs[0], shm=ShmSlice("no-such-segment", 0, 8))
    empty = lease([3])
    empty.inline = memoryview(b"")  # its blob has expired
    results = run([lost, lease([4]), empty], held, SEGMENTS, CLOCK)
    assert [values(result) for result in results] == [None, [4], None]
    assert [code for code, _ in (lost.failures[0], lost.failures[1], empty.failures[0])] == [Code.UNAVAILABLE] * 3
    assert [values(result) for result in run([lost], held, SEGMENTS, CLOCK)] == [None]


def test_a_version_that_is_not_loaded_is_unavailable():
    [result] = run([lease([1], [2])], holding(None, signature()), SEGMENTS, CLOCK)
    assert result.outputs is None
    assert [code for code, _ in result.lease.failures.values()] == [Code.UNAVAILABLE] * 2


def test_requests_leave_a_lease_once():
    one = lease([1], [2, 3], [4])
    assert one.rows == 4
    one.fail(1, Code.MODEL, "no")
    assert (one.live_requests, one.rows, one.failures) == ([0, 2], 2, {1: [Code.MODEL, "no"]})
    with pytest.raises(ValueError):
        one.fail(1, Code.MODEL, "again")
    with pytest.raises(ValueError):
        Lease("m", b"1-0", b"nonsense", 1)


class Narrow(Counted):
    """Has memory for a few rows."""

    def __init__(self, instance: Instance, rows_max: int) -> None:
        super().__init__(instance)
        self.rows_max = rows_max

    def run(self, inputs: Any) -> Sequence[Array]:
        outputs = super().run(inputs)
        if self.runs[-1] > self.rows_max:
            raise OutOfMemory("no memory")
        return outputs


class Memory(OutOfMemoryPolicy):
    """Rows of runs that found no memory, and of those whose halves ran."""

    def __init__(self) -> None:
        self.failures: list[int] = []
        self.halved: list[int] = []

    def failed(self, lane: str, rows: int) -> None:
        self.failures.append(rows)

    def halves_ran(self, lane: str, rows: int) -> None:
        self.halved.append(rows)


def test_a_run_without_memory_is_halved_until_there_is_enough(simulated):
    held = simulated()
    held = replace(held, instance=Narrow(held.instance, 3))
    memory = Memory()
    one, two = run([lease([1, 2, 3, 4, 5], [6]), lease([7, 8])], held, SEGMENTS, CLOCK, memory)
    assert (values(one), values(two)) == ([1, 2, 3, 4, 5, 6], [7, 8])
    assert runs(held) == [8, 4, 2, 2, 4, 2, 2]
    assert memory.failures == [8, 4, 4]
    assert memory.halved == [4, 4, 8]


def test_leases_that_cannot_be_put_together_run_one_after_the_other(simulated, monkeypatch):
    def full(_: Any) -> Array:
        raise MemoryError("no room")

    held = simulated()
    memory = Memory()
    monkeypatch.setattr("millstream.workers.batches.runner.np.concatenate", full)
    one, two = run([lease([1, 2]), lease([3])], held, SEGMENTS, CLOCK, memory)
    assert (values(one), values(two)) == ([1, 2], [3])
    assert (runs(held), memory.failures, memory.halved) == ([2, 1], [3], [3])


def test_a_row_without_memory_is_an_error_of_its_request_alone(simulated):
    held = simulated()
    held = replace(held, instance=Narrow(held.instance, 0))
    [result] = run([lease([1], [2])], held, SEGMENTS, CLOCK)
    assert result.outputs is None
    assert result.lease.failures == {0: [Code.MODEL, "no memory"], 1: [Code.MODEL, "no memory"]}


class Greedy(Counted):
    """Has no memory for the number HUGE, however few rows there are."""

    def run(self, inputs: Any) -> Sequence[Array]:
        outputs = super().run(inputs)
        if (inputs["x0"] == HUGE).any():
            raise OutOfMemory("no memory")
        return outputs


def test_a_request_that_asks_for_too_much_alone_changes_no_size_of_the_others(simulated):
    held = simulated()
    held = replace(held, instance=Greedy(held.instance))
    memory = Memory()
    one, two = run([lease([1], [2], [HUGE]), lease([3], [4])], held, SEGMENTS, CLOCK, memory)
    assert (values(one), values(two)) == ([1, 2], [3, 4])
    assert one.lease.failures == {2: [Code.MODEL, "no memory"]}
    assert memory.halved == []
    assert 1 in memory.failures


def test_requests_of_a_version_that_batches_no_more_run_one_by_one(simulated):
    held = replace(simulated(), alone="its rows influence each other")
    assert held.rows_merged_max == 1
    one, two = run([lease([1], [2, 3], [BAD]), lease([4])], held, SEGMENTS, CLOCK)
    assert (values(one), values(two)) == ([1, 2, 3], [4])
    assert list(one.lease.failures) == [2]
    assert runs(held) == [1, 2, 1, 1]
    kept: list[int] = []
    run([lease([1], [2])], simulated(), SEGMENTS, CLOCK, on_run=lambda inputs, outputs: kept.append(len(outputs[0])))
    run([lease([1])], simulated(), SEGMENTS, CLOCK, on_run=lambda inputs, outputs: kept.append(len(outputs[0])))
    assert kept == [2, 1]


def test_a_run_that_fails_leaves_nothing_for_the_garbage_collector(simulated):
    held = simulated()
    gc.collect()
    gc.disable()
    try:
        results = run([lease([1], [BAD], [2]), lease([3])], held, SEGMENTS, CLOCK)
        outputs = [weakref.ref(array) for result in results for array in result.outputs or ()]
        assert len(outputs) == 2
        del results
        assert [one() for one in outputs] == [None, None]
    finally:
        gc.enable()
