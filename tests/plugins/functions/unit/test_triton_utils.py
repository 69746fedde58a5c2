"""What models import as `triton_python_backend_utils`: arguments, conversions and metrics, as Triton has them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from millstream.plugins.functions.model_metrics import checked
from millstream.plugins.functions.triton import model_metrics
from millstream.plugins.functions.triton import utils as pb_utils

X = pb_utils.Tensor("x", np.zeros((1, 2), np.float32))
REQUEST: dict[str, Any] = {"inputs": [X], "requested_output_names": ["y"], "model_name": "other"}


@pytest.mark.parametrize("wrong", [{name: None} for name in ("inputs", "model_name", "requested_output_names")])
def test_arguments_of_another_type_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(TypeError):
        pb_utils.InferenceRequest(**(REQUEST | wrong))


def test_names_may_be_bytes() -> None:
    request = pb_utils.InferenceRequest(**(REQUEST | {"model_name": b"other", "requested_output_names": [b"y"]}))
    assert (request.model_name(), request.requested_output_names()) == ("other", ["y"])


def test_parameters_of_a_response_are_texts_numbers_and_truths() -> None:
    assert pb_utils.InferenceResponse([X], parameters={"a": 1}).parameters() == '{"a": 1}'
    with pytest.raises(pb_utils.TritonModelException, match="have type bool/int/str, found type <class 'float'>"):
        pb_utils.InferenceResponse([X], parameters={"a": 0.5})


def test_texts_become_bytes_and_back() -> None:
    texts = np.array([["a", b"\0b"]], dtype=np.object_)
    data = pb_utils.serialize_byte_tensor(texts)
    assert pb_utils.deserialize_bytes_tensor(data).tolist() == [b"a", b"\0b"]
    assert pb_utils.numpy_to_triton_type(np.object_) == 13
    assert pb_utils.triton_string_to_numpy("TYPE_FP16") is np.float16


def test_tensors_go_through_dlpack() -> None:
    array = np.arange(6, dtype=np.int16).reshape(2, 3)
    tensor = pb_utils.Tensor.from_dlpack("x", pb_utils.Tensor("x", array).to_dlpack())
    assert tensor.as_numpy().tolist() == array.tolist()
    with pytest.raises(pb_utils.TritonModelException, match="not contiguous"):
        pb_utils.Tensor.from_dlpack("x", array.T)


def test_a_completed_configuration_contradicts_no_given_one() -> None:
    config = pb_utils.ModelConfig('{"name": "m", "max_batch_size": 4, "input": [{"name": "x", "dims": [2]}]}')
    config.add_input({"name": "x", "data_type": "TYPE_FP32", "dims": [2]})
    with pytest.raises(ValueError, match=r"model 'm', tensor 'x': the model expects dims \[3\]"):
        config.add_input({"name": "x", "data_type": "TYPE_FP32", "dims": [3]})
    with pytest.raises(ValueError, match="is missing 'dims' property"):
        config.add_output({"name": "y", "data_type": "TYPE_FP32"})
    with pytest.raises(ValueError, match="configuration specified max_batch_size 4"):
        config.set_max_batch_size(2)


def test_metrics_are_bounded_and_forgotten_with_the_model() -> None:
    family = pb_utils.MetricFamily("unit_gauge", "text", pb_utils.MetricFamily.GAUGE)
    metrics = [family.Metric(labels={"i": str(number)}) for number in range(model_metrics.METRICS_MAX)]
    with pytest.raises(pb_utils.TritonModelException, match="at most"):
        family.Metric(labels={"i": "one more"})
    metrics[0].set(2.5)
    [found] = checked(model_metrics.snapshot())
    assert (found.name, found.series[0].value) == ("unit_gauge", 2.5)
    del family, metrics
    assert model_metrics.snapshot() == []


@pytest.mark.parametrize(
    "told",
    [
        None,
        [["millstream_requests_total", "counter", "", []]],
        [["name with spaces", "gauge", "", []]],
        [["g", "gauge", "", [[{"a": "b" * 1000}, 1.0, [], []]]]],
        [["h", "histogram", "", [[{}, 1.0, [1.0], [1]]]]],
        [["g", "gauge", "", [[["a"], 1.0, [], []]]]],
        [[f"g{number}", "gauge", "", []] for number in range(1000)],
    ],
)
def test_metrics_that_cannot_be_are_refused(told: Any) -> None:
    with pytest.raises(ValueError, match=r"metric|cannot"):
        checked(told)
