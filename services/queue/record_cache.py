"""Records of workers, parsed where they changed. Pure.

A record of thousands of instances comes with every refresh of every gateway, and hardly anything in it is new.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NamedTuple

import orjson

from millstream.services.wire.records import InstanceRecord, WorkerRecord, readable_instances


class _Known(NamedTuple):
    """What was read last of one worker: the bytes, the record, and each instance with the JSON object it was made of."""

    data: bytes
    record: WorkerRecord
    instances: dict[str, tuple[dict[str, Any], InstanceRecord]]


class RecordCache:
    """Parses records; what did not change is the same object as before."""

    def __init__(self) -> None:
        self._known: dict[str, _Known] = {}

    def record(self, worker: str, data: bytes) -> WorkerRecord:
        """The record of `worker`. Raises ValueError (pydantic's, or the JSON parser's) when it is none."""
        known = self._known.get(worker)
        if known is not None and known.data == data:
            return known.record
        document = orjson.loads(data)
        given = document.pop("instances", []) if isinstance(document, dict) else []
        before = known.instances if known is not None else {}
        head = WorkerRecord.model_validate(document)
        instances: dict[str, tuple[dict[str, Any], InstanceRecord]] = {}
        for one in readable_instances(given) if isinstance(given, list) else [given]:
            made = (
                before.get(one["content_id"])
                if isinstance(one, dict) and isinstance(one.get("content_id"), str)
                else None
            )
            if made is None or made[0] != one:
                made = (one, InstanceRecord.model_validate(one))
            instances[made[1].content_id] = made
        held = tuple(instance for _, instance in instances.values())
        if known is not None and _same(held, known.record.instances):
            held = known.record.instances
        record = head.model_copy(update={"instances": held})
        self._known[worker] = _Known(data, record, instances)
        return record

    def keep(self, workers: Collection[str]) -> None:
        """Forget all other workers: they are gone."""
        for worker in self._known.keys() - set(workers):
            del self._known[worker]


def _same(left: tuple[InstanceRecord, ...], right: tuple[InstanceRecord, ...]) -> bool:
    return len(left) == len(right) and all(one is other for one, other in zip(left, right, strict=True))
