# SPDX-License-Identifier: Apache-2.0
"""One model on more and more devices: the page and the data of `autoplan size`.

In come plans by number of devices, out goes the curve of step time and cost, with the smallest
number that fits, the fastest and the cheapest marked.
"""

from __future__ import annotations

from collections.abc import Sequence

from autoplan.plan import Plan
from autoplan.render.compare import cheapest, fastest, money, samples_per_s, terms
from autoplan.render.layout import WIDTH, format_table, join_blocks
from autoplan.sizing import Size
from autoplan.units import format_bytes, format_seconds


def sizes_text(sizes: Sequence[Size], width: int | None = None) -> str:
    """The curve as a page.

    Args:
        sizes: By number of devices; a plan for one at least.
        width: Columns, 80 unless told.
    """
    plans = {size.cluster: size.plan for size in sizes if size.plan is not None}
    title = ("devices", "layout", "step", "samples/s", "scaling", "peak", "price a step")
    table = [title, *(_row(size, plans) for size in sizes)]
    blocks = [format_table(table, width or WIDTH)]
    devices = {size.cluster: size.num_devices for size in sizes}
    best = {"smallest": next(iter(plans)), "fastest": fastest(plans), "cheapest": cheapest(plans)}
    told = [f"{w}: {_counted(devices[n])} ({n})" for w, n in best.items() if n is not None]
    blocks.append("\n".join(told))
    refused = [size for size in sizes if size.plan is None]
    if refused:
        row = (f"{_counted(refused[-1].num_devices)}:", refused[-1].reason)
        blocks.append(format_table([row], width or WIDTH))
    return join_blocks(blocks)


def _row(size: Size, plans: dict[str, Plan]) -> tuple[str, ...]:
    plan = size.plan
    if plan is None:
        return (str(size.num_devices), "does not fit", *("",) * 5)
    first = next(iter(plans.values()))
    ideal = samples_per_s(first) / first.cluster.num_devices * size.num_devices
    return (
        str(size.num_devices),
        f"dp={plan.layout.dp} tp={plan.layout.tp} pp={plan.layout.pp}",
        format_seconds(plan.estimate.step_time_s),
        f"{samples_per_s(plan):.4g}",
        f"{samples_per_s(plan) / ideal:.0%}" if ideal else "-",
        format_bytes(plan.estimate.peak_memory_bytes),
        money(plan),
    )


def _counted(devices: int) -> str:
    return f"{devices} device" + "s" * (devices != 1)


def sizes_data(sizes: Sequence[Size]) -> dict[str, object]:
    """The same as plain data."""
    plans = {size.cluster: size.plan for size in sizes if size.plan is not None}
    return {
        "sizes": [
            {
                "cluster": size.cluster,
                "devices": size.num_devices,
                "reason": size.reason or None,
                **({} if size.plan is None else terms(size.plan)),
            }
            for size in sizes
        ],
        "smallest": next(iter(plans), None),
        "fastest": fastest(plans) if plans else None,
        "cheapest": cheapest(plans) if plans else None,
    }
