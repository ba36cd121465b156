# SPDX-License-Identifier: Apache-2.0
"""Single public reports on state: R83 checkpoints, R84 frozen parts, R85 parts left whole."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from cases.catalog import build
from cases.running import TOLERANCE, digest, error, plan_case, run, train
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver

import autoplan
from autoplan.plan import Plan

PP: dict[str, object] = {"pp": 2, "tp": 1, "dp": 1}
TP: dict[str, object] = {"pp": 1, "tp": 2, "dp": 1}
DP: dict[str, object] = {"pp": 1, "tp": 1, "dp": 2}
ATTENTION = {
    "q.weight": "RS(0)",
    "k.weight": "RS(0)",
    "v.weight": "RS(0)",
    "o.weight": "RS(1)",
    "up.weight": "RS(0)",
    "down.weight": "RS(1)",
}


def _equal(plan: Plan, name: str) -> None:
    outcomes = run(2, train, plan.to_json(), name, 2)
    assert max(o.worst for o in outcomes) < TOLERANCE


def save_after_a_step(rank: int, text: str, name: str, folder: str) -> dict[str, str]:
    """One step, a distributed checkpoint, digests of the whole state."""
    model, inputs, loss_fn = build(name)
    parallel = autoplan.parallelize(model, Plan.from_json(text), loss_fn=loss_fn)
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-2)
    parallel.forward_backward(**inputs)
    optimizer.step()
    state_dict_saver.save(parallel.state_dict(), checkpoint_id=folder)
    return {n: digest(v) for n, v in parallel.full_state_dict().items()}


def load_elsewhere(rank: int, text: str, name: str, folder: str) -> dict[str, str]:
    """The checkpoint in another layout, into a model that has no weights."""
    with torch.device("meta"):
        model, _, loss_fn = build(name)
    parallel = autoplan.parallelize(model, Plan.from_json(text), loss_fn=loss_fn)
    state = parallel.state_dict()
    state_dict_loader.load(state, checkpoint_id=folder)
    parallel.load_state_dict(state)
    return {n: digest(v) for n, v in parallel.full_state_dict().items()}


@pytest.mark.distributed
def test_r83_checkpoint_resumes_under_another_layout(tmp_path: Path) -> None:
    """Saved under tp=2, read under pp=2 by processes that hold their own stage alone, and on one
    device."""
    name, folder = "parallel_residual", str(tmp_path / "checkpoint")
    split = plan_case(name, 2, **TP, placements=ATTENTION)
    saved = run(2, save_after_a_step, split.to_json(), name, folder)[0]
    piped = plan_case(name, 2, **PP)
    assert run(2, load_elsewhere, piped.to_json(), name, folder) == [saved, saved]
    fresh = build(name, seed=1)[0]
    state = fresh.state_dict()
    with pytest.warns(UserWarning, match="single process"):  # torch says so; it is what is meant
        state_dict_loader.load(state, checkpoint_id=folder, no_dist=True)
    assert {n: digest(v) for n, v in state.items()} == saved


def held_elements(rank: int, text: str, name: str) -> tuple[int, bool]:
    """Elements this process holds after loading from rank 0 alone, and whether the values are
    right."""
    with torch.device("meta"):
        empty, _, loss_fn = build(name)
    real, inputs, _ = build(name)
    parallel = autoplan.parallelize(empty, Plan.from_json(text), loss_fn=loss_fn)
    parallel.load_full_state_dict(real.state_dict() if rank == 0 else None, from_rank0=True)
    right = error(parallel(**inputs), real(**inputs)) < TOLERANCE
    held = [p.to_local() if hasattr(p, "to_local") else p for p in parallel.parameters()]
    return sum(t.numel() for t in held), right


@pytest.mark.distributed
def test_r83_weights_of_rank_0_reach_all_without_whole_copies() -> None:
    name = "parallel_residual"
    plan = plan_case(name, 2, **PP)
    total = plan.model.num_parameters
    found = run(2, held_elements, plan.to_json(), name)
    assert all(right for _, right in found)
    assert sum(n for n, _ in found) == total
    assert max(n for n, _ in found) < total


def trainable(rank: int, text: str) -> dict[str, bool]:
    """requires_grad by name."""
    model, _, loss_fn = build("adapted")
    parallel = autoplan.parallelize(model, Plan.from_json(text), loss_fn=loss_fn)
    return {n: p.requires_grad for n, p in parallel.named_parameters()}


@pytest.mark.distributed
@pytest.mark.parametrize(
    "pins", [PP, {**DP, "zero": 3}, {**DP, "zero": 1}, TP], ids=["pp", "zero-3", "zero-1", "tp"]
)
def test_r84_frozen_parameters_stay_frozen_and_have_no_states(pins: dict[str, object]) -> None:
    model = build("adapted")[0]
    plan = plan_case("adapted", 2, **pins)
    named = dict(model.named_parameters())
    assert {n: p.trainable for n, p in plan.parameters.items()} == {
        n: p.requires_grad for n, p in named.items()
    }
    for found in run(2, trainable, plan.to_json()):
        assert all(named[n].requires_grad == grad for n, grad in found.items())
    _equal(plan, "adapted")


def test_r84_optimizer_bytes_are_of_trainable_parameters_alone() -> None:
    model = build("adapted")[0]
    memory = plan_case("adapted", 1).stages[0].estimate.memory
    elements = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert elements == 4 * 32
    assert memory.gradients == 8 * elements
    assert memory.optimizer_state == 16 * elements
    assert memory.parameters == 8 * sum(p.numel() for p in model.parameters())


@pytest.mark.distributed
def test_r85_part_of_a_model_is_left_whole() -> None:
    """Pins by pattern: attention split, the rest replicated."""
    rest = dict.fromkeys(("up.*", "down.*", "norm?.*"), "RR")
    chosen = {k: v for k, v in ATTENTION.items() if k[0] in "qkvo"}
    plan = plan_case("parallel_residual", 2, **TP, placements={**chosen, **rest})
    for name, parameter in plan.parameters.items():
        if name.startswith(("up", "down", "norm")):
            assert parameter.spec == "RR"
    assert plan.parameters["o.weight"].spec == "RS(1)"
    _equal(plan, "parallel_residual")
