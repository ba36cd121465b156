# SPDX-License-Identifier: Apache-2.0
"""Plans side by side: what differs and what it costs, term by term.

In come Plans, out go pages and the same as plain data. Money is the price of all devices of the
cluster, idle ones too, for the time of a step. Of one model, the fastest plan and the cheapest are
marked. Not here: any estimate that the plans do not hold.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from autoplan.errors import PlanError
from autoplan.plan import Plan
from autoplan.render.layout import WIDTH, Fold, fold_names, format_table, join_blocks, natural_key
from autoplan.units import format_bytes, format_seconds

MOST_PLACEMENTS = 20  # rows of parameters that differ; `all` shows the rest
COLUMN = 14  # the least width of a plan's column


def price_per_step(plan: Plan) -> float | None:
    """US dollars for one step of the whole cluster; None where it states no price."""
    price = plan.cluster.description.get("price_per_device_hour")
    if not isinstance(price, (int, float)):
        return None
    return price * plan.cluster.num_devices * plan.estimate.step_time_s / 3600.0


def compare_data(plans: Mapping[str, Plan]) -> dict[str, object]:
    """The comparison as plain data: per plan its terms, which is fastest and cheapest, and the
    parameters that are placed differently.
    """
    return {
        "plans": {name: terms(plan) for name, plan in plans.items()},
        "same_model": _same_model(plans),
        "fastest": fastest(plans),
        "cheapest": cheapest(plans),
        "placements": {
            fold.pattern: dict(zip(plans, fold.first)) for fold in _different_placements(plans)
        },
    }


def compare_text(plans: Mapping[str, Plan], *, all: bool = False, width: int | None = None) -> str:
    """The comparison as a page.

    Args:
        plans: Two or more, by the name to show; the first is what the others are compared with.
        all: Every parameter that is placed differently.
        width: Columns, 80 unless told. Plans that do not fit beside each other come below.

    Raises:
        PlanError: Fewer than two plans.
    """
    if len(plans) < 2:
        raise PlanError("there is one plan to compare, expected two or more. Name another one.")
    columns, names = width or WIDTH, list(plans)
    letters = {name: chr(ord("A") + i % 26) + "'" * (i // 26) for i, name in enumerate(names)}
    room = max((columns - 16) // max(COLUMN, _widest(plans)), 2)
    told = {n: " and ".join(marks(n, plans)) for n in names}
    blocks = [
        "\n".join(f"{letters[n]}  {n}" + (f"   <- {told[n]}" if told[n] else "") for n in names)
    ]
    if not _same_model(plans):
        blocks.append("the plans are of different models or inputs: their times do not compare")
    rest = names[1:]
    for start in range(0, len(rest), room - 1):
        group = [names[0], *rest[start : start + room - 1]]
        blocks.append(_table({letters[n]: plans[n] for n in group}, columns))
    blocks.append(_placements(plans, letters, all, columns))
    return join_blocks(blocks)


def _widest(plans: Mapping[str, Plan]) -> int:
    return 2 + max(len(value(p)) for p in plans.values() for _, value in ROWS)


def _same_model(plans: Mapping[str, Plan]) -> bool:
    return len({(p.fingerprint.graph, p.fingerprint.inputs) for p in plans.values()}) == 1


def fastest(plans: Mapping[str, Plan]) -> str | None:
    """The name of the plan with the shortest step; None for plans of different models."""
    if not _same_model(plans):
        return None
    return min(plans, key=lambda name: plans[name].estimate.step_time_s)


def cheapest(plans: Mapping[str, Plan]) -> str | None:
    """The name of the plan whose step costs least; None where no cluster states a price."""
    prices = {n: price for n, p in plans.items() if (price := price_per_step(p)) is not None}
    return min(prices, key=lambda n: prices[n]) if prices and _same_model(plans) else None


def marks(name: str, plans: Mapping[str, Plan]) -> list[str]:
    """What a plan is among the others: "fastest", "cheapest", both or nothing."""
    found = {"fastest": fastest(plans), "cheapest": cheapest(plans)}
    return [word for word, best in found.items() if best == name]


def terms(plan: Plan) -> dict[str, object]:
    """What a plan costs, as plain data."""
    e = plan.estimate
    return {
        "cluster": plan.cluster.name,
        "devices": plan.cluster.num_devices,
        "idle_devices": plan.search.idle_devices,
        "dp": plan.layout.dp,
        "tp": plan.layout.tp,
        "pp": plan.layout.pp,
        "schedule": plan.schedule.name,
        "num_microbatches": plan.schedule.num_microbatches,
        "step_time_s": e.step_time_s,
        "samples_per_s": samples_per_s(plan),
        "compute_s": e.compute_s,
        "communication_s": e.communication_s,
        "bubble_s": e.bubble_s,
        "optimizer_s": e.optimizer_s,
        "mfu": e.mfu,
        "peak_memory_bytes": e.peak_memory_bytes,
        "memory_bytes": plan.cluster.memory_bytes,
        "price_per_step": price_per_step(plan),
    }


def samples_per_s(plan: Plan) -> float:
    """Samples of the global batch per second."""
    step = plan.estimate.step_time_s
    return plan.model.batch_size / step if step else 0.0


def _recomputed(plan: Plan) -> str:
    layers = sum(len(stage.layers) for stage in plan.stages)
    count = sum(len(stage.recompute) for stage in plan.stages)
    return f"{count} of {layers}" if count else "none"


def _stage_layers(plan: Plan) -> str:
    counts = [len(stage.layers) for stage in plan.stages]
    return str(counts[0]) if len(set(counts)) == 1 else f"{min(counts)}-{max(counts)}"


def money(plan: Plan) -> str:
    """The price of a step as text."""
    price = price_per_step(plan)
    return "-" if price is None else f"${price:.4g}"


def _zero(plan: Plan) -> str:
    levels = sorted({p.zero for p in plan.parameters.values()})
    return ",".join(map(str, levels)) or "0"


# a row's name -> its cell for one plan
ROWS: tuple[tuple[str, Callable[[Plan], str]], ...] = (
    ("cluster", lambda p: p.cluster.name),
    ("devices", lambda p: str(p.cluster.num_devices)),
    ("idle", lambda p: str(p.search.idle_devices)),
    ("dp tp pp", lambda p: f"{p.layout.dp} {p.layout.tp} {p.layout.pp}"),
    ("ZeRO", _zero),
    ("schedule", lambda p: p.schedule.name),
    ("microbatches", lambda p: str(p.schedule.num_microbatches)),
    ("layers a stage", _stage_layers),
    ("recomputed", _recomputed),
    ("step", lambda p: format_seconds(p.estimate.step_time_s)),
    ("  compute", lambda p: format_seconds(p.estimate.compute_s)),
    ("  communication", lambda p: format_seconds(p.estimate.communication_s)),
    ("  bubble", lambda p: format_seconds(p.estimate.bubble_s)),
    ("  optimizer", lambda p: format_seconds(p.estimate.optimizer_s)),
    ("samples/s", lambda p: f"{samples_per_s(p):.4g}"),
    ("MFU", lambda p: f"{p.estimate.mfu:.1%}"),
    ("peak memory", lambda p: format_bytes(p.estimate.peak_memory_bytes)),
    ("of", lambda p: format_bytes(p.cluster.memory_bytes)),
    ("price a step", money),
)
DIFFERENCES = ("step", "  compute", "  communication", "  bubble", "  optimizer")


def _table(plans: Mapping[str, Plan], width: int) -> str:
    """One column a plan; rows that are equal for all stand without the difference."""
    first = next(iter(plans.values()))
    rows = [("", *plans)]
    for name, value in ROWS:
        cells = [value(plan) for plan in plans.values()]
        rows.append((name, *cells))
        if name in DIFFERENCES and len(set(cells)) > 1:
            field = f"{name.strip()}_s" if name != "step" else "step_time_s"
            rows.append(
                (
                    "",
                    "",
                    *(
                        _difference(getattr(p.estimate, field) - getattr(first.estimate, field))
                        for p in list(plans.values())[1:]
                    ),
                )
            )
    return format_table(rows, width)


def _difference(seconds: float) -> str:
    return f"{'+' if seconds >= 0 else '-'}{format_seconds(abs(seconds))}"


def _different_placements(plans: Mapping[str, Plan]) -> list[Fold[tuple[str, ...]]]:
    """Parameters of all plans whose layouts differ, equal ones folded."""
    common = set.intersection(*(set(p.parameters) for p in plans.values()))
    rows = []
    for name in common:
        entries = [p.parameters[name] for p in plans.values()]
        cells = tuple(
            f"{e.spec} used {e.used}" + (f" zero {e.zero}" if e.zero else "") for e in entries
        )
        if len(set(cells)) > 1:
            rows.append((name, cells))
    folds = fold_names(rows)
    return sorted(folds, key=lambda f: natural_key(f.pattern))


def _placements(
    plans: Mapping[str, Plan], letters: Mapping[str, str], all: bool, width: int
) -> str:
    folds = _different_placements(plans)
    if not set.intersection(*(set(p.parameters) for p in plans.values())):
        return ""
    if not folds:
        return "every parameter is placed alike"
    shown = folds if all else folds[:MOST_PLACEMENTS]
    lines = ["parameters placed differently (specs are of meshes dp x tp)"]
    for fold in shown:
        lines.append(f"  {fold.pattern}")
        groups: dict[str, list[str]] = {}
        for name, cell in zip(plans, fold.first):
            groups.setdefault(cell, []).append(letters[name])
        lines += [f"    {','.join(who)}: {cell}" for cell, who in groups.items()]
    if len(folds) > len(shown):
        lines.append(f"  and {len(folds) - len(shown)} more: --all")
    return "\n".join(lines)
