"""Writes docs/console/*.png: each page of the console, light and dark, of a server that answers calls."""

from __future__ import annotations

import random
import tempfile
import threading
import urllib.error
import urllib.request
from pathlib import Path

from tests.kit import models
from tests.kit.browser import running_browser, visiting
from tests.kit.command_line import ROOT
from tests.kit.stack import running_stack

FOLDER = ROOT / "docs" / "console"
DIGITS = ROOT / "examples" / "digits"
TRAFFIC_S = 100.0  # so that the history has a line
PAGES = {
    "overview": ("",),
    "models": ("models",),
    "model": ("models", "digits"),
    "try": ("models", "digits", "try"),
    "upload": ("upload",),
    "workers": ("workers",),
    "scaling": ("scaling",),
    "requests": ("requests",),
    "logs": ("logs",),
    "keys": ("keys",),
    "audit": ("audit",),
}


def _call(url: str, ended: threading.Event) -> None:
    """Call the example at an uneven pace; now and then with a request that is not right."""
    body = (DIGITS / "request.json").read_bytes()
    pace = random.Random(1)
    while not ended.wait(pace.expovariate(40.0)):
        try:
            urllib.request.urlopen(f"{url}/v2/models/digits/infer", b"{}" if pace.random() < 0.02 else body).close()
        except urllib.error.HTTPError as error:
            error.close()


def main() -> None:
    """Start the product, call it, and take the pictures."""
    FOLDER.mkdir(exist_ok=True)
    ended = threading.Event()
    with tempfile.TemporaryDirectory() as name, running_browser() as browser:
        folder = Path(name)
        served = {"digits": DIGITS / "digits.onnx", "scale": models.scale(folder / "scale.onnx")}
        with running_stack(folder / "home", pools="cpu=1:2", controller=True, models=served) as stack:
            threading.Thread(target=_call, args=(stack.url, ended), daemon=True).start()
            try:
                with visiting(browser, stack.url) as visitor:
                    visitor.sign_in(stack.key).get_by_role("link", name="Audit").wait_for()
                    visitor.page.wait_for_timeout(1000 * TRAFFIC_S)
                for dark in (False, True):
                    with visiting(browser, stack.url, dark=dark) as visitor:
                        visitor.sign_in(stack.key).get_by_role("link", name="Audit").wait_for()
                        for picture, parts in PAGES.items():
                            tab = "?tab=try" if parts[-1] == "try" else ""
                            page = visitor.open(*parts[: 2 if tab else None], query=tab)
                            page.wait_for_timeout(3000)
                            if tab:
                                page.get_by_role("button", name="Send").click()
                                page.wait_for_timeout(2000)
                            whole = picture not in {"logs", "requests"}  # these are long
                            path = FOLDER / f"{picture}-{'dark' if dark else 'light'}.png"
                            page.screenshot(path=path, full_page=whole)
            finally:
                ended.set()


if __name__ == "__main__":
    main()
