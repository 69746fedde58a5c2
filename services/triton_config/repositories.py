"""The model repositories that are served in place: which models there are in them. Read when asked, never watched."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from millstream.services.errors import Failure, invalid
from millstream.services.model.names import check_name

MODELS_MAX = 10_000


def model_names(folder: Path) -> list[str]:
    """Names of the models in a repository, sorted. Raises Failure(INVALID) when it cannot be read."""
    try:
        found = sorted(entry.name for entry in folder.iterdir() if not entry.name.startswith(".") and entry.is_dir())
    except OSError as error:
        raise invalid(f"the model repository {folder} cannot be read: {error.strerror or error}") from error
    if len(found) > MODELS_MAX:
        raise invalid(f"the model repository {folder} has more than {MODELS_MAX} models")
    return found


class Folders:
    """Several repositories as one."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self._folders = folders

    def names(self) -> list[str]:
        """Names of all models. A repository that cannot be read has none."""
        names: set[str] = set()
        for folder in self._folders:
            try:
                names.update(model_names(folder))
            except Failure:
                continue
        return sorted(names)

    def find(self, model: str) -> Path | None:
        """The repository that has the model. Raises Failure(INVALID) when two have it."""
        check_name(model)
        found = [folder for folder in self._folders if (folder / model).is_dir()]
        if len(found) > 1:
            raise invalid("the model is in two repositories: rename one of its folders")
        return found[0] if found else None
