"""Who is sent from `/` to the console: browsers, not clients of the API."""

from __future__ import annotations

import pytest

from millstream.plugins.console.gateway.session import prefers_html

BROWSER = "text/html,application/xhtml+xml,application/xml;q=0.9,image/avif,image/webp,*/*;q=0.8"


@pytest.mark.parametrize(
    ("accept", "html"),
    [
        (BROWSER, True),
        ("text/html", True),
        ("TEXT/HTML;Q=0.5", True),
        ("application/json, text/html;q=0.9", False),
        ("application/json;q=0.5,text/html;q=0.5", True),
        ("text/html;q=0", False),
        ("text/html;q=zero", False),
        ("*/*", False),
        ("text/*", False),
        ("application/json", False),
        ("", False),
        (",;,;q=", False),
    ],
)
def test_who_is_sent_to_the_console(accept: str, html: bool) -> None:
    assert prefers_html(accept) is html
