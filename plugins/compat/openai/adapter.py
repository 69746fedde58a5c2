"""adapter: registers the routes of OpenAI's embeddings API."""

from __future__ import annotations

from millstream.gateway.http.adapter import Adapter, Routes, Tag
from millstream.plugins.compat.openai import errors, routes, schemas

ADAPTER = Adapter(
    routes=(Routes(routes.router, Tag("OpenAI", "Embeddings.")),),
    error_format=errors.FORMAT,
    error_paths=("/v1/", "/openai/"),
    schemas=schemas.SCHEMAS,
)
