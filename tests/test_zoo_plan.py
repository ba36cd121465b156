# SPDX-License-Identifier: Apache-2.0
"""A sample of the zoo, planned at full size: one of each kind of architecture.

`python -m tests.zoo_plan` plans all of them; here is what keeps the command and the rules honest in
a few seconds. Degrees are pinned, so that one candidate is priced.
"""

from __future__ import annotations

import csv
from unittest.mock import patch

import pytest
from zoo_models import find
from zoo_plan import TABLE, Row, row_of

import autoplan

# decoder, encoder, encoder-decoder, experts, vision
SAMPLE = "causal:gpt2 masked:bert seq2seq:pegasus causal:mixtral image:vit".split()
PINS = autoplan.Pins(dp=2, tp=4, pp=1, num_microbatches=1)
optimize = autoplan.optimize


@pytest.mark.parametrize("name", SAMPLE)
def test_a_family_is_planned_with_a_rule_for_every_op(name: str) -> None:
    with patch("autoplan.optimize", lambda *args: optimize(*args, pins=PINS)):
        row = row_of(find(name, "full"))
    assert row.outcome == "planned", row.reason
    assert row.unruled == ""
    assert float(row.ruled) == 100.0


def test_a_branch_on_data_is_refused_with_its_place() -> None:
    row = row_of(find("seq2seq:fsmt", "full"))
    assert row.outcome == "refused"
    assert "modeling_fsmt.py:" in row.reason
    assert "branches on the values of a tensor" in row.reason


def test_the_committed_table_is_the_command_s() -> None:
    with TABLE.open(newline="") as file:
        rows = [Row(**row) for row in csv.DictReader(file)]
    assert [r.name for r in rows] == sorted(r.name for r in rows)
    assert {r.outcome for r in rows} <= {"planned", "refused", "fails"}
    below = [r.name for r in rows if r.outcome == "planned" and float(r.ruled) < 99.9]
    assert not below, f"less than 99.9% of the forward FLOPs are in ops with a rule: {below}"
    assert not [r.name for r in rows if r.outcome == "refused" and not r.reason]
