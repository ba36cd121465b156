# SPDX-License-Identifier: Apache-2.0
"""Made-up rows of a table of runs."""

from __future__ import annotations

from autoplan.check.rows import COLUMNS, Run


def run_of(**cells: str) -> Run:
    """A run on A100s with these cells; all others blank."""
    known = {
        "id": "made-1", "source": "Megatron-LM SC21", "gpu": "A100-80GB", "gpus_per_node": "8",
        "status": "ok", "task": "pretrain", "split": "calibration",
    }  # fmt: skip
    unknown = set(cells) - set(COLUMNS)
    assert not unknown, f"{unknown} are no columns"
    return Run({**dict.fromkeys(COLUMNS, ""), **known, **cells})
