"""Procedures of models, versions, API keys and the server: one for each method of the client. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple, TypedDict, cast
from urllib.parse import quote

from millstream.client.call import Call, Pause, Steps, json_call, json_of, listed, send
from millstream.client.documents import (
    EndpointSettings,
    ListedVersion,
    Metadata,
    Model,
    Placement,
    PoolScale,
    Version,
    VersionStatistics,
)
from millstream.client.errors import ServerError, Timeout, VersionFailed
from millstream.client.replies import document_of
from millstream.client.retry import Budget
from millstream.services.errors import Code, Failure, invalid
from millstream.services.model.names import check_name

WAIT_PAUSE_S_MIN = 0.05
WAIT_PAUSE_S_MAX = 1.0
#: states of a version that answers requests
AVAILABLE = frozenset({"ready", "standby"})
PLACEMENT_MODELS_MAX = 1000  # of one page
#: statuses of "not ready"
_NOT_READY = {400, 503}
_KEYS = "/admin/v1/keys"


class Sample(NamedTuple):
    """One value: name of the series, its labels, and the number."""

    name: str
    labels: dict[str, str]
    value: float


class Metrics:
    """The samples of one metrics page. `text` is the page itself."""

    def __init__(self, text: str) -> None:
        self.text = text

    @cached_property
    def samples(self) -> list[Sample]:
        """All samples in the page's order. Raises Failure(INTERNAL) for a page in another format."""
        from prometheus_client.parser import text_string_to_metric_families

        try:
            families = list(text_string_to_metric_families(self.text))
        except (ValueError, KeyError, IndexError) as error:
            raise Failure(Code.INTERNAL, f"/metrics is not a metrics page: {error}") from error
        return [Sample(one.name, dict(one.labels), one.value) for family in families for one in family.samples]

    def select(self, name: str, **labels: str) -> list[Sample]:
        """Return the samples of a series that have these labels."""
        return [one for one in self.samples if one.name == name and labels.items() <= one.labels.items()]

    def value(self, name: str, **labels: str) -> float:
        """Return the sum of the samples of a series that have these labels; 0 if there is none."""
        return sum(one.value for one in self.select(name, **labels))

    def __repr__(self) -> str:
        return f"Metrics({len(self.text)} characters)"


class SettingsChanges(TypedDict, total=False):
    """Changes of the settings of a model's endpoint; None leaves a setting as it is.

    Args:
        pools: pools that may serve it, the preferred one first; empty: those of the version.
        instances_min: instances that are always loaded.
        instances_max: most instances in a pool; 0: no limit.
        idle_s: seconds without a call until it is unloaded; 0: only if memory is short.
        pin: whether a loaded instance stays, also when memory is short.
        owner: name of an API key, "" for none; it needs the scope `admin`.
        labels: labels to set, by name; a value of None removes one.
    """

    pools: Sequence[str] | None
    instances_min: int | None
    instances_max: int | None
    idle_s: float | None
    pin: bool | None
    owner: str | None
    labels: Mapping[str, str | None] | None


def admin_path(model: str, version: int | None = None) -> str:
    """Return the path of a model or version in the admin API. Raises Failure(INVALID) for an impossible name."""
    return _path("/admin/v1/models", model, version)


def v2_path(model: str, version: int | None = None) -> str:
    """Return the path of a model or version in the Open Inference Protocol. Raises as `admin_path` does."""
    return _path("/v2/models", model, version)


def _path(parent: str, model: str, version: int | None) -> str:
    # The rule is told here: a slash in a name would lead to another path, whose error tells nothing.
    path = f"{parent}/{check_name(model)}"
    return path if version is None else f"{path}/versions/{version}"


def get_json(path: str, *members: str) -> Steps[dict[str, Any]]:
    """Return the JSON object at a path, which has these members."""
    return document_of((yield from send(Call("GET", path, repeatable=True))), *members)


def models(owner: str | None, labels: Mapping[str, str] | None) -> Steps[list[Model]]:
    query: dict[str, str | list[str]] = {} if owner is None else {"owner": owner}
    if labels:
        query["label"] = [f"{name}={value}" for name, value in labels.items()]
    reply = yield from send(Call("GET", "/admin/v1/models", query=query, repeatable=True))
    return cast("list[Model]", document_of(reply, "models")["models"])


