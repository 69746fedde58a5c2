"""The backend of functions: each instance is a process of its own, so workers of every CPU pool have it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import ClassVar

from millstream.plugins.children.process import InstanceProcesses
from millstream.plugins.children.streaming_worker import StreamingChild
from millstream.plugins.children.worker import ChildInstance, RequestsInstance, memory_bytes_max
from millstream.plugins.functions.document import (
    FORMAT,
    TRITON_FORMAT,
    RunsIn,
    program_of,
    read_document,
    served_file,
    triton_program_of,
)
from millstream.plugins.functions.function_packages import python_of, python_of_text
from millstream.plugins.functions.model_metrics import MetricsFile
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
    known: ClassVar[Mapping[str, type]] = {"configuration": str, "lock": str}
    formats = frozenset({FORMAT, TRITON_FORMAT})

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
        if "configuration" in options:
            return self._triton_model(path, signature, threads, stop, options)
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
            served_file(document),
            f"{folder.parent.name}:{folder.name}",
            _runs_in(python, threads),
        )
        kind = StreamingChild if document.streams else ChildInstance
        return kind(partial(self._children.start, program), self.title, signature, stop)

    def _triton_model(
        self, path: Path, signature: Signature, threads: int, stop: Stop | None, options: Options
    ) -> Instance:
        """Start the process of the model of Triton's Python backend at `path`."""
        assert self._children is not None
        config = str(options["configuration"])
        home = self._home or read_settings().home
        python = python_of_text(str(options.get("lock", "")), path.parent, home, BUILD_S_MAX)
        check_not_ended(stop)
        program = triton_program_of(
            path,
            config,
            str(json.loads(config)["name"]),
            _runs_in(python, threads),
        )
        instance = RequestsInstance(partial(self._children.start, program), self.title, signature, stop)
        metrics = MetricsFile(home)
        instance.on_metrics, instance.on_close = metrics.write, metrics.remove
        instance.on_metrics(instance.said.get("metrics", ()))
        return instance


def _runs_in(python: str, threads: int) -> RunsIn:
    return RunsIn(python, memory_bytes_max(), threads, read_settings().unconfined_imports == "accept")
