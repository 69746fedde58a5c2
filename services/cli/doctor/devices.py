"""Shows what this machine has for inference, and which compile targets can use it: `millstream doctor devices`."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

    from millstream.plugins.compile.devices import DevicesReport

GIB = 1 << 30


def show_devices(*, json_output: bool) -> None:
    """Print the report on this machine's devices."""
    from millstream.plugins.compile.devices import find_devices
    from millstream.services.cli.terminal import emit, results

    report = find_devices()
    if json_output:
        emit(report.model_dump(mode="json"))
    else:
        _show(results(), report)


def _show(console: Console, report: DevicesReport) -> None:
    from millstream.services.cli.terminal import escape, show_detail

    processor = report.processor
    present = [name for name, found in processor.instructions.items() if found]
    absent = [name for name, found in processor.instructions.items() if not found]
    nodes = f"{processor.numa_nodes} NUMA node{'s' if processor.numa_nodes != 1 else ''}"
    lines = [
        ("Processor", f"{processor.cores:g} cores of {processor.name} ({processor.architecture}), {nodes}"),
        ("Instructions", f"{', '.join(present) or 'none that are known'}{_without(absent)}"),
        ("Memory", f"{processor.memory_bytes / GIB:.1f} GiB"),
    ]
    for gpu in report.gpus:
        what = f"{gpu.device}: {gpu.name}, {gpu.memory_bytes / GIB:.0f} GiB"
        lines.append(("GPU", f"{what}, compute capability {gpu.compute_capability}, driver {gpu.driver}"))
    if not report.gpus:
        lines.append(("GPU", "none that the NVIDIA driver knows"))
    for name, detail in lines:
        show_detail(console, f"{name:<24} ", escape(detail))
    for target in report.targets:
        state = target.device if target.usable else target.why
        show_detail(console, f"{target.target:<24} ", escape(state), style="green" if target.usable else "yellow")
        if target.install:
            show_detail(console, " " * 25, f"[dim]{escape(target.install)}[/]")


def _without(absent: list[str]) -> str:
    return f"; without {', '.join(absent)}" if absent else ""
