"""page: what the HTML pages share: their icon, and headers that let a browser load nothing from elsewhere. Pure."""

from __future__ import annotations

#: the icon of the pages, as a URL
ICON = (
    "data:image/svg+xml,%3Csvg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 16 16'%3E"
    "%3Crect width='16' height='16' rx='3' fill='%230b57a4'/%3E"
    "%3Cpath d='M2 6q3-3 6 0t6 0M2 11q3-3 6 0t6 0' fill='none' stroke='%23fff' stroke-width='1.5'/%3E%3C/svg%3E"
)


def page_headers(**sources: str) -> dict[str, str]:
    """Return the headers of a page.

    Args:
        sources: what the page may load, by directive of Content-Security-Policy without `-src`. All else is refused.
    """
    directives = ["default-src 'none'", *(f"{kind}-src {source}" for kind, source in sources.items())]
    directives += ["base-uri 'none'", "form-action 'none'", "frame-ancestors 'none'"]
    return {
        "content-security-policy": "; ".join(directives),
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "cache-control": "no-cache",
    }
