"""Which server a client calls, and with which key.

endpoint: argument ─> MILLSTREAM_ENDPOINT ─> the installation of this folder ─> `default` of config.toml ─> URL_DEFAULT
key: argument ─> that of the named endpoint ─> MILLSTREAM_ADMIN_KEY ─> the token of the installation of this folder
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from millstream.client.trust import SYSTEM_TRUST, Trust
from millstream.services.errors import invalid
from millstream.services.local_token import read_token

#: link in the folder `run` of a home to the certificate of its installation
CERTIFICATE = "certificate.pem"
URL_DEFAULT = "http://127.0.0.1:8000"


@dataclass(frozen=True, slots=True)
class ServerAddress:
    """Where a server is, and what a client needs to call it.

    Attributes:
        url: without a slash at its end.
        key: of its admin API.
        trust: which servers to trust over TLS.
        warnings: what the user should change in the configuration.
    """

    url: str
    key: str | None = field(default=None, repr=False)
    trust: Trust = SYSTEM_TRUST
    warnings: tuple[str, ...] = ()


def find_server(endpoint: str | None, key: str | None, source: str = "endpoint") -> ServerAddress:
    """Return the address of an endpoint, which is a URL or a name in the user's configuration; None: the default.

    `source` names the argument in messages. Raises Failure(INVALID).
    """
    from millstream.client.user_config import read_user_config
    from millstream.services.settings import read_settings

    settings = read_settings()
    if not endpoint and settings.endpoint:
        endpoint, source = settings.endpoint, "MILLSTREAM_ENDPOINT"
    pinned = None
    if not endpoint:
        endpoint = url_of_home(settings.home)
        pinned = certificate_of_home(settings.home)
    secret = settings.admin_key.get_secret_value() if settings.admin_key else None
    if endpoint and "://" in endpoint:
        url, token = _with_token(checked_url(endpoint, source), settings.home)
        return ServerAddress(url, _checked_key(key or secret or token), Trust.of(settings, pinned=pinned))
    config = read_user_config()
    named = config.find(endpoint, source) if endpoint or config.default else None
    if named is None:
        return ServerAddress(URL_DEFAULT, _checked_key(key or secret), Trust.of(settings))
    trust = Trust.of(settings, named.ca_file)
    url, token = _with_token(named.url, settings.home)
    return ServerAddress(url, _checked_key(key or named.api_key or secret or token), trust, named.warnings)


def is_of_home(url: str, home: Path) -> bool:
    """Whether a URL is that of the installation that runs in a home."""
    return url.replace("//localhost:", "//127.0.0.1:") == url_of_home(home)


def _with_token(url: str, home: Path) -> tuple[str, str | None]:
    """Return the URL to call, and the token of the home if its installation is there: no other server gets it."""
    known = url_of_home(home)
    if known is None or not is_of_home(url, home):
        return url, None
    return known if known.startswith("http:") else url, read_token(home)  # another user may listen on [::1]


def checked_url(url: str, source: str) -> str:
    """Return a URL without a slash at its end. Raises Failure(INVALID) that names `source`."""
    try:
        parts = urlsplit(url)
        usable = parts.scheme in {"http", "https"} and bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        usable = False
    if not usable or parts.username or parts.query or parts.fragment or not url.isprintable() or " " in url:
        raise invalid(f"{source} {url[:80]}: write http://HOST:PORT or https://HOST")
    return url.rstrip("/")


def _checked_key(key: str | None) -> str | None:
    if key is not None and not all("!" <= character <= "~" for character in key):
        raise invalid("the key may have visible ASCII characters only, no spaces or line breaks")
    return key or None


def url_of_home(home: Path) -> str | None:
    """Return the URL of the installation that runs in a home; None if none does."""
    try:
        return (home / "run" / "url").read_text().strip() or None
    except (OSError, ValueError):
        return None


def certificate_of_home(home: Path) -> Path | None:
    """Return the link to the certificate of the installation that runs in a home; None if it does without TLS."""
    link = home / "run" / CERTIFICATE
    return link if link.is_symlink() else None
