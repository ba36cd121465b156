# SPDX-License-Identifier: Apache-2.0
"""The HTML page as text: what it holds, how it is escaped, that it reaches for nothing.

Read with Python's own HTML parser; what a browser makes of it is in `test_browser.py`.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import math
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hostile_plan import HOSTILE, hostile_plan
from sample_plans import llama_plan, mlp_plan
from wide_plan import NUM_MICROBATCHES, NUM_STAGES, wide_plan

from autoplan.plan import Plan
from autoplan.render.page import SCRIPTS, page_html, script_json
from autoplan.render.page_data import coded_lane, front_coded, page_data
from autoplan.render.timeline import Box, Lane, step_timeline

ROOT = Path(__file__).resolve().parents[2]
EACH = pytest.mark.parametrize("make", [llama_plan, mlp_plan, hostile_plan])


class Reader(HTMLParser):
    """Every tag with its attributes, and the text of scripts and styles."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.inside = False
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self.inside = tag in ("script", "style", "title")
        if self.inside:
            self.texts.append("")

    def handle_endtag(self, tag: str) -> None:
        self.inside = False

    def handle_data(self, data: str) -> None:
        if self.inside:
            self.texts[-1] += data

    def text(self, tag: str, place: int = 0) -> str:
        """The text of the place-th such element."""
        names = [name for name, _ in self.tags if name in ("script", "style", "title")]
        return [text for name, text in zip(names, self.texts) if name == tag][place]

    def data(self) -> dict[str, Any]:
        return dict(json.loads(self.text("script")))


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


@EACH
def test_the_page_reaches_for_nothing(make: Callable[[], Plan]) -> None:
    reader = Reader(page_html(make()))
    for tag, attributes in reader.tags:
        assert "src" not in attributes, tag
        assert (attributes.get("href") or "#").startswith(("#", "data:")), attributes
        assert not [name for name in attributes if name.startswith("on") or name == "style"]
    assert not re.search(r"url\(|@import|https?:", reader.text("style"))
    script = reader.text("script", 1)
    for word in ("http:", "https:", "fetch", "XMLHttpRequest", "WebSocket", "import(", "eval"):
        assert word not in script
    for word in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "srcdoc"):
        assert word not in script


@EACH
def test_the_policy_allows_this_style_and_script_alone(make: Callable[[], Plan]) -> None:
    reader = Reader(page_html(make()))
    policies = [
        a["content"] or "" for t, a in reader.tags if "Security" in str(a.get("http-equiv"))
    ]
    rules = dict(rule.strip().split(" ", 1) for rule in policies[0].split(";"))
    assert rules["default-src"] == "'none'"
    assert rules["script-src"] == f"'{_digest(reader.text('script', 1))}'"
    assert rules["style-src"] == f"'{_digest(reader.text('style'))}'"
    assert rules["img-src"] == "data:"
    assert set(rules) == {
        "default-src",
        "script-src",
        "style-src",
        "img-src",
        "base-uri",
        "form-action",
    }


@EACH
def test_the_page_is_ascii_and_always_the_same(make: Callable[[], Plan]) -> None:
    page = page_html(make())
    assert page.isascii()
    assert "%%" not in page.replace(Reader(page).text("script"), "")
    assert page == page_html(make())


def test_hostile_names_are_data_and_nothing_else() -> None:
    plan = hostile_plan()
    page = page_html(plan)
    tags = [tag for tag, _ in Reader(page).tags]
    assert tags == [tag for tag, _ in Reader(page_html(llama_plan())).tags]
    reader = Reader(page)
    assert reader.text("title") == f"{plan.model.name}: plan"
    data = reader.data()
    assert data["title"] == plan.model.name
    assert not set("<>&") & set(reader.text("script"))
    labels = {label for stage in data["stages"] for label, _ in stage["layers"]}
    assert set(HOSTILE) <= labels
    names = [name for row in data["parameters"] for name in _decoded(row[1])]
    assert sorted(names) == sorted(plan.parameters)


