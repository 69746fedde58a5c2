"""upload_form: reads the form of an upload: passes on the bytes of the part `model`, and keeps the part `config`."""

from __future__ import annotations

from millstream.gateway.http.multipart import MultipartReader, Sink
from millstream.services.errors import Code, Failure, invalid

CONFIG_PART_BYTES_MAX = 64 * 1024

_MODEL, _CONFIG = "model", "config"
_NAME_CHARACTERS_MAX = 80  # of a part's name in a message


class UploadForm:
    """Extracts the model's bytes from the chunks of a body.

    Raises Failure(INVALID) for a form that is broken, incomplete or has other parts; TOO_LARGE for a long config.
    """

    def __init__(self, content_type: str) -> None:
        self._reader = MultipartReader(content_type, self._open_part)
        self._has_model = False
        self._config: bytearray | None = None
        self._pieces: list[bytes] = []

    @property
    def config(self) -> bytes | None:
        """The part `config`; None until it has been received."""
        return None if self._config is None else bytes(self._config)

    def feed(self, chunk: bytes) -> list[bytes]:
        """Return the pieces of the model's file in `chunk`, in order."""
        self._pieces = []
        self._reader.feed(chunk)
        return self._pieces

    def close(self) -> None:
        """Check that the form is complete. Call it at the end of the body."""
        self._reader.close()
        if not self._has_model:
            raise invalid("the form has no part 'model' (the model's file)")

    def _open_part(self, name: str) -> Sink:
        if name == _MODEL:
            self._has_model = True
            return self._add_model
        if name == _CONFIG:
            self._config = bytearray()
            return self._add_config
        raise invalid(
            f"the form has a part '{name[:_NAME_CHARACTERS_MAX]}': only 'model' (a file) and 'config' (JSON) are known"
        )

    def _add_model(self, piece: bytes) -> None:
        self._pieces.append(piece)

    def _add_config(self, piece: bytes) -> None:
        assert self._config is not None
        if len(self._config) + len(piece) > CONFIG_PART_BYTES_MAX:
            raise Failure(
                Code.TOO_LARGE, f"the part 'config' is larger than the limit of {CONFIG_PART_BYTES_MAX} bytes"
            )
        self._config.extend(piece)
