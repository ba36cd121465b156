# SPDX-License-Identifier: Apache-2.0
"""Measuring: fits recover known lines from made-up timings, a written document loads and says where
its numbers come from, stages that share cores do no work twice, a failing process is one line.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from models import MLP

import autoplan
from autoplan.cli import cli
from autoplan.cluster import Cluster
from autoplan.costs.profile import Profiles
from autoplan.errors import ProfileError
from autoplan.measure.clock import Row
from autoplan.measure.fit import Line, fit_line, fit_terms, rising
from autoplan.measure.host import Both, HostTimings
from autoplan.measure.kernels import DeviceTimings
from autoplan.measure.launch import measure_cluster
from autoplan.measure.links import LinkTimings, shapes
from autoplan.measure.steps import Factors, corrected, reason
from autoplan.measure.write import Machine, cluster_document
from autoplan.schedule import finish_times, gpipe, replay


def test_line_is_recovered() -> None:
    line = fit_line([(x, 3e-6 + x / 2e9) for x in (1e3, 1e5, 1e6, 1e8)])
    assert line.fixed_s == pytest.approx(3e-6, rel=1e-9)
    assert line.rate == pytest.approx(2e9, rel=1e-9)
    assert line.half == pytest.approx(6e3, rel=1e-9)


def test_a_line_below_zero_goes_through_the_origin() -> None:
    line = fit_line([(1.0, 0.1), (2.0, 1.2)])
    assert line.fixed_s == 0.0
    assert line.rate > 0.0


def test_terms_are_recovered_and_never_negative() -> None:
    rows = [(1.0, f, b) for f, b in ((1e6, 1e3), (1e7, 5e4), (1e8, 2e4), (1e9, 8e6))]
    exact = [2e-6 * a + f / 8e10 + b / 1e10 for a, f, b in rows]
    found, error = fit_terms(rows, exact)
    assert found == pytest.approx([2e-6, 1 / 8e10, 1e-10], rel=1e-6)
    assert error < 1e-9
    found, _ = fit_terms([(1.0, 1.0), (1.0, 2.0), (1.0, 4.0)], [0.5, 1.5, 3.5])
    assert min(found) >= 0.0


def test_tables_never_fall() -> None:
    assert rising([(1.0, 5.0), (2.0, 3.0), (4.0, 9.0)]) == [(1.0, 3.0), (2.0, 3.0), (4.0, 9.0)]


def test_group_shapes() -> None:
    assert [(s.size, s.stride, s.crosses) for s in shapes(4, 4)] == [(2, 1, False), (4, 1, False)]
    across = [(s.size, s.stride, s.crosses) for s in shapes(4, 2)]
    assert across == [(2, 1, False), (2, 2, True), (4, 1, True)]


def _document() -> dict[str, Any]:
    rows = [
        Row(what, 3, 1e-6, 1e-3, 0.05)
        for what in ("matmul", "passes", "attention", "AdamW", "elementwise", "shortest kernel")
    ]
    host = HostTimings(Both(3e-6, 2e-6), 2e-5, Both(6e-6, 3e-6), 2e-4, 3e-4)
    device = DeviceTimings(
        peaks={"float32": 8e10},
        product=Line(1e-6, 8e10, 0.01),
        packing_bytes_per_s=1e10,
        update_factor=2.0,
        attention=Line(2e-6, 3e10, 0.02),
        memory=Line(0.0, 3e10, 0.03),
        elementwise={"tanh": (4e8, 5e9)},
        launch_s=1e-7,
        rows=rows,
    )
    points = [(1024.0, 2e-4), (1048576.0, 1e-3)]
    links = LinkTimings({"all_reduce": {2: points, 4: points}, "send": {2: points}}, {}, rows[:1])
    machine = Machine(
        "here", "a CPU", True, 1, 4, 4 << 30, 2, "torch, gloo", "2026-11-30", "autoplan profile"
    )
    return cluster_document(machine, host, device, links)


def test_document_loads_with_complete_provenance() -> None:
    document = _document()
    cluster = Cluster.from_json(document)
    assert Cluster.from_json(cluster.to_json()) == cluster
    assert cluster.intra_host.tables[0][2][0] == (1024.0, 2e-4)
    device = document["device"]
    stated = device["provenance"]
    measured = {"memory_GiB", "memory_GBps", "peak_TFLOPs"}
    measured |= {f"kernel.{k}" for k in device["kernel"] if k != "efficiency"}
    measured |= {f"kernel.efficiency.{k}" for k in device["kernel"]["efficiency"]}
    for key in measured:
        assert stated[key]["source"] == "measured", key
        assert "2026-11-30" in stated[key]["note"]
    assert "spread 5%" in stated["kernel.update_factor"]["note"]


def test_devices_share_the_cores() -> None:
    cluster = Cluster.from_json(_document())
    alone, all_ = Profiles.of(cluster, 2).device, Profiles.of(cluster, 4).device
    assert cluster.crowding(4) == 2.0
    assert alone.peak("float32")[0] == pytest.approx(2 * all_.peak("float32")[0], rel=1e-12)
    assert all_.host.op_s[0] == pytest.approx(6e-6, rel=1e-12)


def test_crowded_stages_conserve_work() -> None:
    # 4 stages on 1 core: whoever computes has the core, so nothing is ever idle
    forward, backward = (1.0, 2.0, 0.5, 1.5), (2.0, 1.0, 3.0, 0.5)
    timeline = replay(gpipe(4, 3), forward, backward, (0.0,) * 3, 4.0)
    assert timeline.end_s == pytest.approx(3 * (sum(forward) + sum(backward)) / 4, rel=1e-9)
    # on 4 cores as without sharing
    alone = finish_times(gpipe(4, 3), forward, backward, (0.1,) * 3)
    assert finish_times(gpipe(4, 3), forward, backward, (0.1,) * 3, 1.0 + 1e-12) == pytest.approx(
        alone, rel=1e-9
    )


def test_a_failing_process_is_one_line() -> None:
    text = "[rank1]: Traceback ...\n[rank1]: RuntimeError: no memory left\nChildFailedError: x"
    assert reason(text) == "RuntimeError: no memory left."


@pytest.mark.distributed
def test_a_process_that_cannot_start_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "no-such-device")
    with pytest.raises(ProfileError, match="a measuring process failed") as caught:
        measure_cluster(2, quick=True)
    assert "\n" not in str(caught.value)


@pytest.mark.distributed
def test_this_machine_is_measured_and_planned_for(tmp_path: Path) -> None:
    """The whole command: what it writes plans, and the plan's number are measured ones."""
    path = tmp_path / "here.json"
    told = CliRunner().invoke(
        cli, ["profile", "--quick", "--processes", "2", "-o", str(path), "--json"]
    )
    assert told.exit_code == 0, told.output
    rows = {row["what"]: row for row in json.loads(told.stdout)["rows"]}
    assert all(0 < row["least_s"] <= row["most_s"] for row in rows.values())
    assert {"matmul", "attention", "all_reduce, 2 ranks inside a host"} <= set(rows)
    cluster = Cluster.load(path)
    assert cluster.num_devices == 2
    batch = {"x": torch.randn(16, 64), "target": torch.randn(16, 4)}
    plan = autoplan.optimize(MLP(64, 4), cluster, batch)
    assert plan.estimate.step_time_s > 0
    assert plan.estimate.sources.get("assumed", 0.0) == 0.0
    assert plan.estimate.sources["measured"] > 0.0


def test_a_path_that_cannot_be_written_is_refused_before_measuring(tmp_path: Path) -> None:
    told = CliRunner().invoke(cli, ["profile", "--quick", "-o", str(tmp_path / "no" / "x.json")])
    assert told.exit_code == 2
    assert "Give a path in a folder that exists" in told.output


def test_a_profile_is_corrected_by_what_steps_take() -> None:
    """Host times times one factor, kernels times the other; optimizer and pipeline as measured."""
    document = _document()
    slower = corrected(document, Factors(host=3.0, kernels=2.0, error=0.04))
    Cluster.from_json(slower)
    before, after = _document()["device"], slower["device"]
    assert after["memory_GBps"] == before["memory_GBps"] / 2
    assert after["peak_TFLOPs"]["float32"] == before["peak_TFLOPs"]["float32"] / 2
    host = before["kernel"]["host_us"]
    assert after["kernel"]["host_us"]["op"] == [3 * t for t in host["op"]]
    assert after["kernel"]["host_us"]["parameter"] == host["parameter"]
    assert after["kernel"]["host_us"]["microbatch"] == host["microbatch"]
    assert "times 3, as in steps" in after["provenance"]["kernel.host_us"]["note"]
    assert document["device"] == before, "the first one is as it was"
