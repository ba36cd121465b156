# SPDX-License-Identifier: Apache-2.0
"""Published runs against predictions: a row or two of each framework.

`tests/data/runs.csv` holds facts from the sources that its rows name.
"""

from __future__ import annotations

import json
import statistics
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from check_rows import run_of
from click.testing import CliRunner

from autoplan.accuracy import checked, expected_error
from autoplan.check.predict import predict
from autoplan.check.report import _in_noise, _sharing, accuracy_of, memory_error, spearman
from autoplan.check.rows import read_runs
from autoplan.check.sweep import Swept, sweep
from autoplan.cli import cli
from autoplan.runtime import OWN, runtime, runtimes
from autoplan.solver.pricing import Streams

RUNS = Path(__file__).resolve().parent.parent / "data" / "runs.csv"


@pytest.fixture(scope="module")
def swept() -> Swept:
    return sweep(read_runs(RUNS))


def test_every_row_is_predicted_near_what_was_measured(swept: Swept) -> None:
    assert not swept.refused
    errors = {p.run.id: p.error for p in swept.predictions if p.error is not None}
    assert len(errors) == 16
    far = {name: error for name, error in errors.items() if abs(error) > 0.2}
    assert not far
    assert statistics.fmean(map(abs, errors.values())) < 0.08


def test_peak_memory_is_near_and_not_under(swept: Swept) -> None:
    found = [e for p in swept.predictions if (e := memory_error(p)) is not None]
    assert len(found) == 2
    assert all(-0.08 < e < 0.25 for e in found)


def test_figures_are_of_the_rows(swept: Swept) -> None:
    figures = accuracy_of("all", swept.predictions)
    errors = [p.error for p in swept.predictions if p.error is not None]
    assert figures.count == len(errors)
    assert figures.mape == pytest.approx(statistics.fmean(map(abs, errors)))
    assert figures.bias == pytest.approx(statistics.fmean(errors))


def test_rank_correlation_is_spearmans() -> None:
    assert spearman([1, 2, 3, 4], [10, 20, 30, 40]) == pytest.approx(1.0)
    assert spearman([1, 2, 3, 4], [4, 3, 2, 1]) == pytest.approx(-1.0)
    # 1 - 6 sum d^2 / (n (n^2 - 1)) with d = (0, 1, -1, 0)
    assert spearman([1, 2, 3, 4], [1, 3, 2, 4]) == pytest.approx(1 - 6 * 2 / (4 * 15))


def test_order_within_noise_is_not_judged() -> None:
    # 1.00, 1.01 and 1.019 lie within 2% of the first, 1.03 does not
    measured = [1.0, 1.01, 1.019, 1.03]
    assert spearman([3.0, 2.0, 1.0, 4.0], _in_noise([3.0, 2.0, 1.0, 4.0], measured)) == 1.0
    assert spearman([4.0, 2.0, 1.0, 3.0], _in_noise([4.0, 2.0, 1.0, 3.0], measured)) < 1.0


def test_groups_of_all_ranks_are_none() -> None:
    assert _sharing(run_of(fsdp_or_zero="zero1 within groups of 8", dp="8")) == "zero1"
    assert _sharing(run_of(fsdp_or_zero="zero1 within groups of 8", dp="16")) != "zero1"


def test_the_host_launches_while_the_device_exchanges() -> None:
    host = msgspec.structs.replace(OWN, host_us=10.0)
    streams = Streams(compute_s=2e-3, exchange_s=1e-3, waited_s=1e-3, launches=300.0)
    assert streams.chain_s(OWN) == 4e-3
    # 3 ms of launches beside 4 ms of the device
    assert streams.chain_s(host) == pytest.approx((3**4 + 4**4) ** 0.25 * 1e-3)
    assert replace(streams, launches=4e4).chain_s(host) == pytest.approx(0.4, rel=1e-6)
    assert replace(streams, launches=40.0).chain_s(host) == pytest.approx(4e-3, rel=1e-4)


SMALL = {
    "model": "gpt", "layers": "8", "hidden": "512", "heads": "8", "vocab": "512", "seq_len": "256",
    "gpus": "4", "tp": "1", "micro_batch_seqs": "1", "global_batch_seqs": "32",
    "recompute": "none", "precision": "fp16", "attention_kernel": "flash",
}  # fmt: skip


