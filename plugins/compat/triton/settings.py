"""Those that Triton's extensions add."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, Field, field_validator

from millstream.plugins.compat.triton.trace_settings import at_start
from millstream.services.errors import Failure


class TritonSettings(BaseModel):
    """Settings of repositories in place, of clients' shared memory, and of trace files."""

    triton_repositories: str = Field(
        "", description="Folders of Triton model repositories to serve in place, comma separated."
    )
    shm_allow_clients: bool = Field(
        False, description="Let clients on this machine pass tensors in shared memory regions that they created."
    )
    trace_file: Path | None = Field(
        None, description="File that request traces are written to. Unset: `logs/trace.json` in `home`."
    )
    trace_config: str = Field(
        "",
        description="Trace settings at start as KEY=VALUE, comma separated; keys: level, rate, count, log-frequency.",
    )

    @field_validator("triton_repositories", mode="after")
    @classmethod
    def _absolute(cls, text: str) -> str:
        """Return absolute folders: processes that are started with them may run in another one."""
        folders = (part.strip() for part in text.split(","))
        return ",".join(str(Path(folder).expanduser().absolute()) for folder in folders if folder)

    @field_validator("trace_config", mode="after")
    @classmethod
    def _usable_trace(cls, text: str) -> str:
        try:
            at_start(text)
        except Failure as failure:
            raise ValueError(failure.message) from failure
        return text

    @property
    def triton_repository_dirs(self) -> list[Path]:
        """The folders of `triton_repositories`."""
        return [Path(folder) for folder in self.triton_repositories.split(",") if folder]
