"""Requests that give texts or encoded files in place of tensors: how they are read, and what prepares them. Pure.

the version's own plans refuse a request ─> its PreparedPlans read it again ─> prepare ─> the inputs of the version
Plug-ins say which versions take what, and make the tensors: texts are tokenized, images decoded.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import TypeVar

from millstream.gateway.tensors.input_plans import CheckedInput, InputPlans, Inputs, UnknownInput, join
from millstream.gateway.tensors.inputs import InputTensor, OtherDatatype
from millstream.services.errors import Failure
from millstream.services.model.datatypes import BYTES, encode_elements

T = TypeVar("T")


class PreparedPlans(InputPlans):
    """The plans of requests that give one or more inputs in another form.

    Attributes:
        names: of inputs that requests give in this form.
        media: media types of bodies that are one text or file.
        hint: for the end of a message about a request that does not fit: how this form is sent.
    """

    names: frozenset[str] = frozenset()
    media: frozenset[str] = frozenset()
    hint = ""

    def recognises(self, body: bytes | memoryview) -> bool:
        """Return whether a body is in this form, by its first bytes."""
        return False

    def gives(self, document: object) -> bool:
        """Return whether a JSON document, other than of v2, gives values in this form without the name of an input."""
        return False

    def one(self, body: bytes) -> Inputs:
        """Return a body that is one text or file as a request. Raises Failure(INVALID)."""
        plan = next(iter(self))
        extent = plan.fit(BYTES, (1,) * len(plan.shape))
        raw = encode_elements([body])
        return join(self, {plan.name: CheckedInput(extent, InputTensor(extent.shape, raw, len(raw)))})

    async def prepare(self, inputs: Sequence[InputTensor]) -> Inputs:
        """Return the version's inputs for a request that these plans have read. Raises Failure."""
        raise NotImplementedError


def read_prepared(
    plans: InputPlans, read: Callable[[InputPlans], T], *, given: bool = False, body: bytes = b""
) -> tuple[T, PreparedPlans | None]:
    """Return what `read` returns, and the plans that have to prepare it; None: it has tensors.

    Args:
        plans: the version's own plans.
        read: reads the request with plans.
        given: whether the request gives the other form by what it is, if the version takes it.
        body: bytes whose form the request does not say.

    Raises:
        Failure: of the plans that fit the request.
    """
    if given and plans.prepared is not None:
        return read(plans.prepared), plans.prepared
    try:
        return read(plans), None
    except Failure as failure:
        prepared = prepared_for(plans, failure, body)
        if prepared is None:
            raise
    return read(prepared), prepared


def prepared_for(plans: InputPlans, failure: Failure, body: bytes | memoryview = b"") -> PreparedPlans | None:
    """Return the plans for a second reading of a request that `plans` refused; None: there is none.

    `body`: bytes whose form the request does not say.
    """
    prepared = plans.prepared
    if prepared is None:
        return None
    if isinstance(failure, UnknownInput):
        wanted = failure.name in prepared.names
    else:
        wanted = isinstance(failure, OtherDatatype) and failure.name in prepared.names and failure.datatype == BYTES
    if not wanted and not (body and prepared.recognises(body)):
        return None
    # The frames of the first reading hold the body, and one of them the failure: a cycle, which would keep a segment.
    failure.__traceback__ = None
    return prepared


def gives_prepared(plans: InputPlans, document: object) -> bool:
    """Return whether a JSON document, other than of v2, gives texts or encoded files that the version takes."""
    return plans.prepared is not None and plans.prepared.gives(document)


def gives_media(plans: InputPlans, media_type: str) -> bool:
    """Return whether a body of this media type is what the version prepares."""
    return plans.prepared is not None and media_type in plans.prepared.media


def expect_tensors(plans: InputPlans, names: Collection[str]) -> None:
    """Raise UnknownInput if a request names what is prepared: it is read again with the plans of that.

    For readers that take a name which is no input's for something else.
    """
    if plans.prepared is not None:
        for name in sorted(plans.prepared.names & set(names) - plans.by_name.keys()):
            plans.named(name)
