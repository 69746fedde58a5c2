"""Error replies become typed errors with one clear line, whatever answered."""

from __future__ import annotations

import pickle

import pytest

from millstream.client.call import Call, Reply
from millstream.client.errors import Cause, ConnectionFailed, ModelNotFound, ServerError, Timeout, VersionFailed
from millstream.client.replies import document_of, failure_of, parse_json
from millstream.services.errors import HTTP_STATUS, Code, Failure, Subject
from tests.kit.scripted_steps import refusal

GET = Call("GET", "/admin/v1/models/m")


def test_each_status_has_the_code_that_the_server_meant():
    for code, status in HTTP_STATUS.items():
        failure = failure_of(refusal(status), GET)
        assert failure is not None
        assert failure.code is code or code in {Code.INTERNAL, Code.MODEL, Code.MEMORY}, status
    for status, code in (
        (403, Code.FORBIDDEN),
        (500, Code.INTERNAL),
        (502, Code.UNAVAILABLE),
        (418, Code.INVALID),
    ):
        failure = failure_of(refusal(status), GET)
        assert failure is not None
        assert failure.code is code


def test_an_error_carries_everything_that_the_reply_says():
    failure = failure_of(refusal(429, "the lane\nis full", x_request_id="abc", retry_after="3"), GET)
    assert isinstance(failure, ServerError)
    assert (failure.status, failure.request_id, failure.retry_after_s) == (429, "abc", 3)
    assert str(failure) == failure.message == "the lane is full"


def test_a_message_cannot_steer_a_terminal():
    failure = failure_of(refusal(400, "\x1b[2Jgone\n\u202e" + "x" * 10_000), GET)
    assert failure is not None
    assert failure.message.isprintable()
    assert len(failure.message) < 3000


def test_an_unknown_model_is_told_from_an_unknown_path():
    unknown = failure_of(refusal(404, "Request for unknown model: 'm' is not found"), GET)
    assert isinstance(unknown, ModelNotFound)
    assert unknown.subject is Subject.MODEL
    path = failure_of(refusal(404, "no such path"), Call("GET", "/v3"))
    assert type(path) is ServerError
    foreign = failure_of(Reply(404, {}, bytearray(b"<html>nginx</html>"), "http://h/admin/v1/models/m"), GET)
    assert type(foreign) is ServerError
    assert "<html>nginx</html>" in foreign.message
    assert "check the endpoint" in foreign.message


def test_a_missing_key_says_where_keys_are_set():
    failure = failure_of(refusal(401, "the admin API needs a key"), GET)
    assert failure is not None
    for word in ("--key", "MILLSTREAM_ADMIN_KEY", "api_key", "config.toml", "Client(key="):
        assert word in failure.message


@pytest.mark.parametrize(
    "content",
    [b"", b"\xff\xfe", b"null", b"[]", b'{"error": {"code": 3}}', b'{"error": null}', b"[" * 100_000, b"x" * 10**6],
)
def test_errors_of_other_servers_are_one_short_line(content):
    failure = failure_of(Reply(500, {}, bytearray(content), "http://h/x"), GET)
    assert failure is not None
    assert len(failure.message) < 300
    assert "\n" not in failure.message
    assert "status 500" in failure.message


def test_a_port_with_tls_that_answers_in_plain_http_says_so():
    said = b"<center>The plain HTTP request was sent to HTTPS port</center>"
    failure = failure_of(Reply(400, {}, bytearray(said), "http://h/x"), GET)
    assert failure is not None
    assert "write https:// instead of http://" in failure.message


def test_numbers_that_json_lacks_are_read():
    value = parse_json(bytearray(b'{"a": [NaN, -Infinity, 18446744073709551615]}'))
    assert str(value) == "{'a': [nan, -inf, 18446744073709551615]}"


@pytest.mark.parametrize("content", [b"", b"OK", b"[1]", b"<html>", b"\xff"])
def test_a_reply_without_a_document_is_not_a_millstream_server(content):
    with pytest.raises(Failure, match="is not a Millstream server"):
        document_of(Reply(200, {}, bytearray(content), "http://h/x"))


@pytest.mark.parametrize(
    "failure",
    [
        ServerError(Code.OVERLOADED, "full", status=429, request_id="a", retry_after_s=2),
        ModelNotFound(Code.NOT_FOUND, "no", status=404, subject=Subject.MODEL),
        ConnectionFailed(Cause.TLS, "no"),
        Timeout("late"),
        VersionFailed("m", 3, "broken"),
        Failure(Code.INVALID, "wrong"),
    ],
)
def test_errors_can_be_pickled(failure):
    """Worker pools send them from one process to another."""
    copy = pickle.loads(pickle.dumps(failure))
    assert type(copy) is type(failure)
    assert copy.__dict__ == failure.__dict__
    assert str(copy) == str(failure)
