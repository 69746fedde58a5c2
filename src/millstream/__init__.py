"""Millstream, a self-hosted model serving platform.

The folders `gateway`, `services`, `workers`, `plugins`, `client` and `examples` are at the root of the repository;
beside this file are links to them. So one import package, `millstream`, is the same for a checkout, an editable
install, a wheel, mypy and editors, and collides with no other distribution.
"""

TYPE_CHECKING = False
if TYPE_CHECKING:
    from millstream.client.async_client import AsyncClient
    from millstream.client.client import Client
    from millstream.client.errors import ConnectionFailed, ModelNotFound, ServerError, Timeout, VersionFailed, WrongFile
    from millstream.client.inference import Prediction
    from millstream.client.models import Metrics
    from millstream.services.errors import Code, Failure

#: public names -> their modules, imported when a name is used first: `import millstream` stays cheap
_MODULES = {
    "AsyncClient": "client.async_client",
    "Client": "client.client",
    "Code": "services.errors",
    "ConnectionFailed": "client.errors",
    "Failure": "services.errors",
    "Metrics": "client.models",
    "ModelNotFound": "client.errors",
    "Prediction": "client.inference",
    "ServerError": "client.errors",
    "Timeout": "client.errors",
    "VersionFailed": "client.errors",
    "WrongFile": "client.errors",
}

__all__ = [
    "AsyncClient",
    "Client",
    "Code",
    "ConnectionFailed",
    "Failure",
    "Metrics",
    "ModelNotFound",
    "Prediction",
    "ServerError",
    "Timeout",
    "VersionFailed",
    "WrongFile",
]


def __getattr__(name: str) -> object:
    """Return a public name. Raises ImportError with the command that installs what the client needs."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    from millstream.services.errors import Failure
    from millstream.services.extras import require

    if name in {"AsyncClient", "Client"}:
        try:
            require("client")
        except Failure as failure:
            raise ImportError(failure.message, name=__name__) from None
    value = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
