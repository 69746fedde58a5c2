"""Who may upload what can execute code, by the setting and the scopes of the caller."""

from __future__ import annotations

import itertools
import re

import pytest

from millstream.gateway.access.gate import Gate
from millstream.gateway.access.principal import CALLER, Principal
from millstream.gateway.admin.upload import check_right_to_code, check_right_to_serve_code
from millstream.services.access.scopes import grants_of
from millstream.services.errors import Code, Failure
from millstream.services.ingest.importers import NETWORK, Importer, ImportOptions
from millstream.services.settings import Settings

NOTHING = ImportOptions()
ASKED = [
    ImportOptions(allow_pickle=True),
    ImportOptions(allow_code=True),
    ImportOptions(allow_pickle=True, allow_code=True),
]


def principal(*scopes: str) -> Principal:
    return Principal("key k (n)", "k", grants_of(scopes), 1e18, None, 0, Gate()._counters("n"))


ADMIN, WRITER = principal("admin"), principal("models:write")
CODER = principal("models:write", "models:code")
#: (setting, caller) -> whether it may; without keys nobody is known, and the operator alone reaches the admin API
MAY = {
    ("never", ADMIN): False,
    ("never", WRITER): False,
    ("never", CODER): False,
    ("never", None): False,
    ("admin", ADMIN): True,
    ("admin", WRITER): False,
    ("admin", CODER): True,
    ("admin", None): True,
    ("writers", ADMIN): True,
    ("writers", WRITER): True,
    ("writers", None): True,
}


@pytest.mark.parametrize("options", ASKED, ids=str)
@pytest.mark.parametrize(("setting", "caller"), MAY)
def test_the_right_is_that_of_the_setting(setting: str, caller: Principal | None, options: ImportOptions) -> None:
    token = CALLER.set(caller)
    try:
        check_right_to_code(setting, NOTHING)
        if MAY[setting, caller]:
            check_right_to_code(setting, options)
            return
        with pytest.raises(Failure) as refused:
            check_right_to_code(setting, options)
    finally:
        CALLER.reset(token)
    assert refused.value.code is Code.FORBIDDEN
    assert "MILLSTREAM_IMPORT_CODE" in refused.value.message


class Functions(Importer):
    name = "Python"
    runs_code = True


HERE, EVERYWHERE = "127.0.0.1", "0.0.0.0"
#: (setting, address of the listener, caller) -> what a refusal says; None: it may
SERVES = {
    ("admin", HERE, ADMIN): None,
    ("admin", HERE, None): None,
    ("admin", "localhost", ADMIN): None,
    ("admin", HERE, CODER): None,
    ("admin", EVERYWHERE, CODER): None,
    ("admin", HERE, WRITER): "key k (n) lacks the scope 'models:code', which an upload of Python needs",
    ("admin", EVERYWHERE, WRITER): "lacks the scope 'models:code'",
    ("admin", EVERYWHERE, ADMIN): "millstream keys create NAME --scope models:write --scope models:code",
    ("admin", "::", None): "millstream keys create NAME --scope models:write --scope models:code",
    ("writers", EVERYWHERE, WRITER): None,
    ("never", HERE, ADMIN): "(MILLSTREAM_IMPORT_CODE)",
    ("never", HERE, CODER): "(MILLSTREAM_IMPORT_CODE)",
}


@pytest.mark.parametrize(("setting", "host", "caller"), SERVES)
def test_what_workers_run_as_code_needs_a_right_of_its_own(setting: str, host: str, caller: Principal | None) -> None:
    settings = Settings.model_validate({"import_code": setting, "host": host})
    why = SERVES[setting, host, caller]
    token = CALLER.set(caller)
    try:
        check_right_to_serve_code(settings, Importer())
        if why is None:
            check_right_to_serve_code(settings, Functions())
            return
        with pytest.raises(Failure, match=re.escape(why)) as refused:
            check_right_to_serve_code(settings, Functions())
    finally:
        CALLER.reset(token)
    assert refused.value.code is Code.FORBIDDEN


NETWORKED = principal("models:write", "models:code", "models:network")


@pytest.mark.parametrize(("setting", "host", "caller", "why"), [
    ("admin", HERE, NETWORKED, None),
    ("admin", EVERYWHERE, NETWORKED, None),
    ("admin", HERE, ADMIN, None),
    ("admin", HERE, None, None),
    ("admin", HERE, CODER, "lacks the scope 'models:network'"),
    ("admin", EVERYWHERE, CODER, "lacks the scope 'models:network'"),
    ("writers", HERE, WRITER, "lacks the scope 'models:network'"),
    ("writers", EVERYWHERE, ADMIN, "needs a key with 'models:network'"),
    ("writers", EVERYWHERE, None, "needs a key with 'models:network'"),
    ("never", HERE, NETWORKED, "(MILLSTREAM_IMPORT_CODE)"),
])  # fmt: skip
def test_the_network_needs_a_right_of_its_own(
    setting: str, host: str, caller: Principal | None, why: str | None
) -> None:
    settings = Settings.model_validate({"import_code": setting, "host": host})
    token = CALLER.set(caller)
    try:
        if why is None:
            check_right_to_serve_code(settings, Functions(), frozenset({NETWORK}))
            return
        with pytest.raises(Failure, match=re.escape(why)) as refused:
            check_right_to_serve_code(settings, Functions(), frozenset({NETWORK}))
    finally:
        CALLER.reset(token)
    assert refused.value.code is Code.FORBIDDEN


def test_every_option_that_allows_something_is_asked_about() -> None:
    allows = {name for name, field in ImportOptions.model_fields.items() if field.annotation is bool}
    assert allows == {"allow_pickle", "allow_code"}
    assert len(ASKED) == len(list(itertools.chain(allows, [allows])))
