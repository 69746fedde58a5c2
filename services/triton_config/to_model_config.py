"""How a version is to be served: scheduling, instances, warm-up and labels of a configuration -> our ModelConfig.

Given + Signature (fitted) ─> Serving (ModelConfig, notes on what changes nothing here)
"""

from __future__ import annotations

from typing import Any, NamedTuple

from millstream.services.errors import invalid
from millstream.services.model.manifest import LEVELS_MAX, ROWS_MAX_DEFAULT, SIZES_MAX, ModelConfig, QueuePolicy
from millstream.services.model.paths import plain_path
from millstream.services.model.signature import Signature
from millstream.services.triton_config.config import Given
from millstream.services.triton_config.ignored_fields import notes_of
from millstream.services.triton_config.to_warmup import warmups

DELAY_MS_MAX = 10_000
_MICROSECONDS = 1000
_KINDS = ("KIND_AUTO", "KIND_GPU", "KIND_CPU", "KIND_MODEL")
_POOLS = {"KIND_GPU": "gpu", "KIND_CPU": "cpu"}


class Serving(NamedTuple):
    config: ModelConfig
    notes: tuple[str, ...]


def serving(given: Given, signature: Signature, pool: str) -> Serving:
    """`signature`: as the configuration has it. `pool`: which one serves models that name no kind of device.

    Raises Failure(INVALID).
    """
    message = given.message
    rows_max = message.max_batch_size or ROWS_MAX_DEFAULT
    chosen, instances = _instances(message, pool)
    config = ModelConfig(
        batching=signature.batching,
        rows_max=rows_max,
        pool=chosen,
        instances_max=instances,
        warmup=warmups(message, signature, rows_max),
        labels=_labels(message),
    )
    if message.HasField("dynamic_batching"):
        config = config.model_copy(update=_scheduling(message.dynamic_batching, rows_max))
    return Serving(config, notes_of(message, config))


def _instances(message: Any, pool: str) -> tuple[str, int]:
    """The pool and the number of workers that the instance groups ask for."""
    if not message.instance_group:
        return pool, 0
    pools = {
        _POOLS.get(_KINDS[group.kind] if group.kind < len(_KINDS) else "", pool) for group in message.instance_group
    }
    if len(pools) > 1:
        raise invalid("instance_group asks for CPU and GPU: a version is served by one pool")
    if any(group.passive for group in message.instance_group):
        raise invalid("instance_group: passive instances are not supported")
    if any(group.count < 0 for group in message.instance_group):
        raise invalid("instance_group: a count is negative")
    return pools.pop(), sum(group.count or 1 for group in message.instance_group)


def _labels(message: Any) -> dict[str, str]:
    return {
        one.name: plain_path(one.label_filename, f"output {one.name!r}: label_filename")
        for one in message.output
        if one.label_filename
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
