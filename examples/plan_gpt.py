# SPDX-License-Identifier: Apache-2.0
"""GPT-2 (124 M parameters) planned for 16 A100 in two hosts, beside what people set up by hand.

    python examples/plan_gpt.py [CLUSTER [PLAN.json]]
    autoplan plan examples/plan_gpt.py:gpt --cluster dgx-a100-2x8 -o gpt.json

The first plans for dgx-a100-2x8 and writes plans/gpt.json beside this file unless told otherwise;
the second makes the same plan. The model lies on the meta device: no GPU is needed, and no memory
for its weights.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch
from torch import nn

import autoplan
from autoplan.capture import capture
from autoplan.solver.baselines import price_baselines
from autoplan.solver.pins import Pinned
from autoplan.solver.search import Search
from autoplan.solver.space import Space

BATCH, SEQUENCE = 128, 1024
TIME_LIMIT_S = 60.0


def gpt() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """The model and one global batch; what `autoplan plan FILE.py:FUNCTION` calls."""
    from transformers import GPT2Config, GPT2LMHeadModel

    # 50257 tokens have no divisor that a mesh has; padded to a multiple of 128, as is usual.
    config = GPT2Config(vocab_size=50304, use_cache=False)
    with torch.device("meta"):
        model: nn.Module = GPT2LMHeadModel(config)
        model.to(torch.bfloat16).train()
        ids = torch.zeros(BATCH, SEQUENCE, dtype=torch.int64)
    return model, {"input_ids": ids, "labels": ids}


def baselines(plan: autoplan.Plan, cluster: autoplan.Cluster) -> dict[str, float | None]:
    """Seconds of a step of each baseline, priced as the plan is; None where it does not fit."""
    model, inputs = gpt()
    space = Space.of(capture(model, inputs).graph)
    settings = plan.settings
    limit_bytes = cluster.device.memory_bytes * (1.0 - settings.memory_reserve)
    search = Search(space, cluster, Pinned(), True, settings.optimizer, limit_bytes, TIME_LIMIT_S)
    return {name: best.step_s if best else None for name, best in price_baselines(search).items()}


def main(cluster_name: str = "dgx-a100-2x8", output: str | None = None) -> None:
    """Plans, prints the summary and the comparison, saves the plan."""
    cluster = autoplan.Cluster.load(cluster_name)
    model, inputs = gpt()
    plan = autoplan.optimize(model, cluster, inputs, time_limit_s=TIME_LIMIT_S)
    print(plan.summary())
    own_s = plan.estimate.step_time_s
    print(f"{'this plan':14} {own_s * 1e3:8.2f} ms")
    for name, step_s in baselines(plan, cluster).items():
        told = f"{step_s * 1e3:8.2f} ms  {step_s / own_s:.2f} x" if step_s else "does not fit"
        print(f"{name:14} {told}")
    plan.save(output or Path(__file__).parent / "plans/gpt.json")


if __name__ == "__main__":
    main(*sys.argv[1:])
