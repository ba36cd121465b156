# SPDX-License-Identifier: Apache-2.0
"""The command line: its words, exit codes, what goes to which stream; no torch for `show`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import msgspec
import pytest
from click.testing import CliRunner, Result
from sample_plans import llama_plan, mlp_plan

from autoplan.api_pins import Pins
from autoplan.cli import cli
from autoplan.errors import (
    CaptureError,
    ClusterError,
    ExecutionError,
    InfeasibleError,
    PlanError,
    ProfileError,
)
from autoplan.plan import Plan

ROOT = Path(__file__).parent.parent


def run(*arguments: str, env: dict[str, str] | None = None) -> Result:
    return CliRunner().invoke(cli, list(arguments), prog_name="autoplan", env=env)


@pytest.fixture
def saved(tmp_path: Path) -> str:
    return str(llama_plan().save(tmp_path / "plan.json"))


@pytest.fixture
def model_file(tmp_path: Path) -> str:
    path = tmp_path / "my_model.py"
    path.write_text(
        "import sys\n"
        "def build():\n    print('hello from the model')\n    return 'model', {'x': 1}\n"
        "def with_loss():\n    return 'model', (1,), max\n"
        "def broken():\n    raise KeyError('width')\n"
        "def single():\n    return 'model'\n"
        "NUMBER = 3\n"
    )
    return str(path)


class Planner:
    """Stands where autoplan.api and autoplan.cluster are imported late; keeps the last call."""

    def __init__(self, outcome: Any) -> None:
        self.outcome = outcome
        self.call: dict[str, Any] = {}

    def optimize_each(
        self, model: Any, clusters: Any, inputs: Any, **rest: Any
    ) -> Iterator[tuple[Any, Plan | InfeasibleError]]:
        print("progress that a library prints")
        for cluster in clusters:
            self.call = {"model": model, "cluster": cluster, "inputs": inputs, **rest}
            outcome = (
                self.outcome.get(cluster.name) if isinstance(self.outcome, dict) else self.outcome
            )
            if isinstance(outcome, BaseException) and not isinstance(outcome, InfeasibleError):
                raise outcome
            yield cluster, outcome


@pytest.fixture
def planner(monkeypatch: pytest.MonkeyPatch) -> Callable[[Plan | BaseException], Planner]:
    def install(outcome: Plan | BaseException) -> Planner:
        fake = Planner(outcome)
        api = types.ModuleType("autoplan.api")
        api.optimize_each = fake.optimize_each  # type: ignore[attr-defined]  # a module made by hand
        monkeypatch.setitem(sys.modules, "autoplan.api", api)
        monkeypatch.setitem(sys.modules, "autoplan.cluster", _fake_cluster())
        return fake

    return install


def _fake_cluster() -> types.ModuleType:
    module = types.ModuleType("autoplan.cluster")

    class Cluster:
        @staticmethod
        def load(name: str) -> Any:
            if name not in ("dgx-h100-2x8", "dgx-a100-2x8"):
                raise ClusterError(f'no cluster "{name}". Known: dgx-a100, dgx-h100.')
            same = name == "dgx-h100-2x8"
            device = types.SimpleNamespace(
                name="h100-80g" if same else "a100-80g", memory_bytes=80 * 2**30
            )
            return types.SimpleNamespace(
                name=name,
                digest="9a03" if same else "ffff",
                device=device,
                num_hosts=2,
                devices_per_host=8,
            )

    module.Cluster = Cluster  # type: ignore[attr-defined]  # a module made by hand
    return module


def assert_error(result: Result, code: int, *words: str) -> None:
    assert result.exit_code == code
    assert result.stdout == ""
    line = result.stderr.removesuffix("\n")
    assert line.startswith("error: ")
    assert "\n" not in line
    for word in words:
        assert word in line


def test_words_are_frozen() -> None:
    common = {"--json", "--quiet", "-q", "--log-level"}
    words = {
        name: {word for p in command.params for word in (*p.opts, *p.secondary_opts)} - common
        for name, command in cli.commands.items()
    }
    assert words == {
        "plan": {
            *("function", "--cluster", "--tp", "-tp", "--tensor-parallel-size", "--pp", "-pp"),
            *("--pipeline-parallel-size", "--dp", "-dp", "--data-parallel-size", "--zero"),
            *("--num-microbatches", "--schedule", "--recompute", "--no-recompute"),
            *("--stage-layers", "--placement", "--optimizer", "--precision", "--mode"),
            *("--memory-reserve", "--time-limit", "--top", "-o", "--output"),
        },
        "size": {
            *("function", "--device", "--kind", "--max-devices", "--tp", "-tp"),
            *("--tensor-parallel-size", "--pp", "-pp", "--pipeline-parallel-size", "--dp", "-dp"),
            *("--data-parallel-size", "--zero", "--num-microbatches", "--schedule", "--recompute"),
            *("--no-recompute", "--stage-layers", "--placement", "--optimizer", "--precision"),
            *("--mode", "--memory-reserve", "--time-limit", "--top", "-o", "--output"),
        },
        "show": {"file", "--stage", "--all", "--width"},
        "draw": {"file", "-o", "--output", "--panel"},
        "compare": {"files", "--all", "--width"},
        "explain": {"file", "name"},
        "validate": {"file", "--cluster"},
        "check": {"file", "--source", "--rows", "--plot", "--accuracy"},
        "demo": {"--cluster", "--pins", "--steps", "-o", "--output"},
        "profile": {"--processes", "--quick", "-o", "--output"},
    }
    for command in cli.commands.values():
        assert common <= {word for p in command.params for word in p.opts}
    assert {p.name: p.default for p in cli.commands["demo"].params if p.name == "pins"} == {
        "pins": ""
    }


def test_help_of_every_command() -> None:
    for name in ("", *cli.commands):
        result = run(*filter(None, [name]), "--help")
        assert result.exit_code == 0
        assert "Usage: autoplan" in result.stdout
    assert "3 nothing feasible" in run("--help").stdout
    assert "AUTOPLAN_LOG_LEVEL" in run("show", "--help").stdout


def test_no_command_shows_help_as_bad_input() -> None:
    result = run()
    assert result.exit_code == 2
    assert "Commands:" in result.output


def test_show_prints_the_page_or_the_document(saved: str) -> None:
    assert run("show", saved).stdout == llama_plan().summary()
    assert run("show", saved, "--stage", "1").stdout.count("stage 1") > 0
    assert "linear_63" in run("show", saved, "--all").stdout
    document = run("show", saved, "--json")
    assert document.stderr == ""
    assert Plan.from_json(document.stdout) == llama_plan()


def test_explain(saved: str) -> None:
    text = run("explain", saved, "lm_head.weight")
    assert text.exit_code == 0
    assert text.stdout == llama_plan().explain("lm_head.weight")
    document = json.loads(run("explain", saved, "stage 1", "--json").stdout)
    assert document == {"name": "stage 1", "text": llama_plan().explain("stage 1")}
    assert_error(run("explain", saved, "lm_haed.weight"), 2, "Did you mean", "lm_head.weight")


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda r: r.update(tensor_paralel=1), ["unknown key $.tensor_paralel"]),
        (lambda r: r["stages"][0].update(rank=1), ["$.stages[0].rank", 'did you mean "ranks"?']),
        (lambda r: r["layout"].update(tp="4"), ["$.layout.tp", "expected an integer"]),
        (lambda r: r.pop("schema_version"), ["$.schema_version is missing"]),
        (lambda r: r.update(schema_version=3), ["schema_version 3 is newer", "Upgrade"]),
    ],
)
def test_t12_3_strict_reading(
    edit: Callable[[dict[str, Any]], object], words: list[str], tmp_path: Path
) -> None:
    raw = json.loads(llama_plan().to_json())
    edit(raw)
    path = tmp_path / "edited.json"
    path.write_text(json.dumps(raw))
    for command in (["validate"], ["show"]):
        assert_error(run(*command, str(path)), 2, str(path), *words)


def test_t12_3_truncated_missing_and_directory(saved: str, tmp_path: Path) -> None:
    path = tmp_path / "cut.json"
    path.write_text(Path(saved).read_text()[:5000])
    assert_error(run("validate", str(path)), 2, "line ", "column ", "truncated")
    assert_error(run("validate", str(tmp_path / "no.json")), 2, "no plan file")
    assert_error(run("validate", str(tmp_path)), 2, "cannot read")


def test_errors_are_a_document_too_with_json(tmp_path: Path) -> None:
    result = run("validate", str(tmp_path / "no.json"), "--json")
    assert result.exit_code == 2
    assert "no plan file" in json.loads(result.stdout)["error"]
    result = run("show", "--json", "--stage", "x", "p")
    assert result.exit_code == 2
    assert "--stage" in json.loads(result.stdout)["error"]


def test_usage_errors_are_bad_input(saved: str) -> None:
    assert_error(run("show"), 2, "PLAN")
    assert_error(run("shwo"), 2, "shwo")
    assert_error(run("show", saved, "--al"), 2, "--al")
    assert_error(run("show", saved, "--log-level", "loud"), 2, "loud")
    assert_error(run("show", saved, env={"AUTOPLAN_LOG_LEVEL": "loud"}), 2, "loud")


def test_t12_7_validate_against_a_cluster(
    saved: str, planner: Callable[[Plan | BaseException], Planner]
) -> None:
    planner(llama_plan())
    assert run("validate", saved, "--cluster", "dgx-h100-2x8").exit_code == 0
    document = json.loads(run("validate", saved, "--json").stdout)
    assert document == {"valid": True, "plan": saved, "cluster": "dgx-h100-2x8"}
    other = run("validate", saved, "--cluster", "dgx-a100-2x8")
    assert_error(other, 2, "device h100-80g against a100-80g", "Plan again")
    assert_error(run("validate", saved, "--cluster", "dgx-h1000"), 2, "Known: dgx-a100, dgx-h100")


def test_plan_passes_every_pin_on(
    model_file: str, tmp_path: Path, planner: Callable[[Plan | BaseException], Planner]
) -> None:
    fake = planner(mlp_plan())
    output = tmp_path / "out.json"
    pins = "-tp 4 --pipeline-parallel-size 2 --dp 2 --zero 3 --num-microbatches 16 --schedule 1f1b"
    rest = "--no-recompute --stage-layers 3,4 --placement a.*.w=RS(0) --placement b=c=RR"
    settings = "--optimizer sgd --precision bf16-mixed --memory-reserve 0.1 --time-limit 5 --top 7"
    where = f"plan {model_file}:with_loss --cluster dgx-h100-2x8 -o {output}"
    result = run(*f"{where} {pins} {rest} {settings}".split())
    assert result.exit_code == 0, result.stderr
    assert result.stdout == mlp_plan().summary()
    assert f"wrote {output}" in result.stderr
    assert Plan.load(output) == mlp_plan()
    call = fake.call
    assert call.pop("cluster").name == "dgx-h100-2x8"
    assert call == {
        "model": "model",
        "inputs": (1,),
        "loss_fn": max,
        "mode": "train",
        "optimizer": "sgd",
        "precision": "bf16-mixed",
        "memory_reserve": 0.1,
        "time_limit_s": 5.0,
        "top": 7,
        "progress": None,  # stderr is no terminal here
        "pins": Pins(
            tp=4,
            pp=2,
            dp=2,
            zero=3,
            num_microbatches=16,
            schedule="1f1b",
            recompute=False,
            stage_layers=(3, 4),
            placements={"a.*.w": "RS(0)", "b=c": "RR"},
        ),
    }


def test_what_native_code_prints_is_no_result(tmp_path: Path) -> None:
    """A solver's library writes to the process's own stdout."""
    (tmp_path / "loud.py").write_text(
        "import os, torch\n"
        "def build():\n"
        "    os.write(1, b'from below')\n"
        "    return torch.nn.Linear(4, 4), (torch.zeros(4, 4),), lambda y, batch: y.sum()\n"
    )
    command = [sys.executable, "-m", "autoplan", "plan", f"{tmp_path / 'loud.py'}:build"]
    done = subprocess.run(
        [*command, "--cluster", "local-cpu-2", "--json"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["model"]["name"] == "Linear"
    assert "from below" in done.stderr


def test_plan_defaults_pin_nothing(
    model_file: str, planner: Callable[[Plan | BaseException], Planner]
) -> None:
    fake = planner(mlp_plan())
    assert run("plan", f"{model_file}:build", "--cluster", "dgx-h100-2x8").exit_code == 0
    assert fake.call["pins"] == Pins()
    assert fake.call["loss_fn"] is None
    assert (fake.call["memory_reserve"], fake.call["time_limit_s"]) == (0.08, 60.0)


def test_t12_5_json_is_one_document_and_nothing_else(
    model_file: str, planner: Callable[[Plan | BaseException], Planner]
) -> None:
    planner(mlp_plan())
    result = run("plan", f"{model_file}:build", "--cluster", "dgx-h100-2x8", "--json")
    assert result.exit_code == 0
    assert Plan.from_json(result.stdout) == mlp_plan()
    assert "hello from the model" in result.stderr
    assert "progress that a library prints" in result.stderr


@pytest.mark.parametrize(
    ("outcome", "code"),
    [
        (PlanError("a"), 2),
        (ClusterError("a"), 2),
        (ProfileError("a"), 2),
        (CaptureError("a\n b"), 2),
        (InfeasibleError("a"), 3),
        (ExecutionError("a"), 1),
        (RuntimeError("a"), 1),
        (KeyboardInterrupt(), 130),
    ],
)
def test_t12_5_exit_codes(
    outcome: BaseException,
    code: int,
    model_file: str,
    planner: Callable[[Plan | BaseException], Planner],
) -> None:
    planner(outcome)
    result = run("plan", f"{model_file}:build", "--cluster", "dgx-h100-2x8")
    assert result.exit_code == code
    assert result.stdout == ""
    assert ("Traceback" in result.stderr) == (code == 1)
    assert result.stderr.splitlines()[-1].startswith("error: ")


def test_t12_10_infeasible_is_a_document_with_reasons(
    model_file: str, planner: Callable[[Plan | BaseException], Planner]
) -> None:
    tried = (("dp=16 tp=1 pp=1", "needs 135 GiB"), ("dp=1 tp=16 pp=1", "24 heads"))
    planner(InfeasibleError("nothing fits", candidates=tried))
    arguments = ("plan", f"{model_file}:build", "--cluster", "dgx-h100-2x8", "--json")
    result = run(*arguments)
    assert result.exit_code == 3
    assert json.loads(result.stdout) == {
        "error": "nothing fits",
        "candidates": [{"layout": a, "reason": b} for a, b in tried],
    }
    planner(InfeasibleError("nothing fits"))
    reasons = [c["reason"] for c in json.loads(run(*arguments).stdout)["candidates"]]
    assert reasons == ["nothing fits"]


def test_plan_refuses_bad_functions_in_one_line(
    model_file: str, planner: Callable[[Plan | BaseException], Planner]
) -> None:
    planner(mlp_plan())

    def plan(function: str, *more: str) -> str:
        result = run("plan", function, "--cluster", "dgx-h100-2x8", *more)
        assert result.exit_code == 2
        assert "Traceback" not in result.stderr
        return result.stderr

    assert "expected FILE.py:FUNCTION" in plan(model_file.removesuffix(".py"))
    assert "there is no file nowhere.py" in plan("nowhere.py:build")
    assert "has no function 'NUMBER'" in plan(f"{model_file}:NUMBER")
    broken = plan(f"{model_file}:broken")
    assert "raised KeyError" in broken
    assert "my_model.py:8: 'width'" in broken
    assert "returned str, expected (model, inputs)" in plan(f"{model_file}:single")
    assert "write it as 3,4" in plan(f"{model_file}:build", "--stage-layers", "3;4")
    assert "is not a sharding spec" in plan(f"{model_file}:build", "--placement", "a=X")
    assert "is not NAME=SPEC" in plan(f"{model_file}:build", "--placement", "a")
    assert "no cluster" in run("plan", f"{model_file}:build", "--cluster", "x").stderr


def test_demo_passes_its_arguments_and_code(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[dict[str, Any]] = []

    def run_demo(**arguments: Any) -> int:
        calls.append(arguments)
        click.echo("{}")
        return len(calls) - 1

    module = types.ModuleType("autoplan.demo")
    module.run_demo = run_demo  # type: ignore[attr-defined]  # a module made by hand
    monkeypatch.setitem(sys.modules, "autoplan.demo", module)
    assert run("demo").exit_code == 0
    assert run("demo", "--pins", "dp=4", "--steps", "3", "--json", "-o", "p.json").exit_code == 1
    assert calls == [
        {
            "cluster": "local-cpu-4",
            "pins": "",
            "steps": 30,
            "output": None,
            "json": False,
        },
        {"cluster": "local-cpu-4", "pins": "dp=4", "steps": 3, "output": "p.json", "json": True},
    ]


def process(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "autoplan", *arguments],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


def test_show_as_a_process_needs_no_torch(saved: str, tmp_path: Path) -> None:
    done = process("show", saved, cwd=tmp_path)
    assert done.returncode == 0
    assert done.stdout == llama_plan().summary()
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "autoplan.render.text" in imported
    assert not {"torch", "numpy", "rich", "ortools", "networkx", "matplotlib"} & imported


def test_t12_11_validate_as_a_process_executes_nothing(tmp_path: Path) -> None:
    (tmp_path / "trap.py").write_text("raise SystemExit(9)\n")
    raw = json.loads(mlp_plan().to_json())
    raw["model"]["name"] = "trap"
    raw["settings"]["pins"] = {"placements": {"trap:build": "R"}, "__class__": "trap.Trap"}
    (tmp_path / "plan.json").write_text(json.dumps(raw))
    done = process("validate", "plan.json", "--json", cwd=tmp_path)
    assert done.returncode == 0
    assert json.loads(done.stdout)["valid"] is True
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert not {"trap", "torch"} & imported


def test_several_clusters_are_compared_and_saved_each(
    planner: Callable[..., Planner], model_file: str, tmp_path: Path
) -> None:
    quick = msgspec.structs.replace(
        llama_plan(), estimate=msgspec.structs.replace(llama_plan().estimate, step_time_s=0.1)
    )
    planner({"dgx-h100-2x8": quick, "dgx-a100-2x8": llama_plan()})
    arguments = ["plan", f"{model_file}:build", "--cluster", "dgx-a100-2x8"]
    arguments += ["--cluster", "dgx-h100-2x8", "-o", str(tmp_path / "plan.json")]
    result = run(*arguments)
    assert result.exit_code == 0
    assert "B  dgx-h100-2x8   <- fastest" in result.stdout
    saved = sorted(p.name for p in tmp_path.glob("*.json"))
    assert saved == ["plan.dgx-a100-2x8.json", "plan.dgx-h100-2x8.json"]
    assert json.loads(run(*arguments, "--json").stdout)["fastest"] == "dgx-h100-2x8"


def test_one_of_several_clusters_may_refuse(
    planner: Callable[..., Planner], model_file: str
) -> None:
    refusal = InfeasibleError("needs 90.00 GiB on each device")
    planner({"dgx-h100-2x8": llama_plan(), "dgx-a100-2x8": refusal})
    clusters = ["--cluster", "dgx-a100-2x8", "--cluster", "dgx-h100-2x8"]
    result = run("plan", f"{model_file}:build", *clusters)
    assert result.exit_code == 0
    assert "dgx-a100-2x8 does not fit: needs 90.00 GiB" in result.stdout
    planner({"dgx-h100-2x8": refusal, "dgx-a100-2x8": refusal})
    both = run("plan", f"{model_file}:build", *clusters)
    assert (both.exit_code, both.stdout) == (3, "")
    assert "error: needs 90.00 GiB" in both.stderr


def test_draw_writes_the_file_and_says_so(saved: str, tmp_path: Path) -> None:
    target = tmp_path / "step.trace.json"
    result = run("draw", saved, "-o", str(target))
    assert (result.exit_code, result.stdout) == (0, "")
    assert json.loads(target.read_text())["traceEvents"]
    document = json.loads(run("draw", saved, "-o", str(target), "--json").stdout)
    assert document == {"output": str(target), "size_bytes": target.stat().st_size}


@pytest.mark.parametrize("command", ["show", "draw", "compare", "explain", "validate"])
@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{}", "schema_version is missing"),
        ('{"schema_version": 99}', "99 is newer"),
        ('{"schema_version": 2, "model": {"na', "truncated"),
        ("not a plan", "not JSON"),
        (None, "Is a directory"),
    ],
)
def test_what_is_no_plan_is_refused_in_one_line(
    command: str, content: str | None, words: str, tmp_path: Path
) -> None:
    path = tmp_path / "plan.json"
    path.mkdir() if content is None else path.write_text(content)
    output = tmp_path / "out.png"
    rest = {"draw": ["-o", str(output)], "compare": [str(path)], "explain": ["stage 0"]}
    assert_error(run(command, str(path), *rest.get(command, [])), 2, words)
    assert [p.name for p in tmp_path.iterdir()] == ["plan.json"]


@pytest.mark.parametrize("name", ["missing/plan.png", "missing/plan.trace.json", "plan.gif"])
def test_unwritable_drawings_are_refused_in_one_line(saved: str, name: str, tmp_path: Path) -> None:
    before = sorted(tmp_path.iterdir())
    assert_error(run("draw", saved, "-o", str(tmp_path / name)), 2, name)
    assert sorted(tmp_path.iterdir()) == before


def test_compare_prints_a_page_or_data(saved: str) -> None:
    other = saved.replace("plan.json", "other.json")
    Path(other).write_text(Path(saved).read_text())
    assert "every parameter is placed alike" in run("compare", saved, other).stdout
    document = json.loads(run("compare", saved, other, "--json").stdout)
    assert (document["same_model"], document["placements"]) == (True, {})
    assert_error(run("compare", saved), 2, "one plan to compare")


def test_size_climbs_until_it_fits(monkeypatch: pytest.MonkeyPatch, model_file: str) -> None:
    calls: list[int] = []

    def optimize_each(model: Any, clusters: Any, inputs: Any, **rest: Any) -> Iterator[Any]:
        for cluster in clusters:
            calls.append(cluster.num_devices)
            fits = cluster.num_devices >= 4
            yield cluster, llama_plan() if fits else InfeasibleError("needs 90.00 GiB")

    api = types.ModuleType("autoplan.api")
    api.optimize_each = optimize_each  # type: ignore[attr-defined]  # a module made by hand
    monkeypatch.setitem(sys.modules, "autoplan.api", api)
    result = run("size", f"{model_file}:build", "--device", "h100-80g", "--max-devices", "8")
    assert result.exit_code == 0
    assert calls == [1, 2, 4, 3, 8]
    assert "smallest: 4 devices (dgx-h100-1x4)" in result.stdout
    assert "8 devices: fits" in result.stderr
    document = json.loads(run("size", f"{model_file}:build", "--kind", "dgx-h100", "--json").stdout)
    assert (document["kind"], document["smallest"]) == ("dgx-h100", "dgx-h100-1x4")
    assert_error(run("size", f"{model_file}:build"), 2, "one of --device and --kind")
    few = run("size", f"{model_file}:build", "--device", "h100-80g", "--max-devices", "2")
    assert few.exit_code == 3
    assert "nothing up to 2 devices of dgx-h100 is enough: needs 90.00 GiB" in few.stderr
