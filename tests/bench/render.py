# SPDX-License-Identifier: Apache-2.0
"""`python -m tests.bench.render [PLAN.json ...]`: seconds and bytes of every output of a plan.

Each is a process of its own, as a user starts it; the plans are those of `examples/plans/` unless
others are named. Not a test: pytest does not collect it.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SUFFIXES = (".png", ".svg", ".pdf", ".html", ".trace.json")


def timed(*arguments: str) -> tuple[float, int]:
    """Seconds of a command of autoplan, and bytes of what it printed."""
    start = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "autoplan", *arguments], capture_output=True, check=True
    )
    return time.perf_counter() - start, len(done.stdout)


def main() -> None:
    """Prints one line a plan and output."""
    plans = [Path(a) for a in sys.argv[1:]] or sorted((ROOT / "examples/plans").glob("*.json"))
    for plan in plans:
        seconds, size = timed("show", str(plan))
        print(f"{plan.name:20} show        {seconds:6.2f} s  {size / 1e3:8.1f} kB")
        with tempfile.TemporaryDirectory() as folder:
            for suffix in SUFFIXES:
                target = Path(folder) / f"plan{suffix}"
                seconds, _ = timed("draw", str(plan), "-o", str(target))
                size = target.stat().st_size
                print(f"{plan.name:20} {suffix:11} {seconds:6.2f} s  {size / 1e3:8.1f} kB")


if __name__ == "__main__":
    main()
