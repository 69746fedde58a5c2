"""Settings: what is refused when they are built, and what a refusal must not repeat."""

from __future__ import annotations

import pytest

from millstream.services.errors import Failure
from millstream.services.settings import child_environment, read_settings


@pytest.mark.parametrize("key", ["", " ", "\t\n", "two words", " padded", "line\nbreak", "schlüssel", "delete\x7f"])
def test_a_key_that_nobody_could_send_is_refused_and_not_repeated(monkeypatch: pytest.MonkeyPatch, key: str) -> None:
    monkeypatch.setenv("MILLSTREAM_ADMIN_KEY", key)
    with pytest.raises(Failure, match="MILLSTREAM_ADMIN_KEY: the admin key") as refused:
        read_settings()
    assert "\n" not in refused.value.message
    assert not key.strip() or key.strip() not in refused.value.message


def test_a_usable_key_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MILLSTREAM_ADMIN_KEY", "a-long-secret!~")
    key = read_settings().admin_key
    assert key is not None
    assert key.get_secret_value() == "a-long-secret!~"


def test_a_bad_value_is_named_with_its_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MILLSTREAM_HTTP_PORT", "eighty")
    with pytest.raises(Failure, match=r"^MILLSTREAM_HTTP_PORT: .*got 'eighty'$"):
        read_settings()
    monkeypatch.delenv("MILLSTREAM_HTTP_PORT")
    monkeypatch.setenv("SAGEMAKER_BIND_TO_PORT", "0")
    with pytest.raises(Failure, match=r"^MILLSTREAM_SAGEMAKER_PORT: "):
        read_settings()


def test_a_child_gets_no_variable_that_is_withheld(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MILLSTREAM_ADMIN_KEY", "inherited")
    withheld = frozenset({"MILLSTREAM_ADMIN_KEY"})
    assert "MILLSTREAM_ADMIN_KEY" not in child_environment({"MILLSTREAM_ADMIN_KEY": "given"}, withheld)
    assert child_environment({"MILLSTREAM_HOME": "x"}, withheld)["MILLSTREAM_HOME"] == "x"
