"""Records of workers are parsed where they changed, and read like any other."""

from __future__ import annotations

import pytest

from millstream.services.queue.worker_records import RecordCache
from millstream.services.wire.records import InstanceRecord, State, WorkerRecord


def _record(*instances: InstanceRecord, device: str = "cpu") -> WorkerRecord:
    return WorkerRecord(
        id="w", pool="cpu", device=device, backend="onnxruntime", pid=1, host="here", started=1.5, instances=instances
    )


def _instance(name: str, **changed: object) -> InstanceRecord:
    given = {
        "content_id": f"{name}:1:x",
        "model": name,
        "version": 1,
        "state": State.READY,
        "profile": {1: 0.5, 2: 0.75},
    }
    return InstanceRecord.model_validate(given | changed)


def test_what_is_read_is_what_was_written_and_what_did_not_change_is_the_same_object() -> None:
    cache = RecordCache()
    written = _record(_instance("a"), _instance("b"))
    first = cache.record("w", written.model_dump_json().encode())
    assert first == written
    assert cache.record("w", written.model_dump_json().encode()) is first
    moved = _record(*written.instances, device="cuda")
    second = cache.record("w", moved.model_dump_json().encode())
    assert second == moved
    assert second.instances is first.instances
    changed = _record(_instance("a"), _instance("b", state=State.FAILED, reason="no"), _instance("c"))
    third = cache.record("w", changed.model_dump_json().encode())
    assert third == changed
    assert third.instances[0] is first.instances[0]
    fewer = _record(_instance("c"))
    assert cache.record("w", fewer.model_dump_json().encode()) == fewer


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"null", b'{"id": "w"}', b'{"instances": [3]}', b"\xff"])
def test_what_is_no_record_is_refused_and_hides_nothing(data: bytes) -> None:
    cache = RecordCache()
    whole = _record(_instance("a"))
    cache.record("w", whole.model_dump_json().encode())
    with pytest.raises(ValueError, match=r".*"):
        cache.record("w", data)
    assert cache.record("w", whole.model_dump_json().encode()) == whole


def test_workers_that_are_gone_are_forgotten() -> None:
    cache = RecordCache()
    data = _record(_instance("a")).model_dump_json().encode()
    first = cache.record("w", data)
    cache.keep_only(["w"])
    assert cache.record("w", data) is first
    cache.keep_only([])
    assert cache.record("w", data) is not first
