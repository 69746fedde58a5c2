"""When a version is loaded that waits for other loads of its worker."""

from __future__ import annotations

import pytest

from millstream.services.placement.line import ready_in_s
from millstream.services.wire.records import LoadRecord

NOW = 1000.0
SECONDS = {"short": 1.0, "long": 20.0, "unknown": 0.0}


def _ready_in_s(*loads: LoadRecord, content_id: str = "m", load_s: float = 2.0) -> float:
    return ready_in_s(loads, SECONDS.__getitem__, content_id, load_s, NOW)


def _begun(content_id: str, seconds: float, yields_s: float = 3.0) -> LoadRecord:
    return LoadRecord(content_id=content_id, began=NOW - seconds, yields_s=yields_s)


def _waits(content_id: str) -> LoadRecord:
    return LoadRecord(content_id=content_id, yields_s=3.0)


@pytest.mark.parametrize(
    ("loads", "seconds"),
    [
        ((), 2.0),
        ((_begun("short", 0.25),), 0.75 + 2.0),
        ((_begun("long", 1.0),), 2.0 + 2.0),  # it is set aside 3 s after its beginning
        ((_begun("long", 8.0),), 2.0),  # it was set aside
        ((_begun("long", 0.0, yields_s=0.5),), 0.5 + 2.0),  # no call waits for it
        ((_begun("short", 0.5), _waits("short"), _waits("long")), 0.5 + 1.0 + 3.0 + 2.0),
        ((_begun("unknown", 0.5),), 2.0),
        ((_begun("m", 0.5),), 1.5),
        ((_begun("m", 9.0),), 0.0),  # it takes longer than was predicted
        ((_begun("short", 0.5), _waits("m"), _waits("long")), 0.5 + 2.0),  # what comes after it does not count
    ],
)
def test_loads_before_it_count(loads, seconds):
    assert _ready_in_s(*loads) == pytest.approx(seconds)
