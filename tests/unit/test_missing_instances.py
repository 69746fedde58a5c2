"""What is said of an endpoint that has fewer instances ready than it wants."""

from __future__ import annotations

from typing import Any

import pytest

from millstream.gateway.admin.standby_reasons import why_missing
from millstream.gateway.catalog.snapshot import Replica, VersionView
from millstream.services.placement.views import Footprint
from millstream.services.wire.records import InstanceRecord, State, WorkerRecord
from tests.contract.repositories import manifest
from tests.kit.catalog import worker

GIB = 1 << 30


def view(*workers: WorkerRecord) -> VersionView:
    replicas = tuple(Replica(one, instance) for one in workers for instance in one.instances)
    return VersionView(manifest("m"), State.STANDBY, None, replicas, pools=("cpu",))


def held(state: State, name: str = "cpu-1", **fields: Any) -> WorkerRecord:
    content_id = manifest("m").content_id
    return worker(InstanceRecord(content_id=content_id, model="m", version=1, state=state, **fields), name=name)


def free(name: str, room_bytes: int = 0, **fields: Any) -> WorkerRecord:
    fields |= {"room_bytes": room_bytes, "budget_bytes": room_bytes}
    return worker(name=name).model_copy(update=fields)


READY, LOADING = held(State.READY), held(State.LOADING, "cpu-2")
FAILED = held(State.FAILED, "cpu-2", reason="it is damaged")


@pytest.mark.parametrize(
    ("workers", "wanted", "leads", "why"),
    [
        ([], 0, False, None),
        ([READY], 1, False, None),
        ([], 1, True, "0 of 1 instances are ready: its pools cpu have no worker"),
        ([free("cpu-1", draining=True)], 1, True, "0 of 1 instances are ready: its pools cpu have no worker"),
        ([worker(name="gpu-1", pool="gpu")], 1, True, "0 of 1 instances are ready: its pools cpu have no worker"),
        (
            [READY, free("cpu-2")],
            2,
            False,
            "1 of 2 instances are ready: no controller leads, and calls load one only",
        ),
        ([READY, LOADING], 2, True, "1 of 2 instances are ready: the others are being loaded"),
        ([READY, FAILED], 2, True, "1 of 2 instances are ready: a load failed: it is damaged"),
        ([READY], 2, True, "1 of 2 instances are ready: its pools cpu have 1 worker"),
        (
            [free("cpu-1", GIB), free("cpu-2", 2 * GIB)],
            1,
            True,
            (
                "0 of 1 instances are ready: a load is predicted to take 3072 MiB, and the largest worker has 2048 MiB "
                "for models"
            ),
        ),
        (
            [free("cpu-1", GIB), free("cpu-2")],
            1,
            True,
            (
                "0 of 1 instances are ready: the controller waits until a worker has free memory, or may unload what "
                "is not called"
            ),
        ),
    ],
)
def test_the_first_thing_to_change_is_said(
    workers: list[WorkerRecord], wanted: int, leads: bool, why: str | None
) -> None:
    load = Footprint(2 * GIB, GIB)
    assert why_missing(view(*workers), wanted, workers, (), load, leads=leads) == why


def test_the_words_of_a_worker_that_refused_are_given() -> None:
    workers = [free("cpu-1", GIB)]
    found = why_missing(view(*workers), 1, workers, ["all are pinned"], None, leads=True)
    assert found == "0 of 1 instances are ready: all are pinned"
