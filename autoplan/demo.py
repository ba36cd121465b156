# SPDX-License-Identifier: Apache-2.0
"""The main job on this machine: a byte-level Llama learns English, planned, run on several
processes, checked against one.

`run_demo` plans, shows the plan, starts the processes through torchrun's launcher, trains, trains
the same model on one device, and compares. `python -m autoplan.demo PLAN STEPS RESULT` is what the
launcher starts. The text is the standard library's own help topics; weights are random; nothing is
downloaded.
"""

from __future__ import annotations

import json as json_format
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autoplan.api import optimize, parallelize
from autoplan.api_pins import Pins
from autoplan.cluster import Cluster
from autoplan.errors import AutoplanError
from autoplan.plan import Plan

if TYPE_CHECKING:
    import torch
    from torch import nn

BATCH, SEQUENCE, SEED, LEARNING_RATE, MAX_NORM = 16, 128, 20, 1e-3, 1.0
LOSS_TOLERANCE = 1e-5  # relative, over all steps; the model's own norms and loss are float32
PARAMETER_TOLERANCE = 1e-4  # norm of the difference over norm, after all steps


def build_model() -> nn.Module:
    """A Llama over bytes: 4 blocks, hidden 128, 8 query and 4 key-value heads; the same weights on
    every call.
    """
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    import torch

    try:
        from transformers import LlamaConfig, LlamaForCausalLM
    except ImportError as error:
        raise AutoplanError(
            "the demo trains transformers' Llama, which is not installed. "
            "Run: pip install 'autoplan[examples]'"
        ) from error
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=SEQUENCE,
        use_cache=False,
    )
    with torch.random.fork_rng():
        torch.manual_seed(SEED)
        model: nn.Module = LlamaForCausalLM(config).train()
        return model


def batch_of(step: int) -> dict[str, torch.Tensor]:
    """One global batch of (BATCH, SEQUENCE) bytes; a function of the step alone."""
    from pydoc_data.topics import topics

    import torch

    text = "\n".join(topics[name] for name in sorted(topics)).encode()
    generator = torch.Generator().manual_seed(SEED + step)
    starts = torch.randint(0, len(text) - SEQUENCE, (BATCH,), generator=generator)
    ids = torch.tensor([list(text[s : s + SEQUENCE]) for s in starts.tolist()])
    return {"input_ids": ids, "labels": ids.clone()}


def train_planned(plan_path: str, steps: int, result_path: str) -> None:
    """One process of the planned run: trains its part; rank 0 writes losses, seconds of
    every step and the gathered parameters.
    """
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    parallel = parallelize(build_model(), Plan.load(plan_path))
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=LEARNING_RATE)
    losses, seconds = [], []
    for step in range(steps):
        start = time.perf_counter()
        optimizer.zero_grad()
        losses.append(float(parallel.forward_backward(**batch_of(step))))
        parallel.clip_grad_norm_(MAX_NORM)
        optimizer.step()
        seconds.append(time.perf_counter() - start)
    state = parallel.full_state_dict()
    if not dist.is_initialized() or dist.get_rank() == 0:
        torch.save({"losses": losses, "seconds": seconds, "state": state}, result_path)
    if dist.is_initialized():
        dist.barrier()  # no process takes its connections away while another still uses them
        dist.destroy_process_group()


