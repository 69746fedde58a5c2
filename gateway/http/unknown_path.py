"""unknown_path: says what is wrong with a path that no route has: a slash in a model's name, a misspelt call. Pure."""

from __future__ import annotations

from millstream.gateway.connection.request_head import has_encoded_slash
from millstream.services.errors import Code, Failure
from millstream.services.model.names import NAME_RULE
from millstream.services.nearest_names import CHARACTERS_MAX, did_you_mean

#: path before a model's name -> what may follow the name
_CALLS: dict[str, tuple[str, ...]] = {
    "/v2/models/": ("infer", "generate", "generate_stream", "ready", "config", "stats", "trace", "versions"),
    "/v2/repository/models/": ("load", "unload"),
    "/v1/models/": ("versions", "labels", "metadata"),
    "/admin/v1/models/": ("versions",),
    "/endpoints/": ("invocations", "invocations-response-stream", "async-invocations"),
}


#: names of regions may have slashes
_REGIONS = ("/v2/systemsharedmemory/", "/v2/cudasharedmemory/")


def slash_fault(path: str, raw_path: bytes) -> Failure | None:
    """Return the refusal of a path with an encoded slash: a proxy that checks paths may have read another one."""
    if not has_encoded_slash(raw_path) or path.startswith(_REGIONS):
        return None
    return Failure(Code.INVALID, f"the path has an encoded slash (%2F); a model name has no slash: {NAME_RULE}")


def path_advice(path: str) -> str:
    """Return what is wrong with `path`, for the end of a message; "" if nothing is known about it."""
    prefix = next((prefix for prefix in _CALLS if path.startswith(prefix)), None)
    if prefix is None:
        return ""
    name, *rest = path.removeprefix(prefix).split("/")
    if not name:
        return "; the path has no model name"
    if path.endswith("/"):
        return "; the path ends with a slash: leave it out"
    if not rest or rest[0] in _CALLS[prefix]:
        return ""
    call = rest[0][:CHARACTERS_MAX]
    meant = did_you_mean(call, _CALLS[prefix]) or f"; a model name has no slash: {NAME_RULE}"
    return f"; a model has no call '{call}'{meant}"
