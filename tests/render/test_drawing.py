# SPDX-License-Identifier: Apache-2.0
"""Pictures: what they are, that equal plans are equal files, and what bad input says."""

from __future__ import annotations

from pathlib import Path

import pytest
from matplotlib.figure import Figure
from sample_plans import llama_plan, mlp_plan

from autoplan.errors import PlanError
from autoplan.render.draw import draw_file
from autoplan.render.panels import PANELS

HEADS = {".png": b"\x89PNG", ".svg": b"<?xml", ".pdf": b"%PDF"}


@pytest.mark.parametrize("suffix", HEADS)
def test_pictures_are_of_their_kind_and_deterministic(suffix: str, tmp_path: Path) -> None:
    first = draw_file(llama_plan(), tmp_path / f"a{suffix}").read_bytes()
    assert first.startswith(HEADS[suffix])
    assert draw_file(llama_plan(), tmp_path / f"b{suffix}").read_bytes() == first
    assert sorted(p.name for p in tmp_path.iterdir()) == [f"a{suffix}", f"b{suffix}"]


@pytest.mark.parametrize("panel", PANELS)
@pytest.mark.parametrize("make", [llama_plan, mlp_plan])
def test_each_panel_stands_alone(panel: str, make: object, tmp_path: Path) -> None:
    assert callable(make)
    path = draw_file(make(), tmp_path / "one.svg", panel=panel)
    titles = {"schedule": "Schedule", "memory": "Memory", "model": "Model", "network": "Network"}
    text = path.read_text()
    for name, title in titles.items():
        assert (f">{title}: " in text) == (name == panel)


def words(panel: str) -> set[str]:
    axes = Figure(figsize=(11, 4)).add_subplot()
    PANELS[panel](axes, llama_plan())
    legend = axes.get_legend()
    labels = [t.get_text() for t in axes.texts]
    labels += [t.get_text() for t in legend.get_texts()] if legend else []
    return {*labels, *(t.get_text() for t in axes.get_yticklabels()), axes.get_title()}


def test_panels_say_what_the_plan_says() -> None:
    schedule, memory, model, network = map(words, PANELS)
    assert {"stage 0 (ranks 0-7)", "stage 1 (ranks 8-15)", "0", "15", "bubble"} <= schedule
    assert {"61", "57", "activations", "Memory: peak 61.00 GiB on stage 0"} <= memory
    assert "model.layers.{0-31}.mlp.up_proj.weight  (ZeRO-3)" in model
    assert {"leaves: pp 16.00 GiB", "hosts 0-1", "network: ib-ndr, 400 GB/s"} <= network


@pytest.mark.parametrize(
    ("name", "panel", "message"),
    [
        ("plan.gif", None, r"expected one of \.png, \.svg, \.pdf, \.html, \.trace\.json"),
        ("plan", None, "expected one of"),
        ("plan.trace.json", "memory", "no panels"),
        ("missing/plan.png", None, "No such file or directory"),
        ("missing/plan.trace.json", None, "No such file or directory"),
    ],
)
def test_bad_output_is_refused_and_nothing_is_written(
    name: str, panel: str | None, message: str, tmp_path: Path
) -> None:
    with pytest.raises(PlanError, match=message):
        draw_file(mlp_plan(), tmp_path / name, panel=panel)
    assert list(tmp_path.iterdir()) == []
