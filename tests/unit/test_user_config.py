"""The user's configuration: endpoints by name, keys, precedence, and errors that name file, key and valid keys."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from millstream.client.address import find_server
from millstream.client.user_config import read_user_config
from millstream.services.errors import Failure

CONFIG = """
default = "prod"
[endpoints.prod]
url = "https://models.example.com/"
api_key = "prod-key"
[endpoints.staging]
url = "http://staging:8000"
api_key_file = "staging.key"
ca_file = "ca.pem"
[endpoints.open]
url = "http://open:8000"
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of config.toml; the current folder has no installation."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    for name in ("MILLSTREAM_ENDPOINT", "MILLSTREAM_ADMIN_KEY", "MILLSTREAM_HOME"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "millstream").mkdir()
    return tmp_path / "millstream"


@pytest.fixture
def write(folder: Path) -> Callable[[str], Path]:
    def write(text: str) -> Path:
        file = folder / "config.toml"
        file.write_text(text)
        file.chmod(0o600)
        return file

    return write


def test_endpoints_are_found_by_name(write, folder):
    write(CONFIG)
    (folder / "staging.key").write_text("staging-key\n")
    (folder / "staging.key").chmod(0o600)
    prod = find_server("prod", None)
    assert (prod.url, prod.key, prod.warnings) == ("https://models.example.com", "prod-key", ())
    assert prod.trust.ca_file is None
    staging = find_server("staging", None)
    assert (staging.url, staging.key) == ("http://staging:8000", "staging-key")
    assert staging.trust.ca_file == folder / "ca.pem"
    assert "prod-key" not in repr(prod)


def test_precedence(write, folder, monkeypatch):
    assert find_server(None, None).url == "http://127.0.0.1:8000"
    write(CONFIG)
    assert find_server(None, None).url == "https://models.example.com"
    home = folder / "home"
    (home / "run").mkdir(parents=True)
    (home / "run" / "url").write_text("http://127.0.0.1:9\n")
    monkeypatch.setenv("MILLSTREAM_HOME", str(home))
    assert find_server(None, None).url == "http://127.0.0.1:9"
    monkeypatch.setenv("MILLSTREAM_ENDPOINT", "open")
    assert find_server(None, None).url == "http://open:8000"
    assert find_server("prod", None).url == "https://models.example.com"
    assert find_server("http://other:1/", None).url == "http://other:1"

    monkeypatch.setenv("MILLSTREAM_ADMIN_KEY", "of-the-environment")
    assert find_server("open", None).key == "of-the-environment"
    assert find_server("prod", None).key == "prod-key"
    assert find_server("prod", "given").key == "given"
    assert find_server("http://other:1", None).key == "of-the-environment"


def test_a_missing_file_or_home_is_an_empty_configuration(folder, monkeypatch):
    assert read_user_config().endpoints == {}
    (folder / "config.toml").mkdir()
    with pytest.raises(Failure, match=r"config\.toml cannot be read: Is a directory"):
        read_user_config()
    monkeypatch.delenv("XDG_CONFIG_HOME")
    monkeypatch.setattr(Path, "home", lambda: (_ for _ in ()).throw(RuntimeError("no home")))
    assert read_user_config().file is None
    assert find_server(None, None).url == "http://127.0.0.1:8000"
    with pytest.raises(Failure, match="endpoint 'prod' is neither a URL"):
        find_server("prod", None)


