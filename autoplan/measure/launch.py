# SPDX-License-Identifier: Apache-2.0
"""Measuring as a command: starts processes on this machine, or joins those of an outer torchrun.

`measure_cluster` is the door. Every process measures at the same time; rank 0 writes the document.
`python -m autoplan.measure.launch RESULT QUICK` is what the launcher starts.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from autoplan.cluster_format import local_cores
from autoplan.errors import ClusterError, ProfileError
from autoplan.measure.host import measure_host
from autoplan.measure.kernels import measure_device
from autoplan.measure.links import LinkTimings, measure_links
from autoplan.measure.steps import corrected, reason, steps_beside
from autoplan.measure.write import Machine, cluster_document, rows_json

TIMEOUT_S = 1800
QUICK_BATCH_S, BATCH_S = 0.008, 0.04
QUICK_STEPS_S, STEPS_S = 0.5, 2.0

Document = dict[str, Any]


def measure_cluster(num_processes: int, *, quick: bool) -> Document | None:
    """Measures this machine, or all machines of an outer torchrun.

    Args:
        num_processes: To start on this machine; not read under torchrun.
        quick: Fewer points and shorter batches.

    Returns:
        {"cluster": a cluster document, "rows": the report's lines}; None on the ranks of an outer
        torchrun that are not the first.

    Raises:
        ProfileError: A process failed; the message is its last line.
    """
    if "RANK" in os.environ:
        return _measure(quick)
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        _start(num_processes, result, quick)
        document: Document = json.loads(result.read_text())
        return document


def default_processes() -> int:
    """One for each CUDA device, else one for each core."""
    return torch.cuda.device_count() or local_cores()


def _start(num_processes: int, result: Path, quick: bool) -> None:
    if torch.cuda.is_available() and num_processes > torch.cuda.device_count():
        raise ClusterError(
            f"--processes {num_processes} on a machine of {torch.cuda.device_count()} CUDA "
            "devices: expected one process for each device at most. Give a smaller number."
        )
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={num_processes}",
        "-m",
        "autoplan.measure.launch",
        str(result),
        "quick" if quick else "full",
    ]
    package = str(Path(__file__).resolve().parents[2])
    paths = os.pathsep.join(filter(None, (package, os.environ.get("PYTHONPATH"))))
    environment = {
        "OMP_NUM_THREADS": "1",
        **os.environ,
        "PYTHONPATH": paths,
        "PYTHONWARNINGS": "ignore",
    }
    try:
        done = subprocess.run(
            command,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=TIMEOUT_S,
        )
    except subprocess.TimeoutExpired as late:
        raise ProfileError(
            f"measuring took more than {TIMEOUT_S} s: expected minutes. Try --quick, or fewer "
            "--processes, on a machine with less else to do."
        ) from late
    if done.returncode != 0:
        raise ProfileError(
            f"a measuring process failed: {reason(done.stderr)} Expected all {num_processes} "
            "to finish. Try fewer --processes."
        )


def _measure(quick: bool) -> Document | None:
    """One process of a launch: measures with the others; the document on rank 0."""
    device = _device()
    world = int(os.environ["WORLD_SIZE"])
    per_host = int(os.environ.get("LOCAL_WORLD_SIZE", str(world)))
    started = not dist.is_initialized()
    if started and world > 1:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    batch_s = QUICK_BATCH_S if quick else BATCH_S
    host = measure_host(device, batch_s=batch_s)
    kernels = measure_device(device, host, quick=quick, batch_s=batch_s)
    links = LinkTimings()
    if world > 1:
        links = measure_links(device, per_host, quick=quick, batch_s=batch_s)
        machine = _machine(device, _hosts(world), per_host)
        dist.barrier()
    else:
        machine = _machine(device, 1, 1)
    rows = [*host.rows, *kernels.rows, *links.rows]
    document = cluster_document(machine, host, kernels, links)
    if machine.is_cpu:
        factors = steps_beside(document, QUICK_STEPS_S if quick else STEPS_S)
        document = corrected(document, factors)
        rows += factors.rows
    rank = dist.get_rank() if world > 1 else 0
    if world > 1:
        dist.barrier()
        if started:
            dist.destroy_process_group()
    return {"cluster": document, "rows": rows_json(rows)} if rank == 0 else None


def _hosts(world: int) -> int:
    """Hosts of the launch, which must have as many processes each, ranks host by host."""
    every: list[object] = [None] * world
    dist.all_gather_object(every, os.environ.get("GROUP_RANK", "0"))
    counts = Counter(str(host) for host in every)
    blocks = sum(a != b for a, b in pairwise(every)) + 1
    if len(set(counts.values())) > 1 or blocks != len(counts):
        raise ClusterError(
            f"the hosts of this launch have {sorted(counts.values())} processes: expected the same "
            "number on each, ranks numbered host by host. Launch with torchrun --nproc-per-node."
        )
    return len(counts)


def _device() -> torch.device:
    if torch.cuda.is_available():
        local = int(os.environ.get("LOCAL_RANK", "0"))
        torch.cuda.set_device(local)
        return torch.device("cuda", local)
    return torch.device("cpu")


def _machine(device: torch.device, num_hosts: int, per_host: int) -> Machine:
    is_cpu = device.type == "cpu"
    if is_cpu:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // per_host
        name = _cpu_name()
    else:
        memory = torch.cuda.get_device_properties(device).total_memory
        name = torch.cuda.get_device_name(device)
    cores = max(1, local_cores() // torch.get_num_threads()) if is_cpu else None
    backend = "gloo" if is_cpu else "NCCL"
    versions = f"torch {torch.__version__}, {backend}, Python {platform.python_version()}"
    return Machine(
        name=f"measured-{num_hosts}x{per_host}",
        device_name=name,
        is_cpu=is_cpu,
        num_hosts=num_hosts,
        devices_per_host=per_host,
        memory_bytes=memory,
        cores_per_host=cores,
        software=f"{versions}, {torch.get_num_threads()} thread(s) a process",
        date=datetime.datetime.now(datetime.UTC).date().isoformat(),
        command=f"autoplan profile --processes {per_host}",
    )


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def main() -> None:
    """What the launcher starts: `launch.py RESULT quick|full`."""
    document = _measure(sys.argv[2] == "quick")
    if document is not None:
        Path(sys.argv[1]).write_text(json.dumps(document))


if __name__ == "__main__":
    main()
