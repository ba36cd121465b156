# SPDX-License-Identifier: Apache-2.0
"""The table of public cases names tests that exist, and has every case once."""

from __future__ import annotations

import re
from pathlib import Path

HERE = Path(__file__).parent
TABLE = (HERE / "README.md").read_text(encoding="utf-8")


def test_every_test_that_the_table_names_exists() -> None:
    named = re.findall(r"`([\w/]+\.py)::(\w+)`", TABLE)
    assert len(named) > 100
    missing = [
        f"{file}::{name}"
        for file, name in named
        if not re.search(rf"^def {name}\(", (HERE.parent / file).read_text(encoding="utf-8"), re.M)
    ]
    assert not missing


def test_every_case_file_and_report_is_in_the_table() -> None:
    for number in range(1, 13):
        assert re.search(rf"^## T{number:02} ", TABLE, re.M)
    for path in HERE.glob("test_reports*.py"):
        for name in re.findall(r"^def (test_r\d\d\w*)\(", path.read_text(encoding="utf-8"), re.M):
            assert f"::{name}`" in TABLE
