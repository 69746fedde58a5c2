"""A cache of parsed worker records: only what changed in a record is parsed again. Pure.

A record can list thousands of instances. Every gateway reads it at every refresh, and little of it has changed.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NamedTuple

import orjson

from millstream.services.wire.records import InstanceRecord, WorkerRecord, readable_instances


class _Known(NamedTuple):
    """The record of a worker that was parsed last."""

    data: bytes
    record: WorkerRecord
    instances: dict[
        str, tuple[dict[str, Any], InstanceRecord]
    ]  # by content id: the JSON object and what it was parsed to


class RecordCache:
    """Parses records; unchanged records and instances are the same objects as before."""

    def __init__(self) -> None:
        self._known: dict[str, _Known] = {}

    def record(self, worker: str, data: bytes) -> WorkerRecord:
        """Parse the record of `worker`. Raises ValueError (pydantic's or the JSON parser's) if it is not valid."""
        known = self._known.get(worker)
        if known is not None and known.data == data:
            return known.record
        document = orjson.loads(data)
        raw = document.pop("instances", []) if isinstance(document, dict) else []
        before = known.instances if known is not None else {}
        head = WorkerRecord.model_validate(document)
        parsed: dict[str, tuple[dict[str, Any], InstanceRecord]] = {}
        for item in readable_instances(raw) if isinstance(raw, list) else [raw]:
            has_name = isinstance(item, dict) and isinstance(item.get("content_id"), str)
            pair = before.get(item["content_id"]) if has_name else None
            if pair is None or pair[0] != item:
                pair = (item, InstanceRecord.model_validate(item))
            parsed[pair[1].content_id] = pair
        instances = tuple(instance for _, instance in parsed.values())
        if known is not None and _same(instances, known.record.instances):
            instances = known.record.instances
        record = head.model_copy(update={"instances": instances})
        self._known[worker] = _Known(data, record, parsed)
        return record

    def keep_only(self, workers: Collection[str]) -> None:
        """Forget all other workers: they no longer exist."""
        for worker in self._known.keys() - set(workers):
            del self._known[worker]


def _same(left: tuple[InstanceRecord, ...], right: tuple[InstanceRecord, ...]) -> bool:
    return len(left) == len(right) and all(one is other for one, other in zip(left, right, strict=True))
