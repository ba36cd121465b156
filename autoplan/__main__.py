# SPDX-License-Identifier: Apache-2.0
"""`python -m autoplan`: the command line of cli.py."""

from __future__ import annotations

from autoplan.cli import main

if __name__ == "__main__":
    main()
