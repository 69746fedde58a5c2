"""Predicts what a version takes that no worker has loaded yet, from the size of its files. Pure.

measured footprints of one kind (backend, device, format) ─> Ratios.learn ─> Ratios ─> predict(bytes of the files)

A file says little about the memory of its model: weights are copied, packed again for the processor, or stay in the
mapped file. The share of measured versions that would have been predicted too low is small by construction (a high
quantile), and while few are measured, assumed ones that take a lot are added to them. Seconds only say what comes
first, so they are the median: one slow model does not make all others slow.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from statistics import median
from typing import NamedTuple

from millstream.services.placement.views import Footprint

#: Versions with smaller files say nothing about bytes for each byte of a file.
LEARN_BYTES_MIN = 256 << 10
MEASURED_MAX = 4096  # measured versions that ratios are learnt from
QUANTILE = 0.9
#: How many assumed versions count besides the measured ones.
ASSUMED = 2
#: A load that found no memory reserves at least this multiple of its last prediction the next time.
CORRECTION = 1.25
#: Versions with smaller files say nothing about seconds for each byte: theirs go into a session and its first run.
LEARN_S_BYTES_MIN = 16 << 20
#: A prediction assumes no slower start than this: the import of a large library from a cold disk takes about as long.
LOAD_S_FIXED_MAX = 30.0
#: Likewise for each byte: a busy network share gives 10 MiB/s.
LOAD_S_PER_BYTE_MAX = 1 / (10 << 20)


class SpaceRatios(NamedTuple):
    """What versions of one kind take of the memory of the host, or of an accelerator, for each byte of their files.

    Args:
        resident: bytes that stay, beyond `resident_fixed`.
        peak: further bytes while it loads, warms up or runs its largest batch, beyond `peak_fixed`.
        resident_fixed: bytes of the smallest version: its session, threads and code.
        peak_fixed: likewise, while it loads.
    """

    resident: float = 0.0
    peak: float = 0.0
    resident_fixed: int = 0
    peak_fixed: int = 0

    def learn(self, measured: Sequence[tuple[int, int, int]]) -> SpaceRatios:
        """Return the ratios of measured versions: bytes of the files, resident and peak bytes. These are assumed."""
        large = [one for one in measured if one[0] >= LEARN_BYTES_MIN]
        small = [one for one in measured if one[0] < LEARN_BYTES_MIN]
        resident_fixed = int(_high((resident for _, resident, _ in small), self.resident_fixed))
        peak_fixed = int(_high((peak for _, _, peak in small), self.peak_fixed))
        return SpaceRatios(
            _high(((resident - resident_fixed) / size for size, resident, _ in large), self.resident),
            _high(((peak - peak_fixed) / size for size, _, peak in large), self.peak),
            resident_fixed,
            peak_fixed,
        )

    def predict(self, file_bytes: int) -> tuple[int, int]:
        """Return the resident and peak bytes of a version with files of `file_bytes`."""
        return (
            self.resident_fixed + int(self.resident * file_bytes),
            self.peak_fixed + int(self.peak * file_bytes),
        )


class Ratios(NamedTuple):
    """What versions of one kind take, and their time to load.

    Args:
        host: of the memory of the host, and `device` of that of an accelerator.
        load_s_fixed: seconds to load the smallest version.
        load_s_per_byte: further seconds for each byte of the files.
    """

    host: SpaceRatios = SpaceRatios(1.5, 3.0, 4 << 20, 4 << 20)
    device: SpaceRatios = SpaceRatios()
    load_s_fixed: float = 0.5
    load_s_per_byte: float = 1 / (100 << 20)

    @staticmethod
    def learn(measured: Sequence[tuple[int, Footprint]], assumed: Ratios | None = None) -> Ratios:
        """Return the ratios of measured versions.

        Args:
            measured: the bytes of the files of each, and what it takes.
            assumed: the ratios of further versions; None: those on a CPU.
        """
        assumed, measured = assumed or ASSUMED_RATIOS, measured[-MEASURED_MAX:]
        starts_s = (one.load_s for size, one in measured if size < LEARN_S_BYTES_MIN)
        per_byte_s = (one.load_s / size for size, one in measured if size >= LEARN_S_BYTES_MIN)
        return Ratios(
            assumed.host.learn([(size, one.resident_bytes, one.peak_bytes) for size, one in measured]),
            assumed.device.learn([(size, one.device_resident_bytes, one.device_peak_bytes) for size, one in measured]),
            min(LOAD_S_FIXED_MAX, _median(starts_s, assumed.load_s_fixed)),
            min(LOAD_S_PER_BYTE_MAX, _median(per_byte_s, assumed.load_s_per_byte)),
        )

    def predict(self, file_bytes: int) -> Footprint:
        """Return what a version with files of `file_bytes` will take."""
        load_s = self.load_s_fixed + self.load_s_per_byte * file_bytes
        return Footprint(*self.host.predict(file_bytes), load_s, False, *self.device.predict(file_bytes))


ASSUMED_RATIOS = Ratios()
#: on an accelerator: weights once on the host while they are read, and once on the device
ASSUMED_ON_DEVICE = Ratios(device=SpaceRatios(1.5, 1.5, 16 << 20, 16 << 20))


def _high(values: Iterable[float], assumed: float) -> float:
    """Return the QUANTILE of the values and of ASSUMED further ones."""
    known = sorted([max(0.0, value) for value in values] + [assumed] * ASSUMED)
    return known[min(len(known) - 1, int(QUANTILE * len(known)))]


def _median(values: Iterable[float], assumed: float) -> float:
    """Return the median of the values and of ASSUMED further ones."""
    return median([*values, *[assumed] * ASSUMED])


def bounded(footprint: Footprint, file_bytes: int, room_bytes: int, device_room_bytes: int) -> Footprint:
    """Return a prediction that is at most the memory that a worker has for models, if the files fit into it.

    A prediction may be too high: whether a large version fits is shown by its load, with all memory there is.
    """
    if footprint.measured:
        return footprint
    resident, peak = _bounded(footprint.resident_bytes, footprint.peak_bytes, file_bytes, room_bytes)
    device, device_peak = _bounded(
        footprint.device_resident_bytes, footprint.device_peak_bytes, file_bytes, device_room_bytes
    )
    return replace(
        footprint,
        resident_bytes=resident,
        peak_bytes=peak,
        device_resident_bytes=device,
        device_peak_bytes=device_peak,
    )


def _bounded(resident_bytes: int, peak_bytes: int, file_bytes: int, room_bytes: int) -> tuple[int, int]:
    if resident_bytes + peak_bytes <= room_bytes or file_bytes > room_bytes:
        return resident_bytes, peak_bytes
    resident_bytes = min(resident_bytes, room_bytes)
    return resident_bytes, room_bytes - resident_bytes


def expected(
    known: Footprint, too_little: Footprint | None, file_bytes: int, room_bytes: int, device_room_bytes: int
) -> Footprint:
    """Return what a version takes in a worker that has this memory for models, or can make it free.

    Other instances may stay for long: pinned, or counted with memory that the process keeps. A version that was never
    measured is tried with what they leave: else it could not be loaded beside one small pinned instance.

    Args:
        known: what it takes, measured or predicted.
        too_little: what an earlier load found too little, maybe in a smaller worker; None: there was none.
        file_bytes: of its files.
        room_bytes: what all instances together may take, or what can be made free.
        device_room_bytes: likewise of the device.
    """
    limited = bounded(known, file_bytes, room_bytes, device_room_bytes)
    # What a load found too little is certain; beyond that it is a prediction.
    return limited if too_little is None or known.measured else at_least(limited, too_little)


def at_least(predicted: Footprint, known: Footprint) -> Footprint:
    """Return a prediction that is not below what an earlier load found too little, in each kind of memory.

    The seconds that an earlier load took replace predicted ones.
    """
    predicted = replace(predicted, load_s=known.load_s or predicted.load_s)
    if known.load_bytes > predicted.load_bytes:
        predicted = replace(predicted, resident_bytes=known.resident_bytes, peak_bytes=known.peak_bytes)
    if known.device_load_bytes > predicted.device_load_bytes:
        predicted = replace(
            predicted,
            device_resident_bytes=known.device_resident_bytes,
            device_peak_bytes=known.device_peak_bytes,
        )
    return predicted


def larger(footprint: Footprint, free_bytes: int, *, of_device: bool = False) -> Footprint:
    """Return the corrected prediction of a version whose load found no memory although `free_bytes` were free."""
    resident, peak, name = footprint.resident_bytes, footprint.peak_bytes, "peak_bytes"
    if of_device:
        resident, peak, name = footprint.device_resident_bytes, footprint.device_peak_bytes, "device_peak_bytes"
    load_bytes = max(int(CORRECTION * (resident + peak)), free_bytes + 1)
    return replace(footprint, measured=False, **{name: max(peak, load_bytes - resident)})
