# SPDX-License-Identifier: Apache-2.0
"""T07: bytes of states and activations against closed forms, schedules, budgets and honest
refusals.

Four linears of 1024 x 1024 with ReLU between, float32, AdamW, batch 256: 4,198,400 parameters,
67,174,400 bytes of states,
4,194,304 bytes of saved activations (four tensors of 256 x 1024: the first linear's input and
three ReLU outputs).
"""

from __future__ import annotations

from functools import lru_cache

import pytest
import torch
from cases.models import linears, mean_square
from cases.running import plain_cluster
from torch import nn

import autoplan
from autoplan.plan import Plan
from autoplan.plan_estimates import MemoryEstimate

PARAMETERS = 4 * (1024 * 1024 + 1024)
STATES = 16 * PARAMETERS
ACTIVATIONS = 4 * 256 * 1024 * 4
MIB = 2**20


def _optimize(
    num_devices: int,
    memory_bytes: float = 1e9,
    *,
    reserve: float = 0.0,
    model: nn.Module | None = None,
    **pins: object,
) -> Plan:
    return autoplan.optimize(
        model or linears(4, 1024),
        plain_cluster(num_devices, memory_bytes=memory_bytes),
        {"input": torch.empty(256, 1024, device="meta")},
        loss_fn=mean_square,
        memory_reserve=reserve,
        pins=autoplan.Pins(**pins),  # type: ignore[arg-type]  # checked by Pins itself
    )


@lru_cache
def pipelined(schedule: str) -> Plan:
    """Two stages of two linears, four microbatches."""
    return _optimize(2, pp=2, tp=1, dp=1, num_microbatches=4, schedule=schedule, recompute=False)


def _states(memory: MemoryEstimate) -> int:
    return memory.parameters + memory.gradients + memory.optimizer_state


def test_one_device_holds_exactly_the_states_and_what_autograd_saves() -> None:
    assert (PARAMETERS, STATES, ACTIVATIONS) == (4198400, 67174400, 4194304)
    plan = _optimize(1, num_microbatches=1, recompute=False)
    memory = plan.stages[0].estimate.memory
    assert plan.model.num_parameters == PARAMETERS
    assert _states(memory) == STATES
    assert (memory.parameters, memory.optimizer_state) == (STATES // 4, STATES // 2)
    assert ACTIVATIONS <= memory.activations <= 1.25 * ACTIVATIONS


def test_each_of_two_stages_holds_half_the_states() -> None:
    for stage in pipelined("1f1b").stages:
        assert _states(stage.estimate.memory) == STATES // 2


def test_split_weights_halve_the_states_but_for_biases() -> None:
    """Columns, rows, columns, rows: the biases of the row-split ones are whole."""
    split = {f"{2 * i}.weight": ("RS(0)", "RS(1)")[i % 2] for i in range(4)}
    plan = _optimize(2, tp=2, dp=1, pp=1, placements=split)
    whole_biases = sum(p.spec == "RR" for n, p in plan.parameters.items() if n.endswith("bias"))
    expected = STATES // 2 + 16 * whole_biases * 1024 // 2
    assert _states(plan.stages[0].estimate.memory) == expected


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_activations_follow_the_schedule(schedule: str) -> None:
    """Stage s of p holds min(m, p - s) microbatches of 64 rows under 1F1B, all m under GPipe."""
    plan = pipelined(schedule)
    assert [s.layers for s in plan.stages] == [("0", "1", "2", "3"), ("4", "5", "6")]
    saved = [
        2 * 64 * 1024 * 4
    ] * 2  # two tensors a stage and microbatch: an input and a ReLU output
    for stage, per_microbatch in zip(plan.stages, saved):
        in_flight = 4 if schedule == "gpipe" else min(4, 2 - stage.index)
        held = stage.estimate.memory.activations
        assert in_flight * per_microbatch <= held <= 1.6 * in_flight * per_microbatch
    peaks = [s.estimate.memory.total for s in plan.stages]
    assert plan.estimate.peak_memory_bytes == max(peaks)
    assert plan.estimate.peak_stage == peaks.index(max(peaks))


def test_fullest_stage_is_reported_not_the_mean() -> None:
    """R58: blocks 1, 2, 2, 3 over four stages."""
    blocks = [nn.Sequential(nn.Linear(1024, 1024, device="meta"), nn.ReLU()) for _ in range(8)]
    plan = _optimize(
        4,
        model=nn.Sequential(*blocks),
        pp=4,
        num_microbatches=4,
        stage_layers=(1, 2, 2, 3),
        recompute=False,
    )
    block = 16 * (1024 * 1024 + 1024)
    assert [_states(s.estimate.memory) for s in plan.stages] == [n * block for n in (1, 2, 2, 3)]
    assert plan.estimate.peak_stage == 3
    assert plan.estimate.peak_memory_bytes == plan.stages[3].estimate.memory.total > 3 * block


@pytest.mark.parametrize(("num_devices", "budget_mib"), [(2, 48), (4, 24)])
def test_budget_that_some_layout_fits_gives_a_plan_inside_it(
    num_devices: int, budget_mib: int
) -> None:
    plan = _optimize(num_devices, budget_mib * MIB)
    assert plan.estimate.peak_memory_bytes <= budget_mib * MIB
    for stage in plan.stages:
        assert stage.estimate.memory.total <= budget_mib * MIB


def test_one_device_too_small_is_refused() -> None:
    with pytest.raises(autoplan.InfeasibleError, match="2 devices of the same kind are enough"):
        _optimize(1, 48 * MIB)


def test_refusal_states_the_least_need_the_largest_term_and_what_is_enough() -> None:
    with pytest.raises(autoplan.InfeasibleError) as refusal:
        _optimize(2, 24 * MIB)
    error = refusal.value
    assert error.required_bytes is not None
    assert STATES / 2 <= error.required_bytes <= 1.05 * STATES / 2
    assert error.available_bytes == 24 * MIB
    message = str(error)
    assert "optimizer state" in message
    assert "4 devices of the same kind are enough" in message
    assert error.candidates
    assert all(reason for _, reason in error.candidates)


def test_largest_term_of_a_refusal_is_that_of_the_layout_it_names() -> None:
    """Split over two devices the moments are 16.02 MiB on each, not 32.03."""
    with pytest.raises(
        autoplan.InfeasibleError, match=r"Largest term: optimizer state 16\.0\d MiB"
    ):
        _optimize(2, 24 * MIB)


def test_reserve_is_kept_free_and_reported() -> None:
    """8% by default, of the device's memory."""
    plan = autoplan.optimize(
        linears(4, 1024),
        plain_cluster(1, memory_bytes=100 * MIB),
        {"input": torch.empty(256, 1024, device="meta")},
        loss_fn=mean_square,
    )
    assert plan.settings.memory_reserve == 0.08
    assert plan.estimate.peak_memory_bytes <= 0.92 * 100 * MIB
    assert plan.stages[0].estimate.memory.reserve == pytest.approx(0.08 * 100 * MIB, abs=1)
    assert "8" in plan.summary()


def test_frozen_parameters_have_no_gradient_and_no_moments() -> None:
    model = linears(4, 1024).requires_grad_(False)
    model[6].requires_grad_(True)  # type: ignore[index]  # a Sequential
    memory = _optimize(1, model=model).stages[0].estimate.memory
    trainable = 1024 * 1024 + 1024
    assert trainable == 1049600
    assert memory.parameters == 4 * PARAMETERS
    assert memory.gradients == 4 * trainable
    assert memory.optimizer_state == 8 * trainable
