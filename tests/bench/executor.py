# SPDX-License-Identifier: Apache-2.0
"""`python -m tests.bench.executor`: step time of a planned module over torch's
`parallelize_module`, in one run.

A 12-block MLP, hidden 64, split column/row over 2 and 4 gloo ranks by both; forward and backward.
The two are timed in turns on the same ranks, so that whatever else the machine does falls on both.
Prints medians and their ratio.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
import warnings

sys.path.insert(0, os.path.join(os.path.dirname(__file__), ".."))

import torch
from pool import run
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import autoplan

HIDDEN, BLOCKS, BATCH, ROUNDS, STEPS = 64, 12, 64, 12, 4


class Block(nn.Module):
    """x + down(gelu(up(x)))."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(x)))


class Model(nn.Module):
    """The blocks and a mean squared output as loss."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def _model() -> Model:
    torch.manual_seed(0)
    return Model()


def time_both(rank: int, text: str, world: int) -> tuple[float, float]:
    """Median seconds a step of (parallelize_module, autoplan)."""
    warnings.simplefilter("ignore")
    x = torch.randn(BATCH, HIDDEN, generator=torch.Generator().manual_seed(1))
    mesh = init_device_mesh("cpu", (world,))
    theirs = _model()
    for block in theirs.blocks:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    ours = autoplan.parallelize(_model(), autoplan.Plan.from_json(text))

    def step_theirs() -> None:
        theirs.zero_grad()
        theirs(x).backward()

    def step_ours() -> None:
        ours.zero_grad()
        ours.forward_backward(x)

    seconds: dict[str, list[float]] = {"theirs": [], "ours": []}
    for round_ in range(ROUNDS + 2):
        for name, step in (("theirs", step_theirs), ("ours", step_ours)):
            torch.distributed.barrier()
            start = time.perf_counter()
            for _ in range(STEPS):
                step()
            if round_ >= 2:  # the first rounds warm up
                seconds[name].append((time.perf_counter() - start) / STEPS)
    return statistics.median(seconds["theirs"]), statistics.median(seconds["ours"])


def main() -> None:
    """Prints the table."""
    print(
        f"{BLOCKS}-block MLP, hidden {HIDDEN}, batch {BATCH}, column/row, forward + backward, "
        f"torch {torch.__version__}, {os.cpu_count()} cores"
    )
    for world in (2, 4):
        cluster = autoplan.Cluster.load(f"local-cpu-{world}")
        placements = {"blocks.*.up.weight": "RS(0)", "blocks.*.down.weight": "RS(1)"}
        pins = autoplan.Pins(
            tp=world, dp=1, pp=1, num_microbatches=1, recompute=False, zero=0, placements=placements
        )
        plan = autoplan.optimize(_model(), cluster, (torch.randn(BATCH, HIDDEN),), pins=pins)
        theirs, ours = run(world, time_both, plan.to_json(), world)[0]  # type: ignore[misc]
        print(
            f"{world} ranks: parallelize_module {theirs * 1e3:.1f} ms, "
            f"autoplan {ours * 1e3:.1f} ms, ratio {ours / theirs:.3f}"
        )


if __name__ == "__main__":
    main()
