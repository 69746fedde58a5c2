"""schemas_races: the JSON documents of the admin API about races, made from the repository's documents. Pure."""

from __future__ import annotations

from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from millstream.plugins.compile.stored.races import (
    SECONDS_DEFAULT,
    SECONDS_MAX,
    TARGETS_MAX,
    Gate,
    Race,
    RaceOptions,
    RaceState,
)


class GateLimits(Gate):
    """The gate of a request."""

    model_config = ConfigDict(extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _without_metric(cls, document: Any) -> Any:
        if isinstance(document, dict) and "metric" in document:
            raise ValueError("metric: the gate has limits alone, cosine_min and agreement_min")
        return document


class RaceRequest(BaseModel):
    """What a race is asked for. Every field has a default."""

    model_config = ConfigDict(extra="forbid")

    seconds: float = Field(SECONDS_DEFAULT, gt=0, le=SECONDS_MAX, description="Longest time of the race.")
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
            seconds=self.seconds,
            targets=self.targets,
            gate=Gate(**self.gate.model_dump()),
            accept_random_samples=self.accept_random_samples,
        )


class RaceUndone(BaseModel):
    """Why the winner of a race serves no longer."""

    why: str
    at: float = Field(description="Seconds since the epoch.")
    automatic: bool = Field(description="Whether a worker decided it; false: it was asked for.")


class RacePast(BaseModel):
    """How an earlier race of the version ended on this kind of device."""

    state: RaceState
    ended_at: float
    winner: str | None
    ratio: float
    why: str


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
    def of(cls, race: Race, *, serving: bool) -> Self:
        report = race.report or {}
        return cls(
            model=race.model,
            version=race.version,
            pool=race.pool,
            kind=race.kind,
            device=race.device,
            state=race.state,
            why=race.why,
            requested_at=race.requested_at,
            began_at=race.began_at or None,
            ended_at=race.ended_at or None,
            worker=race.worker or None,
            tries=race.tries,
            options=race.options,
            progress=race.progress,
            baseline=report.get("baseline"),
            winner=race.winner,
            ratio=report.get("ratio", 1.0),
            table=report.get("table", {}),
            rows=report.get("rows", []),
            report=race.report,
            serving=serving,
            undone=RaceUndone(**race.undone.model_dump()) if race.undone is not None else None,
            past=[RacePast(**one.model_dump()) for one in race.past],
        )


class SamplesStored(BaseModel):
    """Samples that later races of a version use."""

    arrays: dict[str, list[int]] = Field(description="Name -> shape.")
