# SPDX-License-Identifier: Apache-2.0
"""The HTML page in a real browser: silent when loaded, its controls work, hostile names do nothing.

Needs Chromium (`find_chromium`); where there is none the tests are skipped, saying so, except with
CI=true, where they fail.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from chromium import Tab, chromium_tab, find_chromium
from hostile_plan import HOSTILE, hostile_plan
from sample_plans import llama_plan, mlp_plan
from wide_plan import wide_plan

from autoplan.plan import Plan
from autoplan.render.colours import ACTIVITY
from autoplan.render.page import page_html
from autoplan.units import format_bytes

SETTLED = "new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => done(1))))"


@pytest.fixture(scope="module")
def tab() -> Iterator[Tab]:
    program = find_chromium()
    if program is None:
        reason = "the page's tests need Chromium on the PATH (Debian: apt-get install chromium)"
        pytest.fail(reason) if os.environ.get("CI") == "true" else pytest.skip(reason)
    with chromium_tab(program) as opened:
        yield opened


def _open(tab: Tab, plan: Plan, folder: Path, width: int = 1280, dark: bool = False) -> None:
    page = folder / "plan.html"
    page.write_text(page_html(plan), encoding="utf-8")
    tab.size(width, 900, dark)
    tab.open(page)
    tab.run(SETTLED)


def _texts(tab: Tab, selector: str) -> list[str]:
    """What every such element says."""
    query = f"[...document.querySelectorAll({json.dumps(selector)})].map((e) => e.textContent)"
    return [str(text) for text in tab.run(query)]


def _choose_stage(tab: Tab, value: str) -> None:
    tab.run(
        f"(() => {{ const box = document.querySelector('#stage'); box.value = '{value}';"
        "box.dispatchEvent(new Event('change')); })()"
    )


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("make", [llama_plan, mlp_plan, hostile_plan, wide_plan])
def test_loads_in_silence(tab: Tab, tmp_path: Path, make: type, dark: bool) -> None:
    plan: Plan = make()
    _open(tab, plan, tmp_path, width=1024, dark=dark)
    assert tab.complaints == []
    assert tab.requests == []
    assert tab.run("document.title") == " ".join(f"{plan.model.name}: plan".split())
    assert tab.run("document.documentElement.scrollWidth <= innerWidth")
    assert tab.run("document.documentElement.dataset.theme") == ("dark" if dark else "light")
    empty = [
        t
        for t in ("facts", "time-legend", "memory-rows", "strip", "cluster-tree")
        if not _texts(tab, f"#{t} > *")
    ]
    assert not empty


def test_a_filter_leaves_the_rows_that_say_so(tab: Tab, tmp_path: Path) -> None:
    _open(tab, llama_plan(), tmp_path)
    rows = "#parameters tbody tr"
    everything = _texts(tab, rows)
    tab.type("#parameters-filter", "down_proj 14336")
    assert len(_texts(tab, rows)) == 2
    assert all("down_proj" in text and "4096x14336" in text for text in _texts(tab, rows))
    assert _texts(tab, "#parameters [role=status]") == [f"2 of {len(everything)} rows"]
    tab.type("#parameters-filter", "layers.17.mlp")
    assert len(_texts(tab, rows)) == 3
    assert all("model.layers.17.mlp" in text for text in _texts(tab, rows))
    tab.type("#parameters-filter", "no such thing")
    assert _texts(tab, rows) == []
    tab.type("#parameters-filter", " ")
    assert _texts(tab, rows) == everything
    assert tab.complaints == []


def test_the_search_box_finds_modules_in_every_view(tab: Tab, tmp_path: Path) -> None:
    _open(tab, llama_plan(), tmp_path)
    tab.type("#search", "Layers.17.mlp")
    assert _texts(tab, ".block:not(.dim)") == ["17"]
    title = "model.layers.17: stage 1, 9 parameters, 3 of that name"
    assert _texts(tab, "#block-title") == [title]
    assert len(_texts(tab, "#block tbody tr")) == 3
    conversions = _texts(tab, "#conversions tbody td.name")
    assert [text.partition(".mlp")[0] for text in conversions] == [
        "model.layers.0",  # stands for the same place of every layer
        "model.layers.{16-31}",
    ]
    assert len(_texts(tab, "#ops tbody tr")) == 2
    tab.press("Escape")
    assert _texts(tab, ".block.dim") == []


def test_a_stage_filters_every_view(tab: Tab, tmp_path: Path) -> None:
    plan = llama_plan()
    _open(tab, plan, tmp_path)
    _choose_stage(tab, "1")
    assert _texts(tab, ".stage-button") == ["stage 1"]
    total = format_bytes(plan.stages[1].estimate.memory.total)
    assert _texts(tab, "#memory-rows .figure") == [total]
    assert _texts(tab, ".group-name") == ["stage 1"]
    assert len(_texts(tab, ".block")) == len(plan.stages[1].layers)
    assert len(_texts(tab, "#cluster-tree li")) == 1
    names = _texts(tab, "#parameters tbody td.name")
    assert len(names) == 12
    assert not [name for name in names if "{0-15}" in name]
    assert tab.run("shownLanes().lanes.map((lane) => lane.stage)") == [1]
    tab.press("Escape")
    assert tab.run("document.querySelector('#stage').value") == ""
    assert _texts(tab, ".stage-button") == ["stage 0", "stage 1"]
    tab.run("document.querySelectorAll('.stage-button')[0].click()")
    assert _texts(tab, ".group-name") == ["stage 0"]
    assert _texts(tab, "#cut")[0].startswith("Stage 0: next best cut, 16 layers in stage 0 and 19 ")
    assert tab.complaints == []


def test_the_canvas_has_the_colours_of_the_schedule(tab: Tab, tmp_path: Path) -> None:
    plan = mlp_plan()  # one forward of 120 us, then 90 us of communication
    _open(tab, plan, tmp_path)
    script = """(() => {
      const canvas = document.querySelector('#time-canvas'), width = canvas.width - LEFT - RIGHT;
      const { data } = canvas.getContext('2d').getImageData(LEFT, AXIS + 2, width, 1);
      return [0.1, 0.5, 0.6, 0.95].map((share) => {
        const [r, g, b] = data.slice(4 * Math.floor(share * width));
        return '#' + [r, g, b].slice(0, 3)
          .map((c) => c.toString(16).padStart(2, '0')).join('').toUpperCase();
      });
    })()"""
    forward, communication = ACTIVITY["forward"], ACTIVITY["communication"]
    assert tab.run(script) == [forward, forward, communication, communication]
    _open(tab, wide_plan(), tmp_path)  # far too narrow for boxes: shares, all colours of the plan
    colours = tab.run("""(() => {
      const canvas = document.querySelector('#time-canvas'), context = canvas.getContext('2d');
      const pixels = new Uint32Array(context.getImageData(LEFT, AXIS, 600, 700).data.buffer);
      return activityColours().filter((hex) => pixels.includes(pixelOf(hex)));
    })()""")
    expected = ("forward", "recompute", "backward", "communication", "bubble")
    assert {hex.upper() for hex in colours} >= {ACTIVITY[name] for name in expected}


def test_the_timeline_follows_keys_and_pointer(tab: Tab, tmp_path: Path) -> None:
    plan = llama_plan()
    _open(tab, plan, tmp_path)
    whole = tab.run("view.to - view.from")
    assert whole == pytest.approx(tab.run("plan.timeline.end_s"), rel=1e-12)
    tab.run("document.querySelector('#time-canvas').focus()")
    tab.press(".")
    readout = _texts(tab, "#time-readout")[0]
    assert readout.startswith("stage 0 (ranks 0-7, dp=2 tp=4), forward of microbatch 0: 3.3 ms")
    tab.press("+")
    assert tab.run("view.to - view.from") == pytest.approx(whole / 1.5, rel=1e-9)
    tab.press("ArrowLeft")
    tab.press("0")
    assert tab.run("view.to - view.from") == pytest.approx(whole, rel=1e-12)
    box = tab.run(
        "(() => { const b = document.querySelector('#time-canvas').getBoundingClientRect();"
        "return [b.left + LEFT + 2, b.top + AXIS + 4]; })()"
    )
    tab.call("Input.dispatchMouseEvent", type="mouseMoved", x=box[0], y=box[1])
    tab.run(SETTLED)
    assert _texts(tab, "#tip:not([hidden])")[0].splitlines()[1] == "forward of microbatch 0: 3.3 ms"
    assert tab.complaints == []


def test_columns_sort_both_ways_and_blocks_follow_arrows(tab: Tab, tmp_path: Path) -> None:
    _open(tab, llama_plan(), tmp_path)
    shapes = "#parameters tbody td:nth-child(2)"
    head = "document.querySelector('#parameters th:nth-child(2) button')"
    tab.run(f"{head}.click()")
    up = [tuple(map(int, text.split("x"))) for text in _texts(tab, shapes)]
    assert up == sorted(up)
    assert up[0] < up[-1]
    tab.run(f"{head}.click()")
    assert [tuple(map(int, text.split("x"))) for text in _texts(tab, shapes)] == sorted(up)[::-1]
    tab.run("document.querySelector('.block').focus()")
    tab.press("ArrowRight")
    assert _texts(tab, "#block-title") == ["model.layers.0: stage 0, 9 parameters"]
    assert tab.run("document.activeElement.dataset.layer") == "1"


def test_the_theme_button_changes_the_colours(tab: Tab, tmp_path: Path) -> None:
    _open(tab, llama_plan(), tmp_path)
    paper = "getComputedStyle(document.body).backgroundColor"
    light = tab.run(paper)
    tab.run("document.querySelector('#theme').click()")
    assert tab.run(paper) != light
    tab.run("document.querySelector('#theme').click()")
    assert tab.run(paper) == light


def test_hostile_names_do_nothing(tab: Tab, tmp_path: Path) -> None:
    _open(tab, llama_plan(), tmp_path)
    kinds = "[...new Set([...document.querySelectorAll('*')].map((e) => e.tagName))].sort()"
    usual = tab.run(kinds)
    plan = hostile_plan()
    _open(tab, plan, tmp_path)
    assert set(tab.run(kinds)) <= set(usual)
    assert tab.run("document.scripts.length") == 2
    assert tab.run("document.querySelector('h1').textContent") == plan.model.name
    shown = _texts(tab, "#parameters tbody td.name")
    assert sorted(shown) == sorted(f"{name}.weight" for name in HOSTILE)
    for name in HOSTILE[:6]:
        tab.type("#search", name)
        tab.type("#conversions-filter", name)
        assert _texts(tab, "#conversions tbody td.name") == [name]
        hover = "document.querySelector('.block:not(.dim)').dispatchEvent(new Event('mousemove'))"
        tab.run(hover)
        assert name in _texts(tab, "#tip")[0]
    assert tab.run("window.hacked") is None
    assert tab.complaints == []
    assert tab.requests == []


def test_the_policy_blocks_what_the_page_does_not_do(tab: Tab, tmp_path: Path) -> None:
    _open(tab, llama_plan(), tmp_path)
    tab.run(
        "document.body.append(Object.assign(document.createElement('script'),"
        " { textContent: 'window.hacked = 1' }))"
    )
    assert tab.run("window.hacked") is None
    assert tab.run("fetch('http://127.0.0.1:9/').then(() => 'sent', () => 'refused')") == "refused"
    assert tab.requests == []
    assert all("Content Security Policy" in text for text in tab.complaints)
    assert len(tab.complaints) >= 2
