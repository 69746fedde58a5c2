"""Makes the v2 REST codec of a version, for the fast path, when the router opens the version's lane."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from millstream.gateway.connection.budgets import ReplyBudget
from millstream.gateway.scheduling.router import Codec
from millstream.gateway.tensors.classification import LabelledOutputs
from millstream.gateway.tensors.input_plans import InputPlans
from millstream.gateway.tensors.output_options import ClientRegions, Extensions
from millstream.gateway.v2.decode import V2Decoder
from millstream.gateway.v2.responder import RestResponder, V2Encoder
from millstream.services.errors import Failure, invalid
from millstream.services.model.manifest import Manifest
from millstream.services.model.version_files import overwritten, read_label_names

log = logging.getLogger("millstream.router")


Labels = dict[str, tuple[str, ...]]


def read_labels(folder: Path, manifest: Manifest) -> Labels:
    """Return the class names of each output of the version in `folder`.

    Raises:
        Failure: INVALID for a file that is not in the version's list, cannot be read, or was changed.
    """
    try:
        names = {path: read_label_names(folder, path, manifest.files) for path in set(manifest.config.labels.values())}
    except Failure as failure:
        raise invalid(failure.message + overwritten(manifest)) from None
    return {output: names[path] for output, path in manifest.config.labels.items()}


class V2CodecFactory:
    """The `codec_of` of a gateway's router.

    Args:
        labels: reads the class names of a version; raises Failure for label files that cannot be read.
        memory: the registered shared memory of clients; None: they can register none.
        reply_budget: bounds replies that are being written.
        request_bytes_max: limit on a request's body, and on an input in shared memory.
    """

    def __init__(
        self,
        labels: Callable[[Manifest], Labels],
        memory: ClientRegions | None,
        reply_budget: ReplyBudget,
        request_bytes_max: int,
    ) -> None:
        self._labels = labels
        self._memory = memory
        self._reply_budget = reply_budget
        self._bytes_max = request_bytes_max

    def __call__(self, manifest: Manifest, plans: InputPlans) -> Codec:
        labels: Labels = {}
        labelled = None
        failure = ""
        if manifest.config.labels:
            try:
                labels = self._labels(manifest)
                if (classes := manifest.config.classes) is not None:
                    labelled = LabelledOutputs(manifest.signature, classes, labels[classes.output])
            except Failure as unreadable:
                log.warning("version %s of %s: %s", manifest.version, manifest.model, unreadable.message)
                failure = unreadable.message
        extensions = Extensions(manifest.answered, labels, self._memory, self._bytes_max, labelled)
        encoder = V2Encoder(manifest.model, manifest.version, manifest.answered, extensions)
        decoder = V2Decoder(plans, self._bytes_max, extensions)
        return Codec(extensions, decoder, RestResponder(encoder, self._reply_budget), failure)
