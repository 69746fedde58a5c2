"""Those of the API for the management of models."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, Field

_SAGEMAKER_MODELS = Path("/opt/ml/models")


class TorchServeSettings(BaseModel):
    """Settings of /models."""

    sagemaker_multi_model: bool = Field(
        False,
        validation_alias="SAGEMAKER_MULTI_MODEL",
        description="Whether /models is that of SageMaker's multi-model containers, in place of TorchServe's.",
    )
    import_dir: Path | None = Field(
        None,
        description="Folder of the model files that `POST /models` may name. Unset: /opt/ml/models in "
        "SageMaker's multi-model containers, else none.",
    )

    @property
    def importable_dir(self) -> Path | None:
        """Folder of the model files that `POST /models` may name; None: there is none."""
        return self.import_dir or (_SAGEMAKER_MODELS if self.sagemaker_multi_model else None)
