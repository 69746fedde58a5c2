"""Those of SageMaker's containers."""

from __future__ import annotations

from pydantic import AliasChoices, BaseModel, Field

from millstream.services.plugin.plugin import Serving
from millstream.services.settings import settings_of


class SageMakerSettings(BaseModel):
    """Settings of SageMaker's containers."""

    sagemaker_model: str | None = Field(
        None,
        validation_alias=AliasChoices("MILLSTREAM_SAGEMAKER_MODEL", "SAGEMAKER_TRITON_DEFAULT_MODEL_NAME"),
        description="Model that answers /invocations. Unset: the only model.",
    )
    sagemaker_port: int | None = Field(
        None,
        ge=1,
        le=65535,
        validation_alias="SAGEMAKER_BIND_TO_PORT",
        description="HTTP port of `millstream serve`, which SageMaker sets.",
    )


def is_multi_model(settings: object) -> bool:
    """Whether this is a multi-model container, whose /models the plug-in torchserve serves."""
    return bool(getattr(settings, "sagemaker_multi_model", False))


def serving(settings: object) -> Serving:
    """Return what SageMaker wants of its container."""
    own = settings_of(settings, SageMakerSettings)
    return Serving(port=own.sagemaker_port, name=own.sagemaker_model or "", by_calls=is_multi_model(settings))
