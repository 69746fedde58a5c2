"""Translates scheduling, instances, warm-up and labels of a Triton configuration to our ModelConfig.

ParsedConfig + Signature (for clients) ─> TranslatedConfig (ModelConfig, notes on ignored fields)
"""

from __future__ import annotations

from collections import Counter
from typing import Any, NamedTuple

from millstream.plugins.compat.triton.config.config import ParsedConfig
from millstream.plugins.compat.triton.config.to_warmup import to_warmups
from millstream.plugins.compat.triton.config.unsupported_fields import ignored_field_notes
from millstream.services.errors import invalid
from millstream.services.model.manifest import LEVELS_MAX, ROWS_MAX_DEFAULT, SIZES_MAX, ModelConfig, QueuePolicy
from millstream.services.model.names import plain_path
from millstream.services.model.signature import Signature

DELAY_MS_MAX = 10_000
_MICROSECONDS = 1000
_KINDS = ("KIND_AUTO", "KIND_GPU", "KIND_CPU", "KIND_MODEL")
_POOLS = {"KIND_GPU": "gpu", "KIND_CPU": "cpu"}


class TranslatedConfig(NamedTuple):
    """Our form of a Triton configuration, and a note for each ignored field."""

    config: ModelConfig
    notes: tuple[str, ...]


def to_model_config(parsed: ParsedConfig, signature: Signature) -> TranslatedConfig:
    """Translate a configuration. Raises Failure(INVALID).

    `signature` is the one that clients see.
    """
    message = parsed.message
    rows_max = message.max_batch_size or ROWS_MAX_DEFAULT
    pools, instances = _instances(message)
    config = ModelConfig(
        batching=signature.batching,
        rows_max=rows_max,
        pools=pools,
        instances_max=instances,
        warmup=to_warmups(message, signature, rows_max),
        labels=_labels(message),
    )
    if message.HasField("dynamic_batching"):
        config = config.model_copy(update=_scheduling(message.dynamic_batching, rows_max))
    return TranslatedConfig(config, ignored_field_notes(message, config))


def _instances(message: Any) -> tuple[tuple[str, ...], int]:
    """Return the pools, the GPU's first, and the number of workers of each that the instance groups request.

    A group that names no kind of device may be served by all pools that can run the model.
    """
    groups = message.instance_group
    if not groups:
        return (), 0
    if any(group.count < 0 for group in message.instance_group):
        raise invalid("instance_group: a count is negative")
    kinds = {_KINDS[group.kind] if group.kind < len(_KINDS) else "" for group in groups}
    pools = tuple(pool for kind, pool in _POOLS.items() if kind in kinds) if kinds <= _POOLS.keys() else ()
    counts: Counter[int] = Counter()
    for group in groups:
        counts[group.kind] += group.count or 1
    return pools, max(counts.values())


def _labels(message: Any) -> dict[str, str]:
    return {
        output.name: plain_path(output.label_filename, f"output {output.name!r}: label_filename")
        for output in message.output
        if output.label_filename
    }


def _scheduling(batching: Any, rows_max: int) -> dict[str, Any]:
    if len(set(batching.preferred_batch_size)) > SIZES_MAX:
        raise invalid(f"preferred_batch_size names more than {SIZES_MAX} sizes")
    for size in batching.preferred_batch_size:
        if not 1 <= size <= rows_max:
            raise invalid(f"preferred_batch_size {size} is not from 1 to max_batch_size {rows_max}")
    delay_ms = batching.max_queue_delay_microseconds / _MICROSECONDS
    if delay_ms > DELAY_MS_MAX:
        raise invalid(f"max_queue_delay_microseconds is more than {DELAY_MS_MAX * _MICROSECONDS}")
    levels = batching.priority_levels
    if levels > LEVELS_MAX:
        raise invalid(f"priority_levels {levels} is more than {LEVELS_MAX}")
    default = batching.default_priority_level
    if (levels or default) and not 1 <= default <= levels:
        raise invalid(f"default_priority_level {default} is not from 1 to priority_levels {levels}")
    policies = batching.priority_queue_policy
    for level in policies:
        if not 1 <= level <= levels:
            raise invalid(f"priority_queue_policy for level {level}, which is not from 1 to priority_levels {levels}")
    return {
        "rows_preferred": tuple(sorted(set(batching.preferred_batch_size))),
        "queue_delay_ms_max": delay_ms,
        "priority_levels": levels,
        "priority_default": default,
        "queue": _policy(batching.default_queue_policy),
        "queue_by_priority": {level: _policy(policies[level]) for level in sorted(policies)},
    }


def _policy(policy: Any) -> QueuePolicy:
    return QueuePolicy(
        timeout_ms_default=policy.default_timeout_microseconds / _MICROSECONDS,
        timeout_action="delay" if policy.timeout_action else "reject",
        timeout_override=policy.allow_timeout_override,
        requests_max=policy.max_queue_size,
    )
