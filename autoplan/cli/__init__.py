# SPDX-License-Identifier: Apache-2.0
"""The command line. Arguments in, one call of a room's door, a page or (--json) one JSON document
on stdout. Rooms are imported by the command that needs them. Not here: any decision.
"""

from __future__ import annotations

from autoplan.cli import checking, planning, reading, running
from autoplan.cli.group import cli

__all__ = ["checking", "cli", "main", "planning", "reading", "running"]


def main() -> None:
    """Entry point of the `autoplan` command."""
    cli.main(prog_name="autoplan")
