# SPDX-License-Identifier: Apache-2.0
"""T01: an embedding and a head that are one tensor, on different pipeline stages and under tensor
parallelism."""

from __future__ import annotations

import math
from functools import lru_cache

import pytest
import torch
from cases.catalog import build
from cases.models import Tied, TwoUses
from cases.running import TOLERANCE, plain_cluster, plan_case, run, train

import autoplan
from autoplan.plan import Plan

TABLE = 101 * 32
GROUP = ("emb.weight", "head.weight")


@lru_cache
def pipelined() -> Plan:
    """Two blocks a stage, two microbatches."""
    return plan_case("tied", 2, pp=2, tp=1, dp=1, num_microbatches=2, stage_layers=(3, 4))


@lru_cache
def split() -> Plan:
    """The table split over two ranks, pinned by the head's name."""
    return plan_case("tied", 2, pp=1, tp=2, dp=1, placements={"head.weight": "RS(1)"})


def whole_state(rank: int, text: str) -> dict[str, torch.Tensor]:
    """The gathered state dict after one step."""
    model, inputs, loss_fn = build("tied")
    parallel = autoplan.parallelize(model, Plan.from_json(text), loss_fn=loss_fn)
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-2)
    parallel.forward_backward(**inputs)
    optimizer.step()
    return parallel.full_state_dict()


def head_of_embedding_checkpoint(rank: int, text: str) -> float:
    """Loads a checkpoint that has the table under one name only; how far the output then is from
    the reference."""
    model, inputs, loss_fn = build("tied", seed=0)
    other, _, _ = build("tied", seed=1)
    saved = {k: v for k, v in other.state_dict().items() if k != "head.weight"}
    parallel = autoplan.parallelize(model, Plan.from_json(text), loss_fn=loss_fn)
    parallel.load_full_state_dict(saved)
    return float((parallel(**inputs) - other(**inputs)).norm())


def test_unique_parameters_are_counted_once() -> None:
    assert pipelined().model.num_parameters == 7776
    assert sum(p.numel() for p in Tied().state_dict().values()) == 11008  # the wrong sum


def test_plan_declares_the_shared_group_and_its_owners() -> None:
    plan = pipelined()
    assert plan.shared == (GROUP,)
    assert plan.parameters["emb.weight"] == plan.parameters["head.weight"]
    assert plan.parameters["emb.weight"].stages == (0, 1)
    assert [len(s.layers) for s in plan.stages] == [3, 4]


def test_both_stages_are_charged_for_the_table() -> None:
    """States of a stage: weights, gradients and two moments of all it holds, the table on both."""
    for stage in pipelined().stages:
        blocks = 2 * (2 * 32 + 32 * 32 + 32)
        held = TABLE + blocks + (2 * 32 if stage.index == 1 else 0)
        memory = stage.estimate.memory
        assert memory.parameters == 8 * held
        assert memory.gradients == 8 * held
        assert memory.optimizer_state == 16 * held


def test_one_stage_is_charged_for_the_table_once() -> None:
    memory = plan_case("tied", 1).stages[0].estimate.memory
    assert (memory.parameters, memory.gradients, memory.optimizer_state) == (
        7776 * 8,
        7776 * 8,
        7776 * 16,
    )


def test_both_names_have_one_placement_whichever_was_pinned() -> None:
    plan = split()
    assert plan.parameters["emb.weight"].spec == plan.parameters["head.weight"].spec == "RS(1)"


def test_contradicting_pins_of_one_tensor_are_refused() -> None:
    with pytest.raises(autoplan.InfeasibleError, match=r"one tensor.*RS\(1\).*RR|RR.*RS\(1\)"):
        plan_case("tied", 2, tp=2, placements={"head.weight": "RS(1)", "emb.weight": "RR"})


@pytest.mark.distributed
@pytest.mark.parametrize("make", [pipelined, split], ids=["pp", "tp"])
# a cached function
def test_three_adamw_steps_equal_one_device(make) -> None:  # type: ignore[no-untyped-def]
    outcomes = run(2, train, make().to_json(), "tied", 3)
    assert max(o.worst for o in outcomes) < TOLERANCE
    assert all("emb.weight" in o.gradients for o in outcomes)
    assert all(set(GROUP) <= set(o.keys) for o in outcomes)
    copies = {o.values["emb.weight"] for o in outcomes}
    assert len(copies) == 1, "both copies are equal, bit for bit"


def test_one_process_equals_one_device() -> None:
    assert train(0, plan_case("tied", 1).to_json(), "tied", 3).worst < TOLERANCE


@pytest.mark.distributed
@pytest.mark.parametrize("make", [pipelined, split], ids=["pp", "tp"])
# a cached function
def test_gathered_state_loads_into_the_original_class(make) -> None:  # type: ignore[no-untyped-def]
    for state in run(2, whole_state, make().to_json()):
        fresh = Tied().to(torch.float64)
        assert set(state) == set(fresh.state_dict())
        fresh.load_state_dict(state, strict=True)
        assert fresh.head.weight is fresh.emb.weight
        assert torch.equal(fresh.head.weight, state["emb.weight"])


@pytest.mark.distributed
def test_checkpoint_with_the_table_under_one_name_reaches_the_head() -> None:
    assert max(run(2, head_of_embedding_checkpoint, pipelined().to_json())) == 0.0


@pytest.mark.distributed
def test_module_used_on_two_stages_is_shared_and_its_gradients_add_up() -> None:
    """R06: one norm behind blocks 0 and 3."""
    plan = plan_case("two_uses", 2, pp=2, tp=1, dp=1, num_microbatches=2)
    assert plan.parameters["norm.weight"].stages == (0, 1)
    assert plan.model.num_parameters == sum(p.numel() for p in TwoUses().parameters())
    assert max(o.worst for o in run(2, train, plan.to_json(), "two_uses", 3)) < TOLERANCE


def test_tied_table_that_does_not_fit_twice_is_refused_on_small_devices() -> None:
    """The stages' copies are real: budgets between one and two tables per device do not pass."""
    model, inputs, loss_fn = build("tied")
    least = 8 * 4 * TABLE
    with pytest.raises(autoplan.InfeasibleError) as refusal:
        autoplan.optimize(
            model,
            plain_cluster(2, memory_bytes=least),
            inputs,
            loss_fn=loss_fn,
            memory_reserve=0.0,
            pins=autoplan.Pins(pp=2, tp=1, dp=1),
        )
    assert refusal.value.required_bytes is not None
    assert least < refusal.value.required_bytes < math.inf
