# SPDX-License-Identifier: Apache-2.0
"""What the READMEs say is so: commands, options and files exist, Python blocks compile.

`README.md`, `autoplan/README.md` and `examples/README.md`; of the tour also the import table. Only
what a machine can check: a command or a file that is gone, renamed or misspelt fails here.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import click
import pytest
from test_layers import OUTSIDE, PARTS, ROOMS, VOCABULARY

from autoplan.cli import cli
from autoplan.cluster import Cluster

ROOT = Path(__file__).resolve().parent.parent
README, TOUR = ROOT / "README.md", ROOT / "autoplan/README.md"
PAGES = (README, TOUR, ROOT / "examples/README.md")
EACH = pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
# named as a user's own, not ours
USERS_FILES = {"plan.json", "gpt.json", "mine.json", "FILE.py", "llama70b.trace.json"}


def _text(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def _fenced(page: Path) -> list[tuple[str, str]]:
    """(language, text) of every fenced block."""
    found: list[tuple[str, str]] = re.findall(r"^```(\w*)\n(.*?)^```", _text(page), re.M | re.S)
    return found


def _code(page: Path) -> list[str]:
    """Every line of indented code and every `span`, without the fenced blocks."""
    prose = re.sub(r"^```.*?^```\n", "", _text(page), flags=re.M | re.S)
    return re.findall(r"^    (\S.*)$", prose, re.M) + re.findall(r"`([^`\n]+)`", prose)


def _commands(page: Path) -> Iterator[list[str]]:
    """The words of every `autoplan ...` command on a page, also behind others in a line."""
    for line in _code(page):
        for part in line.partition("  #")[0].split("&&"):
            words = shlex.split(part)
            if words and Path(words[0]).name == "autoplan" and len(words) > 1:
                yield words[1:]


def _command_under(heading: str) -> str:
    """The first indented command under a heading, read as `.ci/run` reads it."""
    section = re.search(rf"^## {heading}\n(.*?)(?=^## )", _text(README), re.M | re.S)
    assert section, f"README.md has a heading '## {heading}'"
    commands = re.findall(r"^    (python3 .*)$", section[1], re.M)
    assert commands, f"a line of four spaces and 'python3 ...' stands under '## {heading}'"
    return str(commands[0])


@pytest.mark.parametrize(
    ("heading", "extra", "last"),
    [("Run the demo", "examples", "autoplan demo"), ("Run the tests", "test", "python -m pytest")],
)
def test_the_two_commands_stand_where_ci_reads_them(heading: str, extra: str, last: str) -> None:
    create, install, run = _command_under(heading).split(" && ")
    assert create == "python3 -m venv .venv"
    assert install == f".venv/bin/pip install -q -e '.[{extra}]'"
    assert run == f".venv/bin/{last}"
    extras = re.findall(r"^(\w+) = \[", (ROOT / "pyproject.toml").read_text("utf-8"), re.M)
    assert extra in extras


def test_ci_looks_for_the_heading_that_is_there() -> None:
    script = (ROOT / ".ci/run").read_text("utf-8")
    assert "/^## Run the tests/" in script
    assert "python3 " in script


@EACH
def test_python_blocks_compile(page: Path) -> None:
    for number, (language, text) in enumerate(_fenced(page)):
        if language == "python":
            compile(text, f"{page.name} block {number}", "exec")


def _problem(words: list[str]) -> str:
    """What is wrong with the words of a command; "" when the command line has them all."""
    name, rest = words[0], words[1:]
    if name.startswith("-"):
        return "" if name in ("--help", "-h") else f"autoplan has no option {name}"
    command = cli.commands.get(name)
    if command is None:
        return f"autoplan has no command {name!r}, only {sorted(cli.commands)}"
    options = {o: p for p in command.params for o in (*p.opts, *p.secondary_opts)}
    for word in (w.partition("=")[0] for w in rest if w.startswith("-")):
        if not isinstance(options.get(word), click.Option) and word not in ("--help", "-h"):
            return f"autoplan {name} has no option {word}"
    return ""


@EACH
def test_commands_and_options_exist(page: Path) -> None:
    problems = [_problem(words) for words in _commands(page)]
    assert problems, "the page shows at least one command"
    assert not [p for p in problems if p]


@EACH
def test_options_named_alone_exist(page: Path) -> None:
    known = {o for c in cli.commands.values() for p in c.params for o in p.opts} | {"--help"}
    named = {line.split()[0] for line in _code(page) if re.match(r"--?[a-z]", line)}
    assert named <= known


@EACH
def test_clusters_exist(page: Path) -> None:
    for words in _commands(page):
        for option, name in pairwise(words):
            if option == "--cluster" and not name.isupper() and name not in USERS_FILES:
                assert Cluster.load(name).num_devices > 0


def _files(page: Path) -> set[str]:
    """Every file or folder that a page names in its code, drawings and tables."""
    places = [text for language, text in _fenced(page) if not language] + _code(page)
    words = {w.strip("()[],;:") for text in places for w in text.split()}
    files = {w.partition(":")[0] for w in words if re.search(r"\w\.(py|json|md|toml)(:\w+)?$", w)}
    folders = {w for w in words if re.fullmatch(r"(\.\./)?[a-z_]+/([a-z_]+/)*", w)}
    return {w for w in files | folders if "*" not in w and not w.startswith(("$", "-"))}


def _exists(page: Path, name: str) -> bool:
    """Below the page's folder or the root; a bare file name anywhere in the package."""
    if any((folder / name).exists() for folder in (page.parent, ROOT, ROOT / "autoplan")):
        return True
    return "/" not in name and any((ROOT / "autoplan").rglob(name))


