"""Which server a client calls, with which key, and which certificates it trusts and shows.

endpoint: argument ─> MILLSTREAM_ENDPOINT ─> the installation of this folder ─> `default` of config.toml ─> URL_DEFAULT
key: argument ─> that of the named endpoint ─> MILLSTREAM_ADMIN_KEY ─> the token of the installation of this folder
trust: ca_file ─> its authorities        pinned ─> exactly this certificate        else ─> those of the system
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from millstream.services.environment import client_variable
from millstream.services.errors import invalid
from millstream.services.local_token import read_token

#: X509_V_FLAG_NO_CHECK_TIME, which the ssl module has no name for
_NO_CHECK_TIME = 0x200000
_END = "-----END CERTIFICATE-----"


@dataclass(frozen=True, slots=True)
class Trust:
    """The files that decide it.

    Attributes:
        ca_file: certificates of authorities to trust instead of the system's.
        pinned: a file whose first certificate is that of the server, the only one to trust: an installation on this
            machine, whose certificate names the host by which others call it.
        certificate: certificate of the client, with its chain; `key` has its private key.
    """

    ca_file: Path | None = None
    pinned: Path | None = None
    certificate: Path | None = None
    key: Path | None = None

    @classmethod
    def of_environment(cls, ca_file: Path | None = None, pinned: Path | None = None) -> Trust:
        """Return what the environment says; `ca_file` and `pinned` come first. Raises Failure(INVALID)."""
        certificate, key = _file("MILLSTREAM_CLIENT_CERT_FILE"), _file("MILLSTREAM_CLIENT_KEY_FILE")
        if (certificate is None) != (key is None):
            raise invalid("set both MILLSTREAM_CLIENT_CERT_FILE and MILLSTREAM_CLIENT_KEY_FILE, or neither")
        return cls(ca_file or (None if pinned else _file("MILLSTREAM_CA_FILE")), pinned, certificate, key)

    def context(self) -> ssl.SSLContext:
        """Return a TLS context for a connection. Raises Failure(INVALID) that names a file which cannot be used."""
        context = self._verifying()
        if self.certificate is not None:
            try:
                context.load_cert_chain(self.certificate, self.key, password=str)
            except OSError as error:  # ssl.SSLError is one
                reason = error.strerror or error
                raise invalid(f"client certificate {self.certificate}, key {self.key}: {reason}") from error
        return context

    def _verifying(self) -> ssl.SSLContext:
        try:
            if self.pinned is not None:
                return _pinning(self.pinned.read_text("ascii", "replace"))
            return ssl.create_default_context(cafile=self.ca_file)
        except OSError as error:
            raise invalid(f"ca_file {self.ca_file or self.pinned}: {error.strerror or error}") from error


def _file(variable: str) -> Path | None:
    text = client_variable(variable)
    return None if text is None else Path(text)


def _pinning(content: str) -> ssl.SSLContext:
    """Return a context that trusts one certificate, whatever names and dates it has."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_flags = ssl.VerifyFlags(ssl.VERIFY_X509_PARTIAL_CHAIN | _NO_CHECK_TIME)
    context.load_verify_locations(cadata=content[: content.find(_END) + len(_END)])
    return context


#: the authorities of the system, and no certificate of the client's own
SYSTEM_TRUST = Trust()


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
    if not endpoint and (given := client_variable("MILLSTREAM_ENDPOINT")):
        endpoint, source = given, "MILLSTREAM_ENDPOINT"
    pinned = None
    if not endpoint:
        endpoint = url_of_home(settings.home)
        pinned = certificate_of_home(settings.home)
    secret = settings.admin_key.get_secret_value() if settings.admin_key else None
    if endpoint and "://" in endpoint:
        url, token = _with_token(checked_url(endpoint, source), settings.home)
        return ServerAddress(url, _checked_key(key or secret or token), Trust.of_environment(pinned=pinned))
    config = read_user_config()
    named = config.find(endpoint, source) if endpoint or config.default else None
    if named is None:
        return ServerAddress(URL_DEFAULT, _checked_key(key or secret), Trust.of_environment())
    trust = Trust.of_environment(named.ca_file)
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
