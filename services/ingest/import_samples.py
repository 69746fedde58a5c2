"""The files of samples: inputs, and what the source framework answered, as `input/NAME` and `output/NAME` of an .npz.

Written by the process that converts a model, read by its check and by the race of compilers.
"""

from __future__ import annotations

import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from millstream.services.errors import invalid
from millstream.services.ingest.importers import IMPORTED, Array, Sample

#: A larger file of samples is not kept with the version.
KEPT_BYTES_MAX = 16 << 20
#: all samples of one import
BYTES_MAX = 256 << 20
_INPUT = "input/"
_OUTPUT = "output/"


def write_samples(folder: Path, samples: Sequence[Sample]) -> list[str]:
    """Write each sample to a file below `folder / IMPORTED`, and return their paths below `folder`.

    The first is `samples.npz`, the one that is kept. Raises Failure(INVALID) for samples that no file can hold.
    """
    (folder / IMPORTED).mkdir(exist_ok=True)
    size_bytes = sum(_storable(array).nbytes for sample in samples for array in _arrays(sample).values())
    if size_bytes > BYTES_MAX:
        raise invalid(f"the model's inputs and outputs take {size_bytes >> 20} MiB, more than {BYTES_MAX >> 20} MiB")
    paths = []
    for number, sample in enumerate(samples):
        path = f"{IMPORTED}/samples{f'-{number}' if number else ''}.npz"
        arrays = {name: _storable(array) for name, array in _arrays(sample).items()}
        with (folder / path).open("wb") as file, zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
            for name, array in arrays.items():
                with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                    np.lib.format.write_array(member, array, allow_pickle=False)
        paths.append(path)
    return paths


def read_sample(path: Path) -> Sample:
    """Return the sample in a file. Text is an array of str. Raises ValueError, OSError, zipfile.BadZipFile."""
    with np.load(path, allow_pickle=False) as file:
        arrays = {name: file[name] for name in file.files}
    return Sample(_of(arrays, _INPUT), _of(arrays, _OUTPUT))


def _arrays(sample: Sample) -> dict[str, Array]:
    inputs = {f"{_INPUT}{name}": array for name, array in sample.inputs.items()}
    return inputs | {f"{_OUTPUT}{name}": array for name, array in sample.outputs.items()}


def _storable(array: Array) -> Array:
    """Return `array` in a form without objects, which only a pickle could hold."""
    return array.astype(str) if array.dtype.kind in "OS" else array


def _of(arrays: Mapping[str, Array], prefix: str) -> dict[str, Array]:
    return {name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)}
