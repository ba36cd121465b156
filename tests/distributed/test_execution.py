# SPDX-License-Identifier: Apache-2.0
"""Plans on real gloo processes against one device: searched layouts, random ones, mixed precision,
ZeRO-3's memory, resharding.

The whole tables are commands (`python -m tests.parity_table`, `python -m tests.fuzz`); here runs a
sample of both.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, os.path.join(os.path.dirname(__file__), ".."))

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from models import build
from parity import LOSSES, capture_named, compare
from parity_table import LAYOUTS, cell, slow_cluster
from pool import run
from random_plans import random_plan
from torch.distributed.tensor import DTensor

import autoplan

pytestmark = pytest.mark.distributed
TOLERANCE = 1e-9


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("gpt2", "tp2"),
        ("llama", "dp2tp2"),
        ("t5", "tp2pp2"),
        ("bert", "zero3"),
        ("vit", "dp2pp2"),
        ("resnet", "dp2"),
        ("mlp", "auto4"),
    ],
)
def test_searched_plans_equal_one_device(name: str, layout: str) -> None:
    assert layout in LAYOUTS
    error, text = cell(name, layout, steps=2)
    assert error is not None, text
    assert error <= TOLERANCE, text


@pytest.mark.parametrize(
    ("name", "dp", "tp", "pp", "microbatches", "schedule", "recompute"),
    [
        ("gpt2", 2, 2, 1, 2, "1f1b", False),
        ("llama", 1, 2, 2, 4, "1f1b", True),
        ("bert", 2, 1, 2, 2, "gpipe", False),
        ("t5", 1, 1, 4, 4, "1f1b", False),
        ("vit", 4, 1, 1, 2, "1f1b", True),
        ("resnet", 1, 4, 1, 1, "1f1b", False),
        ("mlp", 2, 2, 1, 4, "1f1b", True),
    ],
)
def test_random_plans_equal_one_device(
    name: str, dp: int, tp: int, pp: int, microbatches: int, schedule: str, recompute: bool
) -> None:
    captured = capture_named(name)[2]
    for seed in (1, 2):
        plan = random_plan(
            captured,
            seed,
            dp=dp,
            tp=tp,
            pp=pp,
            num_microbatches=microbatches,
            schedule=schedule,
            recompute=recompute,
        )
        errors = run(dp * tp * pp, compare, plan.to_json(), name, 1)
        assert max(e.worst for e in errors) <= TOLERANCE, seed  # type: ignore[attr-defined]


def _plan(name: str, precision: str | None = None, **pins: int) -> autoplan.Plan:
    model, inputs = build(name)
    if precision is not None:
        model = model.float()
    count = pins["dp"] * pins["tp"] * pins["pp"]
    loss_fn = LOSSES.get(name) if precision is None else None
    return autoplan.optimize(
        model,
        slow_cluster(count),
        inputs,
        loss_fn=loss_fn,
        precision=precision,
        pins=autoplan.Pins(**pins),
    )  # type: ignore[arg-type]


def mixed_losses(rank: int, text: str) -> tuple[list[float], set[str], set[str]]:
    """Losses of four steps in mixed precision, and the dtypes of parameters and gradients."""
    model, inputs = build("llama")
    parallel = autoplan.parallelize(model.float(), autoplan.Plan.from_json(text))
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-2)
    losses = []
    for _ in range(4):
        optimizer.zero_grad()
        losses.append(float(parallel.forward_backward(**inputs)))
        parallel.clip_grad_norm_(1.0)
        optimizer.step()
    return (
        losses,
        {str(p.dtype) for p in parallel.parameters()},
        {str(p.grad.dtype) for p in parallel.parameters() if p.grad is not None},
    )


@pytest.mark.parametrize(
    "pins",
    [
        {"dp": 2, "tp": 1, "pp": 1, "zero": 3},
        {"dp": 2, "tp": 1, "pp": 1, "zero": 2, "num_microbatches": 2},
        {"dp": 1, "tp": 1, "pp": 2, "num_microbatches": 4},
    ],
)
def test_mixed_precision_trains_as_on_one_device(pins: dict[str, int]) -> None:
    """bfloat16 products, float32 parameters and gradients: losses agree to bfloat16's rounding."""
    expected = mixed_losses(0, _plan("llama", "bf16-mixed", dp=1, tp=1, pp=1).to_json())[0]
    losses, parameters, gradients = run(
        2, mixed_losses, _plan("llama", "bf16-mixed", **pins).to_json()
    )[0]  # type: ignore[misc]
    assert parameters == gradients == {"torch.float32"}
    assert losses == pytest.approx(expected, rel=2e-3)
    assert losses[-1] < losses[0] - 0.3


