# SPDX-License-Identifier: Apache-2.0
"""T12: plans of real models as files: the same bytes every time, stale ones refused, degenerate
clusters, launches that do not fit.

Strict reading of documents is in tests/test_plan.py, words and exit codes of the command line in
tests/test_cli.py.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch
import torch.distributed as dist
from cases.catalog import build
from cases.models import Tied, linears, mean_square, small_stack
from cases.running import plain_cluster, plan_case, train
from torch import nn

import autoplan
from autoplan.plan import Plan

ROOT = Path(__file__).parent.parent.parent
MAKE = """
import sys
sys.path.insert(0, "tests")
from cases.running import plan_case
plan_case("tied", 2, pp=2, num_microbatches=2).save(sys.argv[1])
"""
MODEL = """
import torch
def build():
    with torch.device("meta"):
        model = torch.nn.Sequential(torch.nn.Linear(1024, 1024), torch.nn.ReLU(),
        torch.nn.Linear(1024, 1))
        return model, (torch.empty(8, 1024),), lambda outputs, batch: outputs.square().mean()
"""


def _tied_with(**changes: int) -> nn.Module:
    return Tied(**changes).double()


def test_round_trip_of_a_real_plan(tmp_path: Path) -> None:
    plan = plan_case("skip", 4, pp=4, num_microbatches=4)
    assert Plan.load(plan.save(tmp_path / "plan.json")) == plan


def test_two_processes_with_different_hash_seeds_write_the_same_bytes(tmp_path: Path) -> None:
    written = []
    for seed in ("1", "2"):
        path = tmp_path / f"{seed}.json"
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        subprocess.run(
            [sys.executable, "-c", MAKE, str(path)], cwd=ROOT, env=environment, check=True
        )
        written.append(path.read_bytes())
    assert written[0] == written[1]
    assert plan_case("tied", 2, pp=2, num_microbatches=2).to_json().encode() == written[0]


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (_tied_with(width=48), ["emb.weight", "(101, 32)", "(101, 48)"]),
        (_tied_with(depth=3), ["blocks.3", "this model lacks"]),
        (_tied_with(depth=5), ["blocks.4"]),
        (Tied().float(), ["float64", "float32"]),
        (small_stack().double(), ["Tied", "Sequential"]),
    ],
    ids=["width", "shallower", "deeper", "dtype", "class"],
)
def test_plan_of_another_model_is_refused_naming_what_differs(
    model: nn.Module, words: list[str]
) -> None:
    plan = plan_case("tied", 1)
    with pytest.raises(autoplan.PlanError) as refusal:
        autoplan.parallelize(model, plan, loss_fn=build("tied")[2])
    message = str(refusal.value)
    assert "another model" in message
    assert "Plan again" in message
    assert all(word in message for word in words), message


def test_other_inputs_change_the_fingerprint_and_are_named() -> None:
    plan = plan_case("tied", 1)
    model, _, loss_fn = build("tied")
    longer = autoplan.optimize(
        model, plain_cluster(1), {"ids": torch.zeros(2, 12, dtype=torch.int64)}, loss_fn=loss_fn
    )
    differs = " ".join(plan.diff_fingerprint(longer.fingerprint))
    assert "inputs" in differs
    assert "cluster" not in differs


def test_another_device_changes_the_fingerprint_and_is_named() -> None:
    plan = plan_case("tied", 1)
    model, inputs, loss_fn = build("tied")
    cluster = plain_cluster(1)
    faster = replace(cluster, device=replace(cluster.device, name="other"))
    differs = plan.diff_fingerprint(
        autoplan.optimize(model, faster, inputs, loss_fn=loss_fn).fingerprint
    )
    assert any("cluster" in words for words in differs)
    assert not any("graph" in words or "inputs" in words for words in differs)


@pytest.mark.parametrize("same_graph", [True, False])
def test_another_torch_is_named(same_graph: bool) -> None:
    """Of the same graph it is a warning, of another one part of the refusal; a build for another
    device ("+cu130") is the same torch."""
    plan = msgspec.structs.replace(plan_case("tied", 1), torch_version="2.12.1+cu130")
    model, _, loss_fn = build("tied")
    here = torch.__version__.partition("+")[0]
    words = f"planned with torch 2.12.1, this is torch {here}"
    if same_graph:
        with pytest.warns(UserWarning, match=re.escape(words)):
            autoplan.parallelize(model, plan, loss_fn=loss_fn)
        again = msgspec.structs.replace(plan, torch_version=f"{here}+other")
        autoplan.parallelize(model, again, loss_fn=loss_fn)
    else:
        with pytest.raises(autoplan.PlanError, match=re.escape(words)):
            autoplan.parallelize(_tied_with(depth=3), plan, loss_fn=loss_fn)


def test_call_with_another_shape_never_runs_on_old_figures() -> None:
    plan = plan_case("tied", 1)
    model, _, loss_fn = build("tied")
    parallel = autoplan.parallelize(model, plan, loss_fn=loss_fn)
    with pytest.raises(autoplan.PlanError, match=r"dim 1 is 12, planned 6"):
        parallel(ids=torch.zeros(4, 12, dtype=torch.int64))


def test_one_device_needs_no_process_group() -> None:
    plan = plan_case("tied", 1)
    assert (plan.layout.dp, plan.layout.tp, plan.layout.pp) == (1, 1, 1)
    assert plan.search.idle_devices == 0
    assert train(0, plan.to_json(), "tied", 2).worst < 1e-9
    assert not dist.is_initialized()


def test_more_devices_than_are_useful_stay_idle_with_a_reason() -> None:
    plan = plan_case("weight_and_bias", 8)
    used = plan.layout.dp * plan.layout.tp * plan.layout.pp
    assert used < 8
    assert plan.search.idle_devices == 8 - used
    assert plan.search.idle_reason
    assert "idle" in plan.summary()


def test_two_plans_in_one_process_do_not_mix() -> None:
    """R81."""
    plans = [
        autoplan.optimize(
            linears(2, 64),
            plain_cluster(2),
            {"input": torch.empty(rows, 64, device="meta")},
            loss_fn=mean_square,
        )
        for rows in (8, 12)
    ]
    assert [p.model.batch_size for p in plans] == [8, 12]


def test_launch_of_another_size_is_refused_before_weights_are_read() -> None:
    """The model given has no weights at all: nothing reads them before the refusal."""
    plan = plan_case("tied", 2, pp=2)
    with pytest.raises(autoplan.PlanError, match=r"for 2 processes .*this launch has 1"):
        autoplan.parallelize(nn.Module(), plan)


def test_infeasible_from_the_command_line(tmp_path: Path) -> None:
    """Exit code 3 and one JSON document with a reason for every layout tried."""
    (tmp_path / "model.py").write_text(MODEL)
    cluster = plain_cluster(2, memory_bytes=1e6).to_json()
    cluster["device"]["memory_GBps"] = 1e3  # JSON has no infinity
    (tmp_path / "cluster.json").write_text(json.dumps(cluster))
    arguments = ["plan", f"{tmp_path}/model.py:build", "--cluster", f"{tmp_path}/cluster.json"]
    done = subprocess.run(
        [sys.executable, "-m", "autoplan", *arguments, "--json"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 3, done.stderr
    document = json.loads(done.stdout)
    candidates = document.get("candidates") or document["error"]["candidates"]
    assert candidates
    assert all(c["reason"] for c in candidates)
