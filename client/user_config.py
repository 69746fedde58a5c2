"""The user's configuration: `~/.config/millstream/config.toml` with endpoints by name, their keys, and the default.

default = "prod"

[endpoints.prod]
url = "https://models.example.com"
api_key_file = "prod.key"       # or api_key = "…"; a relative path starts at the folder of this file
ca_file = "ca.pem"              # certificates to trust instead of the system's
"""

from __future__ import annotations

import stat
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from millstream.client.address import URL_DEFAULT, checked_url
from millstream.services.environment import user_config_file
from millstream.services.errors import invalid
from millstream.services.nearest_names import unknown_key

CONFIG_BYTES_MAX = 1 << 20
KEY_BYTES_MAX = 16 << 10
_EXCERPT_CHARACTERS = 80  # of a name in a message
_TOP_KEYS = ("default", "endpoints")
_ENDPOINT_KEYS = ("url", "api_key", "api_key_file", "ca_file")


@dataclass(frozen=True, slots=True)
class NamedEndpoint:
    """An endpoint of the configuration. `warnings`: what its user should change."""

    url: str
    api_key: str | None = field(default=None, repr=False)
    ca_file: Path | None = None
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class UserConfig:
    """The configuration in a file; `file` None: there is no folder for it, because the user has no home."""

    file: Path | None
    default: str | None = None
    endpoints: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def find(self, name: str | None, source: str) -> NamedEndpoint:
        """Return the endpoint with this name, None: the default one. Raises Failure(INVALID) for an unknown name."""
        if name is None:
            name, source = self.default, f"{self.file}: default"
        assert name is not None
        if name not in self.endpoints:
            known = unknown_key(name, self.endpoints, "endpoint") if self.endpoints else "it has no endpoints"
            problem = f"{source} {name[:_EXCERPT_CHARACTERS]!r} is neither a URL, like {URL_DEFAULT}, nor an endpoint"
            raise invalid(f"{problem} of {self.file or 'config.toml'}: {known}")
        return self._endpoint(name)

    def _endpoint(self, name: str) -> NamedEndpoint:
        values = self.endpoints[name]
        assert self.file is not None
        where = f"{self.file}: endpoints.{name}"
        if "url" not in values:
            raise invalid(f"{where} has no url")
        if "api_key" in values and "api_key_file" in values:
            raise invalid(f"{where} has both api_key and api_key_file: keep one")
        key, warnings = values.get("api_key"), []
        if key is not None and _others_may_read(self.file):
            warnings.append(_readable(self.file))
        if "api_key_file" in values:
            path = self._path(values["api_key_file"])
            key = (_read(path, KEY_BYTES_MAX, f"{where}.api_key_file") or "").strip()
            if _others_may_read(path):
                warnings.append(_readable(path))
        if key is not None and not key.strip():
            raise invalid(f"{where}: the key is empty")
        ca_file = self._path(values["ca_file"]) if "ca_file" in values else None
        return NamedEndpoint(checked_url(values["url"], f"{where}.url"), key, ca_file, tuple(warnings))

    def _path(self, text: str) -> Path:
        assert self.file is not None
        try:
            return self.file.parent / Path(text).expanduser()
        except RuntimeError as error:  # ~ of an unknown user
            raise invalid(f"{self.file}: {text}: {error}") from error


def read_user_config() -> UserConfig:
    """Return the user's configuration; an empty one without a file.

    Raises Failure(INVALID) that names the file and the key: for broken TOML, an unknown key, a value of another type.
    """
    file = user_config_file()
    text = None if file is None else _read(file, CONFIG_BYTES_MAX, "the user's configuration", required=False)
    if text is None:
        return UserConfig(file)
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise invalid(f"{file} is not TOML: {error}") from error
    _check_keys(document, _TOP_KEYS, str(file))
    default = document.get("default")
    endpoints = document.get("endpoints", {})
    if default is not None and not isinstance(default, str):
        raise invalid(f"{file}: default must be the name of an endpoint")
    if not isinstance(endpoints, dict):
        raise invalid(f"{file}: endpoints must be tables, like [endpoints.prod]")
    for name, values in endpoints.items():
        where = f"{file}: endpoints.{name}"
        if not isinstance(values, dict):
            raise invalid(f"{where} must be a table: write [endpoints.{name}] and its url below")
        _check_keys(values, _ENDPOINT_KEYS, where)
        for key, value in values.items():
            if not isinstance(value, str):
                raise invalid(f"{where}.{key} must be a string")
    return UserConfig(file, default, endpoints)


def _check_keys(table: Mapping[str, Any], known: tuple[str, ...], where: str) -> None:
    for key in table:
        if key not in known:
            raise invalid(f"{where}: {unknown_key(key, known, 'key')}")


def _read(path: Path, bytes_max: int, what: str, *, required: bool = True) -> str | None:
    """Return a file's text; None if it does not exist and is not required. Raises Failure(INVALID)."""
    try:
        with path.open("rb") as file:
            content = file.read(bytes_max + 1)
        if len(content) > bytes_max:
            raise invalid(f"{what}: {path} is larger than {bytes_max} bytes")
        return content.decode("utf-8-sig")  # some editors begin with a mark
    except (FileNotFoundError, NotADirectoryError) as error:
        if not required:
            return None
        raise invalid(f"{what}: {path} does not exist") from error
    except OSError as error:
        raise invalid(f"{what}: {path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise invalid(f"{what}: {path} is not UTF-8 text") from error


def _others_may_read(path: Path) -> bool:
    try:
        return bool(path.stat().st_mode & (stat.S_IRGRP | stat.S_IROTH))
    except OSError:
        return False


def _readable(path: Path) -> str:
    return f"other users may read the key in {path}: chmod 600 {path}"
