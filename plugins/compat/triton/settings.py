"""Those that Triton's extensions add."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, Field, field_validator


class TritonSettings(BaseModel):
    """Settings of repositories in place and of clients' shared memory."""

    triton_repositories: str = Field(
        "", description="Folders of Triton model repositories to serve in place, comma separated."
    )
    shm_allow_clients: bool = Field(
        False, description="Let clients on this machine pass tensors in shared memory regions that they created."
    )

    @field_validator("triton_repositories", mode="after")
    @classmethod
    def _absolute(cls, text: str) -> str:
        """Return absolute folders: processes that are started with them may run in another one."""
        folders = (part.strip() for part in text.split(","))
        return ",".join(str(Path(folder).expanduser().absolute()) for folder in folders if folder)

    @property
    def triton_repository_dirs(self) -> list[Path]:
        """The folders of `triton_repositories`."""
        return [Path(folder) for folder in self.triton_repositories.split(",") if folder]
