"""Shared memory of clients, registered by name, so that tensors need not pass through a socket.

register ─> regions.json (one for all gateways of the machine) ─> read / target, in the gateway that has the request

Bytes are copied with pread and pwrite, not mapped: a client that truncates its memory while a mapping of it is in use
would kill the gateway with SIGBUS.

A registration belongs to a file, not to a name: it has the file's device and inode, and a unique token. A region that
is registered again is therefore opened again in every gateway. A file that was replaced after its registration is
refused in all gateways, where the reference server would use the old file. If the name is removed, gateways that have
the file open keep using it, as in the reference server.

A region belongs to the key that registered it: other keys can neither use, list nor unregister it, nor register the
same memory under another name. Keys with the scope `admin` may; what was registered without a key is theirs.
"""

from __future__ import annotations

import os
import secrets
import stat
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from millstream.gateway.access.principal import CALLER
from millstream.gateway.tensors.json_document import excerpt
from millstream.plugins.compat.triton.settings import TritonSettings
from millstream.plugins.compat.triton.shared_settings import SharedDocument
from millstream.services.errors import Code, Failure, invalid, not_found
from millstream.services.installation import shm_prefix
from millstream.services.settings import Settings, settings_of

REGIONS_MAX = 4096  # registered regions; more are refused
NAME_CHARACTERS_MAX = 255
_RESERVED = "triton_python_backend_shm_region_"
_DISABLED = (
    "Client shared memory is disabled. Start the server with '--shm-allow-clients' to enable it "
    "(MILLSTREAM_SHM_ALLOW_CLIENTS=true)."
)


@dataclass(frozen=True, slots=True)
class Region:
    """Shared memory of a client, registered under a name."""

    name: str
    key: str  # the name for shm_open
    offset: int  # start of the part that may be used
    size_bytes: int  # size of that part


class _Registration(NamedTuple):
    """A region as it is stored in the document."""

    region: Region
    file: tuple[int, int]  # device and inode of the memory
    token: str  # the id of the key that registered it, and what differs for each registration

    @property
    def owner(self) -> str:
        """The id of the key that registered it; "": the admin key, or none was needed."""
        # In the token, which earlier releases do not read: gateways of both read the document during an upgrade.
        return self.token.rpartition(".")[0]

    @classmethod
    def of(cls, name: str, entry: list[Any]) -> _Registration:
        key, offset, size_bytes, device, inode, token = entry
        return cls(Region(name, key, offset, size_bytes), (device, inode), token)

    @property
    def entry(self) -> list[Any]:
        region = self.region
        return [region.key, region.offset, region.size_bytes, *self.file, self.token]


class _OpenFile:
    """The open file of a region. It is closed with its last reference, which may outlive the registration."""

    def __init__(self, region: Region, path: Path) -> None:
        self.region = region
        self.path = path
        self.fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        weakref.finalize(self, os.close, self.fd)
        status = os.fstat(self.fd)
        self.file = (status.st_dev, status.st_ino)

    def replaced(self) -> bool:
        """Whether the name belongs to another file now. False if the name was removed."""
        try:
            status = self.path.lstat()
        except OSError:
            return False
        return (status.st_dev, status.st_ino) != self.file


class RegionTarget:
    """A part of a region that an output is written to."""

    def __init__(self, opened: _OpenFile, offset: int, size_bytes: int) -> None:
        self._opened = opened
        self._at = opened.region.offset + offset
        self.size_bytes = size_bytes

    def write(self, data: bytes | memoryview, output: str) -> None:
        """Write an output. Raises Failure(INVALID) when the region is too small for it, or has become too small."""
        view = memoryview(data).cast("B")
        if len(view) > self.size_bytes:
            raise invalid(
                f"shared memory size specified with the request for output '{output}' ({self.size_bytes} bytes) should "
                f"be at least {len(view)} bytes to hold the results"
            )
        fd, at = self._opened.fd, self._at
        if os.fstat(fd).st_size < at + len(view):  # a write past the end would enlarge the client's memory
            raise _outside(self._opened.region)
        while view:
            try:
                written = os.pwrite(fd, view, at)
            except OSError as error:
                raise invalid(f"the result cannot be written to the shared memory: {error.strerror}") from error
            view = view[written:]
            at += written


