"""Inference procedures: encoding, the kept signature, and what the server is told; and `wait`."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from millstream.client import inference
from millstream.client.call import Call, Steps
from millstream.client.errors import ModelNotFound, ServerError, Timeout, VersionFailed
from millstream.client.inference import Options, Prediction, Signatures, as_text, predict, row_columns
from millstream.client.models import wait
from millstream.client.retry import Budget
from millstream.services.errors import Code, Failure
from tests.kit.scripted_steps import Script, refusal, reply


def signature(columns: int = 2, datatype: str = "FP32") -> dict[str, Any]:
    spec = {"name": "x", "datatype": datatype, "shape": [-1, columns]}
    return {"name": "m", "versions": ["1"], "platform": "p", "inputs": [spec], "outputs": [spec | {"name": "y"}]}


ANSWER = reply(
    {
        "model_name": "m",
        "model_version": "3",
        "id": "of-the-body",
        "outputs": [{"name": "y", "datatype": "FP32", "shape": [1, 2], "data": [2, 4]}],
    }
)


def asked(script: Script, inputs: Any, kept: Signatures, options: Options | None = None, **named: Any) -> Prediction:
    def steps(budget: Budget) -> Steps[Prediction]:
        return predict("m", inputs, options or Options(), kept, budget)

    return script.run(steps, **named)


def header_of(call: Call) -> dict[str, Any]:
    assert isinstance(call.content, bytes)
    document: dict[str, Any] = json.loads(call.content[: int(call.headers["Inference-Header-Content-Length"])])
    return document


def test_a_signature_is_read_once():
    kept: Signatures = {}
    script = Script(reply(signature()), ANSWER)
    first = asked(script, [[1, 2]], kept)
    assert (first["y"].tolist(), first.version, first.request_id) == ([[2, 4]], 3, "of-the-body")
    asked(script, [[1, 2]], kept)
    assert script.sent == [("GET", "/v2/models/m"), *[("POST", "/v2/models/m/infer")] * 2]


def test_the_request_says_what_the_caller_said():
    options = Options(version=4, outputs=["y"], request_id="id-1", parameters={"priority": 2})
    script = Script(reply(signature()), ANSWER, call_s=10)
    asked(script, {"x": [[1, 2]]}, {}, options, timeout_s=30)
    assert script.sent[1] == ("POST", "/v2/models/m/versions/4/infer")
    call = script.calls[1]
    header = header_of(call)
    assert (header["id"], call.headers["X-Request-Id"]) == ("id-1", "id-1")
    assert header["outputs"] == [{"name": "y", "parameters": {"binary_data": True}}]
    # the server's deadline is what is left of the caller's timeout
    assert header["parameters"] == {"binary_data_output": True, "timeout": 20_000_000, "priority": 2}
    asked(script, {"x": [[1, 2]]}, {("m", None): signature()}, Options(parameters={"timeout": 5}))  # type: ignore[dict-item]
    assert header_of(script.calls[-1])["parameters"]["timeout"] == 5


@pytest.mark.parametrize("first", ["the arrays do not fit", "the server refuses"])
def test_a_signature_that_changed_is_read_again(first):
    kept: Any = {("m", None): signature(3 if first == "the arrays do not fit" else 2, "FP32")}
    current = signature(2, "INT64")
    refused = [] if first == "the arrays do not fit" else [refusal(400, "unexpected datatype")]
    script = Script(*refused, reply(current), ANSWER)
    asked(script, [[1, 2]], kept)
    assert kept["m", None] == current
    assert header_of(script.calls[-1])["inputs"][0]["datatype"] == "INT64"
    assert len(script.calls) == len(refused) + 2


def test_a_mistake_of_the_caller_is_raised_after_one_more_look():
    kept: Any = {("m", None): signature()}
    script = Script(reply(signature()))
    with pytest.raises(Failure, match="has shape"):
        asked(script, [[1, 2, 3]], kept)
    assert script.sent == [("GET", "/v2/models/m")]
    script = Script(refusal(400, "no"), reply(signature()))
    with pytest.raises(ServerError, match="no"):
        asked(script, [[1, 2]], kept)
    assert len(script.calls) == 2


def test_kept_signatures_are_bounded(monkeypatch):
    monkeypatch.setattr(inference, "SIGNATURES_MAX", 3)
    kept: Signatures = {}
    for version in range(1, 9):
        asked(Script(reply(signature()), ANSWER), [[1, 2]], kept, Options(version=version))
        assert len(kept) <= 3


@pytest.mark.parametrize("request_id", ["a b", "ü", "a\r\nX: 1", "\x00"])
def test_ids_that_a_header_cannot_carry_are_refused(request_id):
    with pytest.raises(Failure, match="visible ASCII"):
        asked(Script(reply(signature())), [[1, 2]], {}, Options(request_id=request_id))


@pytest.mark.parametrize(
    "inputs", [{"x": [[1], [2, 3]]}, {"x": {"a": 1}}, {1: [[1, 2]], "a": 0}, {}, None, "text", [[None, 1]]]
)
def test_odd_inputs_are_refused_or_left_to_the_server(inputs):
    script = Script(reply(signature()), refusal(400, "expected 1 input"))
    with pytest.raises(Failure) as failure:
        asked(script, inputs, {})
    assert failure.value.code is Code.INVALID
    assert "\n" not in failure.value.message


def test_text_is_str_and_an_output_with_other_bytes_stays_bytes():
    texts = np.array([["é".encode(), b"a\0"]], object)
    assert as_text(texts).tolist() == [["é", "a\0"]]
    assert as_text(np.array([b"\xff", b"a"], object)).tolist() == [b"\xff", b"a"]
    assert as_text(np.zeros((0, 2), object)).shape == (0, 2)
    assert as_text(np.array([1.5])).tolist() == [1.5]


def test_outputs_become_the_columns_of_a_table():
    outputs = {
        "label": np.array(["a", "b"], object),
        "score": np.array([[1], [2]]),
        "p": np.array([[0.25, 0.75], [0.5, 0.5]]),
        "box": np.zeros((2, 1, 2)),
    }
    columns = {name: column.tolist() for name, column in row_columns(outputs, 2).items()}
    assert columns == {
        "label": ["a", "b"],
        "score": [1, 2],
        "p_0": [0.25, 0.5],
        "p_1": [0.75, 0.5],
        "box": [[[0, 0]], [[0, 0]]],
    }
    assert row_columns(outputs, None, wide=False)["p"].tolist() == [[0.25, 0.75], [0.5, 0.5]]
    for wrong in ({"y": np.zeros((3, 2))}, {"y": np.zeros(())}):
        with pytest.raises(Failure, match="not one row for each row"):
            row_columns(wrong, 2)
    with pytest.raises(Failure, match="two outputs would have the column 'p_0'"):
        row_columns({"p_0": np.zeros(2), "p": np.zeros((2, 2))}, 2)


def version(state: str, reason: str | None = None) -> Any:
    return reply({"version": 2, "state": state, "reason": reason, "pools": ["gpu"]})


def waited(script: Script, number: int | None = 2, timeout_s: float = 300) -> Any:
    return script.run(lambda budget: wait("m", number, budget), timeout_s=timeout_s)


def test_wait_looks_less_often_over_time():
    script = Script(*[version("loading")] * 20, version("ready"))
    assert waited(script)["state"] == "ready"
    assert script.pauses[0] == 0.05
    assert script.pauses[-1] == 1.0
    assert script.pauses == sorted(script.pauses)


def test_wait_ends_with_the_reason():
    with pytest.raises(VersionFailed, match="m version 2 failed: no memory"):
        waited(Script(version("warming"), version("failed", "no memory")))
    with pytest.raises(Timeout, match=r"m version 2 is still loading after 5 s: has pool gpu a worker\?"):
        waited(Script(version("loading")), timeout_s=5)
    with pytest.raises(Failure, match="m is unloaded"):
        waited(Script(version("unloaded")))
    with pytest.raises(ModelNotFound):
        waited(Script(version("loading"), refusal(404, "unknown model")))


def test_wait_tells_the_last_state_also_if_a_call_does_not_end_in_time():
    script = Script(version("loading"), Timeout("GET did not end"))
    with pytest.raises(Timeout, match="m version 2 is still loading after 300 s"):
        waited(script)
    script = Script(version("loading"), call_s=0.96)
    with pytest.raises(Timeout, match="m version 2 is still loading after 1 s"):
        waited(script, timeout_s=1)
    with pytest.raises(Timeout, match="GET did not end"):
        waited(Script(Timeout("GET did not end")))


def test_wait_without_a_number_follows_the_active_version():
    def model(active: int | None) -> Any:
        return reply({"versions": [], "active": active, "unloaded": False})

    script = Script(model(None), model(2), version("loading"), model(2), version("ready"))
    assert waited(script, None)["version"] == 2
    assert script.sent[-1] == ("GET", "/admin/v1/models/m/versions/2")
    with pytest.raises(Timeout, match="m is still without an active version after 1 s"):
        waited(Script(model(None)), None, timeout_s=1)
