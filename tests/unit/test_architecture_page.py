"""docs/architecture.md names files and time constants that exist, and gives the values that the code has."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/architecture.md").read_text()
PACKAGES = ("gateway", "services", "workers")
SETTINGS = "services/settings.py"

SECONDS_OF_UNIT = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0, "d": 86_400.0}
#: Units that a name ends in, before a possible MAX or MIN. `SECONDS` is a unit, too.
_TIME_NAME = re.compile(r"(?:^|_)(S|MS|US|NS|SECONDS)(?:_MAX|_MIN)?$", re.IGNORECASE)
#: Names with such an end that bound nothing: the milliseconds of a second.
_CONVERSIONS = {"SECOND_MS"}

_FILE = re.compile(r"(?<![\w/.<>])(?:[\w.-]+/)*[\w.-]+\.(?:py|lua)\b")
_FOLDER = re.compile(r"`((?:\.?[\w-]+/)+)`")
_LINK = re.compile(r"\]\(([^)#]+)\)")
_KEY = re.compile(r"ms:(\d+):\{millstream(?::cpu)?\}:([a-z]+)")
#: | `NAME` | value | `file` | ...: a row of the table of time constants
_ROW = re.compile(
    r"^\| `([\w.]+)` \| ([\d.,]+)(?: (ns|us|ms|s|min|h|d))?(?: \([^|]*\))? \| `([\w/.]+)` \|", re.MULTILINE
)


class Constant(NamedTuple):
    file: str
    name: str


def number(node: ast.expr | None) -> float | None:
    """The value of an expression of numbers; None: it is something else."""
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float) and not isinstance(node.value, bool):
        return float(node.value)
    if isinstance(node, ast.BinOp):
        left, right = number(node.left), number(node.right)
        if left is not None and right is not None and isinstance(node.op, ast.Mult | ast.Div):
            return left * right if isinstance(node.op, ast.Mult) else left / right
    return None


def assigned(body: list[ast.stmt], prefix: str = "") -> dict[str, float]:
    """The numbers that a module, or the body of a class, assigns to names."""
    found: dict[str, float] = {}
    for statement in body:
        if isinstance(statement, ast.ClassDef) and not prefix:
            found |= assigned(statement.body, f"{statement.name}.")
        targets: list[ast.expr] = statement.targets if isinstance(statement, ast.Assign) else []
        value = statement.value if isinstance(statement, ast.Assign | ast.AnnAssign) else None
        if isinstance(statement, ast.AnnAssign):
            targets = [statement.target]
        for target in targets:
            pairs: list[tuple[ast.expr, ast.expr | None]] = [(target, value)]
            if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
                pairs = list(zip(target.elts, value.elts, strict=True))
            for name, expression in pairs:
                known = number(expression)
                if isinstance(name, ast.Name) and known is not None:
                    found[prefix + name.id] = known
    return found


def settings_defaults() -> dict[str, float]:
    """Default of each setting that is a number, by the name of its environment variable."""
    tree = ast.parse((ROOT / SETTINGS).read_text())
    found: dict[str, float] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.AnnAssign) and isinstance(node.value, ast.Call) and isinstance(node.target, ast.Name):
            default = number(node.value.args[0]) if node.value.args else None
            if default is not None:
                found[f"MILLSTREAM_{node.target.id.upper()}"] = default
    return found


def lua_constants(text: str) -> dict[str, float]:
    found: dict[str, float] = {}
    for names, values in re.findall(r"^local ([A-Z_, ]+) = ([\d, ]+)(?:--.*)?$", text, re.MULTILINE):
        pairs = zip(names.split(", "), values.strip().split(", "), strict=True)
        found |= {name: float(value) for name, value in pairs}
    return found


def constants() -> dict[Constant, float]:
    """Every number that has a name at the top of a module, of a class or of a script."""
    found: dict[Constant, float] = {}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.*")):
            if path.suffix not in {".py", ".lua"}:
                continue
            file, text = path.relative_to(ROOT).as_posix(), path.read_text()
            named = assigned(ast.parse(text).body) if path.suffix == ".py" else lua_constants(text)
            found |= {Constant(file, name): value for name, value in named.items()}
    found |= {Constant(SETTINGS, name): value for name, value in settings_defaults().items()}
    return found


CONSTANTS = constants()


def of_time(constant: Constant) -> bool:
    """Whether a constant is a duration, by its name."""
    return constant.name not in _CONVERSIONS and _TIME_NAME.search(constant.name) is not None


def seconds(constant: Constant, value: float) -> float:
    unit = _TIME_NAME.search(constant.name)
    assert unit is not None
    return value * SECONDS_OF_UNIT["s" if unit[1].upper() == "SECONDS" else unit[1].lower()]


def rows() -> dict[Constant, float]:
    """What the page's table says: seconds for durations, else the number."""
    found: dict[Constant, float] = {}
    for name, value, unit, file in _ROW.findall(PAGE):
        constant = Constant(file, name)
        assert constant not in found, f"{constant} stands twice in the table"
        found[constant] = float(value.replace(",", "")) * (SECONDS_OF_UNIT[unit] if unit else 1.0)
    return found


def test_every_file_that_the_page_names_is_there():
    files = set(_FILE.findall(PAGE)) | set(_FOLDER.findall(PAGE))
    assert len(files) > 100
    assert sorted(file for file in files if not (ROOT / file).exists()) == []


def test_every_link_leads_to_a_file():
    links = [link for link in _LINK.findall(PAGE) if "://" not in link]
    assert links
    assert [link for link in links if not (ROOT / "docs" / link).exists()] == []


def test_each_question_is_answered_with_a_file_first():
    section = PAGE.split("## Where is it decided")[1].split("\n## ")[0]
    answers = re.findall(r"^\| [^|]+\? \| `([\w/.-]+)`", section, re.MULTILINE)
    assert len(answers) >= 12
    assert [answer for answer in answers if not (ROOT / answer).exists()] == []


def test_every_redis_key_of_the_page_is_one_of_the_code():
    keys = (ROOT / "services/queue/keys.py").read_text()
    named = set(_KEY.findall(PAGE))
    assert len(named) > 10
    assert re.search(r"^PROTOCOL = (\d+)$", keys, re.MULTILINE)[1] in {number for number, _ in named}  # type: ignore[index]
    prelude = (ROOT / "services/queue/scripts/_prelude.lua").read_text()  # keys that only scripts use
    assert sorted(key for _, key in named if f'b"{key}' not in keys and f"PREFIX .. '{key}'" not in prelude) == []


def test_every_constant_of_the_table_has_the_value_that_the_table_says():
    table = rows()
    assert len(table) > 80
    assert sorted(set(table) - set(CONSTANTS)) == [], "these constants are not in the code"
    for constant, stated in table.items():
        value = CONSTANTS[constant]
        real = seconds(constant, value) if of_time(constant) else value
        assert stated == pytest.approx(real), f"{constant} is {value:g} in the code"


def test_every_time_constant_of_the_code_is_in_the_table():
    of_modules = {constant for constant in CONSTANTS if "." not in constant.name}
    missing = {constant for constant in of_modules if of_time(constant)} - set(rows())
    lines = [f"| `{at.name}` | {CONSTANTS[at]:g} | `{at.file}` | bounds | relation |" for at in sorted(missing)]
    assert not lines, "add to the table of time constants in docs/architecture.md:\n" + "\n".join(lines)
