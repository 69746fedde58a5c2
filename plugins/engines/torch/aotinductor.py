"""The target "aotinductor": a program of torch.export, compiled to native code by PyTorch's inductor and g++.

program ─> checked as for a load ─> torch._inductor.aoti_compile_and_package ─> a package that the backend torch loads
The package is machine code: it is made here, from the version, and never taken from an upload.
"""

from __future__ import annotations

import shutil
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from millstream.plugins.compile.candidate import Candidate, Compiled, Flags, Missing, Subject
from millstream.plugins.compile.targets.base import Target, runtime_version
from millstream.plugins.engines.torch.document import FORMAT
from millstream.plugins.engines.torch.torch_program import load_program

PACKAGE = "aotinductor.pt2"
#: Where g++ keeps the programs that it starts, and the headers that it reads.
_FOLDERS = ("/usr/lib/gcc", "/usr/libexec/gcc", "/usr/local/libexec/gcc", "/usr/include", "/usr/local/include")
_PROGRAMS = ("g++", "as", "ld")


class AotInductor(Target):
    """Compiles programs of torch.export ahead of time. Names of files in the package differ from run to run."""

    name = "aotinductor"
    backend = "torch"
    deterministic = False
    formats = frozenset({FORMAT})
    modules: ClassVar = {"torch": "pip install 'millstream[torch]'"}

    def available(self, device: str) -> Missing | None:
        """Return what is missing: a CPU, torch, or a C++ compiler."""
        lacks = next((name for name in _PROGRAMS if shutil.which(name) is None), None)
        compiler = Missing(f"there is no {lacks}", "apt-get install g++") if lacks else None
        return super().available(device) or compiler

    def programs(self) -> Sequence[Path]:
        """Return g++, what it starts, the headers that it reads, and Python, which tries to load what g++ wrote."""
        found = [Path(program).resolve() for name in _PROGRAMS if (program := shutil.which(name)) is not None]
        return [*found, Path(sys.executable).resolve(), *map(Path, _FOLDERS), Path(sysconfig.get_paths()["include"])]

    def flags(self, subject: Subject) -> Sequence[Flags]:
        """Return the program with weights packed for this processor, and without."""
        return [{"freezing": freezing} for freezing in (True, False)]

    def compile(self, subject: Subject, candidate: Candidate, folder: Path, samples: Path | None) -> Compiled:
        """Compile the program and write its package. See `Target`."""
        import torch
        import torch._inductor.config as settings

        settings.cpp.vec_isa_ok = True  # else g++ compiles a program for each set of instructions, for 20 s
        # Precompiled headers serve later compilations, which do not come.
        settings.cpp_cache_precompile_headers = settings.aot_inductor.precompile_headers = False
        shutil.copymode = lambda *_, **__: None  # the sandbox allows no process to change modes
        torch.set_num_threads(subject.threads)
        program = load_program(torch, subject.path)
        by_position, by_name = program.call_spec.in_spec.children()
        with torch.no_grad():
            torch._inductor.aoti_compile_and_package(
                program,
                package_path=str(folder / PACKAGE),
                inductor_configs={"freezing": bool(candidate.flags["freezing"])},
            )
        return Compiled(
            files=(PACKAGE,),
            backend=self.backend,
            options={
                "aotinductor": True,
                "inputs": ",".join(program.graph_signature.user_inputs),
                "positional": by_position.num_children,
                "keywords": ",".join(by_name.context or ()),
            },
            runtime=runtime_version("torch"),
        )


TARGETS = (AotInductor(),)
