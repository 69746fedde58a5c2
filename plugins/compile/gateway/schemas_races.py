"""The JSON documents of the admin API about races, made from the repository's documents. Pure."""

from __future__ import annotations

from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from millstream.plugins.compile.race.report import Gate
from millstream.plugins.compile.stored.job import TARGETS_MAX, Job, RaceOptions, RacePast, RaceState, RaceUndone

#: What earlier releases took -> why it is refused.
_GONE = {
    "seconds": "a race measures each candidate as often; name targets to end it earlier",
    "metric": "the gate has limits alone, cosine_min and agreement_min",
}


class Refusing(BaseModel):
    """A document that refuses what earlier releases took with the reason."""

    model_config = ConfigDict(extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _refuse(cls, document: Any) -> Any:
        for name in _GONE if isinstance(document, dict) else ():
            if name in document and name not in cls.model_fields:
                raise ValueError(f"{name}: {_GONE[name]}")
        return document


class GateLimits(Refusing, Gate):
    """What the outputs of a candidate must agree in with those of the baseline."""

    model_config = ConfigDict(extra="forbid")


class RaceRequest(Refusing):
    """What a race is asked for. Every field has a default."""

    targets: tuple[str, ...] = Field(
        (), max_length=TARGETS_MAX, description="Targets, or keys of candidates, that take part; empty: all."
    )
    gate: GateLimits = GateLimits()
    accept_random_samples: bool = Field(
        False, description="Whether lossy targets may take part although inputs are random numbers."
    )
    pool: str | None = Field(None, description="Pool whose worker runs it; null: the first one that has it ready.")

    @property
    def options(self) -> RaceOptions:
        return RaceOptions(
            targets=self.targets,
            gate=Gate(**self.gate.model_dump()),
            accept_random_samples=self.accept_random_samples,
        )


class RaceDocument(BaseModel):
    """A race of a version on a kind of device, and its report."""

    model: str
    version: int
    pool: str
    kind: str = Field(description='Backend and device of the workers that it holds for, like "onnxruntime.cpu".')
    device: str = Field(description="Id of the device and of the versions of the libraries there.")
    state: RaceState
    why: str = Field(description="Why it waits, was queued again, or ended as it did.")
    requested_at: float = Field(description="Seconds since the epoch.")
    began_at: float | None = None
    ended_at: float | None = None
    worker: str | None = Field(None, description="That runs it.")
    tries: int = Field(description="How often a worker began it.")
    options: RaceOptions
    progress: dict[str, Any] = Field({}, description="The last event while it runs: stage, candidate, ratios so far.")
    baseline: str | None = Field(None, description="What served before: backend, threads and datatype.")
    winner: str | None = Field(None, description="Candidate that won; null: nothing changes, or there is no verdict.")
    ratio: float = Field(1.0, description="Times as fast as the baseline, weighted by batch size.")
    table: dict[int, str] = Field({}, description='Rows of a run -> candidate, or "baseline".')
    rows: list[dict[str, Any]] = Field([], description="All candidates with verdict, ratios and accuracy.")
    report: dict[str, Any] | None = Field(None, description="The whole report; null: there is no verdict.")
    serving: bool = Field(False, description="Whether workers of this kind follow the verdict.")
    undone: RaceUndone | None = None
    past: list[RacePast] = []

    @classmethod
    def of(cls, job: Job, *, serving: bool) -> Self:
        report = job.report.model_dump(mode="json") if job.report is not None else {}
        kept = (
            "model",
            "version",
            "pool",
            "kind",
            "device",
            "state",
            "why",
            "requested_at",
            "tries",
            "options",
            "undone",
        )
        return cls(
            **{name: getattr(job, name) for name in kept},
            began_at=job.began_at or None,
            ended_at=job.ended_at or None,
            worker=job.worker or None,
            progress=job.progress.model_dump(exclude_defaults=True),
            baseline=report.get("baseline"),
            winner=job.winner,
            ratio=job.ratio,
            table=report.get("table", {}),
            rows=report.get("rows", []),
            report=report or None,
            serving=serving,
            past=list(job.past),
        )


class SamplesStored(BaseModel):
    """Samples that later races of a version use."""

    arrays: dict[str, list[int]] = Field(description="Name -> shape.")
