"""`millstream version` and `millstream demo`."""

from __future__ import annotations

import platform
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from millstream.client.cli.options import Endpoint, Json, Key, open_client, server_address
from millstream.services.environment import revision
from millstream.services.version import VERSION


def version_text() -> str:
    """Return the version of Millstream, and in an image the commit that it was built from."""
    built_from = revision()
    return VERSION if built_from == "unknown" else f"{VERSION} ({built_from[:12]})"


def version(json_output: Json = False) -> None:
    """Print the version of Millstream; with --json also its commit, and the versions of Python and the system."""
    if json_output:
        from millstream.client.cli.terminal import emit

        emit(
            {
                "version": VERSION,
                "revision": built_from if (built_from := revision()) != "unknown" else _checked_out(),
                "python": platform.python_version(),
                "system": platform.platform(),
            }
        )
    else:
        print(f"millstream {version_text()}")


def _checked_out() -> str:
    """Return the commit of the checkout that this runs from; "unknown": it runs from none."""
    root = Path(__file__).resolve().parents[2]
    if (root / ".git").exists():
        with suppress(OSError, subprocess.SubprocessError):
            asked = ["git", "-C", str(root), "rev-parse", "HEAD"]
            return subprocess.run(asked, capture_output=True, check=True, text=True, timeout=5).stdout.strip()
    return "unknown"


def demo(
    context: typer.Context,
    connections: Annotated[int, typer.Option(metavar="N", min=1, max=1024, help="Connections to use.")] = 16,
    json_output: Json = False,
    endpoint: Endpoint = None,
    key: Key = None,
) -> None:
    """Classify handwritten digits with the example model, and print accuracy, rate and latency.

    Sends images that the model was not trained on, one per request. Needs the example model "digits", which
    `millstream up` loads unless it is started with --no-example.
    """
    server = server_address(context, endpoint, key)
    with open_client(context, endpoint, key) as client:
        client.metadata("digits")  # raises Failure if no server answers or the example model is missing
    from millstream.examples.digits.demo import run

    raise typer.Exit(run(server, connections=connections, json_output=json_output))
