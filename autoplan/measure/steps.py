# SPDX-License-Identifier: Apache-2.0
"""Training steps on one device, against what a measured profile says of them.

An op in a loop of its own finds code and operands in the caches and its memory mapped; in a step it
does not. So a few reference models run forward and backward through the executor, every process at
the same time, and two factors make the profile right for them: one for the host's part of ops, one
for the kernels. `python -m autoplan.measure.steps CLUSTER RESULT SECONDS` is one process of it. On
a GPU, where the host runs ahead and operands stream from memory anyhow, nothing is corrected.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from autoplan.api import optimize, parallelize
from autoplan.api_pins import Pins
from autoplan.cluster import Cluster
from autoplan.errors import ProfileError
from autoplan.measure.clock import Row
from autoplan.measure.fit import fit_terms

Document = dict[str, Any]
# what a torch launcher says to its processes, which these are none of
LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR")


@dataclass(frozen=True)
class Factors:
    """How many times as long as alone things take in a step.

    Attributes:
        host: The host's part of ops and conversions.
        kernels: Kernels.
        error: Mean of |fitted / measured - 1| over the reference models.
        rows: For the report.
    """

    host: float
    kernels: float
    error: float
    rows: tuple[Row, ...] = ()


class _Residual(nn.Module):
    """Blocks of a norm, two linears and a sum; the mean square of the end."""

    def __init__(self, width: int, inner: int, depth: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.LayerNorm(width), nn.Linear(width, inner), nn.GELU(), nn.Linear(inner, width)
            )
            for _ in range(depth)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x.square().mean()


class _Attending(nn.Module):
    """Blocks of causal attention and a feed-forward; the mean square of the end."""

    def __init__(self, width: int, heads: int, depth: int) -> None:
        super().__init__()
        self.heads = heads
        self.packed = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(depth))
        self.out = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.forwards = nn.ModuleList(
            _Residual(width, 4 * width, 1).blocks[0] for _ in range(depth)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, tokens, width = x.shape
        for packed, out, forwards in zip(self.packed, self.out, self.forwards):
            parts = packed(x).view(rows, tokens, 3, self.heads, width // self.heads)
            q, k, v = parts.permute(2, 0, 3, 1, 4).unbind(0)
            y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + out(y.transpose(1, 2).reshape(rows, tokens, width))
            x = x + forwards(x)
        return x.square().mean()


def _references() -> dict[str, tuple[nn.Module, torch.Tensor]]:
    """Models whose steps are the host's, the products', and both; with a batch each."""
    return {
        "of small ops": (_Residual(32, 64, 16), torch.randn(8, 32)),
        "of small products": (_Residual(256, 1024, 6), torch.randn(64, 256)),
        "of large products": (_Residual(768, 3072, 2), torch.randn(64, 768)),
        "of attention": (_Attending(192, 8, 3), torch.randn(4, 64, 192)),
    }


def measure_steps(document: Document, seconds: float) -> Factors:
    """Trains the reference models in this process and fits the factors.

    Args:
        document: The cluster file so far.
        seconds: To train each of them.
    """
    alone = {**document, "num_hosts": 1, "devices_per_host": 1, "inter_host": None}
    alone.pop("cores_per_host", None)
    device = document["device"]
    kernel = {k: v for k, v in device["kernel"].items() if k != "host_us"}
    free = {**alone, "device": {**device, "kernel": kernel}}
    clusters = [Cluster.from_json(d) for d in (alone, free)]
    pins = Pins(dp=1, tp=1, pp=1, zero=0, num_microbatches=1, recompute=False)
    parts, measured, rows = [], [], []
    for name, (model, x) in _references().items():
        plans = [optimize(model, cluster, {"x": x}, pins=pins) for cluster in clusters]
        whole_s, kernels_s = (p.estimate.step_time_s - p.estimate.optimizer_s for p in plans)
        parallel = parallelize(model, plans[0])
        times: list[float] = []
        until = time.perf_counter() + seconds
        while len(times) < 4 or time.perf_counter() < until:
            parallel.zero_grad()
            began = time.process_time()
            parallel.forward_backward(x=x)
            times.append(time.process_time() - began)
        times = sorted(times[1:])
        middle = times[len(times) // 2]
        parts.append((whole_s - kernels_s, kernels_s))
        measured.append(middle)
        rows.append(Row(f"forward and backward {name}", 1, middle, middle, middle / times[0] - 1.0))
    (host, kernels), error = fit_terms(parts, measured)
    return Factors(host, kernels, error, tuple(rows))


def steps_beside(document: Document, seconds: float) -> Factors:
    """The same in a process of its own, which knows nothing of a launcher; every process of a
    launch calls it at once.

    Raises:
        ProfileError: The process failed; the message says what of.
    """
    with tempfile.TemporaryDirectory() as folder:
        given, result = Path(folder) / "cluster.json", Path(folder) / "factors.json"
        given.write_text(json.dumps(document))
        environment = {k: v for k, v in os.environ.items() if k not in LAUNCHER}
        command = [sys.executable, "-m", "autoplan.measure.steps", str(given), str(result)]
        done = subprocess.run(
            [*command, str(seconds)], env=environment, capture_output=True, text=True, check=False
        )
        if done.returncode != 0:
            raise ProfileError(
                f"measuring training steps failed: {reason(done.stderr)} Expected factors of "
                "host and kernels. Try again with less else to do on the machine."
            )
        found = json.loads(result.read_text())
    rows = tuple(Row(**row) for row in found.pop("rows"))
    return Factors(**found, rows=rows)


def corrected(document: Document, factors: Factors) -> Document:
    """The cluster file with times as they are in a step."""
    device = document["device"]
    kernel, host, slow = dict(device["kernel"]), factors.host, factors.kernels
    kernel["launch_us"] = kernel["launch_us"] * slow
    if "packing_GBps" in kernel:
        kernel["packing_GBps"] = kernel["packing_GBps"] / slow
    kernel["elementwise_GFLOPs"] = {
        op: [ahead / slow, back / slow]
        for op, (ahead, back) in kernel["elementwise_GFLOPs"].items()
    }
    kernel["host_us"] = {
        **kernel["host_us"],
        **{key: [t * host for t in kernel["host_us"][key]] for key in ("op", "conversion")},
    }
    models = f"{len(factors.rows)} reference models, told within {factors.error:.0%}"
    provenance = dict(device["provenance"])
    for key in filter(_is_time, provenance):
        factor = host if key == "kernel.host_us" else slow
        note = f"{provenance[key]['note']}; times {factor:.3g}, as in steps of {models}"
        provenance[key] = {**provenance[key], "note": note}
    changed = {
        **device,
        "memory_GBps": device["memory_GBps"] / slow,
        "peak_TFLOPs": {dtype: peak / slow for dtype, peak in device["peak_TFLOPs"].items()},
        "kernel": kernel,
        "provenance": provenance,
    }
    return {**document, "device": changed}


def _is_time(key: str) -> bool:
    return key.startswith(("peak", "memory_GBps", "kernel.packing", "kernel.launch")) or (
        key in ("kernel.host_us", "kernel.elementwise_GFLOPs")
    )


def reason(stderr: str) -> str:
    """The last line of the first traceback: what the processes died of."""
    lines = [re.sub(r"^\[rank\d+\]:", "", line).strip() for line in stderr.splitlines()]
    errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception|Interrupt)\b", line)]
    text = next((line for line in errors if "ChildFailed" not in line), "it said nothing")
    return text if text.endswith(".") else f"{text}."


def main() -> None:
    """One process: `steps CLUSTER RESULT SECONDS`."""
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    factors = measure_steps(json.loads(Path(sys.argv[1]).read_text()), float(sys.argv[3]))
    Path(sys.argv[2]).write_text(json.dumps(asdict(factors)))


if __name__ == "__main__":
    main()
