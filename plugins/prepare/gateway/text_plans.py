"""The texts that a request may have in place of a model's token inputs, their limits, and the inputs of them. Pure.

bytes of the texts ─> tokenizer ─> tokens of each text, and of all ─> padded to the longest: the inputs of the version

"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from millstream.gateway.tensors.hugging_face import gives_texts
from millstream.gateway.tensors.input_plans import InputPlans, Inputs, join
from millstream.gateway.tensors.inputs import InputPlan, InputTensor
from millstream.gateway.tensors.json_document import excerpt
from millstream.gateway.tensors.nested_lists import from_array
from millstream.gateway.tensors.prepared import PreparedPlans
from millstream.services.errors import invalid
from millstream.services.model.datatypes import BYTES, decode_elements
from millstream.services.model.manifest import Manifest
from millstream.services.model.signature import Signature, TensorSpec
from millstream.services.model.usage import IDS, MASK, TEXT, TYPES

if TYPE_CHECKING:
    from millstream.plugins.prepare.gateway.tokenizers import Tokenizers

TEXT_PAIR = "text_pair"
TEXT_SPEC = TensorSpec(name=TEXT, datatype=BYTES, shape=(-1,))
#: texts of a request to a version that does not batch; rows_max bounds those of other versions
TEXTS_MAX = 2048
#: one text, in UTF-8; a tokenizer needs about a hundred times as much memory
TEXT_BYTES_MAX = 256 << 10
#: all texts of a request
TEXTS_BYTES_MAX = 4 << 20
TOKENS_MAX = 8192  # of one text
TOKENS_TOTAL_MAX = 300_000
#: texts times the tokens of the longest: all are padded to its length; 8 MiB of INT64 for each input
PADDED_TOKENS_MAX = 1 << 20
ID_BYTES = 8

Array = np.ndarray[Any, Any]


class TextPlans(PreparedPlans):
    """The plans of requests with texts: the one input TEXT, and the outputs of the version.

    Args:
        manifest: of a version that takes texts.
        own: the version's own plans.
        tokenizers: make token ids of texts.
    """

    names = frozenset({TEXT, TEXT_PAIR})
    media = frozenset({"text/plain"})

    def __init__(self, manifest: Manifest, own: InputPlans, tokenizers: Tokenizers) -> None:
        outputs, batching = manifest.answered.outputs, manifest.signature.batching
        signature = Signature(inputs=(TEXT_SPEC,), outputs=outputs, batching=batching)
        super().__init__(manifest.model, signature, own.rows_max, own.json_limits)
        self._manifest, self._own, self._tokenizers = manifest, own, tokenizers
        self.hint = (
            ': it takes token ids; texts go as {"instances": ["a text"]} in JSON to /invocations or '
            f"/v1/models/{self.model}:predict, or as the one BYTES input 'text' to /v2/models/{self.model}/infer"
        )

    def gives(self, document: object) -> bool:
        """Return whether the rows, or the one column, of a JSON document are strings, which name no input."""
        if gives_texts(document):
            return True
        values = document.get("instances") if isinstance(document, dict) else document
        return type(values) is list and set(map(type, values)) == {str}

    async def prepare(self, inputs: Sequence[InputTensor]) -> Inputs:
        return await self._tokenizers.inputs(self._manifest, self._own, inputs[0])

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


def token_inputs(
    plans: InputPlans,
    entries: Sequence[Sequence[int]],
    padded_max: int = 0,
    types: Sequence[Sequence[int]] | None = None,
) -> tuple[Inputs, Array]:
    """Return token ids of at least one row as one request, and a mask of the tokens that are not padding.

    Args:
        plans: inputs of which `takes_tokens` is true.
        entries: the ids of each row.
        padded_max: tokens up to which rows are padded to one of few lengths, so that requests share runs; 0: they are
            padded to the longest.
        types: the type of each token; None: 0.

    Raises:
        Failure: INVALID.
    """
    width = _width(plans, entries, padded_max)
    rows = len(entries)
    if rows * width > PADDED_TOKENS_MAX:
        raise invalid(
            f"{rows} texts padded to the {width} tokens of the longest have {rows * width} tokens: at most "
            f"{PADDED_TOKENS_MAX}; send fewer texts together, or none that is so long"
        )
    try:
        ids = np.array([[*entry, *[0] * (width - len(entry))] for entry in entries], np.int64)
    except OverflowError:
        raise invalid("a token id is out of the range of INT64") from None
    mask = (np.arange(width) < np.array([[len(entry)] for entry in entries])).astype(np.int64)
    kinds = np.zeros_like(ids)
    for row, of_tokens in enumerate(types or ()):
        kinds[row, : len(of_tokens)] = of_tokens
    columns = {IDS: ids, MASK: mask, TYPES: kinds}
    return join(plans, {plan.name: from_array(plan, columns[_role(plan)]) for plan in plans}), mask


def rows_padded_max(plans: InputPlans, entries: Sequence[Sequence[int]]) -> int:
    """Return how many of these entries `token_inputs` takes at once, at least 1. Raises Failure(INVALID)."""
    return max(1, PADDED_TOKENS_MAX // _width(plans, entries))


def _role(plan: InputPlan) -> str:
    return plan.name if plan.name in {MASK, TYPES} else IDS


def padded_width(tokens: int, padded_max: int) -> int:
    """Return the length to which a row of so many tokens is padded: the next of few, at most an eighth or 8 more."""
    step = max(8, 1 << max(tokens.bit_length() - 4, 0))
    return max(tokens, min(-(-tokens // step) * step, padded_max))


def padded_max_of(manifest: Manifest) -> int:
    """Return up to how many tokens rows may be padded; 0: that may change the answers, or their shape."""
    signature, imported = manifest.signature, manifest.imported
    if imported is None or all(spec.name != MASK for spec in signature.inputs):
        return 0
    return 0 if any(-1 in spec.shape[1:] for spec in signature.outputs) else imported.padded_max


def _width(plans: InputPlans, entries: Sequence[Sequence[int]], padded_max: int = 0) -> int:
    """Return the tokens of each row, with padding: those that the model wants, else those of the longest entry."""
    longest = max(map(len, entries))
    fixed = next(plan for plan in plans if _role(plan) == IDS).shape[1]
    if fixed >= 0 and longest > fixed:
        raise invalid(f"the model takes at most {fixed} tokens, and an entry has {longest}")
    return padded_width(longest, padded_max) if fixed < 0 else fixed


def strings_of(texts: InputTensor) -> list[str]:
    """Return the elements of a BYTES tensor. Raises Failure(INVALID) unless they are UTF-8, and within the limits."""
    if not 0 < texts.shape[0] <= TEXTS_MAX:
        raise invalid(f"'{TEXT}' has {texts.shape[0]} texts: at least 1, at most {TEXTS_MAX}")
    found: list[str] = []
    elements = decode_elements(bytes(texts.data))
    _check_sizes(TEXT, [len(element) for element in elements])
    for index, element in enumerate(elements):
        try:
            found.append(element.decode())
        except UnicodeDecodeError:
            raise invalid(f"'{TEXT}[{index}]' is not UTF-8") from None
    return found


def check_bytes(name: str, texts: Sequence[str]) -> None:
    """Raise Failure(INVALID) for a text, or texts together, of too many bytes; `name`: of the member that has them."""
    _check_sizes(name, [len(text) if text.isascii() else len(text.encode()) for text in texts])


def _check_sizes(name: str, sizes: Sequence[int]) -> None:
    for index, size_bytes in enumerate(sizes):
        if size_bytes > TEXT_BYTES_MAX:
            raise invalid(f"'{name}[{index}]' has {size_bytes} bytes: at most {TEXT_BYTES_MAX}")
    if sum(sizes) > TEXTS_BYTES_MAX:
        raise invalid(f"'{name}' has {sum(sizes)} bytes: at most {TEXTS_BYTES_MAX} in a request")


def check_tokens(name: str, counts: Sequence[int]) -> None:
    """Raise Failure(INVALID) for a text without a token, and for too many tokens in a text, or in all texts."""
    for index, count in enumerate(counts):
        if not count:
            raise invalid(f"'{name}[{index}]' has no token")
        if count > TOKENS_MAX:
            raise invalid(f"'{name}[{index}]' has {count} tokens: at most {TOKENS_MAX}")
    if sum(counts) > TOKENS_TOTAL_MAX:
        raise invalid(f"'{name}' has {sum(counts)} tokens: at most {TOKENS_TOTAL_MAX} in a request")
