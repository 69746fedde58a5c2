"""JSON bodies of TorchServe's management API, for the OpenAPI document.

Source: pytorch/serve, "Management API"; DescribeModelResponse and ListModelsResponse of its http package.
"""

from __future__ import annotations

from typing import Literal, NotRequired

from pydantic import BaseModel, ConfigDict
from typing_extensions import TypedDict


class LoadModel(BaseModel):
    """The body of SageMaker's POST. `url`: the folder of the model."""

    model_config = ConfigDict(extra="ignore")

    model_name: str
    url: str


class ListedModel(TypedDict):
    """A model, and the path of its serving version in the repository."""

    modelName: str
    modelUrl: str


class ListedModels(TypedDict):
    """A page of models. `nextPageToken` is absent on the last page."""

    nextPageToken: NotRequired[str]
    models: list[ListedModel]


class DescribedWorker(TypedDict):
    """A worker that has loaded the version."""

    id: str
    startTime: str
    status: Literal["READY", "LOADING", "UNLOADING", "FAILED"]
    memoryUsage: int
    pid: int
    gpu: bool
    gpuUsage: str


class JobQueueStatus(TypedDict):
    """Rows that may still wait, and requests that wait."""

    remainingCapacity: int
    pendingRequests: int


class DescribedVersion(TypedDict):
    """One version of a model."""

    modelName: str
    modelVersion: str
    modelUrl: str
    engine: str
    runtime: str
    minWorkers: int
    maxWorkers: int
    batchSize: int
    maxBatchDelay: int
    responseTimeout: int
    loadedAtStartup: bool
    default: bool
    workers: list[DescribedWorker]
    jobQueueStatus: JobQueueStatus


class ManagementStatus(TypedDict):
    """What was done."""

    status: str


SCHEMAS = (LoadModel, ListedModel, ListedModels, DescribedVersion, ManagementStatus)
