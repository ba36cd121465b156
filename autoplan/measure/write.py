# SPDX-License-Identifier: Apache-2.0
"""From timings to a cluster file that `Cluster.load` takes, with where each number comes from."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from autoplan.measure.clock import Row
from autoplan.measure.fit import Line, fit_line, rising
from autoplan.measure.host import HostTimings
from autoplan.measure.kernels import DeviceTimings
from autoplan.measure.links import LinkTimings, Point
from autoplan.units import GIB, US

DIGITS = 6


@dataclass(frozen=True, slots=True)
class Machine:
    """What was measured, and with what.

    Attributes:
        name: Of the cluster.
        device_name: "NVIDIA H200", or the CPU's model.
        is_cpu: Devices are processes of a CPU.
        num_hosts, devices_per_host: Of the launch.
        memory_bytes: Of one device.
        cores_per_host: Cores that a host's processes share; None on GPUs.
        software: Versions: "torch 2.13.0, gloo, Python 3.11".
        date: "2026-11-30".
        command: That measures again.
    """

    name: str
    device_name: str
    is_cpu: bool
    num_hosts: int
    devices_per_host: int
    memory_bytes: int
    cores_per_host: int | None
    software: str
    date: str
    command: str


def cluster_document(
    machine: Machine, host: HostTimings, device: DeviceTimings, links: LinkTimings
) -> dict[str, Any]:
    """The measurements as a cluster file.

    Args:
        machine: Where they were made.
        host, device, links: What was measured; a launch of one process has no links, and its
            links are then ideal.
    """
    rows = [*host.rows, *device.rows, *links.rows]
    document: dict[str, Any] = {
        "name": machine.name,
        "num_hosts": machine.num_hosts,
        "devices_per_host": machine.devices_per_host,
        "device": _device(machine, host, device),
        "intra_host": _link(machine, "intra", links.intra, links.rows),
        "inter_host": _link(machine, "inter", links.inter, links.rows) if links.inter else None,
        "provenance": {
            "all": _measured(machine, f"by `{machine.command}`; {_spread(rows)}"),
        },
    }
    if machine.cores_per_host is not None:
        document["cores_per_host"] = machine.cores_per_host
    return document


def _device(machine: Machine, host: HostTimings, device: DeviceTimings) -> dict[str, Any]:
    memory = device.memory
    kernel: dict[str, Any] = {
        "launch_us": _short(device.launch_s / US),
        "efficiency": {
            "matmul": _curve(device.product, device.product.rate),
            "attention": _curve(device.attention, device.product.rate),
            "memory": {"share": 1.0, "half_MB": _short(memory.half / 1e6)},
        },
    }
    kernel["update_factor"] = _short(device.update_factor)
    if math.isfinite(device.packing_bytes_per_s):
        kernel["packing_GBps"] = _short(device.packing_bytes_per_s / 1e9)
    notes = {
        "peak_TFLOPs": f"long products, float32 by the fit over products; {_row(device, 'matmul')}",
        "memory_GBps": f"additions; {_row(device, 'passes')}; {_error(memory)}",
        "kernel.packing_GBps": f"{_row(device, 'matmul')}; {_error(device.product)}",
        "kernel.update_factor": _row(device, "AdamW"),
        "kernel.launch_us": _row(device, "shortest"),
        "kernel.efficiency.matmul": f"{_row(device, 'matmul')}; {_error(device.product)}",
        "kernel.efficiency.attention": f"{_row(device, 'attention')}; {_error(device.attention)}",
        "kernel.efficiency.memory": f"{_row(device, 'passes')}; {_error(memory)}",
    }
    if machine.is_cpu:
        kernel["elementwise_GFLOPs"] = {
            op: [_short(ahead / 1e9), _short(back / 1e9)]
            for op, (ahead, back) in sorted(device.elementwise.items())
        }
        kernel["host_us"] = {
            "op": [_short(host.op.forward_s / US), _short(host.op.backward_s / US)],
            "conversion": [
                _short(host.conversion.forward_s / US),
                _short(host.conversion.backward_s / US),
            ],
            "parameter": _short(host.parameter_s / US),
            "microbatch": _short(host.microbatch_s / US),
        }
        notes["kernel.elementwise_GFLOPs"] = _row(device, "elementwise")
        notes["kernel.host_us"] = "; ".join(map(_text, host.rows))
    return {
        "name": machine.device_name,
        "memory_GiB": _short(machine.memory_bytes / GIB),
        "memory_GBps": _short(memory.rate / 1e9),
        "peak_TFLOPs": {d: _short(p / 1e12) for d, p in sorted(device.peaks.items())},
        "kernel": kernel,
        "provenance": {
            "memory_GiB": _measured(machine, "what the system reports, by process"),
            **{key: _measured(machine, note) for key, note in notes.items()},
            "kernel.efficiency.convolution": {"source": "assumed", "note": "not measured"},
        },
    }


def _curve(line: Line, peak: float) -> dict[str, float]:
    """A line over FLOP as an efficiency of a peak; faster than the peak counts as the peak."""
    return {
        "share": _short(min(1.0, line.rate / peak)),
        "half_GFLOP": _short(line.fixed_s * min(line.rate, peak) / 1e9),
    }


def _link(
    machine: Machine, name: str, tables: dict[str, dict[int, list[Point]]], rows: list[Row]
) -> dict[str, Any]:
    """Tables as measured; for other numbers of ranks a line through the largest group's sums."""
    if not tables:
        return {"name": name, "latency_us": 0.0, "bandwidth_GBps": None}
    latency_s, bandwidth = _alpha_beta(tables)
    return {
        "name": f"{machine.name}-{name}",
        "latency_us": _short(latency_s / US),
        "bandwidth_GBps": _short(bandwidth / 1e9),
        "tables_MB_us": {
            kind: {
                str(count): [[size / 1e6, _short(t / US)] for size, t in rising(points)]
                for count, points in sorted(by_count.items())
            }
            for kind, by_count in sorted(tables.items())
        },
        "provenance": {
            key: _measured(machine, f"{note}; {_spread(rows)}")
            for key, note in (
                ("latency_us", "of a step, by the line through all-reduce"),
                ("bandwidth_GBps", "by the line through all-reduce"),
                ("efficiency", "shares of the line through all-reduce"),
                ("tables_MB_us", "the executor's own collectives, all groups of a shape at once"),
            )
        },
    }


