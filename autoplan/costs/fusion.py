# SPDX-License-Identifier: Apache-2.0
"""Which ops run inside their neighbours' kernels, and what they then no longer move.

In: a folded graph and the runtime's list of ops it fuses. Two such ops of which one feeds the other
are one kernel: the tensor between them is neither written nor read, forward nor backward, and the
second launches nothing. What a runtime fuses is data; autoplan's own executor fuses nothing.
"""

from __future__ import annotations

from dataclasses import replace

from autoplan.costs.kernels import Kernel
from autoplan.costs.tables import Folded
from autoplan.graph import Op, TensorMeta
from autoplan.runtime import Runtime


class Fusion:
    """The fused ops of one folded graph.

    Args:
        folded: The graph.
        runtime: What it fuses.
    """

    def __init__(self, folded: Folded, runtime: Runtime) -> None:
        self.inside: dict[str, frozenset[int]] = {}
        """Op -> its input slots that come from an op in the same kernel."""
        self.joining: frozenset[str] = frozenset()
        """Ops that run in a kernel which another op launches."""
        self.kept_inside: frozenset[str] = frozenset()
        """Values that no kernel writes."""
        if runtime.fused:
            self._find(folded, runtime)

    def _find(self, folded: Folded, runtime: Runtime) -> None:
        group = {
            op.name: runtime.fused[stem_of(op)] for op in folded.ops if stem_of(op) in runtime.fused
        }
        maker = {v: op.name for op in folded.ops for v in op.outputs if v}
        users: dict[str, set[str]] = {}
        for value, consumer, _ in folded.edges:
            users.setdefault(value, set()).add(consumer)
        for op in folded.ops:
            if op.name in group:
                mine = group[op.name]
                slots = {i for i, v in enumerate(op.inputs) if group.get(maker.get(v, "")) == mine}
                if slots:
                    self.inside[op.name] = frozenset(slots)
        self.joining = frozenset(self.inside)
        self.kept_inside = frozenset(
            v
            for op in folded.ops
            if op.name in group
            for v in op.outputs
            if v and users.get(v) and all(group.get(u) == group[op.name] for u in users[v])
        )

    def fused(
        self,
        op: Op,
        kernels: tuple[Kernel, ...],
        inputs: tuple[TensorMeta, ...],
        outputs: tuple[TensorMeta, ...],
    ) -> tuple[Kernel, ...]:
        """The kernels without the bytes that stay inside.

        Args:
            op: Whose kernels, forward or backward.
            kernels: As `kernels.py` gives them.
            inputs, outputs: Local metas.
        """
        slots = self.inside.get(op.name, frozenset())
        within = [o for o, v in zip(outputs, op.outputs) if v in self.kept_inside]
        if not kernels or not (slots or within):
            return kernels
        saved = float(sum(inputs[i].size_bytes for i in slots))
        saved += sum(meta.size_bytes for meta in within)
        total = sum(k.num_bytes for k in kernels if k.family == "memory")
        if total <= 0.0:
            return kernels
        share = max(0.0, 1.0 - saved / total)
        return tuple(
            replace(k, num_bytes=k.num_bytes * share) if k.family == "memory" else k
            for k in kernels
        )


def stem_of(op: Op) -> str:
    """ "gelu" of "aten.gelu.default"; autoplan's own ops keep their full name."""
    return op.target if op.target.startswith("autoplan.") else op.target.split(".")[1]
