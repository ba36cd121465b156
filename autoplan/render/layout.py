# SPDX-License-Identifier: Apache-2.0
"""What pages are made of: folded names, number ranges, tables, wrapped lines.

In come names, numbers and rows, out goes plain ASCII. What repeats is folded: names that differ
only in one number are shown once, `model.layers.{0-79}.mlp.up_proj`. Formatted by hand: importing
a table library takes longer than drawing the page. Not here: anything a plan says.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Generic, TypeVar

from autoplan.plan import StagePlan

WIDTH = 80
SHORT_DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float64": "fp64"}


# ---- folding ----


T = TypeVar("T", bound=Hashable)
Entry = tuple[tuple[str, ...], tuple[str, ...], T]  # dotted parts, names, value


@dataclass(frozen=True, slots=True)
class Fold(Generic[T]):
    """Items whose names differ only in numbers: one pattern for all of them, in natural order."""

    pattern: str
    names: tuple[str, ...]
    first: T


def fold_names(items: Iterable[tuple[str, T]]) -> list[Fold[T]]:
    """Merges equal items whose names differ in one dotted number, one number after the other."""
    ordered = sorted(items, key=lambda item: natural_key(item[0]))
    entries: list[Entry[T]] = [(tuple(n.split(".")), (n,), value) for n, value in ordered]
    for position in range(max((len(parts) for parts, _, _ in entries), default=0)):
        groups: dict[Hashable, list[Entry[T]]] = {}
        for parts, names, value in entries:
            open_part = position < len(parts) and parts[position].isdigit()
            rest = (parts[:position], parts[position + 1 :]) if open_part else (parts, position)
            groups.setdefault((open_part, rest, value), []).append((parts, names, value))
        entries = [_merge(group, position) for group in groups.values()]
    return [Fold(".".join(parts), names, value) for parts, names, value in entries]


def _merge(group: list[Entry[T]], position: int) -> Entry[T]:
    parts, names, value = group[0]
    if len(group) == 1:
        return parts, names, value
    numbers = number_ranges(int(other[position]) for other, _, _ in group)
    merged = (*parts[:position], "{" + numbers + "}", *parts[position + 1 :])
    return merged, tuple(name for _, inner, _ in group for name in inner), value


def natural_key(name: str) -> tuple[tuple[int, int, str], ...]:
    """Sort key in which layers.2 comes before layers.10."""
    return tuple((0, int(p), "") if p.isdigit() else (1, 0, p) for p in re.split(r"(\d+)", name))


def number_ranges(numbers: Iterable[int]) -> str:
    """Numbers as "0-3,7"; an even stride as "0-30 step 2"."""
    ordered = sorted(set(numbers))
    strides = {b - a for a, b in pairwise(ordered)}
    if len(ordered) > 2 and len(strides) == 1 and strides != {1}:
        return f"{ordered[0]}-{ordered[-1]} step {strides.pop()}"
    runs: list[list[int]] = []
    for number in ordered:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(f"{r[0]}-{r[-1]}" if len(r) > 1 else str(r[0]) for r in runs)


def fold_labels(labels: Sequence[str]) -> str:
    """Layer labels in their own order, folded: "model.embed, model.layers.{0-39}"."""
    place = {label: i for i, label in enumerate(labels)}
    folds = sorted(fold_names((label, None) for label in labels), key=lambda f: place[f.names[0]])
    return ", ".join(fold.pattern for fold in folds)


# ---- layout of the page ----


def join_blocks(blocks: Iterable[str]) -> str:
    """Blocks with an empty line between them; empty ones are left out."""
    return "\n\n".join(block for block in blocks if block) + "\n"


def format_table(rows: Sequence[Sequence[str]], width: int, indent: str = "") -> str:
    """Columns two spaces apart; the last one wraps at `width` under itself."""
    sizes = [max(len(row[i]) for row in rows) for i in range(len(rows[0]) - 1)]
    start = len(indent) + sum(sizes) + 2 * len(sizes)
    lines: list[str] = []
    for row in rows:
        cells = [cell.ljust(size) for cell, size in zip(row, sizes)]
        wrapped = wrap_lines(row[-1], max(width - start, 16))
        lines.append((indent + "  ".join([*cells, wrapped[0]])).rstrip())
        lines += [" " * start + more for more in wrapped[1:]]
    return "\n".join(lines)


def wrap_lines(text: str, width: int) -> list[str]:
    """The text in lines of at most `width`, except for words that are longer; one line at least."""
    lines = textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False)
    return lines or [""]


def format_flow(inputs: Sequence[str], outputs: Sequence[str]) -> str:
    """Layouts as "S(0)R, RR -> S(0)R"."""
    return f"{', '.join(inputs) or '-'} -> {', '.join(outputs) or '-'}"


def format_shape(shape: Sequence[int]) -> str:
    """A shape as "4x128"."""
    return "x".join(map(str, shape)) or "scalar"


def format_dtype(dtype: str) -> str:
    """A dtype by its short name, "bf16", where it has one."""
    return SHORT_DTYPES.get(dtype, dtype)


def format_mesh(stage: StagePlan) -> str:
    """A stage's mesh as "dp=2 tp=4"."""
    return " ".join(f"{axis}={size}" for axis, size in stage.mesh.items())