def _step_s(monkeypatch: pytest.MonkeyPatch, *, cells: dict[str, str], **traits: object) -> float:
    changed = msgspec.structs.replace(runtime("megatron-2021"), **traits)
    monkeypatch.setattr("autoplan.check.case.runtime_for", lambda run: changed)
    return predict(run_of(**SMALL, **cells)).step_s


def test_a_stage_waits_for_its_transfers_once_a_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    cells = {"pp": "4", "dp": "1"}
    none = _step_s(monkeypatch, cells=cells, send_us=0.0)
    some = _step_s(monkeypatch, cells=cells, send_us=1000.0)
    # 32 microbatches and 3 to fill and drain, forward and backward
    assert some - none == pytest.approx(2 * (32 + 3) * 1e-3, rel=0.05)


def test_owners_send_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    cells = {"pp": "1", "dp": "4"}
    for level, each in (("zero1", 4), ("zero1 within groups of 2", 2), ("none", 0)):
        stated = {**cells, "fsdp_or_zero": level}
        none = _step_s(monkeypatch, cells=stated, owner_us=0.0)
        some = _step_s(monkeypatch, cells=stated, owner_us=1000.0)
        assert some - none == pytest.approx(each * 1e-3, rel=1e-6, abs=1e-12)


def test_sums_of_gradients_have_the_dtype_they_are_reduced_in(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cells = {"pp": "1", "dp": "4"}
    wide = _step_s(monkeypatch, cells=cells, gradient_dtype="float32", host_us=0.0)
    half = _step_s(monkeypatch, cells=cells, gradient_dtype="float16", host_us=0.0)
    # of 8 blocks' matrices, 4 bytes less read and written of each of 8 sums, at 2039 GB/s at most
    assert wide - half > 8 * 8 * 12 * 512**2 * 4 / 2039e9


def test_a_softmax_of_several_kernels_moves_more(monkeypatch: pytest.MonkeyPatch) -> None:
    cells = {"pp": "1", "dp": "4"}
    monkeypatch.setitem(SMALL, "attention_kernel", "unfused")
    monkeypatch.setitem(SMALL, "seq_len", "1024")
    one = _step_s(monkeypatch, cells=cells, softmax_passes=1.0, host_us=0.0)
    two = _step_s(monkeypatch, cells=cells, softmax_passes=2.0, host_us=0.0)
    # forward and backward read and write 5 scores of 2 bytes, 8 blocks, 8 microbatches
    assert two - one > 8 * 8 * 5 * 8 * 1024**2 * 2 / 2039e9


def test_the_command_prints_draws_and_writes(tmp_path: Path) -> None:
    picture, figures = tmp_path / "runs.png", tmp_path / "accuracy.json"
    command = ["check", str(RUNS), "--source", "korth22", "--json", "--plot", str(picture)]
    result = CliRunner().invoke(cli, [*command, "--accuracy", str(figures)])
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert [row["id"] for row in document["rows"]] == ["korth22-002", "korth22-004"]
    assert picture.stat().st_size > 1000
    (row,) = json.loads(figures.read_text(encoding="utf-8"))
    assert (row["device"], row["runtime"], row["runs"]) == ("a100-80g", "megatron-2022", 2)


def test_our_own_runtime_hides_nothing() -> None:
    assert msgspec.structs.replace(runtime("autoplan"), provenance={}) == OWN
    assert not any((OWN.hides_gradients, OWN.hides_gathers, OWN.hides_tp, OWN.fuses))
    assert len({r.name for r in runtimes()}) == len(runtimes())


def test_the_error_to_expect_is_of_the_nearest_runs() -> None:
    rows = [c for c in checked() if c.device == "a100-80g"]
    assert rows
    error, source = expected_error("a100-80g", "autoplan")
    runs = sum(c.runs for c in rows)
    assert error == pytest.approx(sum(c.runs * c.mape for c in rows) / runs)
    assert source.startswith(f"{runs} published runs on a100-80g")
    assert expected_error("cpu-core", "autoplan") == (None, "")
