"""What compile targets can use on this machine, as `millstream doctor devices` shows it."""

from __future__ import annotations

from millstream.plugins.compile.targets import TARGETS
from millstream.plugins.compile.targets.base import Target
from millstream.services.cli.doctor.machine import Check
from millstream.services.metrics.gpus import gpus


def target_checks() -> list[Check]:
    """Return a check for each target. Never fails."""
    devices = ["cpu", *(f"cuda:{number}" for number in range(len(gpus()) or 1))]
    return [_check(target, devices) for target in TARGETS]


def _check(target: Target, devices: list[str]) -> Check:
    """Return the check for the first device that the target can use, else for the one that it is meant for."""
    missing = {device: target.available(device) for device in devices}
    usable = next((device for device, lacks in missing.items() if lacks is None), None)
    if usable is not None:
        return Check(target.name, "ok", usable)
    lacking = [lacks for lacks in missing.values() if lacks is not None]
    meant = next((lacks for lacks in lacking if lacks.install), lacking[0])
    return Check(target.name, "warn", meant.why, meant.install)
