"""The processes with a framework loaded, which imports are forked from, end with their gateway."""

from __future__ import annotations

from millstream.gateway.parts import GatewayParts
from millstream.plugins.convert.conversion import end_warm_importers


class WarmImporters:
    """They start with the first import that needs them."""

    async def stop(self) -> None:
        await end_warm_importers()


def build(_: GatewayParts) -> WarmImporters:
    """Return what ends them."""
    return WarmImporters()
