"""Signs a browser in with a cookie that holds a key, and lets the page call every API with it.

cookie ─> SessionMiddleware ─> Authorization: Bearer KEY ─> the checks of any other call
/console/api/call/PATH ──────> /PATH, so that the cookie's path, …/console/api, covers all that the page calls

A browser sends a cookie by itself, so a call with it has to come from the page: no other origin, and a header that
only scripts of the page can add where the call changes something. SameSite=Strict alone would let in pages of other
ports of this host.
"""

from __future__ import annotations

from typing import Any
from urllib.parse import quote, unquote

from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from millstream.gateway.access.gate import Gate
from millstream.gateway.access.principal import Principal
from millstream.gateway.admin.upload import why_no_code
from millstream.gateway.http.compression import qualities
from millstream.gateway.http.deps import Deps
from millstream.gateway.http.errors import ErrorReplies
from millstream.services.access.scopes import Need, Row
from millstream.services.errors import Code, Failure

COOKIE = "millstream_console"
API, CALL, SESSION = "/console/api/", "/console/api/call/", "/console/api/session"
PROOF = b"x-millstream-console"
_OWN_SITES = frozenset({b"same-origin", b"none"})
_PRIVATE = frozenset({b"cookie", PROOF})
#: live figures and their history: without keys anybody may read them, as on the metrics page
WATCH = Row(Need.READ)
READ = Row(Need.READ, admin=True)
LOGS = Row(Need.ADMIN, admin=True)  # a line may be about any model and any caller
_READS = frozenset({"GET", "HEAD"})

Headers = list[tuple[bytes, bytes]]


class SessionMiddleware:
    """ASGI middleware: adds the key of the cookie to calls of the page, and rewrites the calls of other APIs.

    It sends browsers from `/` to the page, too.
    """

    def __init__(self, app: ASGIApp, _deps: Deps, replies: ErrorReplies) -> None:
        self._app = app
        self._replies = replies

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"].startswith(API):
            try:
                scope = with_key(rewritten(scope))
            except Failure as failure:
                await self._replies.reply(scope["path"], failure)(scope, receive, send)
                return
        elif scope["type"] == "http" and scope["path"] == "/" and _is_browser(scope):
            headers = {"location": "console/", "vary": "Accept"}
            await Response(status_code=307, headers=headers)(scope, receive, send)
            return
        await self._app(scope, receive, send)


def _is_browser(scope: Scope) -> bool:
    accept = dict(scope["headers"]).get(b"accept", b"").decode("latin-1")
    return scope["method"] == "GET" and prefers_html(accept)


def prefers_html(accept: str) -> bool:
    """Return whether an Accept header names HTML, and does not prefer JSON. Wildcards, as curl sends, mean JSON."""
    wanted = qualities(accept)
    html = wanted.get("text/html", 0.0)
    return html > 0 and html >= wanted.get("application/json", 0.0)


def rewritten(scope: Scope) -> Scope:
    """Return the scope of what a call of another API is about; another scope is returned as it is."""
    raw = scope.get("raw_path") or b""
    if not scope["path"].startswith(CALL) or not raw.startswith(CALL.encode()):
        return scope
    return {**scope, "path": scope["path"][len(CALL) - 1 :], "raw_path": raw[len(CALL) - 1 :]}


def with_key(scope: Scope) -> Scope:
    """Return the scope of a request with the key of its cookie. Raises Failure(FORBIDDEN): another page sent it."""
    headers: Headers = scope["headers"]
    sent = dict(headers)
    key = _cookie(headers)
    kept = [header for header in headers if header[0] not in _PRIVATE]
    if scope["path"] == SESSION and scope["method"] not in _READS and _is_of_other_page(sent):
        raise Failure(Code.FORBIDDEN, "the console's cookie is set by its own page alone")
    if key is not None and b"authorization" not in sent:
        if _is_of_other_page(sent):
            raise Failure(Code.FORBIDDEN, "the console's cookie counts for calls of its own page alone")
        if scope["method"] not in _READS and sent.get(PROOF) != b"1":
            raise Failure(Code.FORBIDDEN, "a call with the console's cookie needs the header X-Millstream-Console: 1")
        kept.append((b"authorization", b"Bearer " + key.encode()))
    return {**scope, "headers": kept}


def _cookie(headers: Headers) -> str | None:
    """Return the key of the cookie. Of several, another server of this host may have set one: none counts."""
    parts = [part for name, value in headers if name == b"cookie" for part in value.decode("latin-1").split(";")]
    pairs = [part.strip().partition("=") for part in parts]
    found = [unquote(content) for cookie, _, content in pairs if cookie == COOKIE and content]
    return found[0] if len(found) == 1 else None


def _is_of_other_page(sent: dict[bytes, bytes]) -> bool:
    """Whether the page is of another origin, as the browser says. Names in MILLSTREAM_CORS_ORIGINS do not count."""
    site, origin = sent.get(b"sec-fetch-site"), sent.get(b"origin")
    if site is not None:
        return site not in _OWN_SITES
    return origin is not None and origin.partition(b"://")[2].lower() != sent.get(b"host", b"").lower()


def cookie_of(key: str, *, secure: bool) -> str:
    """Return the value of Set-Cookie that signs in; an empty key signs out.

    It names no path, so that the browser takes that of `…/console/api/session`, below any path of a proxy.
    """
    age = "" if key else "; Max-Age=0"
    return f"{COOKIE}={quote(key, safe='')}{age}; HttpOnly; SameSite=Strict{'; Secure' if secure else ''}"


def is_secure(scope: Scope) -> bool:
    """Return whether the browser uses TLS, also where a proxy ends it: the page's origin says so."""
    return bool(scope["scheme"] == "https" or dict(scope["headers"]).get(b"origin", b"").startswith(b"https://"))


def who_is(gate: Gate, credential: bytes | None) -> Principal | None:
    """Return who sent a header Authorization; None: it is no right key."""
    try:
        return None if credential is None else gate.identify(credential)
    except Failure:
        return None


def allowed(gate: Gate, principal: Principal | None) -> dict[str, bool]:
    """Return what the page may offer: what the caller's scopes allow, and what is open to anybody."""
    rows = {
        "watch": WATCH,
        "read": READ,
        "write": Row(Need.WRITE, admin=True),
        "keys": LOGS,
        "infer": Row(Need.INFER),
        "metrics": Row(Need.METRICS),
    }
    return {
        name: gate.is_open(row) or (principal is not None and principal.grants.allows(row.need))
        for name, row in rows.items()
    }


def session_document(deps: Deps, credential: bytes | None, *, prometheus: bool) -> dict[str, Any]:
    """Return what the page has to know first. `credential`: the header Authorization."""
    principal = who_is(deps.gate, credential)
    return {
        "signed_in": principal is not None,
        "name": None if principal is None else principal.counters.name,
        "can": allowed(deps.gate, principal),
        "keys_required": deps.gate.enforced,
        "no_code": why_no_code(deps.settings, principal, "Python"),
        "version": deps.version,
        "prometheus": prometheus,
        "home": f"…/{deps.settings.home.name}",
    }
