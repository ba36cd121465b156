# SPDX-License-Identifier: Apache-2.0
"""How far off the cost model has been: its errors on published runs, by device and runtime.

`profiles/accuracy.json` is what `autoplan check RUNS.csv --accuracy` wrote; a plan states the
figure that is nearest to what it plans for.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import msgspec

from autoplan.cluster_format import profiles_dir


class Checked(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    """Errors of the step time over some runs.

    Attributes:
        device: The device's profile.
        runtime: The framework that ran them.
        runs: How many.
        mape: Mean of |predicted / measured - 1|.
    """

    device: str
    runtime: str
    runs: int
    mape: float


def write_checked(found: list[Checked], path: str | Path) -> None:
    """Writes the figures, one a line."""
    lines = [msgspec.json.encode(row).decode() for row in found]
    Path(path).write_text("[\n" + ",\n".join(lines) + "\n]\n", encoding="utf-8")


@lru_cache(maxsize=1)
def checked() -> tuple[Checked, ...]:
    """The shipped figures; none where nothing was checked."""
    path = profiles_dir() / "accuracy.json"
    if not path.is_file():
        return ()
    return msgspec.json.decode(path.read_bytes(), type=tuple[Checked, ...])


def expected_error(device: str, runtime: str) -> tuple[float | None, str]:
    """The error to expect of a step time, and which runs say so; (None, "") where no device of its
    family was checked.

    The runs of the same device count, of the same runtime if there are any; else those of devices
    of the same family ("a100" of "a100-80g").
    """
    same = [c for c in checked() if c.device == device]
    family = device.partition("-")[0]
    rows = (
        [c for c in same if c.runtime == runtime]
        or same
        or [c for c in checked() if c.device.partition("-")[0] == family]
    )
    runs = sum(c.runs for c in rows)
    if not runs:
        return None, ""
    mape = sum(c.mape * c.runs for c in rows) / runs
    names = sorted({c.runtime for c in rows})
    shown = ", ".join(names[:3]) + (" and others" if len(names) > 3 else "")
    return mape, f"{runs} published runs on {rows[0].device}: {shown}"