def _alpha_beta(tables: dict[str, dict[int, list[Point]]]) -> tuple[float, float]:
    """alpha and bandwidth of a ring all-reduce, 2 (n - 1) (alpha + S / (n B)), of the largest
    group.
    """
    count = max(tables["all_reduce"])
    line = fit_line(tables["all_reduce"][count])
    steps = 2 * (count - 1)
    return line.fixed_s / steps, line.rate * steps / count


def _measured(machine: Machine, note: str) -> dict[str, str]:
    where = f"{machine.device_name}, {machine.num_hosts} x {machine.devices_per_host} processes"
    return {"source": "measured", "note": f"{machine.date}, {where}, {machine.software}; {note}"}


def _row(device: DeviceTimings, start: str) -> str:
    return next(_text(row) for row in device.rows if row.what.startswith(start))


def _text(row: Row) -> str:
    return f"{row.what}: {row.num_points} points, spread {row.spread:.0%}"


def _error(line: Line) -> str:
    return f"mean error of the line {line.error:.0%}"


def _spread(rows: list[Row]) -> str:
    worst = max(rows, key=lambda row: row.spread)
    return f"largest median spread {worst.spread:.0%} ({worst.what})"


def _short(value: float) -> float:
    return float(f"{value:.{DIGITS}g}") if math.isfinite(value) else value


def rows_json(rows: list[Row]) -> list[dict[str, object]]:
    """The report's lines as JSON data."""
    return [asdict(row) for row in rows]
