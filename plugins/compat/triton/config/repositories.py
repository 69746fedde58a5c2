"""Lists the models of Triton model repositories that are served in place. Read on request, never watched."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from millstream.services.errors import Failure, invalid
from millstream.services.model.names import check_name

MODELS_MAX = 10_000


def model_names(folder: Path) -> list[str]:
    """Return the sorted names of the models in a repository. Raises Failure(INVALID) if it cannot be read.

    A name that is not UTF-8 has escapes instead of the other bytes: it is no model's name, and is refused by it.
    """
    try:
        found = [entry.name for entry in folder.iterdir() if not entry.name.startswith(".") and entry.is_dir()]
        names = sorted(name.encode(errors="surrogateescape").decode(errors="backslashreplace") for name in found)
    except OSError as error:
        raise invalid(f"the model repository {folder} cannot be read: {error.strerror or error}") from error
    if len(names) > MODELS_MAX:
        raise invalid(f"the model repository {folder} has more than {MODELS_MAX} models")
    return names


class ModelRepositories:
    """Several model repositories as one."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self._folders = folders

    def names(self) -> list[str]:
        """Return the sorted names of all models. A repository that cannot be read counts as empty."""
        names: set[str] = set()
        for folder in self._folders:
            try:
                names.update(model_names(folder))
            except Failure:
                continue
        return sorted(names)

    def find(self, model: str) -> Path | None:
        """Return the repository that contains the model, or None. Raises Failure(INVALID) if two contain it."""
        check_name(model)
        matches = [folder for folder in self._folders if (folder / model).is_dir()]
        if len(matches) > 1:
            raise invalid("the model is in two repositories: rename one of its folders")
        return matches[0] if matches else None
