"""Writes docs/console/*.png: each page of the console, light and dark, of a server as a team has one.

`python -m tests.kit.console_pictures NAMES…` writes some alone.
"""

from __future__ import annotations

import io
import json
import random
import sys
import tempfile
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from PIL import Image

from tests.kit import models
from tests.kit.browser import Visitor, running_browser, visiting
from tests.kit.command_line import ROOT
from tests.kit.races import raise_priorities
from tests.kit.stack import Stack, running_stack
from tests.kit.wait import wait_until

FOLDER = ROOT / "docs" / "console"
DIGITS = ROOT / "examples" / "digits"
TRAFFIC_S = 100.0  # so that the history has a line
COLOURS = 256  # of a picture: flat areas and text need no more
PAGES = {
    "overview": "",
    "models": "models",
    "model": "models/digits",
    "try": "models/digits?tab=try",
    "steps": "models/read-digit?tab=graph",
    "function": "models/spell?tab=function",
    "race": "models/digits?tab=race",
    "upload": "upload",
    "workers": "workers",
    "scaling": "scaling",
    "requests": "requests?show=failed",
    "logs": "logs",
    "keys": "keys",
    "audit": "audit",
}
WHOLE = frozenset(PAGES) - {"logs", "requests", "audit"}  # the others are long
KEYS: dict[str, tuple[list[str], dict[str, float]]] = {
    "team-vision": (["infer:digits", "models:read:digits"], {"requests_per_s": 500, "concurrency": 20}),
    "ci-uploads": (["models:write:*", "models:read:*"], {"models": 50}),
    "dashboards": (["metrics"], {}),
}


FUNCTION = """\
# /// script
# dependencies = ["humanize>=4"]
# ///
import humanize


def spell(digit: int) -> str:
    \"\"\"Return the word for a digit.\"\"\"
    return humanize.apnumber(digit)
"""
GRAPH = {
    "steps": {
        "quick": {"model": "digits", "inputs": {"pixels": "pixels"}},
        "careful": {"model": "digits", "inputs": {"pixels": "pixels"}, "if": "max(quick.probabilities) < 0.9"},
        "word": {"model": "spell", "inputs": {"digit": ["careful.label", "quick.label"]}},
    },
    "outputs": {"label": ["careful.label", "quick.label"], "word": "word.output"},
}


def _furnish(stack: Stack, folder: Path, *, race: bool) -> str:
    """Give the server labels, keys, a second version, code and a race; return the key that calls models."""
    stack.push("scale", models.scale(folder / "scale.onnx", 3.0))
    for name, text in (("service.py", FUNCTION), ("graph.json", json.dumps(GRAPH))):
        (folder / name).write_text(text)
        stack.push("spell" if name == "service.py" else "read-digit", folder / name)
    stack.http.patch("/admin/v1/models/digits", json={"labels": {"team": "vision"}, "pin": True})
    secrets = {}
    for name, (scopes, limits) in KEYS.items():
        reply = stack.http.post("/admin/v1/keys", json={"name": name, "scopes": scopes, "limits": limits})
        secrets[name] = reply.json()["key"]
    path = "/admin/v1/models/digits/versions/1/race"

    def over() -> bool:
        raise_priorities(stack)
        return stack.http.get(path).json()["state"] not in {"queued", "running"}

    if race:
        stack.http.post(path, json={"accept_random_samples": True})
        wait_until(over, 400, what="the end of the race")
    return str(secrets["team-vision"])


def _call(stack: Stack, key: str, ended: threading.Event) -> None:
    """Call models at an uneven pace; now and then so that the model fails."""
    digits = (DIGITS / "request.json").read_bytes()
    outside = json.dumps({"inputs": [{"name": "index", "shape": [1, 1], "datatype": "INT64", "data": [99]}]}).encode()
    pace = random.Random(1)
    while not ended.wait(pace.expovariate(40.0)):
        model, body, sender = ("lookup", outside, stack.key) if pace.random() < 0.02 else ("digits", digits, key)
        if pace.random() < 0.1:
            model, body, sender = "read-digit", digits, stack.key
        headers = {"Authorization": f"Bearer {sender}"}
        try:
            urllib.request.urlopen(
                urllib.request.Request(f"{stack.url}/v2/models/{model}/infer", body, headers)
            ).close()
        except urllib.error.HTTPError as error:
            error.close()


@contextmanager
def _traffic(stack: Stack, key: str) -> Iterator[None]:
    ended = threading.Event()
    threading.Thread(target=_call, args=(stack, key, ended), daemon=True).start()
    try:
        yield
    finally:
        ended.set()


def _take(visitor: Visitor, name: str, theme: str) -> None:
    path, mark, query = PAGES[name].partition("?")
    page = visitor.open(*path.split("/"), query=mark + query)
    page.wait_for_timeout(5000 if name == "scaling" else 3000)
    if name == "try":
        page.get_by_role("button", name="Send").click()
        page.wait_for_timeout(2000)
    picture = Image.open(io.BytesIO(page.screenshot(full_page=name in WHOLE))).convert("RGB")
    picture.quantize(COLOURS, Image.Quantize.MAXCOVERAGE).save(FOLDER / f"{name}-{theme}.png", optimize=True)


def main() -> None:
    """Start the product, use it, and take the pictures."""
    FOLDER.mkdir(exist_ok=True)
    names = sys.argv[1:] or list(PAGES)
    with tempfile.TemporaryDirectory() as name, running_browser() as browser:
        folder = Path(name)
        served = {
            "digits": DIGITS / "digits.onnx",
            "lookup": models.failing(folder / "lookup.onnx"),
            "scale": models.scale(folder / "scale.onnx"),
            "squeezenet": models.squeezenet(folder / "squeezenet.onnx"),
        }
        with (
            running_stack(folder / "home", pools="cpu=2:3", controller=True, models=served) as stack,
            _traffic(stack, _furnish(stack, folder, race="race" in names)),
        ):
            with visiting(browser, stack.url) as visitor:
                visitor.sign_in(stack.key).get_by_role("link", name="Audit").wait_for()
                visitor.page.wait_for_timeout(1000 * TRAFFIC_S)
            for theme in ("light", "dark"):
                with visiting(browser, stack.url, dark=theme == "dark") as visitor:
                    visitor.sign_in(stack.key).get_by_role("link", name="Audit").wait_for()
                    for page in names:
                        _take(visitor, page, theme)


if __name__ == "__main__":
    main()
