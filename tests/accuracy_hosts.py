# SPDX-License-Identifier: Apache-2.0
"""Where `tests/accuracy.py` starts its processes: this machine, or two network namespaces joined by
a link of 1 Gbit/s, each with an end of a veth pair whose rate `tc` limits. Needs root and iproute2;
the namespaces are removed at the end, also after a failure.
"""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import TracebackType

RATE = "1gbit"
ROOT = Path(__file__).resolve().parent.parent
TIMEOUT_S = 1500


class Namespaces:
    """Two namespaces, if wanted, while the block runs; `names` are theirs, or empty.

    Raises:
        SystemExit: They are wanted without root, or without iproute2.
    """

    def __init__(self, wanted: bool) -> None:
        self.names = tuple(f"autoplan{os.getpid()}{end}" for end in "ab") if wanted else ()

    def __enter__(self) -> Namespaces:
        if not self.names:
            return self
        if os.geteuid() != 0 or not shutil.which("ip") or not shutil.which("tc"):
            raise SystemExit(
                "--two-hosts makes network namespaces: expected root and iproute2 (ip, tc). "
                "Run it as root, or without --two-hosts."
            )
        try:
            self._make()
        except BaseException:
            self._remove()
            raise
        return self

    def _make(self) -> None:
        for name in self.names:
            _run("ip", "netns", "add", name)
        a, b = self.names
        _run("ip", "link", "add", "veth0", "netns", a, "type", "veth", "peer", "veth0", "netns", b)
        for i, name in enumerate(self.names):
            inside = ("ip", "netns", "exec", name)
            _run(*inside, "ip", "addr", "add", f"10.77.0.{i + 1}/24", "dev", "veth0")
            _run(*inside, "ip", "link", "set", "veth0", "up")
            _run(*inside, "ip", "link", "set", "lo", "up")
            limit = ("rate", RATE, "burst", "128kb", "latency", "50ms")
            _run(*inside, "tc", "qdisc", "add", "dev", "veth0", "root", "tbf", *limit)

    def _remove(self) -> None:
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._remove()


def _run(*command: str) -> None:
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)} failed: {done.stderr.strip()}")


def launch(hosts: Namespaces, world: int, command: list[str]) -> float:
    """Runs a command on `world` processes under torchrun, on each of the namespaces as a host of
    its own, which has its share of the cores; the CPU seconds that they took.
    """
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    names = hosts.names or ("",)
    torchrun = [sys.executable, "-m", "torch.distributed.run"]
    torchrun += [f"--nproc-per-node={world // len(names)}"]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "ignore",
        "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
    }
    started = []
    for i, name in enumerate(names):
        where, inside = ["--standalone"], []
        if name:
            inside = ["ip", "netns", "exec", name]
            environment["GLOO_SOCKET_IFNAME"] = "veth0"
            where = [f"--nnodes={len(names)}", f"--node-rank={i}"]
            where += ["--master-addr=10.77.0.1", "--master-port=29577"]
        own = sorted(os.sched_getaffinity(0))[i :: len(names)]
        started.append(
            subprocess.Popen(
                [*inside, *torchrun, *where, *command],
                cwd=ROOT,
                env=environment,
                preexec_fn=partial(os.sched_setaffinity, 0, own),
            )
        )
    try:
        codes = [process.wait(TIMEOUT_S) for process in started]
    finally:
        for process in started:
            process.terminate()
    if any(codes):
        raise SystemExit(f"{' '.join(command)} failed with exit codes {codes}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
