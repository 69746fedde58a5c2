"""The process that decodes files of callers: a decoder is a large program in C, which reads what anybody sends.

python -m millstream.plugins.prepare.decoder_process PARENT
plan, file ─> sandbox ─> Pillow, or libsndfile ─> tensor, or why there is none
"""

from __future__ import annotations

import msgspec

from millstream.plugins.prepare.audio import audio_tensor
from millstream.plugins.prepare.confined_process import MEMORY_BYTES_MAX, serve
from millstream.plugins.prepare.image import Array, image_tensor
from millstream.services.errors import Failure
from millstream.services.model.preparation import AudioPlan, ImagePlan

#: characters of an error that a library gives
ERROR_CHARACTERS_MAX = 300


class EncodedFile(msgspec.Struct, frozen=True, array_like=True):
    """A file, and how a tensor is made of it: as an image, or as a recording."""

    content: bytes
    image: ImagePlan | None
    audio: AudioPlan | None


class Decoded(msgspec.Struct, frozen=True, array_like=True):
    """The tensor of a file in raw form, of one row.

    Args:
        error: why there is none, on one line; "": there is one.
    """

    error: str = ""
    shape: tuple[int, ...] = ()
    data: memoryview = memoryview(b"")


_files = msgspec.msgpack.Decoder(EncodedFile)
_encoder = msgspec.msgpack.Encoder()


def pack(message: EncodedFile | Decoded) -> bytes:
    """Return a message as bytes."""
    return _encoder.encode(message)


def answer(message: bytes) -> bytes:
    """Return the packed answer to a packed file."""
    file = _files.decode(message)
    try:
        made = _tensor(file)
    except Failure as failure:
        return pack(Decoded(failure.message[:ERROR_CHARACTERS_MAX]))
    except MemoryError:
        return pack(Decoded(f"the file needs more than {MEMORY_BYTES_MAX >> 20} MiB of memory to be decoded"))
    except Exception as error:
        return pack(Decoded(f"the file cannot be decoded: {type(error).__name__}"))
    return pack(Decoded("", made.shape, made.data.cast("B")))


def _tensor(file: EncodedFile) -> Array:
    if file.image is not None:
        return image_tensor(file.image, file.content)
    assert file.audio is not None
    return audio_tensor(file.audio, file.content)


if __name__ == "__main__":
    serve(answer)
