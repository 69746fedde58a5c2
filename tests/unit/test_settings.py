"""Settings: what is refused when they are built, and what a refusal must not repeat."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from millstream.services.environment import child_environment
from millstream.services.errors import Failure
from millstream.services.secret_files import FILE_BYTES_MAX
from millstream.services.settings import (
    SECRET_FILES,
    Settings,
    changed_settings,
    check_platform_port,
    read_settings,
    unknown_variables,
)
from millstream.services.start_log import log_start


@pytest.mark.parametrize("key", ["", " ", "\t\n", "two words", " padded", "line\nbreak", "schlüssel", "delete\x7f"])
def test_a_key_that_nobody_could_send_is_refused_and_not_repeated(monkeypatch: pytest.MonkeyPatch, key: str) -> None:
    monkeypatch.setenv("MILLSTREAM_ADMIN_KEY", key)
    with pytest.raises(Failure, match="MILLSTREAM_ADMIN_KEY: the admin key") as refused:
        read_settings()
    assert "\n" not in refused.value.message
    assert not key.strip() or key.strip() not in refused.value.message


def test_an_empty_key_of_metrics_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MILLSTREAM_METRICS_KEY", "")
    with pytest.raises(Failure, match="MILLSTREAM_METRICS_KEY: the metrics key is empty"):
        read_settings()


def test_a_usable_key_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MILLSTREAM_ADMIN_KEY", "a-long-secret!~")
    key = read_settings().admin_key
    assert key is not None
    assert key.get_secret_value() == "a-long-secret!~"


@pytest.mark.plugins
def test_a_bad_value_is_named_with_its_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MILLSTREAM_HTTP_PORT", "eighty")
    with pytest.raises(Failure, match=r"^MILLSTREAM_HTTP_PORT: .*got 'eighty'$"):
        read_settings()
    monkeypatch.delenv("MILLSTREAM_HTTP_PORT")
    monkeypatch.setenv("SAGEMAKER_BIND_TO_PORT", "0")
    with pytest.raises(Failure, match=r"^SAGEMAKER_BIND_TO_PORT: "):
        read_settings()


def test_a_child_gets_no_variable_that_is_withheld(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MILLSTREAM_ADMIN_KEY", "inherited")
    withheld = frozenset({"MILLSTREAM_ADMIN_KEY"})
    assert "MILLSTREAM_ADMIN_KEY" not in child_environment({"MILLSTREAM_ADMIN_KEY": "given"}, withheld)
    assert child_environment({"MILLSTREAM_HOME": "x"}, withheld)["MILLSTREAM_HOME"] == "x"


@pytest.mark.parametrize("ending", ["", "\n", "\r\n"])
def test_a_secret_is_read_from_its_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, ending: str) -> None:
    file = tmp_path / "key"
    file.write_bytes(b"from-a-file" + ending.encode())
    monkeypatch.setenv("MILLSTREAM_ADMIN_KEY_FILE", str(file))
    monkeypatch.setenv("MILLSTREAM_REDIS_URL_FILE", str(file))
    monkeypatch.delenv("MILLSTREAM_DRAIN_DELAY_S", raising=False)  # tests do not wait that long
    settings = read_settings()
    assert settings.admin_key is not None
    assert settings.admin_key.get_secret_value() == "from-a-file"
    assert settings.redis_url is not None
    assert "from-a-file" not in repr(settings)
    assert changed_settings(settings) == {"admin_key": "(set)", "redis_url": "(set)"}
    assert Settings(admin_key="argument").admin_key.get_secret_value() == "argument"  # type: ignore[union-attr]
    files = {f"MILLSTREAM_{name}_FILE" for name in ("ACCESS_SECRET", "ADMIN_KEY", "METRICS_KEY", "REDIS_URL")}
    assert files == SECRET_FILES


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "is empty"),
        (b"\n\n", "is empty"),
        (b"x" * (FILE_BYTES_MAX + 1), "is longer than 16 KiB"),
        (b"\xff\xfe", "is not text in UTF-8"),
        (b"two words", "visible ASCII"),
        (b"two\nlines", "visible ASCII"),
        (None, "No such file"),
    ],
)
def test_a_file_that_is_no_secret_is_refused_in_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, content: bytes | None, says: str
) -> None:
    file = tmp_path / "key\nfile"
    if content is not None:
        file.write_bytes(content)
    monkeypatch.setenv("MILLSTREAM_ADMIN_KEY_FILE", str(file))
    with pytest.raises(Failure, match=f"^MILLSTREAM_ADMIN_KEY_FILE: .*{says}") as refused:
        read_settings()
    assert "\n" not in refused.value.message


def test_endless_files_and_folders_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for path, says in (("/dev/zero", "longer"), (str(tmp_path), "Is a directory"), ("", "No such file")):
        monkeypatch.setenv("MILLSTREAM_ADMIN_KEY_FILE", path)
        with pytest.raises(Failure, match=says):
            read_settings()


def test_a_secret_that_is_given_twice_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MILLSTREAM_ADMIN_KEY", "")
    monkeypatch.setenv("MILLSTREAM_ADMIN_KEY_FILE", "/dev/null")
    with pytest.raises(Failure, match=r"^MILLSTREAM_ADMIN_KEY_FILE and MILLSTREAM_ADMIN_KEY are both set"):
        read_settings()


def test_port_is_used_where_there_is_no_port_of_our_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PORT", "1234")
    assert read_settings().http_port == 1234
    assert Settings(http_port=5).http_port == 5
    monkeypatch.setenv("MILLSTREAM_HTTP_PORT", "4321")
    assert read_settings().http_port == 4321
    monkeypatch.delenv("MILLSTREAM_HTTP_PORT")
    monkeypatch.setenv("PORT", "tcp://10.0.0.1:80")  # as older Kubernetes sets variables of services
    assert read_settings().http_port == 8000  # a client in such an environment needs no port
    with pytest.raises(Failure, match=r"^PORT: .*got 'tcp://10.0.0.1:80'$"):
        check_platform_port()
    for text in ("", "-1", "65536", "١", "9" * 10_000):
        monkeypatch.setenv("PORT", text)
        with pytest.raises(Failure, match=r"^PORT: "):
            check_platform_port()
    monkeypatch.setenv("MILLSTREAM_HTTP_PORT", "1")
    check_platform_port()


def test_unknown_log_formats_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MILLSTREAM_LOG_FORMAT", "xml")
    with pytest.raises(Failure, match=r"^MILLSTREAM_LOG_FORMAT: .*'text' or 'json'"):
        read_settings()


def test_changed_settings_are_those_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("MILLSTREAM_")]:
        monkeypatch.delenv(name)
    assert changed_settings(Settings()) == {}
    assert changed_settings(Settings(gateways=2, admin_key="k")) == {"gateways": "2", "admin_key": "(set)"}


@pytest.mark.parametrize(
    ("variable", "meant"),
    [
        ("MILLSTREAM_HTP_PORT", "'MILLSTREAM_HTTP_PORT'"),
        ("MILLSTREAM_ADMINKEY", "'MILLSTREAM_ADMIN_KEY'"),
        ("MILLSTREAM_REDIS", "'MILLSTREAM_REDIS_URL'"),
    ],
)
def test_an_unknown_variable_gets_a_warning_with_the_setting_that_was_meant(variable: str, meant: str) -> None:
    (warning,) = unknown_variables({variable: "x", "MILLSTREAM_HOME": "x", "OTHER": "x"})
    assert warning.startswith(f"{variable} is no setting and has no effect; did you mean {meant}")


def test_variables_of_a_kubernetes_service_get_no_warning() -> None:
    address = "tcp://10.0.0.7:8000"
    service = {
        "MILLSTREAM_SERVICE_HOST": "10.0.0.7",
        "MILLSTREAM_SERVICE_PORT": "8000",
        "MILLSTREAM_SERVICE_PORT_HTTP": "8000",
        "MILLSTREAM_PORT": address,
        "MILLSTREAM_PORT_8000_TCP": address,
        "MILLSTREAM_PORT_8000_TCP_ADDR": "10.0.0.7",
        "MILLSTREAM_GATEWAY_PORT": address,
        "MILLSTREAM_ADMIN_KEY_FILE": "/run/secrets/key",
    }
    assert unknown_variables(service) == []


def test_a_port_that_kubernetes_set_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MILLSTREAM_HTTP_PORT", "tcp://10.0.0.7:8000")  # of a Service called millstream-http
    with pytest.raises(Failure, match=r"^MILLSTREAM_HTTP_PORT: .*enableServiceLinks: false"):
        read_settings()


def test_a_process_logs_unknown_variables_unless_its_supervisor_did(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("MILLSTREAM_HTP_PORT", "1")
    log_start(read_settings(), "gateway-0", supervised=True)
    assert "is no setting" not in caplog.text
    log_start(read_settings(), "gateway-0", supervised=False)
    assert "MILLSTREAM_HTP_PORT is no setting" in caplog.text
