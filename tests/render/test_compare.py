# SPDX-License-Identifier: Apache-2.0
"""Plans side by side, and the curve over numbers of devices."""

from __future__ import annotations

import msgspec
import pytest
from sample_plans import llama_plan, mlp_plan

from autoplan.errors import PlanError
from autoplan.plan import Plan
from autoplan.render.compare import compare_data, compare_text, price_per_step
from autoplan.render.sizes import sizes_data, sizes_text
from autoplan.sizing import Size


def changed(
    plan: Plan, *, step_s: float, price: float | None, cluster: str = "other", devices: int = 16
) -> Plan:
    """The plan with another step time on a cluster of another price."""
    estimate = msgspec.structs.replace(plan.estimate, step_time_s=step_s)
    description = {**plan.cluster.description, "price_per_device_hour": price}
    summary = msgspec.structs.replace(
        plan.cluster, name=cluster, num_devices=devices, description=description
    )
    return msgspec.structs.replace(plan, estimate=estimate, cluster=summary)


def test_price_is_all_devices_for_the_time_of_a_step() -> None:
    plan = changed(llama_plan(), step_s=0.9, price=2.0)
    assert price_per_step(plan) == pytest.approx(2.0 * 16 * 0.9 / 3600)
    assert price_per_step(llama_plan()) is None


def test_fastest_and_cheapest_are_marked() -> None:
    plans = {
        "a.json": changed(llama_plan(), step_s=0.30, price=1.0),
        "b.json": changed(llama_plan(), step_s=0.20, price=9.0),
        "c.json": changed(llama_plan(), step_s=0.25, price=None),
    }
    data = compare_data(plans)
    assert (data["fastest"], data["cheapest"]) == ("b.json", "a.json")
    page = compare_text(plans)
    assert "A  a.json   <- cheapest" in page
    assert "B  b.json   <- fastest" in page
    assert max(map(len, page.splitlines())) <= 80


def test_differences_are_to_the_first() -> None:
    plans = {
        "a": changed(llama_plan(), step_s=0.30, price=None),
        "b": changed(llama_plan(), step_s=0.20, price=None),
    }
    rows = compare_text(plans).splitlines()
    at = next(i for i, row in enumerate(rows) if row.startswith("step "))
    assert rows[at].split() == ["step", "300", "ms", "200", "ms"]
    assert rows[at + 1].split() == ["-100", "ms"]


def test_placements_that_differ_are_folded_with_who_has_which() -> None:
    plan = llama_plan()
    parameters = {
        name: msgspec.structs.replace(p, spec="RR", used="RR~PP", zero=0)
        if "up_proj" in name
        else p
        for name, p in plan.parameters.items()
    }
    plans = {"a": plan, "b": msgspec.structs.replace(plan, parameters=parameters)}
    page = compare_text(plans)
    assert "  model.layers.{0-31}.mlp.up_proj.weight\n" in page
    assert "    A: S(0)S(0) used RS(0)~PS(0) zero 3\n    B: RR used RR~PP\n" in page
    assert "down_proj" not in page
    data = compare_data(plans)["placements"]
    assert isinstance(data, dict)
    assert list(data) == ["model.layers.{0-31}.mlp.up_proj.weight"]


def test_equal_plans_say_so_and_other_models_too() -> None:
    assert "every parameter is placed alike" in compare_text({"a": llama_plan(), "b": llama_plan()})
    page = compare_text({"a": llama_plan(), "b": mlp_plan()})
    assert "different models" in page
    assert "fastest" not in page


def test_many_plans_come_in_groups_that_fit() -> None:
    plans = {f"{i}.json": changed(llama_plan(), step_s=0.3 + i, price=1.0) for i in range(7)}
    page = compare_text(plans)
    assert max(map(len, page.splitlines())) <= 80
    assert page.count("cluster ") == 2  # of three beside the first each
    with pytest.raises(PlanError, match="two or more"):
        compare_text({"a": llama_plan()})


def test_sizes_mark_the_smallest_the_fastest_and_the_cheapest() -> None:
    rows = [
        Size("k-1x8", 8, None, "needs 90.00 GiB on each device"),
        Size("k-2x8", 16, changed(llama_plan(), step_s=0.30, price=1.0, cluster="k-2x8"), ""),
        Size(
            "k-4x8",
            32,
            changed(llama_plan(), step_s=0.20, price=1.0, cluster="k-4x8", devices=32),
            "",
        ),
    ]
    page = sizes_text(rows)
    lines = page.splitlines()
    assert lines[1].split()[:4] == ["8", "does", "not", "fit"]
    assert "75%" in lines[3]  # 1.5 times as fast on twice the devices
    assert "smallest: 16 devices (k-2x8)\nfastest: 32 devices (k-4x8)" in page
    assert "cheapest: 16 devices (k-2x8)" in page
    assert "8 devices:  needs 90.00 GiB" in page
    assert max(map(len, lines)) <= 80
    data = sizes_data(rows)
    assert (data["smallest"], data["fastest"], data["cheapest"]) == ("k-2x8", "k-4x8", "k-2x8")
