"""Reads a model's folder in Triton's layout, in place.

<folder>/config.pbtxt      optional, see triton_config.config
<folder>/<n>/model.onnx    version n, with its external data in the same folder; or a folder of that name with both
<folder>/<n>/model.pt2     or a program of torch.export
<folder>/labels.txt, <folder>/warmup/…    files that the configuration names
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from millstream.plugins.compat.triton.config.config import CONFIG_BYTES_MAX, ParsedConfig, empty_config, from_text
from millstream.plugins.compat.triton.config.unsupported_fields import PYTHON_BACKEND, REASONS_MAX, refuse, unsupported
from millstream.services.errors import Code, Failure, Subject, invalid
from millstream.services.model.formats import ENSEMBLE, formats
from millstream.services.model.manifest import ModelConfig
from millstream.services.model.names import FILE, VERSION_MAX, is_version, plain_path
from millstream.services.model.version_files import open_regular

CONFIG = "config.pbtxt"


class ModelFolder(NamedTuple):
    """A model's folder.

    Args:
        served: the versions to serve, each with the path of its model file relative to the folder.
    """

    path: Path
    parsed: ParsedConfig
    served: Mapping[int, str]


def read_model_folder(path: Path, model: str, parsed: ParsedConfig | None) -> ModelFolder:
    """Return the folder's configuration and versions to serve. Blocking.

    Args:
        path: the model's folder.
        model: the model's name.
        parsed: replaces the folder's own configuration; None reads that.

    Raises:
        Failure: INVALID, for a configuration that is invalid or a version without a model file.
    """
    try:
        if parsed is None:
            parsed = read_config(path)
        check_config(parsed, model)
        versions = [int(entry.name) for entry in path.iterdir() if is_version(entry.name) and entry.is_dir()]
        served = served_versions(parsed.message, [version for version in versions if version <= VERSION_MAX])
        message = parsed.message
        if message.platform == ENSEMBLE or message.WhichOneof("scheduling_choice") == "ensemble_scheduling":
            return ModelFolder(path, parsed, dict.fromkeys(served, CONFIG))
        given = message.default_model_filename
        names = [plain_path(given, "default_model_filename")] if given else _file_names(message.backend)
        return ModelFolder(path, parsed, _files(path, served, names))
    except OSError as error:
        raise Failure(
            Code.INVALID, f"the model's folder cannot be read: {error.strerror or type(error).__name__}"
        ) from error


def _file_names(backend: str) -> list[str]:
    """Return the names that a version's file may have, without those of backends that are not this one."""
    python = [one.file for one in formats().values() if one.platform_backend == PYTHON_BACKEND and one.file]
    if backend == PYTHON_BACKEND:
        return python
    others = [one.file for one in formats().values() if one.file and one.platform_backend != PYTHON_BACKEND]
    return [FILE, *others, *([] if backend else python)]


def check_config(parsed: ParsedConfig, model: str) -> None:
    """Raise Failure(INVALID) for a configuration of another model, and with all features that are not supported."""
    name = parsed.message.name
    reasons = unsupported(parsed.message)
    if name not in {"", model}:
        reasons = [f"the configuration is for model {name[:80]!r}: name must be {model!r} or absent", *reasons]
    refuse(reasons)


def referenced_files(config: ModelConfig) -> list[str]:
    """Return the files that a configuration refers to, relative to the model's folder."""
    files = [entry.file for warmup in config.warmup for entry in warmup.inputs.values()]
    return sorted({*config.labels.values(), *(file for file in files if file is not None)})


def read_config(path: Path) -> ParsedConfig:
    """Return the configuration in a model's folder. Raises Failure(INVALID)."""
    file = path / CONFIG
    if not file.exists():
        return empty_config()
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


def _files(path: Path, versions: Sequence[int], names: Sequence[str]) -> dict[int, str]:
    """Return the model file of each version. Raises Failure(INVALID) with all versions that have none."""
    found = {version: _file(path, version, names) for version in versions}
    missing = [
        f"version {version}: the file {version}/{names[0]} does not exist" for version in found if not found[version]
    ]
    if missing:
        raise invalid("; ".join(missing[:REASONS_MAX]), Subject.VERSION)
    return found


def _file(path: Path, version: int, names: Sequence[str]) -> str:
    """Return the path of a version's model file below `path`; "" if there is none."""
    served = (place for name in names for place in (f"{version}/{name}", f"{version}/{name}/{name}"))
    return next((place for place in served if (path / place).is_file()), "")


def served_versions(message: Any, versions: Sequence[int]) -> tuple[int, ...]:
    """Return the versions that the policy serves, ascending; without a policy only the highest.

    Like Triton, skips versions that the policy names but that do not exist.

    Raises:
        Failure: INVALID, if no version is left.
    """
    if not versions:
        raise invalid("the model has no version: add a folder named 1, 2, … that contains the model file")
    policy = message.version_policy
    kind = policy.WhichOneof("policy_choice")
    if kind == "all":
        return tuple(sorted(versions))
    if kind == "specific":
        return _specific(policy.specific.versions, versions)
    number = policy.latest.num_versions if kind == "latest" else 1
    return tuple(sorted(versions)[-max(1, number) :])


def _specific(named: Sequence[int], versions: Sequence[int]) -> tuple[int, ...]:
    if not named:
        raise invalid("version_policy: specific names no version")
    existing = sorted(set(named) & set(versions))
    if not existing:
        missing = ", ".join(map(str, sorted(set(named))[:5]))
        raise invalid(f"version_policy names {missing}, but the model has no such version")
    return tuple(existing)
