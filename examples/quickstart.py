# SPDX-License-Identifier: Apache-2.0
"""An MLP planned for a made-up cluster of 2 hosts x 4 devices; needs no such hardware, and no memory for the weights.

    python examples/quickstart.py [PLAN.json]         # default: plans/quickstart.json beside this file
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from pathlib import Path

import torch
from torch import nn

import autoplan
from autoplan.cluster import DeviceSpec, Link

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
    intra_host=Link(latency_s=5e-6, bytes_per_s=1e11),  # alpha; bytes/s of one device, one direction
    inter_host=Link(latency_s=2e-5, bytes_per_s=2.5e10),  # of all NICs of a host together
)
with torch.device("meta"):
    blocks = [
        nn.Sequential(nn.Linear(4096, 16384), nn.GELU(), nn.Linear(16384, 4096)) for _ in range(4)
    ]
    model = nn.Sequential(OrderedDict(blocks=nn.Sequential(*blocks)))
    x_BD = torch.empty(2048, 4096)  # B rows: the whole global batch

plan = autoplan.optimize(model, cluster, (x_BD,), loss_fn=lambda y_BD, batch: y_BD.square().mean())
print(plan.summary())
plan.save(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parent / "plans/quickstart.json")