def saved_whole_parameters(rank: int, text: str) -> int:
    """Bytes that autograd keeps of tensors as large as a whole parameter, outside of the stage's
    own hooks.
    """
    model, inputs, _ = capture_named("mlp")
    whole = {p.numel() for p in model.parameters() if p.dim() == 2 and p.numel() > 100}
    parallel = autoplan.parallelize(model, autoplan.Plan.from_json(text))
    program = parallel._program
    assert program.regather is not None
    kept: list[int] = []
    inner = program.regather._pack

    def pack(tensor: torch.Tensor) -> object:
        packed = inner(tensor)
        if isinstance(packed, torch.Tensor) and packed.numel() in whole and packed.dim() == 2:
            kept.append(packed.numel())
        return packed

    program.regather._pack = pack  # type: ignore[method-assign]
    parallel.forward_backward(**inputs)
    return len(kept)


def test_zero_3_keeps_shards_for_backward_not_gathered_parameters() -> None:
    plan = _plan("mlp", dp=2, tp=1, pp=1, zero=3)
    assert run(2, saved_whole_parameters, plan.to_json()) == [0, 0]


def save_trained(rank: int, text: str, folder: str) -> float:
    """Trains one step, saves with torch.distributed.checkpoint; the loss of the next step."""
    model, inputs, _ = capture_named("llama")
    parallel = autoplan.parallelize(model, autoplan.Plan.from_json(text), loss_fn=LOSSES["llama"])
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1)
    parallel.forward_backward(**inputs)
    optimizer.step()
    dcp.save(parallel.state_dict(), checkpoint_id=folder)
    optimizer.zero_grad()
    return float(parallel.forward_backward(**inputs))


def load_elsewhere(rank: int, text: str, folder: str) -> float:
    """Loads that checkpoint into another layout from a meta model; the loss."""
    model, inputs, _ = capture_named("llama")
    buffers = dict(model.named_buffers())
    parallel = autoplan.parallelize(
        model.to("meta"), autoplan.Plan.from_json(text), loss_fn=LOSSES["llama"], buffers=buffers
    )
    state = parallel.state_dict()
    dcp.load(state, checkpoint_id=folder)
    parallel.load_state_dict(state)
    return float(parallel.forward_backward(**inputs))


def test_a_checkpoint_moves_between_layouts(tmp_path: Path) -> None:
    saved = run(2, save_trained, _plan("llama", dp=1, tp=2, pp=1).to_json(), str(tmp_path))
    for pins in ({"dp": 1, "tp": 1, "pp": 2}, {"dp": 2, "tp": 1, "pp": 1, "zero": 3}):
        loaded = run(2, load_elsewhere, _plan("llama", **pins).to_json(), str(tmp_path))
        assert loaded == pytest.approx(saved, rel=1e-12)


def clipped_norm(rank: int, text: str, name: str) -> tuple[float, float, bool]:
    """The global norm by the plan, by one device, and whether all gradients are DTensors."""
    model, inputs, _ = capture_named(name)
    parallel = autoplan.parallelize(model, autoplan.Plan.from_json(text), loss_fn=LOSSES.get(name))
    parallel.forward_backward(**inputs)
    ours = float(parallel.clip_grad_norm_(0.5))
    after = float(parallel.clip_grad_norm_(1e9))
    assert after == pytest.approx(min(ours, 0.5), rel=1e-4)
    from parity import reference_loss

    reference_loss(name, model, inputs).backward()  # type: ignore[no-untyped-call]
    theirs = float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5))
    return (
        ours,
        theirs,
        all(isinstance(p.grad, DTensor) for p in parallel.parameters() if p.grad is not None),
    )


@pytest.mark.parametrize(
    "pins",
    [
        {"dp": 2, "tp": 1, "pp": 1, "zero": 1},
        {"dp": 1, "tp": 2, "pp": 1},
        {"dp": 1, "tp": 1, "pp": 2},
    ],
)
def test_clipping_uses_the_norm_of_the_whole_model(pins: dict[str, int]) -> None:
    """GPT-2's tied table counts once, replicas count once."""
    # type: ignore[misc]
    for ours, theirs, distributed in run(2, clipped_norm, _plan("gpt2", **pins).to_json(), "gpt2"):
        assert ours == pytest.approx(theirs, rel=1e-9)
        assert distributed


def refused_world(rank: int, text: str) -> str:
    """The message of a launch with another number of processes than the plan's."""
    assert dist.get_world_size() == 2
    model, _, _ = capture_named("mlp")
    try:
        autoplan.parallelize(model, autoplan.Plan.from_json(text))
    except autoplan.PlanError as error:
        return str(error)
    return ""


def test_another_world_size_is_refused_with_both_numbers() -> None:
    message = run(2, refused_world, _plan("mlp", dp=4, tp=1, pp=1).to_json())[0]
    assert "plan is for 4 processes" in str(message)
    assert "this launch has 2" in str(message)
