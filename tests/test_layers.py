# SPDX-License-Identifier: Apache-2.0
"""One direction: who may import whom, as data, held by walking every import of every file.

The rooms are files or folders of the package. What the tables do not list is refused, with the line
that imports it. Also here: what importing loads, what is public, what lies at the top of the tree.
"""

from __future__ import annotations

import ast
import fnmatch
import subprocess
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from sample_plans import llama_plan

import autoplan

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "autoplan"
FILES = sorted(PACKAGE.rglob("*.py"))
MAX_LINES = 500

# Files that are one room with another: its second noun.
PARTS = {
    "api_pins": "api",
    "cluster_format": "cluster",
    "cluster_json": "cluster",
    "device": "cluster",
    "crowded": "schedule",
    "interleaved": "schedule",
    "plan_checks": "plan",
    "plan_estimates": "plan",
    "plan_format": "plan",
    "canonical_names": "canonical",
    "canonical_rows": "canonical",
}

# room -> rooms that it may import, besides itself; all may import these two, which import none
FOR_ALL = {"errors", "units"}
VOCABULARY = {"graph", "placements", "cluster", "schedule"}
ROOMS: dict[str, set[str]] = {
    "errors": set(),
    "units": set(),
    "graph": set(),
    "placements": set(),
    "cluster": set(),
    "schedule": set(),
    "runtime": {"cluster"},
    "accuracy": {"cluster"},
    "plan": {"placements"},
    "canonical": {"graph", "sharding"},
    "sharding": {"graph", "placements"},
    "costs": {"graph", "placements", "cluster", "runtime", "sharding"},
    "solver": {*VOCABULARY, "runtime", "accuracy", "sharding", "costs", "plan"},
    "check": {"graph", "cluster", "runtime", "accuracy", "sharding", "costs", "solver"},
    "capture": {"graph", "canonical"},
    "measure": {"graph", "placements", "cluster", "sharding", "costs", "executor", "api"},
    "executor": {"graph", "placements", "plan", "capture", "sharding"},
    "render": {"placements", "schedule", "plan", "sizing"},
    "sizing": {"cluster", "plan"},
    "api": {*VOCABULARY, "plan", "sharding", "costs", "solver", "capture", "executor"},
    "demo": {"cluster", "plan", "api"},
    "cli": {*VOCABULARY, "plan", "costs", "render", "measure", "check", "sizing", "api", "demo"},
    "__init__": {"cluster", "plan", "api"},
    "__main__": {"cli"},
}

# package -> rooms that may import it; any room may import the standard library
OUTSIDE: dict[str, set[str]] = {
    "torch": {"capture", "measure", "demo", "executor"},
    "numpy": {"capture", "costs", "solver", "measure"},
    "ortools": {"solver"},
    "networkx": {"sharding", "solver"},
    "matplotlib": {"render"},
    "msgspec": {"cluster", "plan", "runtime", "accuracy", "check"},
    "click": {"cli"},
    "rich": {"cli"},
    "transformers": {"demo"},
}

# Imports inside functions: (room, function or "*") -> what may be imported there beyond the tables
LATE: dict[tuple[str, str], set[str]] = {
    ("api", "*"): {"torch"},
    ("cli", "*"): set(),
    ("plan", "summary"): {"render"},
    ("plan", "_repr_html_"): {"render"},
    ("render", "draw_file"): {"render"},
    ("plan", "explain"): {"render"},
}
# packages that may be missing, or are dear to load: these rooms may import them inside functions
LATE_OUTSIDE = {("demo", "torch"), ("demo", "transformers")}


@dataclass(frozen=True)
class Import:
    """One imported module: where, in which function ("" at the top), and whether for types only."""

    file: str
    line: int
    module: str
    function: str
    for_types: bool

    def __str__(self) -> str:
        return f"{self.file}:{self.line} imports {self.module}"


def imports_of(
    tree: ast.AST, file: str, function: str = "", typing: bool = False
) -> Iterator[Import]:
    """Every import below a node, those inside functions and `if TYPE_CHECKING` included."""
    for node in ast.iter_child_nodes(tree):
        inner, for_types = function, typing
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            inner = getattr(node, "name", "lambda")
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            for_types = True
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(file, node.lineno, alias.name, function, typing)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}:{node.lineno}: imports are absolute"
            module = str(node.module)
            if module == "autoplan" or (PACKAGE.parent / module.replace(".", "/")).is_dir():
                names = [f"{module}.{alias.name}" for alias in node.names]
            else:
                names = [module]
            for name in names:
                yield Import(file, node.lineno, name, function, typing)
        yield from imports_of(node, file, inner, for_types)


def room_of_file(path: Path) -> str:
    name = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    return PARTS.get(name, name)


def room_of_module(module: str) -> str:
    """The room of "autoplan.costs.tables"; a name of the package itself comes by `__init__`."""
    parts = module.split(".")
    name = parts[1] if len(parts) > 1 else "__init__"
    if not (PACKAGE / name).is_dir() and not (PACKAGE / f"{name}.py").is_file():
        name = "__init__"
    return PARTS.get(name, name)


