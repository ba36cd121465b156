# SPDX-License-Identifier: Apache-2.0
"""`python -m tests.parity_table`: seven models x eight layouts, each planned, run on gloo
processes, and compared with one device.

    python -m tests.parity_table [--models mlp,gpt2] [--layouts dp2,auto4] [--steps 3]

Prints per cell the largest relative error of loss, all gradients, and parameters after AdamW steps
(float64), or the planner's refusal. Exits 1 when a cell differs by more than 1e-9.
"""

from __future__ import annotations

import argparse
import os
import sys
import time

sys.path.insert(0, os.path.dirname(__file__))

from models import BUILDERS, build
from parity import LOSSES, compare
from pool import RemoteError, run

import autoplan
from autoplan.cluster import DeviceSpec, Link

TOLERANCE = 1e-9


def slow_cluster(world: int) -> autoplan.Cluster:
    """Devices so slow and links so fast that every split pays, however small the model: nothing is
    left whole for its size.
    """
    device = DeviceSpec(
        name="slow",
        memory_bytes=2.0**32,
        memory_bytes_per_s=1e8,
        peak_flop_per_s={"float64": 1e8, "float32": 1e8},
    )
    return autoplan.Cluster(
        name="slow",
        num_hosts=1,
        devices_per_host=world,
        device=device,
        intra_host=Link(latency_s=1e-9, bytes_per_s=1e12),
    )


LAYOUTS: dict[str, tuple[int, dict[str, int]]] = {
    "dp2": (2, {"dp": 2, "tp": 1, "pp": 1}),
    "tp2": (2, {"dp": 1, "tp": 2, "pp": 1}),
    "pp2": (2, {"dp": 1, "tp": 1, "pp": 2, "num_microbatches": 2}),
    "zero3": (2, {"dp": 2, "tp": 1, "pp": 1, "zero": 3}),
    "tp2pp2": (4, {"dp": 1, "tp": 2, "pp": 2, "num_microbatches": 4}),
    "dp2tp2": (4, {"dp": 2, "tp": 2, "pp": 1}),
    "dp2pp2": (4, {"dp": 2, "tp": 1, "pp": 2, "num_microbatches": 2}),
    "auto4": (4, {}),
}


def cell(
    name: str, layout: str, steps: int, degrees: dict[str, int] | None = None
) -> tuple[float | None, str]:
    """(largest error, what was run) of one cell; (None, refusal) where the planner refuses.

    Where the batch cannot be cut (batch norm's statistics), the refusal is printed and the cell is
    run with one microbatch.
    """
    world = LAYOUTS[layout][0]
    degrees = dict(LAYOUTS[layout][1]) if degrees is None else degrees
    model, inputs = build(name)
    pins = autoplan.Pins(**degrees)  # type: ignore[arg-type]
    try:
        plan = autoplan.optimize(
            model, slow_cluster(world), inputs, loss_fn=LOSSES.get(name), pins=pins
        )
    except autoplan.InfeasibleError as error:
        if degrees.pop("num_microbatches", None) is None:
            return None, str(error)
        print(f"{name:7} {layout:7} refused: {error}", flush=True)
        return cell(name, layout, steps, degrees)
    used = plan.layout.dp * plan.layout.tp * plan.layout.pp
    degrees_run = f"dp={plan.layout.dp} tp={plan.layout.tp} pp={plan.layout.pp}"
    shape = f"{degrees_run} m={plan.schedule.num_microbatches} {plan.schedule.name}"
    try:
        errors = (
            run(used, compare, plan.to_json(), name, steps)
            if used > 1
            else [compare(0, plan.to_json(), name, steps)]
        )
    except (RemoteError, TimeoutError) as error:
        return float("inf"), f"{shape}: {error}"
    worst = max(e.worst for e in errors)  # type: ignore[attr-defined]
    parts = [max(getattr(e, key) for e in errors) for key in ("loss", "gradient", "parameter")]
    return (
        worst,
        f"{shape}: loss {parts[0]:.1e}, gradients {parts[1]:.1e}, parameters {parts[2]:.1e}",
    )


def main() -> int:
    """Prints the table; 0 when every cell is equal or refused."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default=",".join(BUILDERS))
    parser.add_argument("--layouts", default=",".join(LAYOUTS))
    parser.add_argument("--steps", type=int, default=3)
    options = parser.parse_args()
    names, layouts = options.models.split(","), options.layouts.split(",")
    start, wrong, rows, notes = time.perf_counter(), 0, [], []
    for name in names:
        row = []
        for layout in layouts:
            error, text = cell(name, layout, options.steps)
            print(f"{name:7} {layout:7} {text}", flush=True)
            if error is None:
                row.append("refused")
                notes.append(f"{name} {layout}: {text}")
            else:
                row.append(f"{error:.0e}")
                wrong += error > TOLERANCE
        rows.append((name, row))
    print(f"\n{'':8}" + "".join(f"{x:>9}" for x in layouts))
    for name, row in rows:
        print(f"{name:8}" + "".join(f"{x:>9}" for x in row))
    for note in notes:
        print(f"refused: {note}")
    print(f"{wrong} cells above {TOLERANCE}; {time.perf_counter() - start:.0f} s")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
