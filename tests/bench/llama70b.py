# SPDX-License-Identifier: Apache-2.0
"""`python -m tests.bench.llama70b`: plan Llama-3-70B for 64 H100 from a meta model; seconds, the
plan, and the baselines' price.

python -m tests.bench.llama70b [--cluster dgx-h100-8x8] [--layers 80] [--no-baselines] [-o
plan.json]
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

from plan_llama70b import llama

import autoplan
from autoplan.capture import capture
from autoplan.solver.baselines import price_baselines
from autoplan.solver.pins import Pinned
from autoplan.solver.search import Search
from autoplan.solver.space import Space


def main() -> None:
    """Prints seconds, summary and baselines."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cluster", default="dgx-h100-8x8")
    parser.add_argument("--layers", type=int, default=80)
    parser.add_argument("--no-baselines", action="store_true")
    parser.add_argument("-o", "--output")
    options = parser.parse_args()
    model, inputs = llama(options.layers)
    cluster = autoplan.Cluster.load(options.cluster)
    start = time.perf_counter()
    marks: dict[str, float] = {}
    plan = autoplan.optimize(
        model,
        cluster,
        inputs,
        precision="bf16-mixed",
        progress=lambda what, share: marks.setdefault(what, time.perf_counter()),
    )
    end = time.perf_counter()
    print(plan.summary())
    print(
        f"seconds: capture {marks['layouts'] - start:.1f}, search {end - marks['layouts']:.1f}, "
        f"together {end - start:.1f} ({os.cpu_count()} cores)"
    )
    if options.output:
        plan.save(options.output)
    if options.no_baselines:
        return
    space = Space.of(capture(model, inputs, precision="bf16-mixed").graph)
    search = Search(
        space, cluster, Pinned(), True, "adamw", cluster.device.memory_bytes * 0.92, 60.0
    )
    for name, priced in price_baselines(search).items():
        ours = plan.estimate.step_time_s
        text = (
            f"{priced.step_s:.2f} s a step ({priced.candidate}), {priced.step_s / ours:.2f} x ours"
            if priced
            else "does not fit"
        )
        print(f"{name}: {text}")


if __name__ == "__main__":
    main()