@pytest.mark.parametrize("text", ["</script>", "<!--", "a&b", "\u2028\u2029", "\"\\'`${x}"])
def test_json_in_a_script_survives(text: str) -> None:
    written = script_json({"name": text, text: 1.5})
    assert json.loads(written) == {"name": text, text: 1.5}
    assert written.isascii()
    assert not set("<>&") & set(written)


def test_numbers_that_json_has_not_are_refused() -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        script_json({"step_s": math.nan})


# ---- what the page knows ----


def _decoded(coded: list[Any]) -> Iterator[str]:
    before = ""
    for same, rest in zip(coded[::2], coded[1::2]):
        before = before[:same] + rest
        yield before


@pytest.mark.parametrize(
    "names", [[], [""], ["a"], ["a.0.b", "a.1.b", "a.10.b", "a"], ["", "x", "", "xy", "xy"]]
)
def test_front_coded_names_come_back(names: list[str]) -> None:
    assert list(_decoded(front_coded(names))) == names


def _boxes(coded: dict[str, Any], activities: list[str], tick_s: float) -> list[Box]:
    """The boxes of a coded lane, waits left out."""
    time_s, current, found = 0.0, 0, []
    for number in coded["boxes"]:
        what, ticks, step = coded["symbols"][number]
        current += step or 0
        end_s = time_s + ticks * tick_s
        microbatch = None if step is None else current
        if activities[what] != "bubble":
            found.append(Box(activities[what], time_s, end_s, microbatch))
        time_s = end_s
    return found


@pytest.mark.parametrize("make", [llama_plan, mlp_plan, lambda: wide_plan(8, 40)])
def test_lanes_come_back_as_they_were(make: Callable[[], Plan]) -> None:
    plan = make()
    timeline, data = step_timeline(plan), page_data(plan)["timeline"]
    assert data["end_s"] == timeline.end_s
    for lane, coded in zip(timeline.lanes, data["lanes"], strict=True):
        found = _boxes(coded, data["activities"], data["tick_s"])
        assert coded["stage"] == lane.stage
        for box, other in zip(lane.boxes, found, strict=True):
            assert (other.activity, other.microbatch) == (box.activity, box.microbatch)
            assert other.start_s == pytest.approx(box.start_s, abs=1e-9 * timeline.end_s)
            assert other.end_s == pytest.approx(box.end_s, abs=1e-9 * timeline.end_s)


def test_waits_are_bubbles_of_a_lane() -> None:
    boxes = (Box("forward", 0.5, 1.0, 0), Box("backward", 1.0, 2.0, 0), Box("forward", 3.0, 3.5, 2))
    lane = Lane(4, (0,), boxes)
    coded = coded_lane(lane, ["forward", "backward", "bubble"], 0.25)
    assert coded == {
        "stage": 4,
        "symbols": [[2, 2, None], [0, 2, 0], [1, 4, 0], [2, 4, None], [0, 2, 2]],
        "boxes": [0, 1, 2, 3, 4],
    }


def test_a_wide_plan_is_small() -> None:
    plan = wide_plan()
    page = page_html(plan)
    assert len(page) < 1_000_000
    data = Reader(page).data()
    assert len(data["timeline"]["lanes"]) == NUM_STAGES
    assert data["timeline"]["num_microbatches"] == NUM_MICROBATCHES
    assert sum(kind["count"] for kind in data["cluster"]["kinds"]) == plan.cluster.num_hosts
    stages = {stage for kind in data["cluster"]["kinds"] for stage in kind["stages"]}
    assert stages == set(range(NUM_STAGES))


