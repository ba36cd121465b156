# SPDX-License-Identifier: Apache-2.0
"""An MLP planned for a made-up cluster of 2 hosts x 4 devices, on any machine, in seconds.

    python examples/quickstart.py [PLAN.json]

Prints the plan and saves it, as plans/quickstart.json beside this file unless told otherwise.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import nn

import autoplan
from autoplan.cluster import DeviceSpec, Link


class MLP(nn.Module):
    """Blocks of two linears (B batch, D width); its output is its loss."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
            for _ in range(depth)
        )

    def forward(self, x_BD: torch.Tensor) -> torch.Tensor:
        """The mean square of the last block's output."""
        for block in self.blocks:
            x_BD = block(x_BD)
        return x_BD.square().mean()


device = DeviceSpec(
    name="ten-teraflop",
    memory_bytes=8 * 2**30,
    memory_bytes_per_s=1e12,
    peak_flop_per_s={"float32": 1e13},
)
cluster = autoplan.Cluster(
    name="made-up-2x4",
    num_hosts=2,
    devices_per_host=4,
    device=device,
    intra_host=Link(latency_s=5e-6, bytes_per_s=1e11),  # of one device, one direction
    inter_host=Link(latency_s=2e-5, bytes_per_s=2.5e10),  # of all NICs of a host together
)
with torch.device("meta"):  # shapes are enough to plan: no memory for weights or batch
    model, x_BD = MLP(width=4096, depth=4), torch.empty(2048, 4096)

plan = autoplan.optimize(model, cluster, (x_BD,))  # x_BD: the whole global batch
print(plan.summary())
plan.save(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parent / "plans/quickstart.json")
