"""home: the folder of an installation."""

from __future__ import annotations

from pathlib import Path

from millstream.services.errors import invalid
from millstream.services.process.private_files import make_private_folder


def make_home(home: Path) -> None:
    """Create the folders of a home, private to this user. Raises Failure(INVALID) if they cannot be written.

    An existing folder that is not empty and not a home keeps its mode, since it may contain other files; only the
    folders created in it are private.
    """
    try:
        if not home.exists() or (home / "run" / "lock").exists() or not any(home.iterdir()):
            make_private_folder(home)
        for name in ("logs", "run", "repository"):
            make_private_folder(home / name)
        (home / "run" / "lock").touch()
    except OSError as error:
        raise invalid(f"--home {home}: cannot be written ({error.strerror}); choose another folder") from error