def train_alone(steps: int) -> tuple[list[float], float, dict[str, torch.Tensor]]:
    """The same training of the unmodified model on one device: losses, seconds, parameters."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    model = build_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    losses, start = [], time.perf_counter()
    for step in range(steps):
        optimizer.zero_grad()
        loss = model(**batch_of(step)).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        losses.append(float(loss.detach()))
    seconds = time.perf_counter() - start
    torch.set_num_threads(threads)
    return losses, seconds, model.state_dict()


def parse_pins(text: str) -> Pins:
    """Pins from "tp=2,pp=2,recompute=true".

    Raises:
        ValueError: A word is not a pin, or its value has another type.
    """
    values: dict[str, Any] = {}
    for part in filter(None, (p.strip() for p in text.split(","))):
        name, _, value = part.partition("=")
        if name in ("tp", "pp", "dp", "zero", "num_microbatches") and value.isdigit():
            values[name] = int(value)
        elif name == "schedule":
            values[name] = value
        elif name == "recompute" and value in ("true", "false"):
            values[name] = value == "true"
        else:
            raise ValueError(
                f"{part!r} is not a pin. Write tp, pp, dp, zero, num_microbatches = a number, "
                f"schedule=gpipe|1f1b, recompute=true|false."
            )
    return Pins(**values)


def run_demo(*, cluster: str, pins: str, steps: int, output: str | None, json: bool) -> int:
    """Plans, runs and checks; prints what it does on stdout (one document with `json`).

    Returns:
        0 when both runs agree, 1 when they do not.

    Raises:
        ValueError: The pins cannot be read.
        AutoplanError: No plan fits, or the processes failed.
    """
    chosen = Cluster.load(cluster)
    model, batch = build_model(), batch_of(0)
    _say(json, f"planning a byte-level Llama for {cluster} ...")
    plan = optimize(model, chosen, batch, pins=parse_pins(pins))
    _say(json, plan.summary())
    with tempfile.TemporaryDirectory() as folder:
        path = str(plan.save(output or Path(folder) / "plan.json"))
        result_path = str(Path(folder) / "result.pt")
        count = plan.layout.dp * plan.layout.tp * plan.layout.pp
        _say(json, f"training {steps} steps on {count} processes ...")
        _launch(count, path, steps, result_path)
        import torch

        result = torch.load(result_path)
    _say(json, f"training the same {steps} steps on one device ...")
    losses, seconds, state = train_alone(steps)
    measured = plan.compare_measured(statistics.median(result["seconds"]))
    report = {**_compare(result, losses, seconds, state), "step_time": measured}
    if json:
        print(json_format.dumps({**report, "plan": json_format.loads(plan.to_json())}))
    else:
        _print_report(report)
    return 0 if report["agree"] else 1


def _say(json: bool, text: str) -> None:
    print(text, file=sys.stderr if json else sys.stdout, flush=True)


def _launch(count: int, plan_path: str, steps: int, result_path: str) -> None:
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={count}",
        "-m",
        "autoplan.demo",
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(
        [*command, plan_path, str(steps), result_path],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise AutoplanError(
            f"the planned run failed with exit code {done.returncode}:\n"
            f"{done.stdout[-2000:]}{done.stderr[-4000:]}"
        )


def _compare(
    result: dict[str, Any], losses: list[float], seconds: float, state: dict[str, torch.Tensor]
) -> dict[str, Any]:
    loss_error = max(abs(a - b) / abs(b) for a, b in zip(result["losses"], losses))
    parameter_error = max(
        float((result["state"][n] - p).norm() / p.norm())
        for n, p in state.items()
        if p.is_floating_point()
    )
    same_names = set(result["state"]) == set(state)
    agree = loss_error <= LOSS_TOLERANCE and parameter_error <= PARAMETER_TOLERANCE and same_names
    return {
        "agree": agree,
        "losses_planned": result["losses"],
        "losses_one_device": losses,
        "largest_loss_difference": loss_error,
        "largest_parameter_difference": parameter_error,
        "seconds_planned": sum(result["seconds"]),
        "seconds_one_device": seconds,
    }


def _print_report(report: dict[str, Any]) -> None:
    planned, alone = report["losses_planned"], report["losses_one_device"]
    print(f"\n{'step':>4}  {'planned':>9}  {'one device':>10}")
    every = max(1, len(planned) // 10)
    for step in sorted({*range(0, len(planned), every), len(planned) - 1}):
        print(f"{step:>4}  {planned[step]:>9.5f}  {alone[step]:>10.5f}")
    print(
        f"\nlargest relative difference: loss {report['largest_loss_difference']:.1e}, "
        f"parameters {report['largest_parameter_difference']:.1e}"
    )
    print(
        f"seconds: planned {report['seconds_planned']:.1f}, "
        f"one device {report['seconds_one_device']:.1f}; {report['step_time']}"
    )
    print(
        "the two runs agree"
        if report["agree"]
        else f"THE TWO RUNS DISAGREE (tolerance: loss {LOSS_TOLERANCE}, "
        f"parameters {PARAMETER_TOLERANCE})"
    )


if __name__ == "__main__":
    train_planned(sys.argv[1], int(sys.argv[2]), sys.argv[3])
