"""Reads requests that give encoded files in place of tensors, for the inputs that a version declares so.

BYTES, a file each row ─> contents: as they are, or base64 ─> Decoders ─> the inputs of the version
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence
from importlib.util import find_spec
from math import prod

from millstream.gateway.connection.budgets import ReceiveBudget
from millstream.gateway.parts import PreparerParts
from millstream.gateway.tensors.input_plans import CheckedInput, InputPlans, Inputs, join, raw_tensor
from millstream.gateway.tensors.inputs import ABSENT, InputPlan, InputTensor
from millstream.gateway.tensors.prepared import PreparedPlans
from millstream.plugins.prepare.audio import RECORDINGS, is_recording
from millstream.plugins.prepare.decoder_process import Decoded
from millstream.plugins.prepare.decoders import Decoders
from millstream.plugins.prepare.image import IMAGES, is_image
from millstream.services.errors import Code, Failure, invalid
from millstream.services.model.datatypes import BYTES, ITEM_BYTES, decode_elements
from millstream.services.model.manifest import Manifest
from millstream.services.model.preparation import AudioPlan, ImagePlan, plan_of
from millstream.services.model.signature import TensorSpec
from millstream.services.model.usage import encoded_names
from millstream.services.process.threads import run_in_thread_if_large

#: one file of a request
FILE_BYTES_MAX = 32 << 20
_DATA_URL_CHARACTERS_MAX = 256  # before the comma


class MediaPlans(PreparedPlans):
    """The plans of requests that give the declared inputs of a version as files.

    Args:
        manifest: of a version that declares inputs.
        own: the version's own plans.
        preparer: what it stands on.
    """

    def __init__(self, manifest: Manifest, own: InputPlans, preparer: MediaPreparer) -> None:
        given = encoded_names(manifest)
        steps = manifest.prepare
        self._plans: dict[str, ImagePlan | AudioPlan] = {}  # by the name that a request gives
        specs = []
        for spec in manifest.answered.inputs:
            name = given.get(spec.name, spec.name)
            if spec.name in given:
                self._plans[name] = plan_of(steps[spec.name], spec)
                shape = (spec.shape[0],)
                spec = TensorSpec(name=name, datatype=BYTES, shape=shape, optional=spec.optional)
            specs.append(spec)
        signature = manifest.answered.model_copy(update={"inputs": tuple(specs)})
        super().__init__(manifest.model, signature, own.rows_max, own.json_limits)
        self._own, self._preparer = own, preparer
        self._aliases = {spec: name for spec, name in given.items() if spec != name}
        self.names = frozenset({*given, *given.values()})
        images = any(isinstance(plan, ImagePlan) for plan in self._plans.values())
        self.media = IMAGES if images else RECORDINGS
        named = ", ".join(given.values())
        self.hint = (
            f"; it takes encoded {'images' if images else 'recordings'}, too, as BYTES of '{named}', or in base64"
        )

    def named(self, name: str) -> InputPlan:
        return super().named(self._aliases.get(name, name))

    def recognises(self, body: bytes | memoryview) -> bool:
        return len(self) == 1 and _is_known(next(iter(self._plans.values())), body)

    async def prepare(self, inputs: Sequence[InputTensor]) -> Inputs:
        checked: dict[str, CheckedInput] = {}
        with self._preparer.receive_budget.reserve() as reservation:
            for plan, own, tensor in zip(self, self._own, inputs, strict=True):
                if tensor is ABSENT:
                    continue
                steps = self._plans.get(plan.name)
                if steps is None:
                    checked[own.name] = CheckedInput(own.fit(own.datatype, tensor.shape), tensor)
                    continue
                _check_installed(steps)
                files = await run_in_thread_if_large(tensor.size_bytes, _files, plan.name, steps, tensor)
                reservation.grow(self._checked_bytes(steps, len(files)))
                checked[own.name] = _tensor(own, await self._preparer.decoders.decode(steps, files))
        return join(self._own, checked)

    def _checked_bytes(self, steps: ImagePlan | AudioPlan, files: int) -> int:
        """Return the bytes of the tensor of so many files; 0: their own sizes decide. Raises Failure(TOO_LARGE)."""
        if isinstance(steps, ImagePlan):
            elements = 0 if steps.size is None else prod(steps.size) * steps.channels
        else:
            elements = steps.samples or 0
        size_bytes = files * elements * ITEM_BYTES[steps.datatype]
        if size_bytes > self._preparer.request_bytes_max:
            raise Failure(
                Code.TOO_LARGE,
                f"{files} files are a tensor of {size_bytes} bytes: at most {self._preparer.request_bytes_max}",
            )
        return size_bytes


def _check_installed(steps: ImagePlan | AudioPlan) -> None:
    """Raise Failure(UNSUPPORTED) if the library that decodes is missing."""
    if find_spec("PIL" if isinstance(steps, ImagePlan) else "soundfile") is None:
        what = "images" if isinstance(steps, ImagePlan) else "recordings"
        message = f"this server decodes no {what}: pip install 'millstream[media]', or send tensors"
        raise Failure(Code.UNSUPPORTED, message)


def _is_known(steps: ImagePlan | AudioPlan, content: bytes | memoryview) -> bool:
    return is_image(content) if isinstance(steps, ImagePlan) else is_recording(content)


def _files(name: str, steps: ImagePlan | AudioPlan, tensor: InputTensor) -> list[bytes]:
    """Return the files in a BYTES tensor. Raises Failure(INVALID)."""
    files = [_content(name, steps, at, element) for at, element in enumerate(decode_elements(bytes(tensor.data)))]
    if not files:
        raise invalid(f"'{name}' has no file: at least 1")
    return files


def _content(name: str, steps: ImagePlan | AudioPlan, at: int, element: bytes) -> bytes:
    """Return the file in an element: as it is, or in base64, perhaps as a data URL. Raises Failure(INVALID)."""
    if not _is_known(steps, element):
        element = _from_base64(element)
        if not _is_known(steps, element):
            what = "image" if isinstance(steps, ImagePlan) else "recording"
            raise invalid(f"'{name}[{at}]' is no {what} of a known format, and no base64 of one")
    if len(element) > FILE_BYTES_MAX:
        raise invalid(f"'{name}[{at}]' has {len(element)} bytes: at most {FILE_BYTES_MAX}")
    return element


def _from_base64(element: bytes) -> bytes:
    if element.startswith(b"data:"):
        element = element[element.find(b",", 0, _DATA_URL_CHARACTERS_MAX) + 1 :]
    try:
        return base64.b64decode(element, validate=True)
    except binascii.Error:
        return b""


def _tensor(plan: InputPlan, rows: Sequence[Decoded]) -> CheckedInput:
    """Return the decoded files as one tensor. Raises Failure(INVALID)."""
    shapes = {row.shape for row in rows}
    if len(shapes) != 1:
        raise invalid("the files become tensors of different sizes: send them one by one")
    shape = (len(rows), *shapes.pop()[1:])
    extent = plan.fit(plan.datatype, shape)
    data = rows[0].data if len(rows) == 1 else b"".join(row.data for row in rows)
    return CheckedInput(extent, raw_tensor(plan, extent, memoryview(data)))


class MediaPreparer:
    """Prepares requests of a gateway that give encoded files."""

    def __init__(self, parts: PreparerParts) -> None:
        self.receive_budget: ReceiveBudget = parts.receive_budget
        self.request_bytes_max = parts.settings.request_bytes_max
        self.decoders = Decoders()

    def plans(self, manifest: Manifest, own: InputPlans) -> MediaPlans | None:
        return MediaPlans(manifest, own, self) if manifest.prepare else None

    async def stop(self) -> None:
        await self.decoders.close()


def build(parts: PreparerParts) -> MediaPreparer:
    """Return the preparer of encoded files."""
    return MediaPreparer(parts)