def test_the_folder_is_that_of_the_xdg_specification(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CONFIG_HOME", "relative")
    assert read_user_config().file == tmp_path / ".config" / "millstream" / "config.toml"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            "defualt = 'prod'",
            r"toml: there is no key 'defualt': did you mean 'default'\? valid: default, endpoints",
        ),
        (
            "[endpoints.prod]\napi_kye = 'x'",
            r"prod: there is no key 'api_kye': did you mean 'api_key' .* valid: api_key, ",
        ),
        (
            "[endpoint.prod]\nurl = 'x'",
            r"no key 'endpoint': did you mean 'endpoints'\? valid: endpoints, default",
        ),
        ("default = 3", "default must be the name of an endpoint"),
        ("endpoints = 3", "endpoints must be tables"),
        ("[endpoints]\nprod = 'http://x'", r"endpoints.prod must be a table: write \[endpoints.prod\]"),
        ("[endpoints.prod]\nurl = 3", "endpoints.prod.url must be a string"),
        ("default = 'prod'\n[endpoints.prod]\napi_key = 'x'", "endpoints.prod has no url"),
        (
            "default = 'prod'\n[endpoints.prod]\nurl = 'models:80'",
            "endpoints.prod.url models:80: write http://HOST:PORT",
        ),
        ("default = 'prod'\n[endpoints.prod]\nurl = 'http://h'\napi_key = ''", "endpoints.prod: the key is empty"),
        ("default = 'prod'\n[endpoints.prod]\nurl = 'http://h'\napi_key = 'a b'", "visible ASCII"),
        (
            "default = 'prod'\n[endpoints.prod]\nurl = 'http://h'\napi_key = 'a'\napi_key_file = 'b'",
            "both api_key and api_key_file",
        ),
        (
            "default = 'prod'\n[endpoints.prod]\nurl = 'http://h'\napi_key_file = 'nowhere'",
            "endpoints.prod.api_key_file: .*nowhere does not exist",
        ),
        ("default = 'prod'\n[endpoints.prod]\nurl = 'http://h'\napi_key_file = '~nobody-here/x'", "home"),
        (
            "default = 'prdo'\n[endpoints.other]\n[endpoints.prod]",
            r"default 'prdo' is neither .* did you mean 'prod'\? valid: prod, other",
        ),
        ("default = 'x'", "it has no endpoints"),
        ("default = ", "is not TOML"),
        ("# \0", "is not TOML"),
        ("x" * (1 << 21), "is larger than"),
    ],
)
def test_errors_name_the_file_the_key_and_what_is_valid(write, text, says):
    file = write(text)
    with pytest.raises(Failure, match=says) as failure:
        find_server(None, None)
    assert str(file) in failure.value.message or "visible ASCII" in says
    assert "\n" not in failure.value.message


def test_a_byte_order_mark_is_ignored(write):
    write("").write_bytes(b"\xef\xbb\xbf" + CONFIG.encode())
    assert find_server("open", None).url == "http://open:8000"


def test_messages_about_long_names_are_short(write, folder):
    write(f"{'k' * 100_000} = 1")
    for endpoint in (None, "http://" + "[" * 100_000):
        with pytest.raises(Failure) as failure:
            find_server(endpoint, None)
        assert len(failure.value.message) < 500
    write("")
    with pytest.raises(Failure) as failure:
        find_server("e" * 100_000, None)
    assert len(failure.value.message) < 500


def test_a_file_that_is_not_text_is_refused(write):
    write("").write_bytes(b"\xff\xfe")
    with pytest.raises(Failure, match=r"config.toml is not UTF-8"):
        read_user_config()


def test_a_key_that_others_may_read_is_a_warning(write, folder):
    file = write(CONFIG)
    key = folder / "staging.key"
    key.write_text("k")
    key.chmod(0o644)
    assert find_server("staging", None).warnings == (f"other users may read the key in {key}: chmod 600 {key}",)
    file.chmod(0o640)
    assert find_server("prod", None).warnings == (f"other users may read the key in {file}: chmod 600 {file}",)
    assert find_server("open", None).warnings == ()


@pytest.mark.parametrize(
    "url",
    [
        "http://",
        "ftp://h",
        "http://h:x",
        "http://h:99999",
        "http://u:p@h",
        "http://h?q",
        "http://h#f",
        "http://[",
        "://",
    ],
)
def test_wrong_urls_are_refused(folder, url):
    with pytest.raises(Failure, match="write http://HOST:PORT or https://HOST"):
        find_server(url, None)


def test_urls_may_have_a_path_and_ipv6(folder):
    assert find_server("https://h/millstream/", None).url == "https://h/millstream"
    assert find_server("http://[::1]:8000", None).url == "http://[::1]:8000"
