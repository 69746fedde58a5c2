"""The warm-up measurement, on instances that move a clock of their own instead of time passing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import pytest

from millstream.services.errors import Code, Failure
from millstream.services.model.signature import Signature, TensorSpec
from millstream.services.model.warmup_inputs import INPUT_BYTES_MAX
from millstream.workers.backends.base import Array, OutOfMemory
from millstream.workers.models.profiler import measure

Shapes = list[tuple[int, ...]]


class Machine:
    """An instance whose runs take `cost(rows)` seconds on its own clock, and fail where `accepts` says no."""

    size_bytes = 0
    lost = ""

    def __init__(
        self, cost: Callable[[int], float], accepts: Callable[[Mapping[str, Array]], bool] = lambda _: True
    ) -> None:
        self.now = 0.0
        self.runs: Shapes = []
        self._cost, self._accepts = cost, accepts

    def run(self, inputs: Mapping[str, Array]) -> Sequence[Array]:
        array = next(iter(inputs.values()))
        self.runs.append(array.shape)
        if not self._accepts(inputs):
            raise Failure(Code.MODEL, "the window does not fit")
        self.now += self._cost(array.shape[0] if array.ndim else 1)
        return [array]

    def terminate(self) -> None: ...

    def rebuild(self) -> None:
        return

    def close(self) -> None: ...

    def clock(self) -> float:
        return self.now


def signature(*shapes: tuple[int, ...], datatype: str = "FP32", batching: bool = True) -> Signature:
    specs = tuple(TensorSpec(name=f"x{i}", datatype=datatype, shape=shape) for i, shape in enumerate(shapes))
    return Signature(inputs=specs, outputs=specs, batching=batching)


def test_measures_powers_of_two_up_to_the_limit() -> None:
    machine = Machine(lambda rows: 0.001 + 0.0001 * rows)
    profile = measure(machine, signature((-1, 4)), 24, 10.0, machine.clock)
    assert list(profile.seconds) == [1, 2, 4, 8, 16, 24]
    assert profile.seconds == pytest.approx({rows: 0.001 + 0.0001 * rows for rows in (1, 2, 4, 8, 16, 24)})


def test_an_outlier_does_not_count() -> None:
    calls = iter(range(1000))
    machine = Machine(lambda rows: 5.0 if next(calls) == 3 else 0.001)
    assert measure(machine, signature((-1, 4)), 1, 1.0, machine.clock).seconds == pytest.approx({1: 0.001})


def test_stops_within_the_budget() -> None:
    machine = Machine(lambda rows: 0.01 * rows)
    profile = measure(machine, signature((-1, 4)), 4096, 2.0, machine.clock)
    assert 1 < max(profile.seconds) < 4096
    assert machine.now <= 2.0


def test_one_size_is_measured_however_small_the_budget() -> None:
    machine = Machine(lambda rows: 3.0)
    assert measure(machine, signature((-1, 4)), 64, 0.0, machine.clock).seconds == {1: 3.0}


def test_inputs_too_large_to_make_up_are_not_measured() -> None:
    machine = Machine(lambda rows: 0.0)
    rows_fit = 4
    profile = measure(machine, signature((-1, INPUT_BYTES_MAX // 4 // rows_fit)), 64, 60.0, machine.clock)
    assert max(profile.seconds) == rows_fit


def test_without_batching_one_run_is_measured_with_the_shape_as_it_is() -> None:
    machine = Machine(lambda rows: 0.002)
    profile = measure(machine, signature((3, 4), batching=False), 64, 1.0, machine.clock)
    assert profile.seconds == pytest.approx({1: 0.002})
    assert set(machine.runs) == {(3, 4)}


@pytest.mark.parametrize("datatype", ["BOOL", "UINT8", "INT64", "FP16", "BF16", "FP32", "FP64", "BYTES"])
def test_inputs_have_the_datatypes_of_the_signature(datatype: str) -> None:
    expected = {"BOOL": "?", "UINT8": "u1", "INT64": "i8", "FP16": "f2", "BF16": "u2", "FP32": "f4", "FP64": "f8"}
    seen: set[np.dtype] = set()

    def accepts(inputs: Mapping[str, Array]) -> bool:
        seen.add(inputs["x0"].dtype)
        return True

    measure(Machine(lambda rows: 0.001, accepts), signature((-1, 2), datatype=datatype), 1, 1.0)
    assert seen == {np.dtype(expected.get(datatype, "O"))}


def test_a_model_that_no_made_up_value_suits_is_not_measured() -> None:
    machine = Machine(lambda rows: 0.001, lambda _: False)
    for batching, runs in ((True, [(1, 4), (1, 4)]), (False, [(2, 4), (2, 4)])):
        machine.runs.clear()
        shape = (-1, 4) if batching else (2, 4)
        assert not measure(machine, signature(shape, batching=batching), 8, 1.0, machine.clock).seconds
        assert machine.runs == runs  # zeros, then ones


def test_inputs_too_large_to_make_up_are_never_made() -> None:
    machine = Machine(lambda rows: 0.001)
    huge = (1 << 20, 1 << 20, 1 << 10)
    assert not measure(machine, signature(huge, batching=False), 1, 1.0, machine.clock).seconds
    assert machine.runs == []


def test_a_fixed_shape_that_finds_no_memory_is_a_failed_load() -> None:
    class Full(Machine):
        def run(self, inputs: Mapping[str, Array]) -> Sequence[Array]:
            raise OutOfMemory("out of memory")

    with pytest.raises(OutOfMemory):
        measure(Full(lambda rows: 0.001), signature((3, 4), batching=False), 1, 1.0)


def test_elements_that_do_not_run_as_zero_are_tried_as_one() -> None:
    machine = Machine(lambda rows: 0.001, lambda inputs: bool(inputs["x0"].all()))
    assert measure(machine, signature((-1, 4)), 2, 1.0, machine.clock).seconds == pytest.approx({1: 0.001, 2: 0.001})


def test_variable_dimensions_grow_until_a_run_succeeds() -> None:
    machine = Machine(lambda rows: 0.001, lambda inputs: inputs["x0"].shape[1] % 16 == 0)
    profile = measure(machine, signature((-1, -1), (-1, 3)), 2, 1.0, machine.clock)
    assert set(profile.seconds) == {1, 2}
    assert machine.runs[-1] == (2, 16)


def test_variable_dimensions_that_never_run_give_an_empty_profile() -> None:
    machine = Machine(lambda rows: 0.001, lambda _: False)
    assert measure(machine, signature((-1, -1)), 8, 1.0, machine.clock).seconds == {}


def test_a_model_that_runs_one_row_but_not_four_is_refused() -> None:
    machine = Machine(lambda rows: 0.001, lambda inputs: inputs["x0"].shape[0] < 4)
    with pytest.raises(Failure, match=r"runs 2 rows but not 4: .*set rows_max to 2"):
        measure(machine, signature((-1, 4)), 8, 1.0, machine.clock)


def test_a_size_without_memory_ends_the_measuring():
    def cost(rows: int) -> float:
        if rows > 8:
            raise OutOfMemory("no memory")
        return rows

    assert list(measure(Machine(cost), signature((-1, 4)), 64, 1e9).seconds) == [1, 2, 4, 8]