class ClientMemory:
    """The shared memory of clients.

    Args:
        folder: The folder in which shm_open's names are files.
        instance: Prefix of Millstream's own segments, which no client may name.
        allowed: Whether clients may use shared memory.
        enforced: Whether calls need a key.
    """

    def __init__(
        self, folder: Path, instance: str, *, allowed: bool, enforced: Callable[[], bool] = lambda: False
    ) -> None:
        # In a separate folder: a starting gateway would take a file with this prefix for a leftover segment.
        self._document = SharedDocument(folder / f"{instance}.clients" / "regions.json")
        self._folder = folder
        self._own_prefix = instance
        self._allowed = allowed
        self._enforced = enforced
        self._content: dict[str, Any] | None = None
        self._regions: dict[str, _Registration] = {}
        self._open: dict[str, tuple[_Registration, _OpenFile]] = {}

    def register(self, name: str, key: str, offset: int, size_bytes: int) -> None:
        """Register a region for the key of the caller.

        Raises Failure: CONFLICT (the name is taken, or the memory by another key), INVALID (no such memory, or too
        small).
        """
        self._check_allowed()
        if not 0 < len(name) <= NAME_CHARACTERS_MAX:
            raise invalid(f"a shared memory region has a name of 1 to {NAME_CHARACTERS_MAX} characters")
        if offset < 0 or size_bytes < 1:
            raise invalid(f"failed to register shared memory region '{name}': invalid args")
        opened = self._open_file(Region(name, key, offset, size_bytes))
        principal = CALLER.get()
        owner = "" if principal is None else principal.key_id
        token = secrets.token_hex(8)
        registration = _Registration(opened.region, opened.file, f"{owner}.{token}" if owner else token)

        def add(content: dict[str, Any]) -> None:
            if name in content:
                raise Failure(Code.CONFLICT, f"shared memory region '{name}' already in manager")
            others = (_Registration.of(*item) for item in content.items())
            if any(other.file == registration.file and not _is_of_caller(other) for other in others):
                raise Failure(Code.CONFLICT, f"the shared memory '{key}' was registered with another key")
            if len(content) >= REGIONS_MAX:
                raise Failure(Code.OVERLOADED, f"{REGIONS_MAX} shared memory regions are registered: unregister some")
            content[name] = registration.entry

        self._document.update(add)

    def unregister(self, name: str | None) -> None:
        """Unregister a region; None: all regions. An unknown name is no error."""
        self._check_allowed()
        if name is None:
            self._document.update(_remove_all)
        elif name in self._registered():
            self._document.update(lambda content: _remove(content, name))

    def regions(self, name: str | None) -> list[Region]:
        """Return a region; None: all regions. Raises Failure(NOT_FOUND) for an unknown name."""
        registered = {
            name: registration for name, registration in self._registered().items() if _is_of_caller(registration)
        }
        if name is None:
            return [registration.region for registration in registered.values()]
        if name not in registered:
            raise not_found(f"Unable to find system shared memory region: '{excerpt(name)}'")
        return [registered[name].region]

    def read(self, name: str, offset: int, size_bytes: int) -> bytes:
        """Return a copy of bytes of a region. Raises Failure(INVALID): no such region, or out of its bounds."""
        opened = self._find(name, offset, size_bytes)
        try:
            data = os.pread(opened.fd, size_bytes, opened.region.offset + offset)
        except OSError as error:
            raise invalid(f"shared memory region '{name}' cannot be read: {error.strerror}") from error
        if len(data) != size_bytes:
            raise _outside(opened.region)
        return data

    def target(self, name: str, offset: int, size_bytes: int) -> RegionTarget:
        """Return a part of a region for an output. Raises Failure(INVALID): no such region, or out of its bounds."""
        return RegionTarget(self._find(name, offset, size_bytes), offset, size_bytes)

    def _find(self, name: str, offset: int, size_bytes: int) -> _OpenFile:
        self._check_allowed()
        registration = self._registered().get(name)
        if registration is None or not self._may_use(registration):
            raise invalid(f"Unable to find shared memory region: '{excerpt(name)}'")
        if offset + size_bytes > registration.region.size_bytes:
            raise _outside(registration.region)
        entry = self._open.get(name)
        if entry is None or entry[0] is not registration:
            entry = self._open[name] = (registration, self._open_file(registration.region))
        opened = entry[1]
        if opened.file != registration.file or opened.replaced():
            raise invalid(
                f"the memory '{registration.region.key}' of shared memory region '{excerpt(name)}' was replaced since "
                "it was registered: unregister the region and register it again"
            )
        return opened

    def _may_use(self, registration: _Registration) -> bool:
        # A call whose key is not known must not use a region: requests always have a key while keys are checked.
        return (CALLER.get() is not None or not self._enforced()) and _is_of_caller(registration)

    def _check_allowed(self) -> None:
        if not self._allowed:
            raise Failure(Code.UNSUPPORTED, _DISABLED)

    def _open_file(self, region: Region) -> _OpenFile:
        name = region.key.removeprefix("/")
        if not name or "/" in name or "\0" in name or name in {".", ".."} or len(name) > NAME_CHARACTERS_MAX:
            raise invalid(f"'{region.key[:NAME_CHARACTERS_MAX]}' is not a name of shared memory")
        if name.startswith((_RESERVED, self._own_prefix)):
            raise invalid(f"shared memory of the name '{region.key}' is reserved")
        try:
            opened = _OpenFile(region, self._folder / name)
            status = os.fstat(opened.fd)
        except (OSError, ValueError) as error:
            reason = (isinstance(error, OSError) and error.strerror) or str(error)
            raise invalid(f"Unable to open shared memory region: '{region.key}': {reason}") from error
        if not stat.S_ISREG(status.st_mode) or region.offset + region.size_bytes > status.st_size:
            raise invalid(
                f"failed to register shared memory region '{region.name}': invalid args: it has {status.st_size} bytes"
            )
        return opened

    def _registered(self) -> dict[str, _Registration]:
        """Return the regions of the document. A region stays the same object while it is registered."""
        content = self._document.read()
        if content is not self._content:
            before = self._regions
            fresh = {name: _Registration.of(name, entry) for name, entry in content.items()}
            # files of unchanged registrations stay open
            self._regions = {name: before[name] if before.get(name) == new else new for name, new in fresh.items()}
            self._open = {name: pair for name, pair in self._open.items() if self._regions.get(name) is pair[0]}
            self._content = content
        return self._regions


def build(settings: Settings, enforced: Callable[[], bool]) -> ClientMemory:
    """Return the shared memory of a gateway's clients. `enforced`: whether calls need a key."""
    return ClientMemory(
        settings.shm_dir,
        shm_prefix(settings),
        allowed=settings_of(settings, TritonSettings).shm_allow_clients,
        enforced=enforced,
    )


def _is_of_caller(registration: _Registration) -> bool:
    """Whether the caller of the current task may see a region; without a key, only operators may call."""
    principal = CALLER.get()
    return principal is None or principal.grants.admin or registration.owner == principal.key_id


def _remove(content: dict[str, Any], name: str) -> None:
    entry = content.get(name)
    if entry is not None and _is_of_caller(_Registration.of(name, entry)):
        del content[name]


def _remove_all(content: dict[str, Any]) -> None:
    for name in list(content):
        _remove(content, name)


def _outside(region: Region) -> Failure:
    return invalid(f"Invalid offset + byte size for shared memory region: '{region.name}'")
