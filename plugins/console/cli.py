"""`millstream console`: tells where the console is, with a link that signs in."""

from __future__ import annotations

import json
import webbrowser
from typing import Annotated
from urllib.parse import quote

import typer

from millstream.client.cli.options import Endpoint, Json, Key, server_address
from millstream.services.errors import Code, Failure


def console(
    context: typer.Context,
    open_browser: Annotated[bool, typer.Option("--open", help="Open it in a browser.")] = False,
    endpoint: Endpoint = None,
    key: Key = None,
    json_output: Json = False,
) -> None:
    """Print the address of the web console, with a link that signs in.

    The link has a key in its fragment, which browsers do not send: the token of this machine's server, or the key of
    --key. Treat it like the key: it does what the key may do.
    """
    server = server_address(context, endpoint, key)
    if server.key is None:
        raise Failure(Code.UNAUTHENTICATED, f"no key is known for {server.url}: give one with --key")
    url = f"{server.url}/console/"
    link = f"{url}#login={quote(server.key, safe='')}"
    print(json.dumps({"url": url, "link": link}) if json_output else link)
    if open_browser and not webbrowser.open(link):
        raise Failure(Code.UNAVAILABLE, "this machine has no browser to open: open the address on another one")
