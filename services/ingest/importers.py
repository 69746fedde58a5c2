"""What an importer is, which a plug-in adds: it recognises a framework's files, and converts them to a served form.

Source ─> recognises, by content ─> run ─> Converted: the model to serve, and samples that the framework answered
Samples are in .npz files, `input/NAME` and `output/NAME`: for the check of what was made, and the race of compilers.
Recognition runs in the command line, too: a module of an importer imports its framework when it converts.
"""

from __future__ import annotations

import zipfile
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from millstream.services.errors import Code, Failure, invalid
from millstream.services.model.datatypes import NUMPY
from millstream.services.model.formats import formats
from millstream.services.model.samples import ARRAYS_MAX, INPUT, OUTPUT, SAMPLES_BYTES_MAX, read_npz
from millstream.services.plugin.registry import contributions, load_for

if TYPE_CHECKING:
    from millstream.services.ingest.report import Converted, Recognised, Served
    from millstream.services.settings import Settings

Array = np.ndarray[Any, Any]

INPUTS_MAX = 64  # that an upload may declare
RANK_MAX = 32  # of a declared input
EXAMPLE = "x:FP32:-1,3,224,224"
#: folders in the folder of an upload: the uploaded files, the converted ones
SOURCE = "source"
IMPORTED = "imported"
NETWORK = "models:network"  # the scope for code that connects to other machines
LABELS = f"{IMPORTED}/labels.txt"
#: A larger file of samples is not kept with the version.
KEPT_BYTES_MAX = 16 << 20


class Source(NamedTuple):
    """What an importer is asked about.

    Args:
        folder: the folder of the upload; the uploaded files are below `folder / SOURCE`.
        path: the file, or the root of the folder, to recognise.
    """

    folder: Path
    path: Path


class ImportOptions(BaseModel):
    """What the caller of an upload allows. Nothing of the upload is executed otherwise."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    allow_pickle: bool = Field(False, description="Load pickles, in the sandbox, and classes of a list alone.")
    allow_code: bool = Field(False, description="Run code that a model folder brings with it, in the sandbox.")
    inputs: tuple[str, ...] = Field(
        (), max_length=INPUTS_MAX, description='Inputs that a file does not describe, such as "x:FP32:-1,3,224,224".'
    )
    formats: frozenset[str] = Field(
        frozenset(), description="Formats that the version's pools load, as far as is known; empty: any."
    )


class Sample(NamedTuple):
    """Inputs and what the source framework answered, as arrays by name with rows in the first dimension.

    Text is an array of str (datatype kind U).
    """

    inputs: Mapping[str, Array]
    outputs: Mapping[str, Array]


class Members(NamedTuple):
    """What in a folder is the model: patterns of `Path.glob`, and notes on what is not served."""

    patterns: Sequence[str]
    notes: tuple[str, ...] = ()


class Importer:
    """Imports the models of one framework.

    Args:
        name: the framework's name, for people: "scikit-learn".
        described: its folders describe themselves, and may have an ONNX file at their top.
        marks: names of files at the top of its folders.
        runs_code: workers run what was uploaded as code, for which its uploader needs the right.
        stands_in_for: names of importers whose refused models it serves, by the framework itself.
    """

    name: str
    runs_code = False
    stands_in_for: frozenset[str] = frozenset()
    described = False
    marks: frozenset[str] = frozenset()

    def recognises(self, source: Source) -> bool:
        """Return whether `source.path` is a model of this framework, judging by its content; executes nothing of it.

        Cheap, and with the standard library alone. Raises OSError if the content cannot be read.
        """
        raise NotImplementedError

    def may_be_of(self, names: Collection[str]) -> bool:
        """Return whether a folder with these names at its top may be of it: an archive of it is to be unpacked."""
        return not self.marks.isdisjoint(names)

    def stands_in(self, source: Source, options: ImportOptions) -> str | None:
        """Return "" if it serves `source.path`, which an importer of `stands_in_for` refused; else what is to be
        allowed for that; None if it does not. Raises OSError.
        """
        return None

    def asks(self, source: Source) -> frozenset[str]:
        """Return the scopes that this model needs besides the one for code. Raises Failure(INVALID), OSError."""
        return frozenset()

    def members(self, folder: Path) -> Members | None:
        """Return the model's files in a folder that it recognises: nothing else is sent. None: it imports files alone.

        Standard library alone. Raises Failure(INVALID) for a folder whose document does not say it; OSError.
        """
        return None

    async def run(
        self, folder: Path, recognised: Recognised, options: ImportOptions, settings: Settings
    ) -> Converted | Served:
        """Convert the model below `folder` in a process of its own, within limits, and have its framework answer.

        Raises Failure: INVALID with what the owner can do, UNSUPPORTED, UNAVAILABLE, INTERNAL.
        """
        raise NotImplementedError


class DeclaredInput(NamedTuple):
    """An input that an upload's owner declares. `shape`: -1 is a variable dimension."""

    name: str
    datatype: str
    shape: tuple[int, ...]


