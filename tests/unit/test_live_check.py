"""The live check: which models it finds, which it leaves alone, and when it runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from millstream.plugins.compile.race.gate import differing
from millstream.plugins.compile.race.report import Gate
from millstream.services.errors import Code, Failure
from millstream.services.model.manifest import Manifest, ModelConfig
from millstream.services.model.signature import Signature, TensorSpec
from millstream.services.wire.records import State
from millstream.workers.batches.live_check import (
    BUSY_STEP_S,
    BYTES_MAX,
    FORMS_SHARE,
    ROWS_MAX,
    LiveCheck,
    Mismatch,
    Outcome,
    Undecided,
    compare,
    sampled,
)
from millstream.workers.models.loaded_models import LoadedModel, LoadedModels

Array = np.ndarray[Any, Any]
Model = Callable[[Array], Array]
RNG = np.random.default_rng(3)
X = RNG.standard_normal((12, 6)).astype(np.float32)


def signature(datatype: str = "FP32") -> Signature:
    x = TensorSpec(name="x", datatype="FP32", shape=(-1, 6))
    return Signature(inputs=(x,), outputs=(TensorSpec(name="y", datatype=datatype, shape=(-1, -1)),), batching=True)


def check(model: Model, datatype: str = "FP32", x: Array = X) -> None:
    def run(inputs: Mapping[str, Array]) -> Sequence[Array]:
        return [model(inputs["x"])]

    sample = sampled("m", {"x": x}, run({"x": x}))
    assert sample is not None
    for _ in compare(sample, signature(datatype), run):
        pass


def padded(x: Array) -> Array:
    """As many columns as the row with the most positive values has of them."""
    kept = [row[row > 0] for row in x]
    return np.stack([np.pad(row, (0, max(map(len, kept)) - len(row))) for row in kept])


COUPLED: dict[str, Model] = {
    "a mean over the batch": lambda x: x - x.mean(axis=0),
    "a leak of a thousandth": lambda x: x + np.float32(1e-3) * np.roll(x, 1, axis=0),
    "a leak into the last column": lambda x: np.concatenate([1e4 * x, x[:, :1] + 0.1 * x[::-1, :1]], axis=1),
    "from the fourth row on": lambda x: np.concatenate([x[:3], x[3:] * x[:1]]),
    "above a threshold": lambda x: x if x.max() < 2 else x * 0.5,
    "the number of rows": lambda x: x * np.float32(len(x)),
    "padding to the longest": padded,
    "a scale over all rows": lambda x: np.round(x / np.abs(x).max() * 127) / 127 * np.abs(x).max(),
}


@pytest.mark.parametrize("model", COUPLED.values(), ids=COUPLED.keys())
def test_rows_that_influence_each_other_are_found(model: Model) -> None:
    x = X.copy()
    x[5, 2] = 3
    with pytest.raises(Mismatch):
        check(model, x=x)


@pytest.mark.parametrize(
    "model", [lambda x: np.full((len(x), 1), len(x)), lambda x: np.argsort(x[:, :1], axis=0)], ids=["count", "rank"]
)
def test_numbers_that_depend_on_the_batch_are_found(model: Model) -> None:
    with pytest.raises(Mismatch):
        check(model, "INT64")


def shaped(x: Array, digits: float = 1e-7) -> Array:
    """Sums in an order that depends on the number of rows."""
    total: Array = x.sum(axis=1, keepdims=True) * np.float32(1 + digits * len(x))
    return total


INDEPENDENT: dict[str, Model] = {
    "elementwise": np.tanh,
    "another order of summing": shaped,
    "sums that are rounded": lambda x: np.round(shaped(x, 1e-5) * 64) / 64,
    "not a number": lambda x: np.where(x > 0, x, np.nan),
}


@pytest.mark.parametrize("model", INDEPENDENT.values(), ids=INDEPENDENT.keys())
def test_what_the_number_of_rows_explains_is_no_influence(model: Model) -> None:
    check(model)


def test_a_single_row_on_the_edge_between_two_classes_is_no_influence() -> None:
    edge = X.copy()
    edge[4] = 0
    edge[4, 1] = 1.05e-6

    def classes(x: Array) -> Array:
        bound = 1e-6 if len(x) == 1 else 1.1e-6  # where sums in one order and in another have the row on two sides
        return np.asarray(x.sum(axis=1, keepdims=True) >= bound, np.int64)

    check(classes, "INT64", edge)


def test_a_model_that_is_never_the_same_is_not_judged() -> None:
    with pytest.raises(Undecided):
        check(lambda x: x + RNG.standard_normal(x.shape))


def test_few_copies_are_kept_of_rows_from_all_over() -> None:
    x = np.arange(100, dtype=np.float32).reshape(100, 1)
    sample = sampled("m", {"x": x}, [x * 2])
    assert sample is not None
    assert len(sample.positions) == ROWS_MAX
    assert (sample.positions[0], sample.positions[-1], sample.rows) == (0, 99, 100)
    np.testing.assert_array_equal(sample.inputs["x"][:, 0], sample.positions)
    np.testing.assert_array_equal(sample.outputs[0], sample.inputs["x"] * 2)
    x[:] = 0
    assert sample.inputs["x"].any(), "they are copies"
    wide = np.zeros((4, BYTES_MAX // 2), np.uint8)
    sample = sampled("m", {"x": wide}, [x[:4]])
    assert sample is not None
    assert len(sample.positions) == 1
    assert sampled("m", {"x": np.zeros((2, BYTES_MAX + 1), np.uint8)}, [x[:2]]) is None


MANIFEST = Manifest(
    model="m", version=1, created=0.0, digest="0" * 64, served="m", files=(), signature=signature(),
    config=ModelConfig(), opset=17, ir_version=8,
)  # fmt: skip
CONTENT_ID = MANIFEST.content_id


class Bench:
    def __init__(self, model: Model, one_in: int = 1) -> None:
        self.now = 0.0
        self.model = model
        self.runs: list[int] = []
        self.ended: list[Outcome] = []
        self.held = LoadedModels()
        self.held.set(LoadedModel(MANIFEST, State.READY, instance=object()))  # type: ignore[arg-type]
        self.check = LiveCheck(
            one_in, self.held, self.run, lambda _, outcome, __: self.ended.append(outcome), lambda: self.now
        )

    def run(self, holding: LoadedModel, inputs: Mapping[str, Array]) -> Sequence[Array]:
        self.runs.append(len(inputs["x"]))
        return [self.model(inputs["x"])]

    @property
    def holding(self) -> LoadedModel:
        holding = self.held.get(CONTENT_ID)
        assert holding is not None
        return holding

    def shared_run(self) -> bool:
        due = self.check.due(CONTENT_ID, self.holding)
        if due:
            self.check.keep(self.holding, {"x": X}, [self.model(X)])
        return due

    def idle(self) -> None:
        for _ in range(1000):
            self.check.step()


def test_the_first_shared_run_is_checked_and_then_one_of_so_many() -> None:
    bench = Bench(np.tanh, one_in=5)
    due = []
    for _ in range(11):
        due.append(bench.shared_run())
        bench.idle()
        bench.ended.clear()
    assert [at for at, one in enumerate(due) if one] == [0, 5, 10]


def test_an_idle_worker_runs_one_row_at_a_time() -> None:
    bench = Bench(np.tanh)
    bench.check.step()
    assert bench.shared_run()
    assert bench.check.sample is not None
    assert not bench.shared_run(), "one sample at a time"
    bench.check.step()
    assert bench.runs == [1]
    bench.idle()
    assert (bench.runs, bench.ended) == ([1] * len(X), [Outcome.AGREES])
    assert bench.check.sample is None


def test_a_busy_worker_runs_a_row_now_and_then() -> None:
    bench = Bench(np.tanh)
    bench.shared_run()
    overdue = []
    for _ in range(2):
        bench.now += BUSY_STEP_S / 2
        overdue.append(bench.check.overdue())
    bench.check.step()
    assert (overdue, bench.runs, bench.check.overdue()) == ([False, True], [1], False)


def test_none_is_checked_where_that_is_off_or_requests_run_alone_or_nothing_can_be_said() -> None:
    assert not Bench(np.tanh, one_in=0).shared_run()
    bench = Bench(np.tanh)
    bench.held.run_alone(CONTENT_ID, "why")
    assert not bench.shared_run()
    bench = Bench(lambda x: x + RNG.standard_normal(x.shape))
    assert bench.shared_run()
    bench.idle()
    assert bench.ended == [Outcome.UNDECIDED]
    assert not bench.shared_run()


def test_a_version_that_goes_meanwhile_and_a_run_that_fails_end_the_check() -> None:
    bench = Bench(np.tanh)
    bench.shared_run()
    bench.held.set(replace(bench.holding, instance=None))
    bench.check.step()
    assert (bench.runs, bench.ended) == ([], [])

    def fails(x: Array) -> Array:
        if len(x) == 1:
            raise Failure(Code.MODEL, "no")
        return x

    bench = Bench(fails)
    bench.shared_run()
    bench.idle()
    assert bench.ended == [Outcome.UNDECIDED]


def test_a_mismatch_is_told() -> None:
    bench = Bench(COUPLED["a mean over the batch"])
    bench.shared_run()
    bench.idle()
    assert bench.ended == [Outcome.DIFFERS]


class Forms:
    """A table with one form, as `plugins/compile/worker/table.py` has it."""

    def __init__(self, lossy: bool) -> None:
        self.lossy = lossy
        self.form = self.key = "form-1"
        self.baseline = object()
        self.undo_reason = ""

    def difference(self, expected: Sequence[Array], outputs: Sequence[Array]) -> str:
        return differing(signature(), expected, outputs, Gate(), lossy=self.lossy)

    def fall_back(self, reason: str) -> None:
        self.undo_reason = reason


class FormBench(Bench):
    def __init__(self, baseline: Model, *, lossy: bool = False) -> None:
        super().__init__(baseline)
        self.forms = Forms(lossy)
        model = replace(self.holding, instance=self.forms, variant="form")  # type: ignore[arg-type]
        self.held.set(model)

    def run(self, holding: LoadedModel, inputs: Mapping[str, Array]) -> Sequence[Array]:
        assert holding.instance is self.forms.baseline
        return super().run(holding, inputs)

    def check_run(self, inputs: Array, outputs: Array) -> str:
        """Return why the form is undone after a run; "": it stays."""
        self.now += 1000.0
        assert self.check.due(CONTENT_ID, self.holding)
        self.check.keep(self.holding, {"x": inputs}, [outputs])
        self.idle()
        return self.forms.undo_reason


def relu(x: Array) -> Array:
    return np.where(x > 0, x, x * 0)


@pytest.mark.parametrize("rows", [1, 4, 16])
@pytest.mark.parametrize("lossy", [False, True])
def test_a_form_that_answers_as_the_version_does_stays(rows: int, lossy: bool) -> None:
    bench = FormBench(relu, lossy=lossy)
    given = np.resize(X, (rows, *X.shape[1:]))
    assert bench.check_run(given, relu(given) * np.float32(1.001)) == ""
    given.reshape(-1)[0] = np.nan
    assert bench.check_run(given, relu(given)) == "", "NaN is equal to NaN"
    assert bench.ended == [Outcome.AGREES, Outcome.AGREES]


@pytest.mark.parametrize("rows", [1, 4, 16])
@pytest.mark.parametrize("lossy", [False, True])
def test_a_form_that_answers_one_row_otherwise_is_undone(rows: int, lossy: bool) -> None:
    given = np.resize(X, (rows, *X.shape[1:]))
    wrong = relu(given)
    wrong[-1] = np.abs(given[-1]) + 3
    bench = FormBench(relu, lossy=lossy)
    assert f"form-1 gave another answer to a live batch of {rows} rows" in bench.check_run(given, wrong)
    assert bench.ended == [Outcome.FORM_DIFFERS]
    given.reshape(rows, -1)[-1] = np.nan
    bench = FormBench(relu, lossy=lossy)
    assert "NaN or infinity in other places" in bench.check_run(given, np.nan_to_num(relu(given))), "it is plausible"


def test_a_form_that_answers_what_the_version_refuses_is_undone() -> None:
    def refuses(x: Array) -> Array:
        raise Failure(Code.MODEL, "the index is out of range")

    assert "refuses: the index is out of range" in FormBench(refuses).check_run(X, X)


def test_forms_are_compared_in_a_small_share_of_the_time_and_only_where_they_ran() -> None:
    bench = FormBench(relu)

    def slow(_: LoadedModel, inputs: Mapping[str, Array]) -> Sequence[Array]:
        bench.now += 2.0
        return [relu(inputs["x"])]

    bench.check._run = slow
    assert bench.check_run(X, relu(X)) == ""
    assert not bench.check.due(CONTENT_ID, bench.holding)
    bench.now += 2.0 / FORMS_SHARE - 1
    assert not bench.check.due(CONTENT_ID, bench.holding)
    bench.now += 2.0
    assert bench.check.due(CONTENT_ID, bench.holding)
    bench.forms.form = ""  # the version's own file made this run
    bench.check.keep(bench.holding, {"x": X}, [X])
    assert bench.check.sample is None


def test_a_run_whose_rows_influence_each_other_is_compared_whole() -> None:
    def centred(x: Array) -> Array:
        centre: Array = x - x.mean(axis=0)
        return centre

    bench = FormBench(centred)
    bench.held.run_alone(CONTENT_ID, "its rows influence each other")
    given = np.resize(X, (2 * ROWS_MAX, *X.shape[1:]))
    assert bench.check_run(given, centred(given)) == ""
    assert bench.runs == [2 * ROWS_MAX]
    assert "another answer" in bench.check_run(given, centred(given) + 1)
