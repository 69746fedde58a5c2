"""Reads secrets from files: MILLSTREAM_<FIELD>_FILE names a file whose content is the value of the field.

Container platforms and systemd pass secrets as files, so that they are in no environment, image or unit.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource

from millstream.services.errors import Failure, invalid

#: bytes of a file: a key or a URL is far shorter, and a longer file is not what was meant
FILE_BYTES_MAX = 16 << 10


def file_variable(name: str) -> str:
    """Return the variable that names the file of a field."""
    return f"MILLSTREAM_{name.upper()}_FILE"


class SecretFiles(PydanticBaseSettingsSource):
    """A source of settings: the fields in `names` whose file the environment names.

    Calling it raises Failure(INVALID) for a file that cannot be used, and for a secret that is given twice.
    """

    def __init__(self, settings_cls: type[BaseSettings], environment: Mapping[str, str], names: Iterable[str]) -> None:
        super().__init__(settings_cls)
        self._environment = environment
        self._names = names

    def get_field_value(self, field: FieldInfo, field_name: str) -> tuple[Any, str, bool]:
        """Return the value of a field, its key, and whether it is JSON."""
        variable = file_variable(field_name)
        path = self._environment.get(variable)
        if field_name not in self._names or path is None:
            return None, field_name, False
        if (other := variable.removesuffix("_FILE")) in self._environment:
            raise invalid(f"{variable} and {other} are both set: unset one of them")
        return _read(variable, path), field_name, False

    def __call__(self) -> dict[str, Any]:
        values = {name: self.get_field_value(field, name)[0] for name, field in self.settings_cls.model_fields.items()}
        return {name: value for name, value in values.items() if value is not None}


def _read(variable: str, path: str) -> str:
    """Return the content of a file without the line break at its end. Raises Failure(INVALID)."""
    try:
        with open(path, "rb") as file:
            content = file.read(FILE_BYTES_MAX + 1)
    except (OSError, ValueError) as error:
        raise _unusable(variable, path, f"cannot be read ({getattr(error, 'strerror', None) or error})") from error
    if len(content) > FILE_BYTES_MAX:
        raise _unusable(variable, path, f"is longer than {FILE_BYTES_MAX >> 10} KiB")
    try:
        text = content.decode().rstrip("\r\n")
    except UnicodeDecodeError as error:
        raise _unusable(variable, path, "is not text in UTF-8") from error
    if not text:
        raise _unusable(variable, path, "is empty")
    return text


def _unusable(variable: str, path: str, problem: str) -> Failure:
    return invalid(f"{variable}: the file {path!r} {problem}")
