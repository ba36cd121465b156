# SPDX-License-Identifier: Apache-2.0
"""A plan file taken apart with the standard library only: the format, for other programs.

    python examples/read_a_plan.py [PLAN.json]        # default: plans/gpt.json beside this file

Sizes are bytes, times are seconds. A spec has one letter per mesh axis, first dp, then tp: R is
whole, S(d) a split of dim d, S(d/k) a split of each of k equal blocks of it, P a sum not yet taken.
A layout is `value~gradient`, or one spec where both are the same.
"""

from __future__ import annotations

import json
import math
import re
import sys
from pathlib import Path
from typing import Any


def parts_of(spec: str, mesh: dict[str, int]) -> int:
    """Into how many different parts a spec cuts a tensor."""
    placements = re.findall(r"R|P|S\(\d+(?:/\d+)?\)", spec)
    return math.prod(n for p, n in zip(placements, mesh.values(), strict=True) if p[0] == "S")


def describe_stages(plan: dict[str, Any]) -> None:
    """Who runs what, and what it takes on the fullest device."""
    for stage in plan["stages"]:
        memory, mesh = stage["estimate"]["memory"], stage["mesh"]
        needed = sum(size for kind, size in memory.items() if kind != "reserve")
        share = needed / plan["cluster"]["memory_bytes"]
        shape = " x ".join(f"{axis}={size}" for axis, size in mesh.items())
        print(f"stage {stage['index']}: ranks {stage['ranks']} as {shape}")
        print(f"  {stage['num_ops']} ops, {stage['first_op']} to {stage['last_op']}")
        print(f"  layers {', '.join(stage['layers'])}")
        print(f"  {needed / 2**30:.2f} GiB of each device, {share:.0%} of its memory")


def describe_parameters(plan: dict[str, Any]) -> None:
    """How many elements a rank stores, and how many distinct ways there are of storing."""
    mesh = {"dp": plan["layout"]["dp"], "tp": plan["layout"]["tp"]}
    also = {name for group in plan["shared"] for name in group[1:]}  # counted by the first name
    ways: dict[tuple[str, str, int], list[str]] = {}
    for name, entry in plan["parameters"].items():
        ways.setdefault((entry["spec"], entry["used"], entry["zero"]), []).append(name)
    print(f"{len(plan['parameters'])} parameters, stored in {len(ways)} ways:")
    for (spec, used, zero), names in sorted(ways.items(), key=lambda way: -len(way[1])):
        counted = [plan["parameters"][n] for n in names if n not in also]
        stored = sum(math.prod(entry["shape"]) // parts_of(spec, mesh) for entry in counted)
        level = f", ZeRO-{zero}" if zero else ""
        print(f"  {spec} used as {used}{level}: {len(names)} of them, as {names[0]}")
        print(f"    {stored} elements on each rank that has them")


def describe_ops(plan: dict[str, Any]) -> None:
    """The strategies that most ops share: `op_strategies` points into `strategies`."""
    users: dict[int, list[str]] = {}
    for op, index in plan["op_strategies"].items():
        users.setdefault(index, []).append(op)
    print(f"{len(plan['op_strategies'])} ops, {len(plan['strategies'])} strategies; the commonest:")
    for index, ops in sorted(users.items(), key=lambda item: -len(item[1]))[:3]:
        strategy = plan["strategies"][index]
        flow = f"{', '.join(strategy['inputs']) or 'nothing'} -> {', '.join(strategy['outputs'])}"
        print(f"  {len(ops)} ops as {ops[0]}: {flow}")


def main() -> None:
    """Reads the file and says what is in it."""
    default = Path(__file__).parent / "plans/gpt.json"
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else default
    plan = json.loads(path.read_text(encoding="utf-8"))
    if plan["schema_version"] != 2:
        sys.exit(f"{path} has schema version {plan['schema_version']}; this reader knows 2.")
    layout, schedule, estimate = plan["layout"], plan["schedule"], plan["estimate"]
    print(f"{plan['model']['name']} on {plan['cluster']['name']}: {layout}")
    print(f"{schedule['num_microbatches']} microbatches of a {schedule['name']} schedule")
    print(f"estimated step {estimate['step_time_s'] * 1e3:.1f} ms")
    describe_stages(plan)
    describe_parameters(plan)
    describe_ops(plan)
    moved = [c for c in plan["conversions"] if c["forward"] or c["backward"]]
    print(f"{len(moved)} kinds of conversion, {sum(c['count'] for c in moved)} in each microbatch")


if __name__ == "__main__":
    main()
