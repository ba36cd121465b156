# SPDX-License-Identifier: Apache-2.0
"""A plan run on this machine: 4 gloo processes train 5 steps, and one process the same 5.

    python examples/run_on_cpu.py

It plans for local-cpu-4 with tp=2 and dp=2 pinned, starts itself four times through torchrun's
launcher, trains the unmodified model in this process, and exits with 1 if any loss differs.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import autoplan

STEPS, ROWS, LENGTH, WORDS, WIDTH = 5, 8, 16, 64, 32  # ROWS: of the global batch
TOLERANCE = 1e-5  # relative; the losses are float32 sums in another order


class Reader(nn.Module):
    """An embedding, a residual MLP, a head (B batch, S sequence, D width, V words)."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, ids_BS: torch.Tensor, labels_BS: torch.Tensor) -> dict[str, torch.Tensor]:
        """The loss over all labels, and the logits (batch, seq, words)."""
        x_BSD = self.words(ids_BS)
        x_BSD = x_BSD + self.down(nn.functional.gelu(self.up(self.norm(x_BSD))))
        logits_BSV = self.head(x_BSD)
        loss = nn.functional.cross_entropy(logits_BSV.flatten(0, 1), labels_BS.flatten())
        return {"loss": loss, "logits": logits_BSV}


def build() -> Reader:
    """The model with the same weights on every call and in every process."""
    torch.manual_seed(0)
    return Reader()


def batch_of(step: int) -> dict[str, torch.Tensor]:
    """The global batch of a step: every rank is given all of it and takes its part."""
    generator = torch.Generator().manual_seed(step)
    ids_BS = torch.randint(0, WORDS, (ROWS, LENGTH), generator=generator)
    return {"ids_BS": ids_BS, "labels_BS": (3 * ids_BS + 1) % WORDS}


def train_planned(plan_file: str, result_file: str) -> None:
    """One of the four processes: the ordinary training loop around `parallelize`."""
    torch.set_num_threads(1)
    parallel = autoplan.parallelize(build(), autoplan.Plan.load(plan_file))
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-2)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        losses.append(float(parallel.forward_backward(**batch_of(step))))
        parallel.clip_grad_norm_(1.0)
        optimizer.step()
    if dist.get_rank() == 0:
        Path(result_file).write_text(json.dumps(losses), encoding="utf-8")
    dist.barrier()  # no process takes its connections away while another still uses them
    dist.destroy_process_group()


def train_alone() -> list[float]:
    """The same steps of the unmodified model in this process."""
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = model(**batch_of(step))["loss"]
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def launch(plan: autoplan.Plan) -> list[float]:
    """Losses of the planned run: this file again, once per device, under torchrun's launcher."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    count = plan.layout.pp * plan.layout.dp * plan.layout.tp
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "losses.json"
        files = [str(plan.save(Path(folder) / "plan.json")), str(result)]
        quiet = {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore::FutureWarning"}
        command = [*launcher, f"--nproc-per-node={count}", __file__, *files]
        subprocess.run(command, env={**os.environ, **quiet}, check=True)
        losses: list[float] = json.loads(result.read_text(encoding="utf-8"))
    return losses


def main() -> int:
    """Plans, runs, compares; 0 when the losses agree."""
    cluster = autoplan.Cluster.load("local-cpu-4")
    plan = autoplan.optimize(build(), cluster, batch_of(0), pins=autoplan.Pins(tp=2, dp=2))
    print(plan.summary())
    planned, alone = launch(plan), train_alone()
    print("step   4 processes  one process")
    for step, (ours, theirs) in enumerate(zip(planned, alone, strict=True)):
        print(f"{step:>4}  {ours:>12.6f} {theirs:>12.6f}")
    worst = max(abs(a - b) / abs(b) for a, b in zip(planned, alone, strict=True))
    agree = worst <= TOLERANCE
    print(f"largest relative difference {worst:.1e}: the losses {'agree' if agree else 'DIFFER'}")
    return 0 if agree else 1


if __name__ == "__main__":
    if len(sys.argv) == 3:
        train_planned(*sys.argv[1:])
    else:
        sys.exit(main())