def model(name: str) -> Steps[Model]:
    return cast("Model", (yield from get_json(admin_path(name), "versions", "active", "unloaded")))


def version(name: str, number: int) -> Steps[Version]:
    return cast("Version", (yield from get_json(admin_path(name, number), "version", "state", "reason")))


def versions(name: str) -> Steps[list[ListedVersion]]:
    return (yield from model(name))["versions"]


def metadata(name: str, number: int | None = None) -> Steps[Metadata]:
    return cast("Metadata", (yield from get_json(v2_path(name, number), "name", "inputs", "outputs")))


def wait(name: str, number: int | None, budget: Budget) -> Steps[Version]:
    """Return the version's document when it is ready or on standby.

    `number` None: the active version, once there is one. Raises VersionFailed, Timeout when the budget is used up,
    Failure(CONFLICT) for a model that is unloaded.
    """
    pause_s = WAIT_PAUSE_S_MIN
    late: Timeout | None = None
    while True:
        try:
            document = yield from (_active(name) if number is None else version(name, number))
        except Timeout as error:
            if late is None:
                raise
            raise late from error
        state = document["state"] if document else "without an active version"
        if document and state in AVAILABLE:
            return document
        if document and state == "failed":
            raise VersionFailed(name, document["version"], document["reason"] or "no reason is known")
        if state == "unloaded":
            raise Failure(Code.CONFLICT, f"{name} is unloaded: load it to serve it again")
        late = _still(name, document, state, budget)
        if budget.left_s() <= pause_s:
            raise late
        yield Pause(pause_s)
        pause_s = min(WAIT_PAUSE_S_MAX, pause_s * 1.5)


def _still(name: str, document: Version | None, state: str, budget: Budget) -> Timeout:
    what = f"{name} version {document['version']}" if document else name
    pools = document.get("pools") if document else None
    hint = f": has pool {' or '.join(pools)} a worker?" if pools else ""
    return Timeout(f"{what} is still {state} after {budget.timeout_s:g} s{hint}")


def _active(name: str) -> Steps[Version | None]:
    found = yield from model(name)
    if found["unloaded"]:
        raise Failure(Code.CONFLICT, f"{name} is unloaded: load it to serve it again")
    if found["active"] is None:
        return None
    return (yield from version(name, found["active"]))


def activate(name: str, number: int) -> Steps[Model]:
    reply = yield from send(Call("POST", admin_path(name, number) + "/activate", repeatable=True))
    return cast("Model", document_of(reply))


def remove(name: str, number: int | None, *, force: bool) -> Steps[None]:
    query = {"force": "true"} if force else {}
    yield from send(Call("DELETE", admin_path(name, number), query=query))


def load(name: str, config: str | dict[str, Any] | None, *, retry: bool) -> Steps[list[int]]:
    """Load a model; the reply comes when it serves. `retry`: also versions that ended processes or took too long.

    Returns the versions that serve; none, where an older release does not tell.
    """
    text = config if config is None or isinstance(config, str) else json_of(config, "the configuration is").decode()
    body = {} if text is None else {"parameters": {"config": text}}
    query = {} if retry else {"retry": "false"}
    reply = yield from send(json_call("POST", _repository_path(name) + "/load", body, query=query))
    return [int(version) for version in document_of(reply).get("versions", [])]


def unload(name: str) -> Steps[None]:
    yield from send(json_call("POST", _repository_path(name) + "/unload", {}))


def _repository_path(name: str) -> str:
    return _path("/v2/repository/models", name, None)


def live() -> Steps[bool]:
    return (yield from _is("/v2/health/live"))


def ready(name: str | None, number: int | None) -> Steps[bool]:
    """Return whether the server, a model or a version answers requests. Raises ModelNotFound."""
    return (yield from _is("/v2/health/ready" if name is None else v2_path(name, number) + "/ready"))


def load_s(name: str, number: int | None) -> Steps[float]:
    """Return for how many seconds a request would wait for the model's load, by the server's prediction; 0: not."""
    try:
        reply = yield from send(Call("GET", v2_path(name, number) + "/ready", once=True))
    except ServerError:
        return 0.0
    return float(document_of(reply).get("load_s", 0.0))


