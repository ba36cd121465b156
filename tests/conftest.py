# SPDX-License-Identifier: Apache-2.0
"""Options of the test run."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-golden", action="store_true", help="rewrite the pages in tests/golden"
    )
