"""The one input `text` that a request may have in place of a model's token inputs. Pure.

Every protocol reads a request with the version's own plans first. A request that these refuse since it names `text` is
read again with the plans of texts, if the version has a tokenizer; then its texts are tokenized (texts).
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TypeVar

from millstream.gateway.tensors.input_plans import InputPlans, UnknownInput
from millstream.gateway.tensors.inputs import InputPlan
from millstream.gateway.tensors.json_document import excerpt
from millstream.gateway.tensors.json_text import DEFAULT_LIMITS, JsonLimits
from millstream.gateway.texts.hugging_face import gives_texts
from millstream.services.errors import Failure, invalid
from millstream.services.model.datatypes import BYTES
from millstream.services.model.manifest import Manifest
from millstream.services.model.signature import Signature, TensorSpec
from millstream.services.model.usage import TEXT, takes_texts

T = TypeVar("T")

TEXT_PAIR = "text_pair"
TEXT_SPEC = TensorSpec(name=TEXT, datatype=BYTES, shape=(-1,))


class TextPlans(InputPlans):
    """The plans of requests with texts: the one input TEXT, and the outputs of the version."""

    def named(self, name: str) -> InputPlan:
        plan = self.by_name.get(name)
        if plan is None:
            why = (
                "pairs of texts are not tokenized here: send their token ids"
                if name == TEXT_PAIR
                else f"leave out '{excerpt(name)}', or send token ids in place of texts"
            )
            raise invalid(f"'{TEXT}' is the only input of a request with texts for model '{self.model}': {why}")
        return plan


def text_plans(manifest: Manifest, rows_max: int, limits: JsonLimits = DEFAULT_LIMITS) -> TextPlans | None:
    """Return the plans of requests with texts; None if the version takes no texts. Arguments as of InputPlans."""
    if not takes_texts(manifest):
        return None
    signature = Signature(inputs=(TEXT_SPEC,), outputs=manifest.answered.outputs, batching=manifest.signature.batching)
    return TextPlans(manifest.model, signature, rows_max, limits)


def read_with_texts(plans: InputPlans, read: Callable[[InputPlans], T], *, strings: bool = False) -> tuple[T, bool]:
    """Return what `read` returns, and whether it read texts. Raises Failure, of the plans that fit the request.

    Args:
        plans: the version's own plans.
        read: reads the request with plans.
        strings: whether the request gives strings without the name of an input: texts, if the version takes them.
    """
    if strings and plans.texts is not None and not _takes_strings(plans):
        return read(plans.texts), True
    try:
        return read(plans), False
    except Failure as failure:
        texts = plans_of_texts(plans, failure)
        if texts is None:
            raise
    return read(texts), True


def expect_no_text(plans: InputPlans, names: Collection[str]) -> None:
    """Raise UnknownInput if a request names texts that the version takes: it is read again with the plans of texts.

    For readers that take a name which is no input's for something else.
    """
    for name in (TEXT, TEXT_PAIR):
        if name in names and plans.texts is not None:
            plans.named(name)


def are_strings(document: object) -> bool:
    """Return whether the rows, or the one column, of a JSON document are strings, which name no input."""
    if gives_texts(document):
        return True
    values = document.get("instances") if isinstance(document, dict) else document
    return type(values) is list and set(map(type, values)) == {str}


def _takes_strings(plans: InputPlans) -> bool:
    return any(plan.datatype == BYTES for plan in plans)


def plans_of_texts(plans: InputPlans, failure: Failure) -> InputPlans | None:
    """Return the plans for a second reading of a request that `plans` refused; None if it does not give texts."""
    names_text = isinstance(failure, UnknownInput) and failure.name in {TEXT, TEXT_PAIR}
    return plans.texts if names_text else None
