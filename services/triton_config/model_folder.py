"""A model's folder as Triton lays it out, read in place.

<folder>/config.pbtxt      optional: millstream.services.triton_config.config
<folder>/<n>/model.onnx    a version, with its external data beside it; or a folder of that name with both in it
<folder>/labels.txt, <folder>/warmup/…    what the configuration names
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from millstream.services.errors import Code, Failure, invalid
from millstream.services.model.manifest import ModelConfig
from millstream.services.model.names import VERSION_MAX
from millstream.services.model.paths import FILE, is_version, plain_path
from millstream.services.model.version_files import open_regular
from millstream.services.triton_config.config import CONFIG_BYTES_MAX, Given, from_text, nothing
from millstream.services.triton_config.unsupported_fields import check_supported
from millstream.services.triton_config.version_policy import chosen

CONFIG = "config.pbtxt"


class ModelFolder(NamedTuple):
    """`served`: versions that are to be served, each with the path of its model file below the folder."""

    path: Path
    given: Given
    served: Mapping[int, str]


def read_model_folder(path: Path, model: str, given: Given | None) -> ModelFolder:
    """What is to be served of the folder. `given`: in place of its own configuration. Blocking.

    Raises Failure(INVALID): the configuration, or a version that is not there.
    """
    try:
        if given is None:
            given = _own(path)
        check_given(given, model)
        versions = [int(entry.name) for entry in path.iterdir() if is_version(entry.name) and entry.is_dir()]
        wanted = chosen(given.message, [version for version in versions if version <= VERSION_MAX])
        name = plain_path(given.message.default_model_filename or FILE, "default_model_filename")
        return ModelFolder(path, given, {version: _file(path, version, name) for version in wanted})
    except OSError as error:
        raise Failure(
            Code.INVALID, f"the model's folder cannot be read: {error.strerror or type(error).__name__}"
        ) from error


def check_given(given: Given, model: str) -> None:
    """Raises Failure(INVALID) for a configuration of another model, or that asks for what is not done here."""
    name = given.message.name
    if name not in {"", model}:
        raise invalid(f"the configuration is that of {name[:80]!r}: name must be {model!r} or absent")
    check_supported(given.message)


def files_named(config: ModelConfig) -> list[str]:
    """Files that a configuration names, below the model's folder."""
    inputs = [one for warmup in config.warmup for one in warmup.inputs.values()]
    return sorted({*config.labels.values(), *(one.file for one in inputs if one.file is not None)})


def _own(path: Path) -> Given:
    file = path / CONFIG
    if not file.exists():
        return nothing()
    try:
        with open_regular(file) as content:
            text = content.read(CONFIG_BYTES_MAX + 1)
    except OSError as error:
        raise invalid(f"{CONFIG} cannot be read: {error.strerror}") from error
    if len(text) > CONFIG_BYTES_MAX:
        raise invalid(f"{CONFIG} is longer than {CONFIG_BYTES_MAX} bytes")
    try:
        return from_text(text.decode())
    except UnicodeDecodeError:
        raise invalid(f"{CONFIG} is not UTF-8 text") from None


def _file(path: Path, version: int, name: str) -> str:
    for served in (f"{version}/{name}", f"{version}/{name}/{name}"):
        if (path / served).is_file():
            return served
    raise invalid(f"version {version}: there is no file {version}/{name}")
