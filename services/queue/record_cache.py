"""A cache of worker records: only what changed in a record is fetched and parsed again. Pure.

record without instances ─> needed: which instances to fetch ─> record: the whole WorkerRecord
A worker can have thousands of instances. Every gateway reads its record at every refresh, and little of it has changed.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import orjson

from millstream.services.wire.records import InstanceRecord, WorkerRecord, readable_instances


class Needed(NamedTuple):
    """The instances to fetch: `whole`: all of them; else those with these content ids."""

    content_ids: tuple[str, ...] = ()
    whole: bool = False


class Fetched(NamedTuple):
    """Instances as they are stored, by content id; None: one that was removed. `whole`: there are no others."""

    fields: Mapping[str, bytes | None]
    whole: bool


_NOTHING = Needed()
_WHOLE = Needed(whole=True)


class _Known(NamedTuple):
    """The record of a worker that was parsed last."""

    data: bytes
    record: WorkerRecord
    instances: dict[str, tuple[object, InstanceRecord]]  # by content id: the JSON, and what it was parsed to


class RecordCache:
    """Parses records; unchanged records and instances are the same objects as before."""

    def __init__(self) -> None:
        self._known: dict[str, _Known] = {}

    def needed(self, worker: str, data: bytes) -> Needed:
        """Return the instances to fetch for `record`. Raises ValueError if `data` is not valid."""
        known = self._known.get(worker)
        if known is not None and known.data == data:
            return _NOTHING
        head = WorkerRecord.model_validate_json(data)
        if not head.instances_version:
            return _NOTHING
        version = known.record.instances_version if known is not None else 0
        if not version or not head.changed_since <= version <= head.instances_version:
            return _WHOLE
        return Needed(tuple(content_id for content_id, at in head.changed.items() if at > version))

    def record(self, worker: str, data: bytes, fetched: Fetched | None = None) -> WorkerRecord:
        """Parse the record of `worker`. Raises ValueError (pydantic's or the JSON parser's) if it is not valid.

        Args:
            worker: id of the worker.
            data: its record as it is stored.
            fetched: the instances that `needed` asked for; None: it asked for none.
        """
        known = self._known.get(worker)
        if known is not None and known.data == data:
            return known.record
        document = orjson.loads(data)
        inline = document.pop("instances", []) if isinstance(document, dict) else []
        head = WorkerRecord.model_validate(document)
        before = known.instances if known is not None else {}
        parsed = _parse_stored(before, fetched) if head.instances_version else _parse_inline(before, inline)
        instances = tuple(instance for _, instance in parsed.values())
        if known is not None and _same(instances, known.record.instances):
            instances = known.record.instances
        record = head.model_copy(update={"instances": instances, "changed": {}})
        self._known[worker] = _Known(data, record, parsed)
        return record

    def keep_only(self, workers: Collection[str]) -> None:
        """Forget all other workers: they no longer exist."""
        for worker in self._known.keys() - set(workers):
            del self._known[worker]


_Parsed = dict[str, tuple[object, InstanceRecord]]


def _parse_inline(before: _Parsed, items: Any) -> _Parsed:
    """Parse the instances of a record that contains them."""
    parsed: _Parsed = {}
    for item in readable_instances(items) if isinstance(items, list) else [items]:
        has_name = isinstance(item, dict) and isinstance(item.get("content_id"), str)
        pair = before.get(item["content_id"]) if has_name else None
        if pair is None or pair[0] != item:
            pair = (item, InstanceRecord.model_validate(item))
        parsed[pair[1].content_id] = pair
    return parsed


def _parse_stored(before: _Parsed, fetched: Fetched | None) -> _Parsed:
    """Parse the instances that were fetched; the others are as before."""
    if fetched is None:
        return before
    parsed = {} if fetched.whole else dict(before)
    for content_id in sorted(fetched.fields):
        data = fetched.fields[content_id]
        pair = before.get(content_id)
        if data is not None and (pair is None or pair[0] != data):
            [*items] = readable_instances([orjson.loads(data)])
            pair = (data, InstanceRecord.model_validate(items[0])) if items else None
        if data is None or pair is None:
            parsed.pop(content_id, None)
        else:
            parsed[content_id] = pair
    return parsed


def _same(left: tuple[InstanceRecord, ...], right: tuple[InstanceRecord, ...]) -> bool:
    return len(left) == len(right) and all(one is other for one, other in zip(left, right, strict=True))
