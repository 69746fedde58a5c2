"""The right to be in flight: how many, how many bytes, and none while the gateway shuts down."""

from __future__ import annotations

import pytest

from millstream.gateway.scheduling.request import Admission, Request
from millstream.services.errors import Code, Failure
from millstream.services.metrics import catalogue
from millstream.services.metrics.registry import MetricsRegistry
from tests.kit.responders import DISCARD


def request() -> Request:
    return Request((), 1, 0, 0.0, 1.0, DISCARD)


@pytest.fixture
def tally() -> MetricsRegistry:
    return MetricsRegistry(None, "gateway-0")


@pytest.fixture
def admission(tally: MetricsRegistry) -> Admission:
    """Room for three requests and 100 bytes."""
    in_flight = tally.gauge(catalogue.REQUESTS_IN_FLIGHT)
    return Admission(3, 100, in_flight, tally.counter(catalogue.REQUESTS_REFUSED, "gateway_full"))


def refused(admission: Admission, size_bytes: int) -> Failure:
    before = (admission.requests, admission.bytes)
    with pytest.raises(Failure) as failure:
        admission.admit(request(), size_bytes)
    assert (admission.requests, admission.bytes) == before
    return failure.value


def test_permits_are_given_until_there_are_none_and_again_when_one_comes_back(admission):
    admitted = [request() for _ in range(3)]
    for one in admitted:
        admission.admit(one, 10)
    failure = refused(admission, 0)
    assert (failure.code, failure.retry_after_s) == (Code.UNAVAILABLE, 1)
    assert "3 requests of 30 bytes" in failure.message
    admission.release([admitted[1]])
    admission.admit(request(), 10)
    assert (admission.requests, admission.bytes) == (3, 30)


def test_bytes_are_bounded_too_and_come_back_with_the_request(admission):
    large = request()
    admission.admit(large, 90)
    assert refused(admission, 11).code is Code.UNAVAILABLE
    admission.admit(request(), 10)
    refused(admission, 1)
    admission.admit(request(), 0)
    admission.release([large])
    assert (admission.requests, admission.bytes) == (2, 10)


def test_while_it_shuts_down_nothing_is_admitted_and_what_is_in_flight_goes_on(admission):
    one = request()
    admission.admit(one, 10)
    admission.closed = True
    assert "shutting down" in refused(admission, 1).message
    admission.release([one])
    assert (admission.requests, admission.bytes) == (0, 0)


def test_what_is_in_flight_and_what_was_refused_is_counted(admission, tally):
    one = request()
    admission.admit(one, 10)
    admission.admit(request(), 10)
    admission.release([one])
    refused(admission, 1000)
    totals = {(key.name, tuple(key.labels)): numbers for key, numbers in tally.totals().items()}
    assert totals[catalogue.REQUESTS_IN_FLIGHT.name, ()] == [1]
    assert totals[catalogue.REQUESTS_REFUSED.name, ("gateway_full",)] == [1]
