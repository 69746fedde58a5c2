"""What the backends share that run on the CPU and compile nothing themselves, and the checks before their loads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar

from millstream.services.errors import Code, Failure
from millstream.services.model.datatypes import BYTES, NUMPY
from millstream.services.model.signature import Signature
from millstream.services.repository.variants import Target
from millstream.workers.backends.base import Array, Instance, Stop
from millstream.workers.backends.options import NO_OPTIONS, Options, check_options


class CpuBackend:
    """The parts of `Backend` that say: no memory of a device, nothing compiled; and what each load refuses first.

    `title` is the library's name in messages, `known` has the options of a load with their types.
    """

    name: str
    title: ClassVar[str]
    known: ClassVar[Mapping[str, type]]
    forwards = False

    def __init__(self, home: Path | None = None) -> None:
        """Keep no files in `home`."""

    def device_bytes(self, device: str) -> int:
        """Return 0: it runs on the CPU."""
        return 0

    def target(self, device: str) -> Target | None:
        """Return None: this backend keeps nothing that it compiles. Races compile by targets."""
        return None

    def compile(self, path: Path, folder: Path, signature: Signature, device: str, threads: int) -> Sequence[str]:
        """Raise Failure(UNSUPPORTED)."""
        raise Failure(Code.UNSUPPORTED, f"the backend {self.name} compiles nothing")

    def load(
        self,
        path: Path,
        signature: Signature,
        device: str,
        threads: int,
        stop: Stop | None = None,
        options: Options = NO_OPTIONS,
    ) -> Instance:
        """Load the file at `path`, as `open` does. Raises Failure: also INVALID for an option that is not known."""
        check_cpu(self.name, device)
        check_options(self.name, options, self.known)
        check_no_text(self.title, signature)
        check_not_ended(stop)
        return self.open(path, signature, int(options.get("threads", threads)), options)

    def open(self, path: Path, signature: Signature, threads: int, options: Options) -> Instance:
        """Load a file that was not refused. Raises Failure(MODEL) or Failure(UNAVAILABLE)."""
        raise NotImplementedError


def check_cpu(backend: str, device: str) -> None:
    """Raise Failure(UNAVAILABLE) if `device` is not the CPU."""
    if device != "cpu":
        raise Failure(Code.UNAVAILABLE, f"the backend {backend} cannot use the device {device!r}; known: cpu")


def check_no_text(library: str, signature: Signature) -> None:
    """Raise Failure(MODEL) if a tensor is text, which `library` has not."""
    for spec in (*signature.inputs, *signature.outputs):
        if spec.datatype == BYTES:
            raise Failure(Code.MODEL, f"{library} has no text: {spec.name!r} is {spec.datatype}")


def ordered(library: str, signature: Signature, names: Sequence[str], found: Sequence[Array]) -> list[Array]:
    """Return the outputs of a compiled function in the signature's order.

    Args:
        library: that ran it, for the message.
        signature: of the version.
        names: of the outputs, in the function's order.
        found: the outputs.

    Raises Failure(MODEL) for an output of another datatype.
    """
    by_name = dict(zip(names, found, strict=True))
    for spec in signature.outputs:
        dtype = by_name[spec.name].dtype
        if dtype != NUMPY[spec.datatype]:
            raise Failure(Code.MODEL, f"{library}: output {spec.name!r} is {dtype}, not {spec.datatype}")
    return [by_name[spec.name] for spec in signature.outputs]


def check_not_ended(stop: Stop | None) -> None:
    """Raise Failure(MODEL) with the reason if the end of the load was requested."""
    if stop is not None and stop.reason:
        raise Failure(Code.MODEL, stop.reason)
