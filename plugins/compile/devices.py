"""What this machine has for inference: its processor, memory and GPUs, and which targets use it.

/proc/cpuinfo, /sys, NVML ─> find_devices ─> DevicesReport, which `millstream doctor devices` shows
"""

from __future__ import annotations

import platform
from pathlib import Path

from pydantic import BaseModel

from millstream.plugins.compile.targets import TARGETS
from millstream.plugins.compile.targets.base import Target
from millstream.services.device import find_device
from millstream.services.metrics.gpus import describe_gpu, gpus

NODES = Path("/sys/devices/system/node")

#: What inference libraries choose their kernels by -> the flags of /proc/cpuinfo, any one of them.
INSTRUCTIONS: dict[str, tuple[str, ...]] = {
    "AVX2": ("avx2",),
    "AVX-512": ("avx512f",),
    "VNNI": ("avx512_vnni", "avx_vnni"),
    "BF16": ("avx512_bf16", "amx_bf16", "bf16"),
    "FP16": ("avx512_fp16", "asimdhp"),
    "AMX": ("amx_tile",),
    "Neon": ("asimd",),
    "dot product": ("asimddp",),
    "I8MM": ("i8mm",),
    "SVE": ("sve", "sve2"),
}
_X86 = frozenset({"AVX2", "AVX-512", "VNNI", "BF16", "FP16", "AMX"})
_ARM = frozenset({"Neon", "dot product", "I8MM", "SVE", "BF16", "FP16"})


class Processor(BaseModel):
    """The processor. `instructions`: those that this architecture may have, and whether this one has them."""

    name: str
    architecture: str
    cores: float
    memory_bytes: int
    numa_nodes: int
    features: tuple[str, ...]
    instructions: dict[str, bool]


class FoundGpu(BaseModel):
    """A GPU that the NVIDIA driver knows."""

    device: str
    name: str
    memory_bytes: int
    compute_capability: str
    driver: str


class TargetReport(BaseModel):
    """Whether a target can be used on a device; if not, why, and what to install."""

    target: str
    device: str
    usable: bool
    why: str = ""
    install: str = ""
    experimental: bool = False


class DevicesReport(BaseModel):
    """Everything that was found."""

    processor: Processor
    gpus: tuple[FoundGpu, ...]
    targets: tuple[TargetReport, ...]


def find_devices() -> DevicesReport:
    """Return what this machine has. Takes a moment; never fails."""
    found = _gpus()
    return DevicesReport(
        processor=_processor(),
        gpus=found,
        targets=tuple(_report(target, found) for target in TARGETS),
    )


def _processor() -> Processor:
    cpu, architecture = find_device("cpu"), platform.machine()
    own = _X86 if architecture in {"x86_64", "AMD64"} else _ARM if architecture in {"aarch64", "arm64"} else frozenset()
    return Processor(
        name=cpu.name,
        architecture=architecture,
        cores=cpu.cores,
        memory_bytes=cpu.memory_bytes,
        numa_nodes=numa_nodes(),
        features=cpu.features,
        instructions={
            name: not {*flags}.isdisjoint(cpu.features) for name, flags in INSTRUCTIONS.items() if name in own
        },
    )


def numa_nodes(folder: Path = NODES) -> int:
    """Return the number of NUMA nodes; 1 where the kernel does not say."""
    try:
        return sum(path.name[4:].isdecimal() for path in folder.glob("node*")) or 1
    except OSError:
        return 1


def _gpus() -> tuple[FoundGpu, ...]:
    found = ((number, describe_gpu(number)) for number in range(len(gpus())))
    return tuple(
        FoundGpu(
            device=f"cuda:{number}",
            name=gpu.name,
            memory_bytes=gpu.memory_bytes,
            compute_capability=gpu.compute_capability,
            driver=gpu.driver,
        )
        for number, gpu in found
        if gpu is not None
    )


def _report(target: Target, found: tuple[FoundGpu, ...]) -> TargetReport:
    """Return the report for the first device that the target can use, else for the one that it is meant for."""
    reports = []
    for device in ("cpu", *(gpu.device for gpu in found), *([] if found else ["cuda:0"])):
        missing = target.available(device)
        reports.append(
            TargetReport(
                target=target.name,
                device=device,
                usable=missing is None,
                why=missing.why if missing is not None else "",
                install=missing.install if missing is not None else "",
                experimental=target.experimental,
            )
        )
    usable = [report for report in reports if report.usable]
    meant = [report for report in reports if report.install] or reports
    return (usable or meant)[0]
