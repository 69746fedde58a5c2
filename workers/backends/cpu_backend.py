"""What the backends share that run on the CPU and compile nothing themselves, and the checks before their loads."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from millstream.services.errors import Code, Failure
from millstream.services.model.datatypes import BYTES
from millstream.services.model.signature import Signature
from millstream.services.repository.variants import Target
from millstream.workers.backends.base import Stop


class CpuBackend:
    """The parts of `Backend` that say: no memory of a device, nothing compiled."""

    name: str

    def device_bytes(self, device: str) -> int:
        """Return 0: it runs on the CPU."""
        return 0

    def target(self, device: str) -> Target | None:
        """Return None: this backend keeps nothing that it compiles. Races compile by targets."""
        return None

    def compile(self, path: Path, folder: Path, signature: Signature, device: str, threads: int) -> Sequence[str]:
        """Raise Failure(UNSUPPORTED)."""
        raise Failure(Code.UNSUPPORTED, f"the backend {self.name} compiles nothing")


def check_cpu(backend: str, device: str) -> None:
    """Raise Failure(UNAVAILABLE) if `device` is not the CPU."""
    if device != "cpu":
        raise Failure(Code.UNAVAILABLE, f"the backend {backend} cannot use the device {device!r}; known: cpu")


def check_no_text(library: str, signature: Signature) -> None:
    """Raise Failure(MODEL) if a tensor is text, which `library` has not."""
    for spec in (*signature.inputs, *signature.outputs):
        if spec.datatype == BYTES:
            raise Failure(Code.MODEL, f"{library} has no text: {spec.name!r} is {spec.datatype}")


def check_not_ended(stop: Stop | None) -> None:
    """Raise Failure(MODEL) with the reason if the end of the load was requested."""
    if stop is not None and stop.reason:
        raise Failure(Code.MODEL, stop.reason)