def importers() -> dict[str, Importer]:
    """Return the importers by name, in the order in which they are asked about an upload."""
    found: dict[str, Importer] = {}
    for one in contributions("importers", type):
        if not issubclass(one, Importer) or one.name in found:
            raise Failure(Code.INTERNAL, f"{one.__module__}.{one.__name__} is no importer, or has the name of another")
        found[one.name] = one()
    return found


def resolve() -> None:
    """Import what plug-ins add to a check and an import: in their sandbox no entry point can be read."""
    importers()
    contributions("file_kinds", object)
    for one in formats().values():
        load_for(one, one.recognises)


def find_importer(source: Source, without: Collection[str] = ()) -> Importer | None:
    """Return the importer of the file or folder at `source.path`; None: it is ONNX, an archive, or nothing known.

    Formats that describe themselves come first; the others are asked about a file, and about a folder without an ONNX
    file at its top.

    Args:
        source: the file or folder.
        without: names of importers that are not asked.

    Raises OSError if it cannot be read.
    """
    known = [one for one in importers().values() if one.name not in without]
    found = next((one for one in known if one.described and one.recognises(source)), None)
    if found is not None or _has_onnx(source.path):
        return found
    return next((one for one in known if not one.described and one.recognises(source)), None)


def _has_onnx(path: Path) -> bool:
    return path.is_dir() and any(entry.suffix == ".onnx" for entry in path.iterdir())


def read_inputs(texts: Sequence[str]) -> tuple[DeclaredInput, ...]:
    """Return the inputs of "name:datatype:shape" texts, in order. Raises Failure(INVALID) with an example."""
    inputs = tuple(map(_read_input, texts))
    names = [one.name for one in inputs]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise invalid(f"the input {twice!r} is declared twice")
    return inputs


def _read_input(text: str) -> DeclaredInput:
    name, _, rest = text.partition(":")
    datatype, _, sizes = rest.partition(":")
    try:
        shape = tuple(int(size) for size in sizes.split(",")) if sizes else ()
    except ValueError:
        raise _wrong(text, "its shape is not whole numbers") from None
    if not name or not name.isprintable() or len(name) > 512:
        raise _wrong(text, "it has no name")
    if datatype not in NUMPY or datatype == "BF16":
        raise _wrong(text, f"{datatype[:20]!r} is no datatype of a tensor of numbers")
    if not shape or len(shape) > RANK_MAX or any(size < -1 or size == 0 for size in shape):
        raise _wrong(text, "a shape has sizes above 0, or -1 for a variable one")
    return DeclaredInput(name, datatype, shape)


def _wrong(text: str, why: str) -> Exception:
    return invalid(f"the declared input {text[:80]!r} cannot be read: {why}; an example: {EXAMPLE}")


def write_samples(folder: Path, samples: Sequence[Sample]) -> list[str]:
    """Write each sample to a file below `folder / IMPORTED`, and return their paths below `folder`.

    The first is `samples.npz`, the one that is kept. Raises Failure(INVALID) for samples that no file can hold.
    """
    (folder / IMPORTED).mkdir(exist_ok=True)
    size_bytes = sum(_storable(array).nbytes for sample in samples for array in _arrays(sample).values())
    if size_bytes > SAMPLES_BYTES_MAX:
        raise invalid(
            f"the model's inputs and outputs take {size_bytes >> 20} MiB, more than {SAMPLES_BYTES_MAX >> 20} MiB"
        )
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
    """Return the sample in a file. Text is an array of str. Raises ValueError, OSError."""
    arrays = read_npz(path, 2 * SAMPLES_BYTES_MAX, ARRAYS_MAX)
    return Sample(_of(arrays, INPUT), _of(arrays, OUTPUT))


def _arrays(sample: Sample) -> dict[str, Array]:
    inputs = {f"{INPUT}{name}": array for name, array in sample.inputs.items()}
    return inputs | {f"{OUTPUT}{name}": array for name, array in sample.outputs.items()}


def _storable(array: Array) -> Array:
    """Return `array` in a form without objects, which only a pickle could hold."""
    return array.astype(str) if array.dtype.kind in "OS" else array


def _of(arrays: Mapping[str, Array], prefix: str) -> dict[str, Array]:
    return {name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)}
