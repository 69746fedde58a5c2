"""Records the files whose functions a process calls between two signals.

Python imports this module at its start where PYTHONPATH names its folder. What was recorded goes to the folder
PYTHON_CALLED_FILES, as <pid>.<number of the recording>.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

START, STOP = signal.SIGRTMIN + 1, signal.SIGRTMIN + 2


class Recorder:
    """What one process calls while it records, in all of its threads."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._called: set[str] = set()
        self._recording = False
        self._made = 0

    def note(self, frame: Any, event: str, _: Any) -> None:
        if self._recording and event == "call":
            self._called.add(frame.f_code.co_filename)

    def start(self, *_: object) -> None:
        self._called.clear()
        self._recording = True
        sys.setprofile(self.note)

    def stop(self, *_: object) -> None:
        sys.setprofile(None)
        self._recording = False
        self._made += 1
        made = self._folder / f"{os.getpid()}.{self._made}"
        partial = made.with_name(f"partial.{made.name}")
        partial.write_text("\n".join(sorted(self._called)))
        partial.rename(made)


if "PYTHON_CALLED_FILES" in os.environ:
    recorder = Recorder(Path(os.environ["PYTHON_CALLED_FILES"]))
    threading.setprofile(recorder.note)
    signal.signal(START, recorder.start)
    signal.signal(STOP, recorder.stop)
