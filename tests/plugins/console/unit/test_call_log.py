"""Which calls the console remembers, and who sees which."""

from __future__ import annotations

from typing import Any

from millstream.gateway.observing.finished import Finished, Run
from millstream.gateway.observing.observer import Observer
from millstream.plugins.console.gateway.call_log import KEPT_MAX, KEPT_S, CallLog, merged

INFER = "/v2/models/{model}/infer"
GRPC = "inference.GRPCInferenceService"


def call(
    seconds: float = 0.01,
    status: int = 200,
    *,
    models: tuple[str, ...] = ("m",),
    ended: float = 100.0,
    path: str = "/v2/models/m/infer",
    route: str = INFER,
    protocol: str = "http",
) -> Finished:
    runs = tuple(Run(model, "1", "cpu", "v2", 1, ended - seconds, None) for model in models)
    return Finished(protocol, "POST", route, path, status, ended - seconds, ended, "id", None, "::1", 5, "key", runs)


def recorded(*calls: Finished, now: float = 100.0) -> dict[str, Any]:
    log = CallLog("gateway-0", lambda: now)
    observer = Observer([log])
    for one in calls:
        failed, invalid = one.failed, one.status >= (400 if one.protocol == "http" else 2)
        for taker in observer.takers(None, one.started, one.ended, failed=failed, invalid=invalid):
            taker.add(one)
    return log.document()


def test_the_slowest_and_the_failed_calls_are_kept_and_no_others() -> None:
    fast = [call(number / 1e6) for number in range(1000)]
    failed = [call(status=503, models=()), call(13, 13, route=GRPC, protocol="grpc"), call(status=400, models=())]
    found = recorded(*fast, call(3.0), *failed)
    assert [one["seconds"] for one in found["slowest"][:2]] == [13, 3]
    assert len(found["slowest"]) == KEPT_MAX
    assert [one["status"] for one in found["failed"]] == [503, 13, 400]


def test_a_call_that_is_not_among_the_slowest_is_not_built() -> None:
    log = CallLog("gateway-0")
    observer = Observer([log])

    def takes(seconds: float, ended: float = 100.0, *, failed: bool = False, invalid: bool = False) -> bool:
        return bool(observer.takers(None, ended - seconds, ended, failed=failed, invalid=invalid))

    for number in range(KEPT_MAX + 1):
        assert takes(1 + number)
        log.add(call(1 + number))
    assert not takes(1.5)
    assert takes(2.5)
    assert takes(0.1, failed=True)
    assert takes(0.1, invalid=True)
    assert takes(0.1, ended=200.0), "the slowest of the next minute are others"
    assert observer.trace(None) is None, "what takes calls without a trace begins none"


def test_wrong_calls_hide_no_failed_ones() -> None:
    found = recorded(call(status=500), *[call(status=400, models=()) for _ in range(1000)])
    assert len(found["failed"]) == 1 + KEPT_MAX
    assert found["failed"][0]["status"] == 500


def test_calls_of_no_model_that_a_caller_got_wrong_are_left_out() -> None:
    found = recorded(
        call(status=404, models=(), route="", path="/wp-admin"),
        call(status=409, models=(), route="/admin/v1/keys", path="/admin/v1/keys"),
        call(status=500, models=(), route="/console/api/history", path="/console/api/history"),
    )
    assert found["failed"] == []


def test_what_is_long_ago_is_forgotten() -> None:
    old = [call(9.0), call(status=500)]
    assert recorded(*old, now=100 + KEPT_S - 1)["slowest"]
    later = recorded(*old, now=100 + KEPT_S + 1)
    assert (later["slowest"], later["failed"]) == ([], [])


def test_a_reader_sees_the_calls_of_its_models_alone_without_their_keys() -> None:
    hostile = "<img src=x onerror=alert(1)>"
    here = recorded(call(1.0), call(2.0, models=("m", "theirs")), call(status=400, models=()))
    there = recorded(
        call(4.0, models=("theirs",)),
        call(status=400, models=(), path=f"/v2/models/{hostile}/infer"),
        call(status=503, models=(), route="/v2/models", path="/v2/models"),
    )
    operator = merged([here, there], None)
    assert [one["seconds"] for one in operator["slowest"]] == [4, 2, 1]
    assert {one["model"] for one in operator["failed"]} == {"m", hostile, None}
    assert {one["key"] for one in operator["slowest"]} == {"key"}
    reader = merged([here, there], {"m"}.__contains__)
    assert [(one["seconds"], one["key"]) for one in reader["slowest"]] == [(1, "")]
    assert [one["model"] for one in reader["failed"]] == ["m"]
