# SPDX-License-Identifier: Apache-2.0
"""The examples run as their README says, and the plans in the tree are the ones they make.

Each runs as a subprocess, as a reader would run it; what it writes goes to a folder of the test.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from autoplan.plan import Plan
from autoplan.render.page import page_html

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples"
PLANS = sorted((EXAMPLES / "plans").glob("*.json"))
TIMEOUT_S = 240.0  # some 10 s each on two idle cores; the rest is for a busy machine


def _run(name: str, *arguments: str) -> str:
    """What an example printed on stdout; its stderr where it failed."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name), *arguments],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


def _document(path: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return document


def test_quickstart_makes_the_plan_in_the_tree(tmp_path: Path) -> None:
    """Byte for byte, but for the torch build that it names."""
    made = tmp_path / "plan.json"
    page = _run("quickstart.py", str(made))
    assert page.startswith("MLP on made-up-2x4: ")
    assert page.strip() == Plan.load(made).summary().strip()
    committed = (EXAMPLES / "plans/quickstart.json").read_text(encoding="utf-8")
    fresh = made.read_text(encoding="utf-8")
    torch_version = f'"torch_version": "{_document(made)["torch_version"]}"'
    assert fresh.count(torch_version) == 1
    committed = re.sub(r'"torch_version": "[^"]*"', torch_version, committed)
    different = [
        f"line {i + 1}: {a.strip()} in the tree, {b.strip()} now"
        for i, (a, b) in enumerate(zip(committed.splitlines(), fresh.splitlines()))
        if a != b
    ]
    assert committed == fresh, (
        "rules, costs or search have changed the plan. If that was meant, run quickstart.py and "
        f"plan_gpt.py in examples/ and commit what they wrote. {different[:5]}"
    )


def test_plan_gpt_beats_the_baselines(tmp_path: Path) -> None:
    """On a smaller cluster than the default: the same steps in less time."""
    made = tmp_path / "plan.json"
    page = _run("plan_gpt.py", "dgx-a100-1x2", str(made))
    assert page.startswith("GPT2LMHeadModel on dgx-a100-1x2: ")
    seconds = dict(re.findall(r"^(this plan|data parallel|fsdp|grid) +([\d.]+) ms", page, re.M))
    assert set(seconds) == {"this plan", "data parallel", "fsdp", "grid"}
    assert float(seconds["this plan"]) <= min(map(float, seconds.values()))
    assert Plan.load(made).cluster.num_devices == 2


@pytest.mark.distributed
def test_run_on_cpu_agrees_with_one_process() -> None:
    page = _run("run_on_cpu.py")
    assert page.startswith("Reader on local-cpu-4: 1 stage, dp=2 tp=2")
    rows = re.findall(r"^ +(\d+) +([\d.]+) +([\d.]+)$", page, re.M)
    assert [int(step) for step, *_ in rows] == [0, 1, 2, 3, 4]
    assert float(rows[-1][1]) < float(rows[0][1]), "it has learned something"
    assert page.rstrip().endswith("the losses agree")


@pytest.mark.parametrize("path", PLANS, ids=lambda p: p.stem)
def test_read_a_plan_says_what_the_plan_says(path: Path) -> None:
    """Its arithmetic on the raw JSON gives what the package's own types give."""
    page, plan = _run("read_a_plan.py", str(path)), Plan.load(path)
    assert page.startswith(f"{plan.model.name} on {plan.cluster.name}: ")
    assert f"estimated step {plan.estimate.step_time_s * 1e3:.1f} ms" in page
    for stage in plan.stages:
        assert f"{stage.estimate.memory.total / 2**30:.2f} GiB of each device" in page
    assert f"{len(plan.op_strategies)} ops, {len(plan.strategies)} strategies" in page
    stored = sum(map(int, re.findall(r"^ +(\d+) elements on each rank", page, re.M)))
    size = {"bfloat16": 2, "float32": 4}[next(iter(plan.parameters.values())).dtype]
    if plan.layout.pp == 1 and all(p.zero in (0, 3) for p in plan.parameters.values()):
        assert stored * size == plan.stages[0].estimate.memory.parameters


def test_read_a_plan_needs_the_standard_library_alone() -> None:
    tree = ast.parse((EXAMPLES / "read_a_plan.py").read_text(encoding="utf-8"))
    modules = {a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names}
    modules |= {str(n.module) for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
    assert {m.partition(".")[0] for m in modules} <= sys.stdlib_module_names


def test_the_plans_in_the_tree_load() -> None:
    assert [p.stem for p in PLANS] == ["demo", "gpt", "llama70b", "quickstart", "uneven"]
    for path in PLANS:
        plan = Plan.load(path)
        plan.verify()
        assert plan.to_json() == path.read_text(encoding="utf-8")


def test_the_plan_of_gpt_is_for_the_default_cluster() -> None:
    plan = Plan.load(EXAMPLES / "plans/gpt.json")
    assert (plan.model.name, plan.cluster.name) == ("GPT2LMHeadModel", "dgx-a100-2x8")
    assert plan.shared == (("transformer.wte.weight", "lm_head.weight"),)


def test_every_example_is_run_here_and_named_in_the_readme() -> None:
    readme = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    own = Path(__file__).read_text(encoding="utf-8")
    for path in EXAMPLES.glob("*.py"):
        assert re.search(rf"(python|autoplan plan) examples/{path.name}\b", readme)
        assert f'"{path.name}"' in own


def test_llama70b_is_the_model_of_the_committed_plan() -> None:
    """Its blocks are equal: what one of them has, 80 have 80 times."""
    spec = importlib.util.spec_from_file_location("llama70b", EXAMPLES / "plan_llama70b.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sizes = []
    for num_layers in (1, 2):
        model, inputs = module.llama(num_layers)
        assert {p.device.type for p in model.parameters()} == {"meta"}
        sizes.append(sum(p.numel() for p in model.parameters()))
    plan = Plan.load(EXAMPLES / "plans/llama70b.json")
    assert plan.model.num_parameters == sizes[0] + 79 * (sizes[1] - sizes[0])
    assert [t.shape for t in plan.signature.tensors] == [tuple(x.shape) for x in inputs.values()]
    assert plan.cluster.name == "dgx-h100-8x8"


@pytest.mark.parametrize("name", ["demo", "llama70b", "uneven"])
def test_the_pages_in_the_tree_are_those_of_the_plans(name: str) -> None:
    page = (EXAMPLES / f"plans/{name}.html").read_text(encoding="utf-8")
    assert page == page_html(Plan.load(EXAMPLES / f"plans/{name}.json"))
    assert (EXAMPLES / f"plans/{name}.png").read_bytes().startswith(b"\x89PNG")
