# SPDX-License-Identifier: Apache-2.0
"""A sample of the zoo's execution parity (`python -m tests.zoo` runs all of it), and what the
committed table of the whole sweep says.
"""

from __future__ import annotations

import os
import sys

import pytest

sys.path.insert(0, os.path.join(os.path.dirname(__file__), ".."))

from zoo import ONE, read_table, sweep
from zoo_models import zoo

# every second one of each line runs in tp2, the others in pp2
SAMPLE = """
causal:llama causal:gpt2 causal:gemma2 causal:bloom causal:gpt_neox causal:falcon causal:cohere2
causal:mistral causal:opt causal:gpt_bigcode causal:mpt causal:stablelm
seq2seq:bart seq2seq:mbart seq2seq:pegasus
image:vit image:beit image:segformer image:pvt image:mobilevit
masked:bert masked:electra masked:tapas masked:fnet masked:roberta
""".split()


@pytest.mark.distributed
@pytest.mark.parametrize("layout", ["tp2", "pp2"])
def test_sample_of_the_zoo_equals_one_device(layout: str) -> None:
    """Loss and every gradient; each family in one of the two layouts."""
    names = SAMPLE[("tp2", "pp2").index(layout) :: 2]
    entries = [e for e in zoo("tiny") if e.name in names]
    assert len(entries) == len(names), "transformers has them all"
    rows = [row for found in sweep(entries, (layout,), jobs=2, exact=False) for row in found]
    different = [r for r in rows if r.outcome not in ("runs", "equal")]
    assert not different
    assert len(rows) == 2 * len(names)


def test_table_of_the_whole_sweep_has_nothing_wrong() -> None:
    rows = list(read_table().values())
    assert {r.outcome for r in rows if r.layout == ONE} == {"runs", "fails"}
    late = [r for r in rows if r.outcome == "broken"]
    assert all(r.reason.startswith("not done in") for r in late), "nothing crashes"
    assert {r.outcome for r in rows if r.layout != ONE and r not in late} == {"equal", "refused"}
    for layout in ("tp2", "pp2"):
        assert sum(r.outcome == "equal" for r in rows if r.layout == layout) >= 200
    assert all(r.reason for r in rows if r.outcome in ("refused", "fails"))
