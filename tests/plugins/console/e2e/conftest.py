"""A server with two models and a key, and a browser: one of each for a file.

Playwright leaves an event loop running in its thread, in which tests of other files could not run theirs.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser

from tests.kit import models
from tests.kit.browser import Visitor, running_browser, visiting
from tests.kit.stack import Stack, running_stack
from tests.plugins.console.e2e.keys import create_key


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """As an operator runs it: a gateway, a pool that scales, a controller. As there is a key, each call needs one."""
    folder = tmp_path_factory.mktemp("server")
    path = models.scale(folder / "scale.onnx")
    with running_stack(folder, pools="cpu=1:2", controller=True, models={"one": path, "other": path}) as stack:
        create_key(stack, "first", "models:read")
        yield stack


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with running_browser() as browser:
        yield browser


@pytest.fixture(scope="module")
def writing_key(server: Stack) -> str:
    """The secret of a key that may call, read and change all models, and nothing else."""
    return create_key(server, "writing", "infer:*", "models:read:*", "models:write:*", "metrics")


@pytest.fixture
def visitor(browser: Browser, server: Stack) -> Iterator[Visitor]:
    """Who has not signed in."""
    with visiting(browser, server.url) as visitor:
        yield visitor


@pytest.fixture
def operator(visitor: Visitor, server: Stack) -> Visitor:
    """Who has signed in with the token of the home."""
    visitor.sign_in(server.key).get_by_role("link", name="Audit").wait_for()
    return visitor


@pytest.fixture
def writer(visitor: Visitor, writing_key: str) -> Visitor:
    """Who has signed in with a key that may change models."""
    visitor.sign_in(writing_key).get_by_role("link", name="Upload", exact=True).wait_for()
    return visitor
