"""Many small models in one installation: all answer, and what is idle takes no key, no label and no heartbeat."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import onnx
import pytest

from tests.kit.many_models import many_mlps, many_scales, write_repository
from tests.kit.stack import Stack, running_stack
from tests.kit.wait import wait_until

MODELS = 60
SHOWN_MAX = 5
LATELY_MAX = 3
#: a model's calls by its number
CALLS = {3: 4, 17: 9, 42: 2, 59: 7, 5: 1, 31: 3, 8: 6}


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("many")
    repository = write_repository(folder / "models", many_scales(MODELS))
    settings = {"triton_repositories": str(repository), "metrics_models_max": SHOWN_MAX}
    with running_stack(folder, gateways=2, settings=settings) as stack:
        yield stack


def _infer(stack: Stack, number: int) -> list[float]:
    tensor = {"name": "x", "shape": [1, 2], "datatype": "FP32", "data": [1.0, 10.0]}
    reply = stack.http.post(f"/v2/models/scale-{number:04d}/infer", json={"inputs": [tensor]})
    assert reply.status_code == 200, reply.text
    data: list[float] = reply.json()["outputs"][0]["data"]
    return data


def test_every_model_of_a_repository_answers_with_its_own_weights(stack: Stack) -> None:
    def states() -> list[str]:
        return [entry["state"] for entry in stack.http.post("/v2/repository/index", json={}).json()]

    wait_until(lambda: states() == ["READY"] * MODELS, what="this gateway knows all of them")
    for number in range(0, MODELS, 7):
        assert _infer(stack, number) == [number + 1.0, 10.0 * (number + 1)]


def test_an_idle_model_is_in_no_heartbeat_and_has_no_key(stack: Stack) -> None:
    [record] = wait_until(lambda: list(stack.redis.scan_iter("*:record:*")), what="the worker's record")
    [instances] = wait_until(lambda: list(stack.redis.scan_iter("*:instances:*")), what="its instances")
    assert stack.redis.hlen(instances) == MODELS

    def settled() -> bool:
        """A probe that a busy machine held up for a while changes a profile."""
        return len(json.loads(stack.redis.get(record) or "{}").get("changed", range(MODELS))) <= LATELY_MAX

    wait_until(settled, what="the record names hardly any instance that changed lately")
    streams = list(stack.redis.scan_iter("*:stream:*"))
    assert stack.redis.dbsize() - len(streams) < 20


def test_the_metrics_page_is_bounded_and_its_sums_are_right(stack: Stack) -> None:
    before = _requests(stack)
    for number, times in CALLS.items():
        for _ in range(times):
            _infer(stack, number)
    text = _text(stack)
    models = set(re.findall(r'model="([^"]+)"', text))
    assert len(models) <= SHOWN_MAX + 1
    assert "other" in models
    assert _requests(stack) == before + sum(CALLS.values())
    statistics = stack.http.get("/v2/models/scale-0017/stats").json()["model_stats"][0]
    assert statistics["inference_count"] >= CALLS[17]


def _requests(stack: Stack) -> float:
    return sum(
        float(value) for value in re.findall(r"^millstream_requests_total\{.*\} (\S+)", _text(stack), re.MULTILINE)
    )


def _text(stack: Stack) -> str:
    reply = stack.http.get("/metrics")
    assert reply.status_code == 200
    return reply.text


def test_generated_models_are_distinct_and_valid() -> None:
    made = dict([*many_scales(1000), *many_mlps(20)])
    assert len(set(made.values())) == len(made) == 1020
    for name in ("scale-0000", "scale-0999", "mlp-0000", "mlp-0019"):
        onnx.checker.check_model(onnx.load_from_string(made[name]), full_check=True)