def refusal(room: str, found: Import) -> str:
    """Why an import is not allowed; "" when it is."""
    top = found.module.partition(".")[0]
    late = next((LATE[k] for k in ((room, found.function), (room, "*")) if k in LATE), None)
    if not found.function:
        late = None
    if top == "autoplan":
        if found.function and late is None:
            return f"{found}, inside a function"
        target = room_of_module(found.module)
        allowed = {room, *FOR_ALL, *ROOMS[room], *(late or ())}
        if room in ("errors", "units"):
            allowed = {room}
        return "" if target in allowed else f"{found}: {room} may import {sorted(allowed)}"
    if top in sys.stdlib_module_names:
        return ""
    if found.function and late is None and (room, top) not in LATE_OUTSIDE:
        return f"{found}, inside a function"
    if found.for_types:
        return ""
    allowed = {*OUTSIDE.get(top, ()), *([room] if top in (late or ()) else ())}
    return "" if room in allowed else f"{found}: for {sorted(allowed) or 'nobody'} only"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_follow_the_table(path: Path) -> None:
    room = room_of_file(path)
    assert room in ROOMS, f"{path.name} has no row in the table"
    tree = ast.parse(path.read_text(encoding="utf-8"))
    found = list(imports_of(tree, str(path.relative_to(ROOT))))
    wrong = [reason for reason in (refusal(room, one) for one in found) if reason]
    assert not wrong, "\n".join(wrong)


def test_the_table_has_one_direction() -> None:
    """No two rooms may import each other, through others either."""
    done: set[str] = set()

    def visit(room: str, path: tuple[str, ...]) -> None:
        assert room not in path, f"a circle: {' -> '.join((*path, room))}"
        for other in ROOMS[room] - done:
            visit(other, (*path, room))
        done.add(room)

    for room in ROOMS:
        visit(room, ())


@pytest.mark.parametrize(
    ("room", "code", "reason"),
    [
        ("costs", "from autoplan.solver.search import Search", "costs may import"),
        ("sharding", "from autoplan.cluster import Cluster", "sharding may import"),
        ("sharding", "from autoplan.cluster_format import Fields", "sharding may import"),
        ("executor", "import autoplan.costs.tables", "executor may import"),
        ("plan", "from autoplan.render import render_text", "plan may import"),
        ("plan", "def f():\n    from autoplan.render import render_text", "inside a function"),
        ("plan", "def summary():\n    from autoplan.render import render_text", ""),
        ("plan", "def summary():\n    from autoplan.solver.search import Search", "may import"),
        ("solver", "def f():\n    def g():\n        import numpy", "inside a function"),
        ("graph", "from autoplan.placements import R", "graph may import"),
        ("errors", "from autoplan.units import GIB", "errors may import"),
        ("render", "from autoplan import units", ""),
        ("render", "from autoplan import optimize", "render may import"),
        ("api", "import torch", "for ['capture', 'demo', 'executor', 'measure'] only"),
        ("api", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch", ""),
        ("api", "def f():\n    import torch", ""),
        ("cli", "def f():\n    import torch", "only"),
        ("costs", "import scipy.optimize", "for nobody only"),
    ],
)
def test_the_walk_finds_what_it_must(room: str, code: str, reason: str) -> None:
    found = [refusal(room, one) for one in imports_of(ast.parse(code), "x.py")]
    assert [bool(r) for r in found if r] == ([True] if reason else [])
    assert reason in "".join(found)


def run_python(code: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


DEAR = "torch numpy ortools networkx matplotlib transformers"


def test_importing_loads_no_torch() -> None:
    code = f"import sys, autoplan; print(*sorted(set(sys.modules) & set({DEAR!r}.split())))"
    assert run_python(code).split() == []


def test_showing_a_plan_loads_no_torch(tmp_path: Path) -> None:
    path = llama_plan().save(tmp_path / "plan.json")
    code = (
        "import sys\n"
        "from autoplan.cli import main\n"
        "sys.argv = ['autoplan', 'show', sys.argv[1]]\n"
        "try:\n    main()\nexcept SystemExit as end:\n    assert not end.code\n"
        f"print('loaded:', *sorted(set(sys.modules) & set({DEAR!r}.split())))\n"
    )
    *page, last = run_python(code, str(path)).splitlines()
    assert page, "the page was printed"
    assert last.split() == ["loaded:"]


def test_all_is_sorted_and_is_what_is_visible() -> None:
    visible = {
        name
        for name, value in vars(autoplan).items()
        if not name.startswith("_") and not isinstance(value, types.ModuleType)
    }
    assert list(autoplan.__all__) == sorted(visible)


def test_the_top_of_the_tree_is_tidy() -> None:
    known = {"pyproject.toml", "autoplan", "tests", "profiles", "examples", "README.md", "LICENSE"}
    ignored = [line.rstrip("/") for line in (ROOT / ".gitignore").read_text().split()]
    found = {path.name for path in ROOT.iterdir() if not path.name.startswith(".")}
    strange = {n for n in found - known if not any(fnmatch.fnmatch(n, p) for p in ignored)}
    assert not strange, f"nothing else belongs at the top: {sorted(strange)}"
    assert known - {"LICENSE", "README.md"} <= found


def test_no_file_is_long() -> None:
    lengths = {p.relative_to(ROOT): len(p.read_text("utf-8").splitlines()) for p in FILES}
    long = {str(path): count for path, count in lengths.items() if count > MAX_LINES}
    assert not long, f"over {MAX_LINES} lines, look for the second noun: {long}"
