"""Run one change of a repository over and over, killed (SIGKILL) at its first, second, … touch of the disk.

python -m tests.contract.crash FACTORY ROOT OPERATION -> one line per life: the folder it left behind
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from millstream.services.repository.endpoint_changes import activate_version
from millstream.services.repository.folder import FolderRepository
from tests.contract.repositories import FACTORIES, publish

_TOUCHES = ("open", "os.", "shutil.", "fcntl.")
_LIVES_MAX = 500

OPERATIONS: dict[str, Callable[[FolderRepository], object]] = {
    "publish": lambda repository: publish(repository, version=2),
    "activate": lambda repository: activate_version(repository, "digits", 1),
    "delete": lambda repository: repository.delete_version("digits", 1),
    "forget": lambda repository: repository.delete_model("digits"),
}


def die_at(touch: int) -> None:
    """Kill this process just before its `touch`-th operation on files."""
    seen = 0

    def hook(event: str, _: tuple[object, ...]) -> None:
        nonlocal seen
        if event.startswith(_TOUCHES):
            seen += 1
            if seen == touch:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def live(factory: str, root: Path, operation: str, touch: int) -> int:
    """One life in a process of its own: its exit status, negative for the signal that ended it."""
    publish(FACTORIES[factory](root))
    child = os.fork()
    if child == 0:
        repository = FACTORIES[factory](root)
        die_at(touch)
        OPERATIONS[operation](repository)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def main() -> None:
    factory, parent, operation = sys.argv[1:]
    for touch in range(1, _LIVES_MAX):
        root = Path(parent, str(touch))
        status = live(factory, root, operation, touch)
        print(root, flush=True)
        if status == 0:
            return
        if status != -signal.SIGKILL:
            sys.exit(f"ended with {status} at touch {touch}")
    sys.exit("the operation never came to its end")


if __name__ == "__main__":
    main()
