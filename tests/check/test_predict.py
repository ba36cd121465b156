# SPDX-License-Identifier: Apache-2.0
"""Published runs against predictions: a row or two of each framework.

`tests/data/runs.csv` holds facts from the sources that its rows name.
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

from autoplan.accuracy import checked, expected_error
from autoplan.check.report import accuracy_of, memory_error, spearman
from autoplan.check.rows import read_runs
from autoplan.check.sweep import Swept, sweep
from autoplan.cli import cli
from autoplan.runtime import OWN, runtime, runtimes

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
