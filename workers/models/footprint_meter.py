"""Measures what an instance takes while it is loaded, beside the traffic of other models.

begin ─> load, warm up, largest measured batch ─> end ─> Measurement
Freed memory is returned to the system before and after, so that neither hides the growth of the other. Runs of other
models allocate and free: the least of several samples is closest to what stays. An upper bound stays an upper bound if
other runs, loads or unloads took place meanwhile, and is marked as disturbed.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from millstream.services.process.process_memory import MemoryUse, mapped_bytes, memory_use, reset_peak, return_freed

SAMPLES = 5
SAMPLE_S = 0.002  # between two samples


class Measurement(NamedTuple):
    """Bytes of an instance as in placement.views.Footprint.

    Args:
        disturbed: whether runs of other models may have added to them.
        alone: False: other loads or unloads changed the memory meanwhile, and the bytes say nothing.
        whole: False: the largest batch was not run, and the peak says nothing.
        device_resident_bytes: of the memory of the accelerator.
        device_peak_bytes: likewise, as far as samples saw it: drivers keep no peak.
    """

    resident_bytes: int
    peak_bytes: int
    disturbed: bool
    alone: bool = True
    whole: bool = True
    device_resident_bytes: int = 0
    device_peak_bytes: int = 0


class FootprintMeter:
    """Measures one load.

    Args:
        runs: returns the number of runs of the main loop so far; None during a run.
        folder: the version's files; pages of these that are mapped belong to the instance.
        device_bytes: returns what the process has of the memory of its accelerator; 0: none, or unknown.
    """

    def __init__(
        self, runs: Callable[[], int | None], folder: Path, device_bytes: Callable[[], int] = lambda: 0
    ) -> None:
        self._runs = runs
        self._folder = folder
        self._device_bytes = device_bytes
        self._device_before = self._device_most = device_bytes()
        return_freed()
        self._runs_before = runs()
        self._before = _least(runs)
        self._peak_known = reset_peak()

    def sample(self) -> None:
        """Note what the process has of the device now. Called after each step of a load that may take more."""
        self._device_most = max(self._device_most, self._device_bytes())

    def end(self) -> Measurement:
        """Return what the process took since the meter was made."""
        self.sample()
        peak = memory_use().peak if self._peak_known else 0
        return_freed()
        after = _least(self._runs)
        resident = max(0, after.anonymous + after.swapped - self._before.anonymous - self._before.swapped)
        resident += mapped_bytes(self._folder)
        beyond = peak - _resident(self._before) - resident
        runs = self._runs()
        disturbed = runs is None or runs != self._runs_before
        device = max(0, self._device_bytes() - self._device_before)
        # The first load of a process also creates what all instances on the device share.
        disturbed = disturbed or (device > 0 and not self._device_before)
        device_peak = max(0, self._device_most - self._device_before - device)
        return Measurement(
            resident,
            max(0, beyond),
            disturbed,
            device_resident_bytes=device,
            device_peak_bytes=device_peak,
        )


def _least(runs: Callable[[], int | None]) -> MemoryUse:
    before, samples = runs(), [memory_use()]
    while len(samples) < SAMPLES and (before is None or runs() != before):  # otherwise no run was in the sample
        time.sleep(SAMPLE_S)
        before = runs()
        samples.append(memory_use())
    return min(samples, key=lambda use: use.anonymous + use.swapped)


def _resident(use: MemoryUse) -> int:
    return use.anonymous + use.file + use.shared
