"""token_inputs: token ids of texts -> the inputs of a model that takes tokens. Pure.

ids ─> padded to the longest ─> input_ids, attention_mask, token_type_ids
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from millstream.gateway.tensors.input_plan import InputPlan
from millstream.gateway.tensors.input_plans import InputPlans
from millstream.gateway.tensors.numpy_arrays import from_array
from millstream.gateway.tensors.request_inputs import Inputs, join
from millstream.gateway.texts.text_limits import PADDED_TOKENS_MAX, check_padded
from millstream.services.errors import invalid
from millstream.services.model.usage import IDS, MASK, TYPES

Array = np.ndarray[Any, Any]


def token_inputs(plans: InputPlans, entries: Sequence[Sequence[int]]) -> tuple[Inputs, Array]:
    """Return token ids as one request, and a mask of the tokens that are not padding. Raises Failure(INVALID).

    Args:
        plans: inputs of which `takes_tokens` is true.
        entries: the token ids of each row, at least one row.
    """
    width = _width(plans, entries)
    check_padded(len(entries), width)
    ids, mask = _padded(entries, width)
    columns = {IDS: ids, MASK: mask, TYPES: np.zeros_like(ids)}
    return join(plans, {plan.name: from_array(plan, columns[_role(plan)]) for plan in plans}), mask


def rows_padded_max(plans: InputPlans, entries: Sequence[Sequence[int]]) -> int:
    """Return how many of these entries `token_inputs` takes at once, at least 1. Raises Failure(INVALID)."""
    return max(1, PADDED_TOKENS_MAX // _width(plans, entries))


def _role(plan: InputPlan) -> str:
    return plan.name if plan.name in {MASK, TYPES} else IDS


def _width(plans: InputPlans, entries: Sequence[Sequence[int]]) -> int:
    """Return the tokens of each row, with padding: those that the model wants, else those of the longest entry."""
    longest = max(map(len, entries))
    fixed = next(plan for plan in plans if _role(plan) == IDS).shape[1]
    if fixed >= 0 and longest > fixed:
        raise invalid(f"the model takes at most {fixed} tokens, and an entry has {longest}")
    return longest if fixed < 0 else fixed


def _padded(entries: Sequence[Sequence[int]], width: int) -> tuple[Array, Array]:
    try:
        ids = np.array([[*entry, *[0] * (width - len(entry))] for entry in entries], np.int64)
    except OverflowError:
        raise invalid("a token id is out of the range of INT64") from None
    mask = (np.arange(width) < np.array([[len(entry)] for entry in entries])).astype(np.int64)
    return ids, mask
