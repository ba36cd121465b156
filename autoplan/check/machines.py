# SPDX-License-Identifier: Apache-2.0
"""The cluster of a published run, from its hardware columns.

`profiles/machines.json` says which device and links a GPU's name usually means; what the row states
of its network beats that.
"""

from __future__ import annotations

import re
from dataclasses import replace
from functools import lru_cache

import msgspec

from autoplan.check.rows import NotExpressedError, Run
from autoplan.cluster import Cluster, Link
from autoplan.cluster_format import profiles_dir

GBIT = 1e9 / 8


class _Machine(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """What a GPU's name means.

    Attributes:
        gpu: Pattern of the name.
        device, intra, inter: Shipped profiles.
        nics: Adapters per device.
        domain: Devices that one switched fabric joins; 0: those of a host.
    """

    gpu: str
    device: str
    intra: str
    inter: str
    nics: float
    domain: int = 0


@lru_cache(maxsize=1)
def _machines() -> tuple[_Machine, ...]:
    text = (profiles_dir() / "machines.json").read_bytes()
    return msgspec.json.decode(text, type=tuple[_Machine, ...])


def cluster_of(run: Run) -> Cluster:
    """The cluster of a run.

    Raises:
        NotExpressedError: The GPU is unknown.
    """
    gpu = run.text("gpu")
    machine = next((m for m in _machines() if re.search(m.gpu, gpu, re.IGNORECASE)), None)
    if machine is None:
        raise NotExpressedError(f"no device profile for {gpu!r}")
    gpus = run.count("gpus")
    per_host = min(gpus, run.count("gpus_per_node", 8))
    if machine.domain and gpus > per_host:
        # whole trays of a rack, as many as divide the job
        most = min(gpus, machine.domain)
        sizes = range(per_host, most + 1, per_host)
        per_host = max((d for d in sizes if gpus % d == 0), default=per_host)
    if gpus % per_host:
        per_host = max(d for d in range(1, per_host + 1) if gpus % d == 0)
        run.assumed.append(f"{per_host} GPUs on each host")
    return _cluster(machine, per_host, gpus // per_host, run.text("interconnect_inter"))


@lru_cache(maxsize=512)
def _cluster(machine: _Machine, per_host: int, hosts: int, network: str) -> Cluster:
    cluster = Cluster.from_json(
        {
            "name": f"{machine.device}-{hosts}x{per_host}",
            "num_hosts": hosts,
            "devices_per_host": per_host,
            "device": machine.device,
            "intra_host": machine.intra,
            "inter_host": _base_link(machine.inter, network),
        }
    )
    inter = cluster.inter_host
    assert inter is not None, "every machine has a link between hosts"
    total = _stated_bytes_per_s(network, per_host)
    if total is None:
        nics = max(1.0, machine.nics * per_host)
        return replace(cluster, inter_host=_shared(inter, inter.bytes_per_s * nics, per_host))
    return replace(cluster, inter_host=_shared(inter, total, per_host))


def _shared(link: Link, total: float, per_host: int) -> Link:
    """A link between hosts of `total` bytes/s, of which a device reaches its part twice at most."""
    return replace(link, bytes_per_s=total, device_bytes_per_s=min(total, 2.0 * total / per_host))


def _base_link(usual: str, network: str) -> str:
    """The profile whose latency and efficiency the stated network has."""
    known = {
        "tcpx": "tcpx",
        "roce|rdma over ethernet|ethernet": "eth-400g",
        "omni": "omnipath-100",
        "efa": "efa-v2",
        "xdr": "ib-xdr",
        "ndr|connectx-7|cx-7": "ib-ndr",
        "hdr": "ib-hdr",
        "edr": "ib-edr",
    }
    for pattern, name in known.items():
        if re.search(pattern, network, re.IGNORECASE):
            return name
    return usual


def _stated_bytes_per_s(network: str, per_host: int) -> float | None:
    """Bandwidth of a host that a text such as "8x HDR InfiniBand 200 Gb/s per node" states."""
    text = network.lower().replace("gbps", "gb/s")
    many = re.search(r"(\d+) ?x\D*?(\d+) gb/s", text)
    if many:
        return int(many[1]) * int(many[2]) * GBIT
    one = re.search(r"(\d+) gb/s", text)
    if one is None:
        return None
    rate = int(one[1]) * GBIT
    return rate * per_host if "per gpu" in text else rate