@EACH
def test_files_exist(page: Path) -> None:
    files = _files(page) - USERS_FILES
    assert files, "the page names at least one file"
    missing = sorted(name for name in files if not _exists(page, name))
    assert not missing, f"{page.relative_to(ROOT)} names files that are not there: {missing}"


def test_the_tour_names_every_file_of_the_package() -> None:
    text = _text(TOUR)
    files = [p for p in (ROOT / "autoplan").rglob("*.py") if not p.name.startswith("__")]
    assert not [p.name for p in files if p.name not in text]


def _table(heading: str) -> dict[str, str]:
    """First cell -> second cell of the tour's table with that head."""
    section = re.search(rf"^\| {heading} \|.*\n\|[-:|]+\n((?:\|.*\n)+)", _text(TOUR), re.M)
    assert section, f"a table starts with '| {heading} |'"
    rows = (line.strip("|\n").split("|") for line in section[1].splitlines())
    return {cells[0].strip(): cells[1].strip() for cells in rows}


def test_the_import_table_is_the_tested_one() -> None:
    stated = {
        room: set(re.findall(r"[a-z_]+", text.partition(":")[0]))
        for rooms, text in _table("room").items()
        for room in re.findall(r"`(\w+)`", rooms)
    }
    assert stated == {room: ROOMS[room] for room in ROOMS if room not in ("errors", "units")}
    assert not set.union(*(ROOMS[room] for room in VOCABULARY))
    assert all(f"`{part}.py`" in _text(TOUR) for part in PARTS)


def test_the_table_of_packages_is_the_tested_one() -> None:
    stated = {
        package: set(re.findall(r"\w+", text.partition("(")[0]))
        for packages, text in _table("package").items()
        for package in packages.split(", ")
    }
    assert stated == OUTSIDE


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ("show plan.json --all", ""),
        ("plan m.py:f --cluster dgx-a100-2x8 --tp=4 -o x.json", ""),
        ("shwo plan.json", "no command 'shwo'"),
        ("show plan.json --cluster x", "no option --cluster"),
        ("--verbose", "no option --verbose"),
    ],
)
def test_the_check_of_commands_finds_what_it_must(words: str, problem: str) -> None:
    assert problem in _problem(words.split())
    assert bool(problem) == bool(_problem(words.split()))


def test_the_check_of_files_finds_what_it_must(tmp_path: Path) -> None:
    page = tmp_path / "README.md"
    page.write_text(
        "Read `autoplan/plan.py`, `gone.py` and `plan.py`; see `sharding/`, `shading/`."
    )
    named = _files(page)
    assert named == {"autoplan/plan.py", "gone.py", "plan.py", "sharding/", "shading/"}
    assert sorted(n for n in named if not _exists(page, n)) == ["gone.py", "shading/"]


def test_t09_8_the_readme_says_that_dropout_draws_other_numbers() -> None:
    """There is no mode in which random numbers are those of one device."""
    assert re.search(r"^- Dropout draws other numbers than one device", _text(README), re.M)
