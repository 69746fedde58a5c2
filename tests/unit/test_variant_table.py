"""Which form of a version runs a batch, and when it is undone."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import pytest

from millstream.plugins.compile.stored import selection
from millstream.plugins.compile.stored.selection import Selection
from millstream.plugins.compile.worker import form as form_module
from millstream.plugins.compile.worker.form import COMPARED, WINDOW, FormWatch, ServingForm
from millstream.services.errors import Code, Failure
from millstream.services.model.signature import Signature, TensorSpec
from millstream.workers.backends.base import Array, OutOfMemory, Terminated

SIGNATURE = Signature(
    inputs=(TensorSpec(name="x", datatype="FP32", shape=(-1, 1)),),
    outputs=(TensorSpec(name="y", datatype="FP32", shape=(-1, 1)),),
    batching=True,
)


class Form:
    """An instance that answers `factor` times its input."""

    size_bytes = 10
    lost = ""

    def __init__(self, factor: float = 1.0, error: Exception | None = None, wrong_rows: int = 0) -> None:
        self.factor, self.error, self.wrong_rows = factor, error, wrong_rows
        self.rows: list[int] = []
        self.closed = self.terminated = self.rebuilt = 0

    def run(self, inputs: Mapping[str, Array]) -> Sequence[Array]:
        self.rows.append(len(inputs["x"]))
        if self.error is not None:
            raise self.error
        return [inputs["x"][self.wrong_rows :] * self.factor]

    def terminate(self) -> None:
        self.terminated += 1

    def rebuild(self) -> None:
        self.rebuilt += 1

    def close(self) -> None:
        self.closed += 1


def batch(rows: int) -> dict[str, Array]:
    return {"x": np.ones((rows, 1), np.float32)}


def serving(form: Form, baseline: Form, on_close: Callable[[], None] = lambda: None, **more: object) -> ServingForm:
    of = selection.Form.model_validate({"key": "v", "target": "v", "backend": "b", **more})
    chosen = Selection(content="c", kind="k", device="d", form=of)
    return ServingForm(form, baseline, SIGNATURE, FormWatch({}), chosen, on_close)


def test_a_form_whose_rows_influence_each_other_runs_single_rows_only() -> None:
    form, own = Form(2), Form(1)
    table = serving(form, own, single=True)
    for rows in (1, 2, 1, 16):
        assert len(table.run(batch(rows))[0]) == rows
    assert (form.rows, own.rows, table.runs) == ([1, 1], [2, 16], 2)
    assert table.size_bytes == 20


def test_a_variant_that_raises_where_the_baseline_does_not_costs_no_request_and_is_undone() -> None:
    broken, own = Form(2, Failure(Code.MODEL, "unsupported operator")), Form(1)
    table = serving(broken, own)
    assert table.run(batch(2))[0].tolist() == [[1], [1]]
    assert "unsupported operator" in table.undo_reason
    assert table.run(batch(3))[0].tolist() == [[1], [1], [1]]
    assert broken.rows == [2]


def test_outputs_of_wrong_shapes_count_as_a_failure_of_the_variant() -> None:
    table = serving(Form(2, wrong_rows=1), Form(1))
    assert table.run(batch(2))[0].tolist() == [[1], [1]]
    assert "for 2 rows" in table.undo_reason


def test_inputs_that_the_baseline_refuses_too_undo_nothing() -> None:
    broken, own = Form(2, Failure(Code.MODEL, "of the variant")), Form(1, Failure(Code.MODEL, "bad index"))
    table = serving(broken, own)
    with pytest.raises(Failure, match="bad index"):
        table.run(batch(2))
    assert not table.undo_reason


def test_a_run_that_finds_no_memory_is_halved_as_before() -> None:
    own = Form(1)
    table = serving(Form(2, OutOfMemory("none")), own)
    with pytest.raises(OutOfMemory):
        table.run(batch(2))
    assert not own.rows
    assert not table.undo_reason


def test_a_variant_whose_run_had_to_be_ended_is_undone_and_the_baseline_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(form_module, "ENDLESS_S", 0.0)
    hung = Form(2, Terminated())
    table = serving(hung, Form(1))
    assert table.run(batch(1))[0].tolist() == [[1]]
    assert "took too long" in table.undo_reason
    assert table.run(batch(1))[0].tolist() == [[1]]
    assert hung.rows == [1]


def test_a_run_that_was_ended_for_a_short_deadline_undoes_nothing() -> None:
    table = serving(Form(2, Terminated()), Form(1))
    with pytest.raises(Terminated):
        table.run(batch(1))
    assert not table.undo_reason


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 5.0, -1.1])
@pytest.mark.parametrize("rows", [1, 4, 16])
def test_the_baseline_runs_a_batch_with_one_number_outside_of_the_bounds(value: float, rows: int) -> None:
    variant, own = Form(2), Form(1)
    table = serving(variant, own, bounds={"x": (-1.0, 4.0)})
    given = batch(rows)
    assert table.run(given)[0].tolist() == [[2]] * rows
    assert table.form == "v"
    given["x"][-1] = value
    np.testing.assert_array_equal(table.run(given)[0], given["x"])
    assert table.form == ""
    assert (variant.rows, own.rows) == ([rows], [rows])
    assert not table.undo_reason, "the form is not to blame"


def test_everything_is_closed_once_and_a_released_baseline_is_not() -> None:
    own, variant, closed = Form(), Form(), []
    table = serving(variant, own, lambda: closed.append(1))
    table.rebuild()
    table.terminate()
    assert (own.rebuilt, variant.rebuilt, own.terminated) == (1, 1, 1)
    table.release()
    table.close()
    assert (own.closed, variant.closed, closed) == (0, 1, [1])


def feed(watch: FormWatch, variant_s: float, baseline_s: float, runs: int, noise: float = 0.0) -> str:
    source = random.Random(3)
    for _ in range(runs):
        baseline = watch.baseline_next
        seconds = (baseline_s if baseline else variant_s) * (1 + noise * source.random())
        if reason := watch.ran(4, seconds, baseline=baseline):
            return reason
    return ""


def test_a_variant_that_is_faster_stays() -> None:
    watch = FormWatch({1: 0.001, 4: 0.004})
    assert not feed(watch, 0.002, 0.004, 10 * WINDOW, noise=0.5)
    assert not watch.comparing


def test_a_variant_that_turns_slow_is_undone_after_a_comparison_with_the_baseline() -> None:
    watch = FormWatch({1: 0.001, 4: 0.004})
    assert not feed(watch, 0.002, 0.004, WINDOW)
    reason = feed(watch, 0.008, 0.004, WINDOW + 4 * COMPARED, noise=0.2)
    assert "2.0" in reason or "1.9" in reason


def test_a_busier_machine_undoes_nothing_and_is_not_suspected_again() -> None:
    watch = FormWatch({1: 0.001, 4: 0.004})
    assert not feed(watch, 0.008, 0.016, WINDOW + 2 * COMPARED, noise=0.1)
    assert not watch.comparing, "the comparison has ended"
    assert not feed(watch, 0.008, 0.016, 3 * WINDOW, noise=0.1)
    assert not watch.comparing, "the scale is that of the busier machine"


def test_noise_of_a_busy_machine_undoes_no_variant_that_is_as_fast() -> None:
    undone = [seed for seed in range(100) if compared_under_noise(seed, factor=1.0)]
    assert len(undone) <= 3, "by chance once in 2,000 looks"


def test_a_variant_that_is_slower_is_found_in_noise() -> None:
    undone = [seed for seed in range(100) if compared_under_noise(seed, factor=2.0)]
    assert len(undone) >= 97


def compared_under_noise(seed: int, factor: float) -> str:
    """Return why a variant is undone that takes `factor` times as long as its baseline, where runs are often late."""
    source, watch = random.Random(seed), FormWatch({1: 0.001})
    for _ in range(1000):
        baseline = watch.baseline_next
        seconds = 0.0016 * source.lognormvariate(0, 0.3) * (1 if baseline else factor)
        if source.random() < 0.1:
            seconds *= source.uniform(3, 30)
        if reason := watch.ran(1, seconds, baseline=baseline):
            return reason
    return ""


def test_a_few_slow_runs_start_no_comparison() -> None:
    watch = FormWatch({4: 0.004})
    assert not feed(watch, 0.1, 0.004, WINDOW // 3)
    assert not feed(watch, 0.002, 0.004, WINDOW)
    assert not watch.comparing


def test_a_comparison_alternates_and_stays_bounded_without_a_baseline() -> None:
    watch = FormWatch({4: 0.004})
    assert not feed(watch, 0.008, 0.004, WINDOW)
    assert watch.comparing
    turns = []
    for _ in range(8):
        turns.append(watch.baseline_next)
        watch.ran(4, 0.004, baseline=watch.baseline_next)
    assert turns == [False, True, True, False] * 2
    for _ in range(10_000):
        assert not watch.ran(4, 0.008, baseline=False)


def test_nothing_is_judged_without_a_profile() -> None:
    watch = FormWatch({})
    assert not feed(watch, 10.0, 0.001, 10 * WINDOW)
    assert not watch.comparing
