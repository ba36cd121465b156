# SPDX-License-Identifier: Apache-2.0
"""`python -m tests.tables FOLDER`: the device and link profiles against tables of benchmarks.

FOLDER holds `gemm.csv`, `attention.csv` and `collectives.csv`: the columns of profiles/README.md,
"Tables". Per device (or node) and kind: rows, mean absolute relative error of the seconds, median,
bias. Left out are products below 1 GFLOP or of sizes that tensor cores cannot read, and rows of low
reliability. Not a test: pytest does not collect it.
"""

from __future__ import annotations

import argparse
import csv
import statistics
from collections.abc import Iterator
from pathlib import Path

from autoplan.cluster import Cluster, Group
from autoplan.costs.collectives import collective_time
from autoplan.costs.compute import kernel_time
from autoplan.costs.profile import DeviceProfile, Profiles

DEVICES = {
    "V100": "v100-32g", "T4": "t4-16g", "A100": "a100-80g", "A100 (inferred)": "a100-80g",
    "A100-SXM": "a100-80g", "A100-80GB": "a100-80g", "H800": "h800-80g", "H100-SXM": "h100-80g",
    "H100-80GB": "h100-80g", "H200-141GB": "h200-141g", "B200": "b200-192g",
    "GB200": "gb200-192g", "B300": "b300-288g", "MI300X": "mi300x-192g",
}  # fmt: skip
DTYPES = {"fp16 in, fp32 accumulate": "float16", "bf16": "bfloat16", "fp16": "float16",
          "fp8": "float8_e4m3fn"}  # fmt: skip
KERNELS = {"FlashAttention-2": "flash2", "FlashAttention-3": "flash3", "cuDNN": "cudnn",
           "FlashAttention-1": "flash1"}  # fmt: skip
NODES = {"A100 node": "dgx-a100", "8x A100": "dgx-a100", "V100 node": "dgx-v100",
         "8x H200": "dgx-h200", "p5.48xlarge": "aws-p5", "p4de.24xlarge": "aws-p4d",
         "p6-b200.48xlarge": "dgx-b200", "GB200 NVL72": "gb200-nvl72"}  # fmt: skip
Errors = dict[str, list[float]]


def rows_of(folder: Path, name: str) -> Iterator[dict[str, str]]:
    """The reliable rows of a table."""
    with open(folder / f"{name}.csv", newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            if row["split"] != "low_reliability" and row.get("status", "ok") == "ok":
                yield row


def profile_of(device: str) -> DeviceProfile:
    """The device in a short benchmark."""
    cluster = Cluster.from_json(
        {"num_hosts": 1, "devices_per_host": 1, "device": device, "intra_host": "nvlink3"}
    )
    return DeviceProfile.of(cluster.device)


def products(folder: Path) -> Errors:
    """Errors of matrix products by device."""
    found: Errors = {}
    for row in rows_of(folder, "gemm"):
        dtype, device = DTYPES.get(row["dtype"]), DEVICES.get(row["gpu"])
        batch, m, n, k = (int(row[c] or 1) for c in ("batch", "m", "n", "k"))
        flop = 2.0 * batch * m * n * k
        if m % 8 or k % 8:  # rows of memory that tensor cores do not read
            continue
        if dtype is None or device is None or flop < 1e9 or not row["tflops"]:
            continue
        width = 1 if dtype.startswith("float8") else 2
        moved = width * batch * (m * k + n * k) + 2.0 * batch * m * n
        cost = kernel_time(profile_of(device), "matmul", flop, moved, dtype, (batch, m, n, k))
        measured = flop / (float(row["tflops"]) * 1e12)
        found.setdefault(f"{device} {dtype}", []).append(cost.time_s / measured - 1.0)
    return found


def attention(folder: Path) -> Errors:
    """Errors of fused attention by device, kernel and pass."""
    found: Errors = {}
    for row in rows_of(folder, "attention"):
        kernel, device = KERNELS.get(row["impl"]), DEVICES.get(row["gpu"])
        profile = profile_of(device) if device else None
        if kernel is None or profile is None or kernel not in profile.flash:
            continue
        causal, both = int(row["causal"]), row["pass"] != "forward"
        seq, d, heads, batch = (int(row[c]) for c in ("seq_len", "head_dim", "heads", "batch"))
        flop = 4.0 * batch * heads * seq * seq * d * (0.5 if causal else 1.0)
        shape = (seq, d, causal)
        once = kernel_time(profile, "attention", flop, 0.0, "float16", shape, kernel).time_s
        total, work = once, flop
        if both:
            total += kernel_time(
                profile, "attention", 2.5 * flop, 0.0, "float16", shape, kernel
            ).time_s
            work *= 3.5
        measured = work / (float(row["tflops"]) * 1e12)
        found.setdefault(f"{device} {kernel} {row['pass']}", []).append(total / measured - 1.0)
    return found


def collectives(folder: Path) -> Errors:
    """Errors of collectives by node, kind and hosts."""
    found: Errors = {}
    for row in rows_of(folder, "collectives"):
        kind, node = NODES.get(row["node"]), row["node"]
        if kind is None or not (row["message_bytes"] and row["time_us"] and row["ranks"]):
            continue
        if row["collective"] not in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all"):
            continue
        if float(row["message_bytes"]) < 1e6 or "Ring" in row["algorithm"]:
            continue
        ranks, hosts = int(row["ranks"]), int(row["nodes"] or 1)
        per_host = max(1, ranks // hosts)
        try:
            cluster = Cluster.load(f"{kind}-{hosts}x{per_host}")
        except ValueError:
            continue
        group = Group(num_ranks=ranks, num_hosts=hosts, ranks_per_host=per_host)
        size, profiles = float(row["message_bytes"]), Profiles.of(cluster)
        cost = collective_time(profiles, row["collective"], size, group)
        error = cost.time_s / (float(row["time_us"]) * 1e-6) - 1.0
        found.setdefault(f"{node} {row['collective']} {hosts} hosts", []).append(error)
    return found


def main() -> None:
    """Prints the three tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    for name, table in (
        ("products", products(folder)),
        ("attention", attention(folder)),
        ("collectives", collectives(folder)),
    ):
        print(f"{name:44} {'rows':>5} {'MAPE':>6} {'median':>7} {'bias':>7}")
        every = [e for errors in table.values() for e in errors]
        for label, errors in [*sorted(table.items()), ("all", every)]:
            sizes = [abs(e) for e in errors]
            print(
                f"{label:44} {len(errors):5d} {statistics.fmean(sizes):6.1%} "
                f"{statistics.median(sizes):7.1%} {statistics.fmean(errors):+7.1%}"
            )
        print()


if __name__ == "__main__":
    main()
