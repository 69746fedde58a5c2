"""Which calls the client repeats, how long it waits, and that the caller's timeout bounds everything."""

from __future__ import annotations

import pytest

from millstream.client.call import Body, Call, send
from millstream.client.errors import Cause, ConnectionFailed, ServerError, Timeout
from millstream.client.models import live, ready
from tests.kit.scripted_steps import Script, refusal, reply

GET = Call("GET", "/x", repeatable=True)
POST = Call("POST", "/x", content=b"body")
REFUSED = ConnectionFailed(Cause.REFUSED, "refused")
CLOSED = ConnectionFailed(Cause.CLOSED, "closed")


def test_a_refused_connection_is_tried_again_after_growing_pauses():
    script = Script(REFUSED, REFUSED, REFUSED, reply({"a": 1}))
    assert script.run(send(POST)).status == 200
    assert len(script.calls) == 4
    assert script.pauses == pytest.approx([0.05, 0.1, 0.2])


def test_the_last_failure_is_raised_when_the_attempts_are_used_up():
    script = Script(REFUSED)
    with pytest.raises(ConnectionFailed, match="refused"):
        script.run(send(GET), attempts=3)
    assert len(script.calls) == 3


@pytest.mark.parametrize("status", [429, 503])
def test_a_refusal_with_retry_after_is_repeated_then_and_not_earlier(status):
    script = Script(refusal(status, retry_after="2"), reply())
    script.run(send(POST), random=1.0)
    assert script.pauses == [2.5]
    script = Script(refusal(status, retry_after="2"), reply())
    script.run(send(POST), random=0.0)
    assert script.pauses == [2.0]


def test_a_repeated_call_is_logged_for_callers_who_want_it():
    script = Script(refusal(429, "model 'm' is loading, about 2 s", retry_after="2"), reply())
    script.run(send(POST))
    assert script.logged == ["POST /x: model 'm' is loading, about 2 s; sent again in 2 s"]


@pytest.mark.parametrize(
    "answer",
    [
        refusal(429),
        refusal(503),
        refusal(400, retry_after="1"),
        refusal(500, retry_after="1"),
        refusal(503, retry_after="Wed, 21 Oct 2026 07:28:00 GMT"),
        refusal(503, retry_after="-1"),
        refusal(503, retry_after="٣"),
        refusal(503, retry_after="9" * 400),
    ],
)
def test_other_errors_are_not_repeated(answer):
    script = Script(answer)
    with pytest.raises(ServerError) as error:
        script.run(send(GET))
    assert len(script.calls) == 1
    assert error.value.status == answer.status


def test_a_connection_that_closed_is_repeated_only_where_that_changes_nothing():
    script = Script(CLOSED, reply())
    script.run(send(GET))
    assert len(script.calls) == 2
    script = Script(CLOSED, reply())
    with pytest.raises(ConnectionFailed):
        script.run(send(POST))
    assert len(script.calls) == 1


@pytest.mark.parametrize("cause", [Cause.UNKNOWN_HOST, Cause.TLS, Cause.PROTOCOL, Cause.INCOMPLETE, Cause.UNREACHABLE])
def test_causes_that_stay_are_not_repeated(cause):
    script = Script(ConnectionFailed(cause, "no"))
    with pytest.raises(ConnectionFailed):
        script.run(send(GET))
    assert len(script.calls) == 1


def test_a_pause_that_would_outlast_the_timeout_is_not_made():
    script = Script(refusal(503, "full", retry_after="30"))
    with pytest.raises(ServerError, match="full") as error:
        script.run(send(GET), timeout_s=20)
    assert script.pauses == []
    assert error.value.retry_after_s == 30


def test_attempts_share_the_timeout():
    script = Script(REFUSED, REFUSED, reply(), call_s=3)
    script.run(send(GET), timeout_s=10)
    totals = [call.timeouts.total_s for call in script.calls if call.timeouts]
    assert totals == pytest.approx([10, 6.95, 3.85])
    script = Script(refusal(429, retry_after="1"), call_s=3)
    with pytest.raises(ServerError):
        script.run(send(GET), timeout_s=10)
    assert [call.timeouts.total_s for call in script.calls if call.timeouts] == [10, 6, 2]


def test_nothing_is_sent_after_the_timeout():
    script = Script(reply())
    with pytest.raises(Timeout, match="GET /x"):
        script.run(send(GET), timeout_s=0)
    assert script.calls == []


def test_timeouts_of_an_upload_bound_silence_only():
    script = Script(reply())
    script.run(send(Call("POST", "/x", content=Body(1, lambda: [b"x"]), read_s=600)), timeout_s=None)
    assert script.calls[0].timeouts == (None, 600, 60, 10)


def test_questions_about_readiness_are_asked_once():
    script = Script(refusal(503, retry_after="1"))
    assert script.run(ready(None, None)) is False
    assert script.run(ready("m", 3)) is False
    assert script.sent == [("GET", "/v2/health/ready"), ("GET", "/v2/models/m/versions/3/ready")]
    with pytest.raises(ConnectionFailed):
        Script(REFUSED).run(live())
