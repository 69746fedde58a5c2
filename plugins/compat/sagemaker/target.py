"""Finds the model and the version that a request of SageMaker names. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from millstream.gateway.access.principal import shown
from millstream.gateway.catalog.snapshot import Snapshot
from millstream.gateway.tensors.json_document import excerpt
from millstream.services.errors import Code, Failure, invalid, not_found

TARGET_MODEL = "x-amzn-sagemaker-target-model"
INFERENCE_COMPONENT = "x-amzn-sagemaker-inference-component"
TARGET_VARIANT = "x-amzn-sagemaker-target-variant"
TARGET_CONTAINER = "x-amzn-sagemaker-target-container-hostname"

_SUFFIX = ".tar.gz"


def default_model(snapshot: Snapshot, configured: str | None) -> str:
    """The model of requests that name none: the configured one, or the only one. Raises Failure.

    Names no model that the caller may not know of.
    """
    serving = sorted(name for name, view in snapshot.models.items() if view.serving is not None)
    name = configured or (serving[0] if len(serving) == 1 else None)
    if name is not None:
        if not shown([name]):
            raise Failure(Code.FORBIDDEN, "the key lacks the scope 'infer:<model>' of the default model")
        return name
    if not serving:
        raise not_found("there is no model yet: upload one")
    known = shown(serving)
    names = f" ({', '.join(known[:5])}{', …' * (len(known) > 5)})" if known else ""
    raise invalid(f"there are {len(serving)} models{names}: set MILLSTREAM_SAGEMAKER_MODEL to the one that is meant")


def named_model(snapshot: Snapshot, headers: Mapping[str, str]) -> str | None:
    """The model that a header names, with or without `.tar.gz`; None: no header does.

    Raises Failure(INVALID) for a header that names a container: another one might answer differently.
    """
    if headers.get(TARGET_CONTAINER):
        raise invalid("TargetContainerHostname is not supported: name the model as EndpointName or TargetModel")
    name = headers.get(TARGET_MODEL) or headers.get(INFERENCE_COMPONENT)
    if not name:
        return None
    name = name.removeprefix("/")
    return name if name in snapshot.models else name.removesuffix(_SUFFIX)


def variant_version(headers: Mapping[str, str]) -> str | None:
    """The version that Target-Variant names. Raises Failure(NOT_FOUND) for a variant that is not a number."""
    variant = headers.get(TARGET_VARIANT)
    if variant is None or (variant.isascii() and variant.isdigit()):
        return variant
    raise not_found(f"Target-Variant '{excerpt(variant)}' is no version: variants are the numbers of versions here")
