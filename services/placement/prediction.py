"""Predicts what a version takes that no worker has loaded yet, from the size of its files. Pure.

measured footprints of one kind (backend, device, format) ─> Ratios.learn ─> Ratios ─> predict(bytes of the files)

A file says little about the memory of its model: weights are copied, packed again for the processor, or stay in the
mapped file. The share of measured versions that would have been predicted too low is small by construction (a high
quantile), and while few are measured, assumed ones that take a lot are added to them. Seconds only say what comes
first, so they are the median: one slow model does not make all others slow.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import median

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


@dataclass(frozen=True, slots=True)
class Ratios:
    """What versions of one kind take for each byte of their files, and their time to load.

    Args:
        resident: bytes that stay, beyond `resident_fixed`.
        peak: further bytes while it loads, warms up or runs its largest batch, beyond `peak_fixed`.
        resident_fixed: bytes of the smallest version: its session, threads and code.
        peak_fixed: likewise, while it loads.
        load_s_fixed: seconds to load the smallest version.
        load_s_per_byte: further seconds for each byte of the files.
        device_resident: as `resident`, of the memory of an accelerator.
        device_peak: likewise.
        device_resident_fixed: likewise.
        device_peak_fixed: likewise.
    """

    resident: float = 1.5
    peak: float = 3.0
    resident_fixed: int = 4 << 20
    peak_fixed: int = 4 << 20
    load_s_fixed: float = 0.5
    load_s_per_byte: float = 1 / (100 << 20)
    device_resident: float = 0.0
    device_peak: float = 0.0
    device_resident_fixed: int = 0
    device_peak_fixed: int = 0

    @staticmethod
    def learn(measured: Sequence[tuple[int, Footprint]], assumed: Ratios | None = None) -> Ratios:
        """Return the ratios of measured versions.

        Args:
            measured: the bytes of the files of each, and what it takes.
            assumed: the ratios of further versions; None: those on a CPU.
        """
        assumed = assumed or ASSUMED_RATIOS
        large = [(size, one) for size, one in measured[-MEASURED_MAX:] if size >= LEARN_BYTES_MIN]
        small = [one for size, one in measured[-MEASURED_MAX:] if size < LEARN_BYTES_MIN]
        starts_s = (one.load_s for size, one in measured[-MEASURED_MAX:] if size < LEARN_S_BYTES_MIN)
        per_byte_s = (one.load_s / size for size, one in large if size >= LEARN_S_BYTES_MIN)
        resident_fixed = int(_high((one.resident_bytes for one in small), assumed.resident_fixed))
        peak_fixed = int(_high((one.peak_bytes for one in small), assumed.peak_fixed))
        device_fixed = int(_high((one.device_resident_bytes for one in small), assumed.device_resident_fixed))
        device_peak_fixed = int(_high((one.device_peak_bytes for one in small), assumed.device_peak_fixed))
        return Ratios(
            resident=_high(((one.resident_bytes - resident_fixed) / size for size, one in large), assumed.resident),
            peak=_high(((one.peak_bytes - peak_fixed) / size for size, one in large), assumed.peak),
            resident_fixed=resident_fixed,
            peak_fixed=peak_fixed,
            load_s_fixed=min(LOAD_S_FIXED_MAX, _median(starts_s, assumed.load_s_fixed)),
            load_s_per_byte=min(LOAD_S_PER_BYTE_MAX, _median(per_byte_s, assumed.load_s_per_byte)),
            device_resident=_high(
                ((one.device_resident_bytes - device_fixed) / size for size, one in large), assumed.device_resident
            ),
            device_peak=_high(
                ((one.device_peak_bytes - device_peak_fixed) / size for size, one in large), assumed.device_peak
            ),
            device_resident_fixed=device_fixed,
            device_peak_fixed=device_peak_fixed,
        )

    def predict(self, file_bytes: int) -> Footprint:
        """Return what a version with files of `file_bytes` will take."""
        return Footprint(
            self.resident_fixed + int(self.resident * file_bytes),
            self.peak_fixed + int(self.peak * file_bytes),
            self.load_s_fixed + self.load_s_per_byte * file_bytes,
            device_resident_bytes=self.device_resident_fixed + int(self.device_resident * file_bytes),
            device_peak_bytes=self.device_peak_fixed + int(self.device_peak * file_bytes),
        )


ASSUMED_RATIOS = Ratios()
#: on an accelerator: weights once on the host while they are read, and once on the device
ASSUMED_ON_DEVICE = Ratios(
    device_resident=1.5, device_peak=1.5, device_resident_fixed=16 << 20, device_peak_fixed=16 << 20
)


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
    """Return what a version takes in a worker that has this memory for models.

    Args:
        known: what it takes, measured or predicted.
        too_little: what an earlier load found too little, maybe in a smaller worker; None: there was none.
        file_bytes: of its files.
        room_bytes: what all instances together may take.
        device_room_bytes: likewise of the device.
    """
    limited = bounded(known, file_bytes, room_bytes, device_room_bytes)
    # What a load found too little is certain; beyond that it is a prediction.
    return limited if too_little is None or known.measured else at_least(limited, too_little)


def reduced(
    predicted: Footprint, known: Footprint | None, file_bytes: int, room_bytes: int, device_room_bytes: int
) -> Footprint:
    """Return a prediction that is at most the memory that can be made free, if the files fit into that.

    Other instances stay for long: pinned, or counted with memory that the process keeps. Without this, a version that
    was never measured could not be loaded beside one small pinned instance.

    Args:
        predicted: what the version takes; a measured footprint is returned unchanged.
        known: what an earlier load found too little; None: there was none.
        file_bytes: of its files.
        room_bytes: what can be made free.
        device_room_bytes: likewise of the device.
    """
    tried = bounded(predicted, file_bytes, room_bytes, device_room_bytes)
    return tried if known is None else at_least(tried, known)


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


def larger(footprint: Footprint, free_bytes: int) -> Footprint:
    """Return the corrected prediction of a version whose load found no memory although `free_bytes` were free."""
    load_bytes = max(int(CORRECTION * footprint.load_bytes), free_bytes + 1)
    peak_bytes = max(footprint.peak_bytes, load_bytes - footprint.resident_bytes)
    return replace(footprint, peak_bytes=peak_bytes, measured=False)


def larger_on_device(footprint: Footprint, free_bytes: int) -> Footprint:
    """Return likewise for a load that found no memory on the device."""
    load_bytes = max(int(CORRECTION * footprint.device_load_bytes), free_bytes + 1)
    peak_bytes = max(footprint.device_peak_bytes, load_bytes - footprint.device_resident_bytes)
    return replace(footprint, device_peak_bytes=peak_bytes, measured=False)
