# SPDX-License-Identifier: Apache-2.0
"""The answer of explain: the runner-up in numbers, and what would have to change for it to win."""

from __future__ import annotations

import msgspec
import pytest
from sample_plans import GIB, LLAMA_RUNNERS_UP, llama_plan

from autoplan.plan import Plan
from autoplan.plan_estimates import ParameterRunnerUp

UP = "model.layers.3.mlp.up_proj.weight"


def flat(text: str) -> str:
    return " ".join(text.split())


def with_runner_up(**changes: float) -> Plan:
    plan = llama_plan()
    runner_up: ParameterRunnerUp = LLAMA_RUNNERS_UP["up_proj.weight"]
    changed = msgspec.structs.replace(runner_up, **changes)
    entry = msgspec.structs.replace(plan.parameters[UP], runner_up=changed)
    return msgspec.structs.replace(plan, parameters={**plan.parameters, UP: entry})


def test_a_parameter_names_its_runner_up_and_the_difference() -> None:
    text = flat(llama_plan().explain(UP))
    assert "runner-up: stored S(1)S(0), used RS(0)~PS(0), ZeRO 1: +2.4 ms a step" in text
    assert "(compute -600 us, communication +3 ms), +3.00 GiB at the peak" in text


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        # 3 ms more on the links, 0.6 ms less elsewhere: five times faster links make them equal
        ({}, "it would win if links were 5 x faster"),
        # 1 ms less on the links, 3 ms more elsewhere
        ({"step_time_s": 0.002, "communication_s": -0.001}, "if links were 3 x slower"),
        (
            {"communication_s": 0.001, "compute_s": 0.0014, "peak_memory_bytes": -GIB},
            "if a device had less for the plan than the 61.00 GiB that this one takes",
        ),
        ({"communication_s": 0.001, "compute_s": 0.0014}, "under no change of links or memory"),
        ({"step_time_s": 0.0}, "if ties went the other way"),
    ],
)
def test_what_would_have_to_change(changes: dict[str, float], words: str) -> None:
    assert words in flat(with_runner_up(**changes).explain(UP))


def test_a_module_lists_the_runners_up_of_its_parameters_closest_first() -> None:
    text = llama_plan().explain("model.layers.3.mlp")
    block = text[text.index("runners-up of its parameters") :]
    assert block.index("up_proj") < block.index("down_proj")
    assert "+2.4 ms" in block


def test_a_stage_names_the_next_best_cut() -> None:
    plan = llama_plan()
    first, last = flat(plan.explain("stage 0")), flat(plan.explain("stage 1"))
    assert "runner-up: 16 layers on stage 0 (not 17), 19 layers on stage 1 (not 18)" in first
    assert "+13.1 ms a step, -2.00 GiB at the peak" in first
    assert "stage 0 needs 78.10 GiB, 73.60 GiB are available" in last


def test_the_runner_up_of_the_whole_plan_has_its_condition() -> None:
    # 18.3 ms slower: 11.5 ms of compute and 6.7 ms of communication more, 5 GiB more memory
    text = flat(llama_plan().explain(UP))
    assert "runner-up of the whole plan: dp=4 tp=2 pp=2" in text
    assert "slower and needs no less memory" in text