def _is(path: str) -> Steps[bool]:
    try:
        yield from send(Call("GET", path, once=True))
    except ServerError as error:
        if error.status in _NOT_READY:
            return False
        raise
    return True


def server_version() -> Steps[str]:
    return str((yield from get_json("/v2", "version"))["version"])


def pools() -> Steps[list[dict[str, Any]]]:
    return cast("list[dict[str, Any]]", (yield from get_json("/admin/v1/pools", "pools"))["pools"])


def workers() -> Steps[list[dict[str, Any]]]:
    return cast("list[dict[str, Any]]", (yield from get_json("/admin/v1/workers", "workers"))["workers"])


def placement(name: str | None) -> Steps[Placement]:
    """Return who holds what, of all models or one, from as many pages as it takes."""
    query = {"limit": str(PLACEMENT_MODELS_MAX)}
    if name is not None:
        query["model"] = check_name(name)
    document = yield from _placement_page(query)
    token = document["next_page_token"]
    while token:
        page = yield from _placement_page(query | {"page_token": token})
        token = page["next_page_token"]
        document["models"] += page["models"]
        more = {worker["id"]: worker["instances"] for worker in page["workers"]}
        for worker in document["workers"]:
            worker["instances"] += more.get(worker["id"], [])
    document["next_page_token"] = None
    return cast("Placement", document)


def _placement_page(query: dict[str, str]) -> Steps[dict[str, Any]]:
    reply = yield from send(Call("GET", "/admin/v1/placement", query=query, repeatable=True))
    return document_of(reply, "leader", "workers", "models", "next_page_token")


def scale() -> Steps[list[PoolScale]]:
    return cast("list[PoolScale]", (yield from get_json("/admin/v1/scale", "pools"))["pools"])


def pool_scale(pool: str) -> Steps[PoolScale]:
    return cast("PoolScale", (yield from get_json(f"/admin/v1/scale/{check_name(pool)}", "wanted", "explanation")))


def statistics() -> Steps[list[VersionStatistics]]:
    document = yield from get_json("/v2/models/stats", "model_stats")
    return cast("list[VersionStatistics]", document["model_stats"])


def settings(name: str) -> Steps[EndpointSettings]:
    return cast("EndpointSettings", (yield from get_json(f"{admin_path(name)}/settings", "settings", "warnings")))


def configure(name: str, changes: SettingsChanges) -> Steps[EndpointSettings]:
    given: dict[str, Any] = {name: value for name, value in changes.items() if value is not None}
    if "pools" in given:
        given["pools"] = listed(given["pools"])
    reply = yield from send(json_call("PATCH", admin_path(name), given, repeatable=True))
    return cast("EndpointSettings", document_of(reply, "settings", "warnings"))


def metrics() -> Steps[Metrics]:
    return Metrics((yield from send(Call("GET", "/metrics", repeatable=True))).text)


def manage_keys(action: str, name: str | None, document: Mapping[str, Any], *, forget: bool) -> Steps[dict[str, Any]]:
    """Create, list, edit, rotate or revoke keys; return the key, or all keys."""
    one = f"{_KEYS}/{quote(name or '', safe='')}"
    calls = {
        "create": json_call("POST", _KEYS, document),
        "list": Call("GET", _KEYS, repeatable=True),
        "edit": json_call("PATCH", one, document),
        "rotate": json_call("POST", f"{one}/rotate", document),
        "revoke": Call("DELETE", one, query={"forget": "true"} if forget else {}, repeatable=True),
    }
    if action not in calls:
        raise invalid(f"{action!r} is no action on keys: use {', '.join(calls)}")
    return document_of((yield from send(calls[action])), "keys" if action == "list" else "id")


def audit(limit: int, **wanted: str | float | None) -> Steps[list[dict[str, Any]]]:
    """Return the newest entries of the audit log, the newest last. `wanted`: key, model, since, until."""
    query = {name: str(value) for name, value in {"limit": limit, **wanted}.items() if value is not None}
    call = Call("GET", "/admin/v1/audit", query=query, repeatable=True)
    return cast("list[dict[str, Any]]", document_of((yield from send(call)), "entries")["entries"])
