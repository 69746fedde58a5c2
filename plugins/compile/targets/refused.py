"""The targets that Millstream names, checks for and refuses: what each needs, and what of it this machine has."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from millstream.plugins.compile.candidate import Candidate, Compiled, Missing, Subject
from millstream.plugins.compile.targets.base import Target
from millstream.services.errors import invalid


class Refused(Target):
    """A target that has no candidates here.

    Args:
        name: of the target.
        hardware: what it needs, for the message.
        signs: files that a machine with this hardware has; none: it needs no hardware of its own.
        advice: what to use instead.
    """

    backend = "onnxruntime"
    lossy = False
    experimental = True

    def __init__(self, name: str, hardware: str, signs: Sequence[str], advice: str) -> None:
        self.name = name
        self._hardware = hardware
        self._signs = signs
        self._advice = advice

    def available(self, device: str) -> Missing:
        """Return what is missing: the hardware, or the part of Millstream that would use it."""
        if self._signs and not any(found for sign in self._signs for found in Path("/").glob(sign.lstrip("/"))):
            return Missing(f"{self.name} needs {self._hardware}: there is no {' and no '.join(self._signs)}")
        found = f"{self._hardware} was found, and " if self._signs else ""
        return Missing(f"{found}Millstream has no backend for {self.name}", self._advice)

    def candidates(self, subject: Subject) -> Sequence[Candidate]:
        """Return none."""
        return ()

    def compile(self, subject: Subject, candidate: Candidate, folder: Path, samples: Path | None) -> Compiled:
        """Raise Failure(INVALID)."""
        raise invalid(f"{self.name}: {self.available(subject.device).why}")


REFUSED = (
    Refused(
        "migraphx",
        "an AMD GPU with ROCm",
        ("/dev/kfd",),
        "serve it by another server with MIGraphX, through the backend triton (docs/backends.md)",
    ),
    Refused("tpu", "a TPU (PJRT)", ("/dev/accel*", "/lib/libtpu.so"), "serve it by another server, backend triton"),
)
