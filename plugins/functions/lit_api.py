"""Serves a class of LitServe (`LitAPI`) as it is: requests and answers are documents of JSON, as with its own server.

setup("cpu") once; decode_request ─> predict ─> encode_response for each request
predict is a generator: decode_request ─> predict ─> encode_response, which yields the parts of the answer
max_batch_size above 1: decode_request of each ─> batch ─> predict ─> unbatch ─> encode_response of each
Source: litserve/api.py of LitServe 0.2. What its server adds (specs of OpenAI, health) is not served.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

from millstream.plugins.children.confined import ModelError

_BASE = "LitAPI"


def is_lit_api(kind: type) -> bool:
    """Return whether a class is one of LitServe's, without importing that."""
    return any(base.__name__ == _BASE and base.__module__.startswith("litserve") for base in kind.__mro__[1:])


def function_of(kind: type) -> Callable[..., Any]:
    """Return what answers requests of the class, with hints. Raises ModelError for what is not served."""
    api: Any = kind()
    api.pre_setup(None)
    api.setup("cpu")

    def predict(request: dict[str, Any]) -> Any:
        return api.encode_response(api.predict(api.decode_request(request)))

    def predict_parts(request: dict[str, Any]) -> Iterator[Any]:
        yield from api.encode_response(api.predict(api.decode_request(request)))

    if inspect.isgeneratorfunction(kind.predict):  # type: ignore[attr-defined]
        if getattr(api, "max_batch_size", 1) > 1:
            raise ModelError(f"{kind.__name__} streams its replies for several requests together, which is not served")
        return predict_parts

    def predict_rows(request: list[dict[str, Any]]) -> list[Any]:
        together = api.predict(api.batch([api.decode_request(one) for one in request]))
        return [api.encode_response(one) for one in api.unbatch(together)]

    return predict_rows if getattr(api, "max_batch_size", 1) > 1 else predict
