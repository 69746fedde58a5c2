"""Requests that killed workers are refused for a while, and only they."""

from __future__ import annotations

import numpy as np
import pytest

from millstream.gateway.scheduling.quarantine import DIED, DIGESTS_MAX, REST_S, Quarantine
from millstream.gateway.scheduling.request import Request
from millstream.gateway.tensors.inputs import InputTensor
from millstream.services.errors import Code, Failure
from millstream.services.metrics import catalogue
from millstream.services.metrics.registry import MetricsRegistry
from tests.kit.responders import DISCARD


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def published() -> list[str]:
    return []


@pytest.fixture
def quarantine(published: list[str], clock: Clock) -> Quarantine:
    return gateway_with(published, clock)


def gateway_with(published: list[str], clock: Clock) -> Quarantine:
    """Return the quarantine of a gateway that appends what it publishes to a list."""
    tally = MetricsRegistry(None, "gateway")
    refusals = tally.counter(catalogue.REQUESTS_REFUSED, "quarantined")
    return Quarantine(tally.gauge(catalogue.REQUESTS_QUARANTINED), refusals, published.append, clock)


def request(data: object, shape: tuple[int, ...] = (2, 2)) -> Request:
    tensor = InputTensor(shape, data, 16)  # type: ignore[arg-type]
    return Request([tensor], 2, 0, 0.0, 1.0, DISCARD)


def refused(quarantine: Quarantine, content_id: str, one: Request) -> bool:
    try:
        quarantine.check(content_id, one)
    except Failure as failure:
        assert failure.code is Code.MODEL
        return True
    return False


def test_the_same_data_of_the_same_content_is_refused_in_whatever_form_it_comes(quarantine):
    array = np.arange(4, dtype=np.float32).reshape(2, 2)
    quarantine.add("m:1", request(array), DIED)
    assert refused(quarantine, "m:1", request(array.tobytes()))
    assert refused(quarantine, "m:1", request(memoryview(array.tobytes())))
    assert not refused(quarantine, "m:2", request(array))
    assert not refused(quarantine, "m:1", request(array, (4, 1)))
    assert not refused(quarantine, "m:1", request(array + 1))


def test_it_ends_after_a_while(quarantine, clock):
    quarantine.add("m:1", request(b"1234"), DIED)
    clock.now = REST_S - 1
    quarantine.add("m:1", request(b"5678"), DIED)
    assert refused(quarantine, "m:1", request(b"1234"))
    clock.now = REST_S
    assert not refused(quarantine, "m:1", request(b"1234"))
    assert refused(quarantine, "m:1", request(b"5678"))
    clock.now = 3 * REST_S
    assert not refused(quarantine, "m:1", request(b"5678"))
    assert len(quarantine) == 0


def test_gateways_learn_from_each_other(quarantine, published, clock):
    other = gateway_with(published, clock)
    quarantine.add("m:1", request(b"1234"), DIED)
    [news] = published
    other.learn(news)
    quarantine.learn(news)
    assert refused(other, "m:1", request(b"1234"))
    assert not refused(other, "m:1", request(b"5678"))
    for nonsense in ("", "zz", "00", "00" * 17):
        with pytest.raises(ValueError, match=r"digest|hexadecimal"):
            other.learn(nonsense)
    assert (len(other), published) == (1, [news])


def test_it_is_bounded(quarantine):
    for number in range(DIGESTS_MAX + 5):
        quarantine.add("m:1", request(b"%d" % number), DIED)
    assert len(quarantine) == DIGESTS_MAX
    assert not refused(quarantine, "m:1", request(b"0"))
    assert refused(quarantine, "m:1", request(b"%d" % DIGESTS_MAX))