def test_memory_and_terms_are_the_plans() -> None:
    plan = llama_plan()
    data = page_data(plan)
    for stage, shown in zip(plan.stages, data["stages"], strict=True):
        memory = stage.estimate.memory
        assert sum(shown["memory"].values()) == shown["total_bytes"] == memory.total
        assert shown["reserve_bytes"] == memory.reserve
    chosen, slower, refused = data["alternatives"]
    assert chosen["terms"] == [0.1986, 0.0275, 0.0189, 0.0111]
    assert slower["terms"] == [0.2101, 0.0342, 0.019, 0.0111]
    assert refused["terms"] == [None] * 4
    assert refused["step_s"] is None
    assert chosen["name"] == "dp=2 tp=4 pp=2 zero=3 1f1b:16 recompute"


def test_conversions_and_ops_belong_to_stages() -> None:
    data = page_data(llama_plan())
    rows = {(row[0], tuple(row[-2])): row for row in data["conversions"]}
    assert set(rows) == {
        ("model.layers.0.mlp.up_proj", (0, 1)),  # stands for 32 equal ones
        ("model.layers.{0-15}.mlp.down_proj", (0,)),
        ("model.layers.{16-31}.mlp.down_proj", (1,)),
        ("model.layers.{0-15}.self_attn.o_proj", (0,)),
        ("model.layers.{16-31}.self_attn.o_proj", (1,)),
    }
    up = rows["model.layers.0.mlp.up_proj", (0, 1)]
    assert up[8] == 32
    assert up[9] == pytest.approx(32 * 0.00031, rel=1e-12)
    assert [row[-1] for row in data["ops"]] == [[0, 1], [0, 1]]
    totals = [row[9] for row in data["conversions"]]
    assert totals == sorted(totals, reverse=True)


def test_a_parameter_says_what_the_runner_up_costs() -> None:
    rows = {row[0]: row for row in page_data(llama_plan())["parameters"]}
    row = rows["model.layers.{0-15}.mlp.down_proj.weight"]
    assert list(_decoded(row[1])) == [f"model.layers.{i}.mlp.down_proj.weight" for i in range(16)]
    assert row[2:8] == ["4096x14336", "fp32", "S(0)S(1)", "RS(1)~PS(1)", 3, (0,)]
    assert row[8] == "RR used RR~PP: step +18.1 ms, peak -1.00 GiB"


def test_cuts_say_what_the_next_best_costs() -> None:
    first, last = page_data(llama_plan())["stages"]
    assert first["cut"] == (
        "next best cut, 16 layers in stage 0 and 19 layers in stage 1: "
        "step +13.1 ms, peak -2.00 GiB"
    )
    assert last["cut"] == (
        "next best cut, 18 layers in stage 0 and 17 layers in stage 1: "
        "refused, stage 0 needs 78.10 GiB, 73.60 GiB are available"
    )


# ---- the package ----


def test_drawing_loads_neither_torch_nor_solver(tmp_path: Path) -> None:
    path = llama_plan().save(tmp_path / "plan.json")
    code = (
        "import sys; from autoplan.plan import Plan; from autoplan.render.page import page_html; "
        "page_html(Plan.load(sys.argv[1])); "
        "print([m for m in ('torch', 'ortools', 'numpy', 'networkx') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


def test_the_parts_of_the_page_are_package_data() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    patterns = project["tool"]["setuptools"]["package-data"]["autoplan.render"]
    folder = ROOT / "autoplan" / "render"
    shipped = {path.name for pattern in patterns for path in folder.glob(pattern)}
    assert shipped == {"page.html", "page.css", *SCRIPTS}
    assert shipped == {path.name for path in (folder / "web").iterdir()}
    for path in (folder / "web").iterdir():
        assert len(path.read_text("utf-8").splitlines()) < 500


def test_a_notebook_shows_the_page_in_a_frame() -> None:
    shown = llama_plan()._repr_html_()
    assert shown.startswith('<iframe srcdoc="')
    frame, _, rest = shown.removeprefix('<iframe srcdoc="').partition('"')
    assert rest == ' style="width:100%;height:900px;border:0"></iframe>'
    assert html.unescape(frame) == page_html(llama_plan())
