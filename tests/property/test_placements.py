"""Instances by content id, kept up to date by differences, are what a look at all records gives."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from millstream.gateway.catalog.placements import Placements
from millstream.services.wire.records import InstanceRecord, State, WorkerRecord

_STATES = st.sampled_from([State.LOADING, State.READY, State.FAILED])
_HOLDINGS = st.dictionaries(st.sampled_from(["a", "b", "c", "d"]), _STATES)
_FLEETS = st.dictionaries(st.sampled_from(["cpu-1", "cpu-2", "gpu-1"]), _HOLDINGS)


def _records(fleet: dict[str, dict[str, State]]) -> tuple[WorkerRecord, ...]:
    return tuple(
        WorkerRecord(
            id=name,
            pool=name[:3],
            device="cpu",
            backend="onnxruntime",
            pid=1,
            host="here",
            started=1.0,
            heartbeat=2.0,
            instances=tuple(
                InstanceRecord(content_id=f"{model}:1:x", model=model, version=1, state=state)
                for model, state in holdings.items()
            ),
        )
        for name, holdings in sorted(fleet.items())
    )


def _whole(workers: tuple[WorkerRecord, ...]) -> dict[str, list[tuple[str, State]]]:
    found: dict[str, list[tuple[str, State]]] = {}
    for worker in workers:
        for instance in worker.instances:
            found.setdefault(instance.model, []).append((worker.id, instance.state))
    return found


@given(st.lists(_FLEETS, max_size=8))
def test_differences_add_up_to_the_whole(fleets: list[dict[str, dict[str, State]]]) -> None:
    placements = Placements()
    before: dict[str, list[tuple[str, State]]] = {}
    for fleet in fleets:
        workers = _records(fleet)
        changed = placements.update(workers)
        now = _whole(workers)
        assert changed == {model for model in before.keys() | now.keys() if before.get(model) != now.get(model)}
        for model in "abcd":
            placed = placements.of(f"{model}:1:x")
            assert [(at.worker.id, at.instance.state) for at in placed] == now.get(model, [])
        assert placements.update(workers) == set(), "a heartbeat that says nothing new changes nothing"
        before = now
