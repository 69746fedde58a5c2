"""The backend of functions: each instance is a process of its own, so workers of every CPU pool have it."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import ClassVar

from millstream.plugins.children.process import InstanceProcesses
from millstream.plugins.children.worker import ChildInstance, memory_bytes_max
from millstream.plugins.functions.document import FORMAT, ServedFile, program_of, read_document
from millstream.plugins.functions.function_packages import python_of
from millstream.services.errors import Code, Failure
from millstream.services.model.signature import Signature
from millstream.services.settings import read_settings
from millstream.workers.backends.base import Instance, Options, Stop
from millstream.workers.backends.engine_parts import CpuBackend, check_not_ended

#: to install the packages of a function where they are not: its upload installs them on its own machine
BUILD_S_MAX = 600.0


class Python(CpuBackend):
    """Starts a process for each function."""

    name = "python"
    title = "Python"
    known: ClassVar[Mapping[str, type]] = {}
    formats = frozenset({FORMAT})

    def __init__(self, home: Path | None = None) -> None:
        super().__init__(home)
        self._home = home
        self._children: InstanceProcesses | None = None

    def prepare(self, device: str) -> None:
        """Start the thread that starts processes."""
        if self._children is None:
            self._children = InstanceProcesses()

    def check_signature(self, signature: Signature) -> None:
        """Raise Failure(MODEL) if a tensor is BF16, which numpy has not."""
        for spec in (*signature.inputs, *signature.outputs):
            if spec.datatype == "BF16":
                raise Failure(Code.MODEL, f"Python has no BF16: {spec.name!r}")

    def open(self, path: Path, signature: Signature, threads: int, options: Options, stop: Stop | None) -> Instance:
        """Start the process of the function that the document at `path` names. Raises Failure."""
        self.prepare("cpu")
        assert self._children is not None
        try:
            document = read_document(path)
        except OSError as error:
            raise Failure(Code.MODEL, f"the function cannot be loaded: {path.name}: {error.strerror}") from error
        except ValueError as error:
            raise Failure(Code.MODEL, f"the function cannot be loaded: {path.name} describes none") from error
        folder = path.parents[1]
        beside = (folder / document.file).parent
        python = python_of(folder, document.lock, beside, self._home or read_settings().home, BUILD_S_MAX)
        check_not_ended(stop)
        program = program_of(
            folder,
            ServedFile(document.file, document.adapter),
            f"{folder.parent.name}:{folder.name}",
            python=python,
            memory_bytes_max=memory_bytes_max(),
            threads=threads,
            unconfined=read_settings().unconfined_imports == "accept",
        )
        return ChildInstance(partial(self._children.start, program), self.title, signature, stop)
