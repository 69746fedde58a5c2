"""The fingerprint of this machine's processor: what is compiled for one may be wrong, slow or refused on another."""

from __future__ import annotations

import functools
import hashlib
import platform
from pathlib import Path

_FIELDS = ("vendor_id", "cpu family", "model", "model name", "flags", "CPU implementer", "CPU part", "Features")


@functools.cache
def cpu_fingerprint() -> str:
    """Return the architecture and a digest of the processor's model and instruction sets; equal for equal ones."""
    try:
        lines = Path("/proc/cpuinfo").read_text().partition("\n\n")[0].splitlines()
    except OSError:  # not Linux
        lines = [f"model name: {platform.processor()}"]
    fields = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    fields["flags"] = " ".join(sorted(fields.get("flags", "").split()))
    known = "\n".join(fields.get(name, "") for name in _FIELDS)
    return f"{platform.machine()} {hashlib.sha256(known.encode()).hexdigest()[:16]}"
