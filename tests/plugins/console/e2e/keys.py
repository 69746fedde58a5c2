"""Keys of people who look at the console, and calls of models with them."""

from __future__ import annotations

import httpx2
import numpy as np

from tests.kit import v2
from tests.kit.stack import Stack


def create_key(server: Stack, name: str, *scopes: str) -> str:
    """Return the secret of a new key."""
    reply = server.http.post("/admin/v1/keys", json={"name": name, "scopes": scopes})
    assert reply.status_code == 201, reply.text
    return str(reply.json()["key"])


def infer(server: Stack, model: str, key: str) -> httpx2.Response:
    """Call a model with two columns."""
    body, headers = v2.request({"x": np.ones((1, 2), np.float32)})
    return server.http.post(
        f"/v2/models/{model}/infer", content=body, headers={**headers, "Authorization": f"Bearer {key}"}
    )
