"""The streaming form parser: the model's bytes come out the same however the body is cut."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.gateway.admin.upload import CONFIG_PART_BYTES_MAX, UploadForm
from millstream.gateway.http.multipart import is_form
from millstream.services.errors import Code, Failure

TYPE = 'multipart/form-data; boundary="xYz"'


def form(*parts: tuple[str, bytes]) -> bytes:
    body = b"".join(
        f'--xYz\r\nContent-Disposition: form-data; name="{name}"; filename="f"\r\nX-Other: 1\r\n\r\n'.encode()
        + content
        + b"\r\n"
        for name, content in parts
    )
    return body + b"--xYz--\r\n"


def parse(chunks: list[bytes]) -> tuple[bytes, bytes | None]:
    parser = UploadForm(TYPE)
    model = b"".join(piece for chunk in chunks for piece in parser.feed(chunk))
    parser.close()
    return model, parser.config


# dashes, line ends and the boundary's own letters are what a parser can trip over
contents = st.one_of(st.binary(max_size=200), st.text("\r\n-xYz", max_size=60).map(str.encode)).filter(
    lambda content: b"\r\n--xYz" not in b"\r\n" + content
)


@given(contents, contents, st.booleans(), st.lists(st.integers(0, 600), max_size=8))
def test_any_cut_gives_the_same_bytes(model: bytes, config: bytes, config_first: bool, cuts: list[int]) -> None:
    parts = [("config", config), ("model", model)]
    body = form(*(parts if config_first else reversed(parts)))
    edges = [0, *sorted(min(cut, len(body)) for cut in cuts), len(body)]
    assert parse([body[a:b] for a, b in itertools.pairwise(edges)]) == (model, config)


def test_byte_by_byte() -> None:
    model = b"\r\n--xY\r\n--tail"
    body = form(("model", model), ("config", b"{}"))
    assert parse([body[at : at + 1] for at in range(len(body))]) == (model, b"{}")


def test_config_is_none_until_its_part_comes() -> None:
    assert parse([form(("model", b"m"))]) == (b"m", None)
    assert parse([form(("model", b"m"), ("config", b""))]) == (b"m", b"")


@pytest.mark.parametrize(
    ("content_type", "body", "says"),
    [
        ("multipart/form-data", b"", "boundary"),
        ("multipart/form-data; boundary=" + "x" * 300, b"", "oundary"),
        (TYPE, b"no form at all", "multipart body"),
        (TYPE, form(("config", b"{}")), "no part 'model'"),
        (TYPE, b"--xYz--\r\n", "no part 'model'"),
        (TYPE, form(("model", b"m"))[:-4], "ends before its last boundary"),
        (TYPE, b"", "ends before its last boundary"),
        (TYPE, form(("model", b"m"), ("model", b"m")), "more than one part 'model'"),
        (TYPE, form(("weights", b"m")), "part 'weights'"),
        (TYPE, b"--xYz\r\nX-Other: 1\r\n\r\nm\r\n--xYz--\r\n", "part ''"),
        (TYPE, b"--xYz\r\n" + b"".join(b"A%d: 1\r\n" % n for n in range(100)) + b"\r\n", "multipart body"),
        (TYPE, b"--xYz\r\nA: " + b"x" * 100_000, "multipart body"),
    ],
)
def test_a_bad_form_is_refused_with_the_reason(content_type: str, body: bytes, says: str) -> None:
    with pytest.raises(Failure, match=says) as refused:
        parser = UploadForm(content_type)
        parser.feed(body)
        parser.close()
    assert refused.value.code is Code.INVALID


def test_a_long_config_is_refused() -> None:
    assert parse([form(("model", b"m"), ("config", b" " * CONFIG_PART_BYTES_MAX))])[0] == b"m"
    with pytest.raises(Failure, match="larger than the limit") as refused:
        parse([form(("config", b" " * (CONFIG_PART_BYTES_MAX + 1)))])
    assert refused.value.code is Code.TOO_LARGE


def test_what_is_a_form() -> None:
    assert is_form("Multipart/Form-Data; boundary=x")
    assert not is_form("multipart/mixed; boundary=x")
    assert not is_form("application/octet-stream")
    assert not is_form("")
