"""Those of the API for the management of models."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, Field

_SAGEMAKER_MODELS = Path("/opt/ml/models")


class TorchServeSettings(BaseModel):
    """Settings of /models."""

    management_api: Literal["torchserve", "sagemaker"] = Field(
        "torchserve",
        description="API that is served under /models: `torchserve` or `sagemaker` (multi-model containers).",
    )
    import_dir: Path | None = Field(
        None,
        description="Folder of the model files that `POST /models` may name. Unset: /opt/ml/models for `sagemaker`, "
        "else none.",
    )

    @property
    def importable_dir(self) -> Path | None:
        """Folder of the model files that `POST /models` may name; None: there is none."""
        return self.import_dir or (_SAGEMAKER_MODELS if self.is_container else None)

    @property
    def is_container(self) -> bool:
        """Whether /models is that of SageMaker's multi-model containers."""
        return self.management_api == "sagemaker"
