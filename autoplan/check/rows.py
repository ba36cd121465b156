# SPDX-License-Identifier: Apache-2.0
"""Published runs: a CSV file read strictly, each row as a `Run`, or with the reason why not.

The columns are those of `profiles/README.md`, "Runs". A blank cell is unknown. What a row leaves
open and a prediction needs is filled by one rule, noted in `Run.assumed`; what cannot be filled is
a reason.
"""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from autoplan.errors import ProfileError

COLUMNS = (
    "id", "source", "gpu", "gpus", "gpus_per_node", "interconnect_intra", "interconnect_inter",
    "model", "params_b", "layers", "hidden", "heads", "kv_heads", "ffn_hidden", "vocab", "seq_len",
    "precision", "global_batch_seqs", "micro_batch_seqs", "grad_accum", "tp", "sequence_parallel",
    "pp", "vpp", "dp", "cp", "ep", "fsdp_or_zero", "recompute", "attention_kernel", "step_time_s",
    "tokens_per_s_per_gpu", "tflops_per_gpu", "peak_memory_gb", "notes", "task", "status", "split",
)  # fmt: skip


class NotExpressedError(ValueError):
    """A row that the cost model cannot price; the message is the reason."""


@dataclass(frozen=True)
class Run:
    """One published run, with numbers as numbers.

    Attributes:
        cells: The row as it is in the file.
        assumed: What the row does not say and was filled, in words.
    """

    cells: Mapping[str, str]
    assumed: list[str] = field(default_factory=list, compare=False)

    def text(self, column: str) -> str:
        """A cell."""
        return self.cells[column]

    def number(self, column: str) -> float | None:
        """A cell as a number, or None where it is blank.

        Raises:
            NotExpressedError: It is neither.
        """
        cell = self.cells[column].strip()
        if not cell:
            return None
        try:
            return float(cell)
        except ValueError as problem:
            raise NotExpressedError(f"{column} is {cell!r}, not a number") from problem

    def count(self, column: str, default: int | None = None) -> int:
        """A cell as a whole number from 1 on.

        Raises:
            NotExpressedError: It is none, or blank without a default.
        """
        value = self.number(column)
        if value is None:
            if default is None:
                raise NotExpressedError(f"the source does not state {column}")
            return default
        if value < 1 or value != int(value):
            raise NotExpressedError(f"{column} is {value:g}, not a count")
        return int(value)

    @property
    def id(self) -> str:
        return self.cells["id"]

    @property
    def prefix(self) -> str:
        """Source in short: the id without its number."""
        return re.sub(r"-[^-]*$", "", self.id)

    @property
    def scored(self) -> bool:
        """The source stands by the number."""
        return (
            self.cells["status"] in ("ok", "memory_only")
            and self.cells["split"] != "low_reliability"
        )


@dataclass(frozen=True)
class Degrees:
    """The plan of a run.

    Attributes:
        tp, pp, dp, cp, ep, chunks: Degrees; `dp` without context parallel ranks.
        micro: Sequences of one microbatch on one data parallel rank.
        num_microbatches: Of one step.
        batch: Sequences of one step, as stated.
    """

    tp: int
    pp: int
    dp: int
    cp: int
    ep: int
    chunks: int
    micro: int
    num_microbatches: int
    batch: int


def read_runs(path: str | Path) -> list[Run]:
    """The runs of a file.

    Raises:
        ProfileError: It cannot be read, or lacks a column.
    """
    try:
        with open(path, newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            missing = [c for c in COLUMNS if c not in (reader.fieldnames or ())]
            if missing:
                raise ProfileError(
                    f"{path} lacks columns {', '.join(missing)}: expected those of "
                    "profiles/README.md. Add them; blank cells are allowed."
                )
            return [Run({k: v or "" for k, v in row.items() if k}) for row in reader]
    except (OSError, UnicodeDecodeError) as problem:
        raise ProfileError(f"cannot read {path}: {problem}. Give a CSV file.") from problem


def degrees_of(run: Run) -> Degrees:
    """The plan of a run.

    Raises:
        NotExpressedError: The row does not say it, or its numbers do not multiply up.
    """
    gpus = run.count("gpus")
    tp, pp = run.count("tp", 1), run.count("pp", 1)
    if not run.cells["tp"] and not run.cells["dp"] and gpus > 1:
        raise NotExpressedError("the source does not state tp, pp and dp")
    cp, ep, chunks = run.count("cp", 1), run.count("ep", 1), run.count("vpp", 1)
    if gpus % (tp * pp * cp):
        raise NotExpressedError(f"tp {tp} x pp {pp} x cp {cp} does not divide {gpus} GPUs")
    dp = gpus // (tp * pp * cp)
    stated = run.number("dp")
    if stated is not None and int(stated) != dp:
        raise NotExpressedError(f"tp x pp x cp x dp = {tp * pp * cp * int(stated)}, not {gpus}")
    micro, m = run.number("micro_batch_seqs"), run.number("grad_accum")
    batch = run.number("global_batch_seqs")
    if batch is None and micro is not None:
        batch = micro * dp * (m or 1)
    if batch is None:
        found = re.search(r"MBS (\d+) / GBS (\d+)", run.text("notes"))
        if found is None:
            raise NotExpressedError("the source does not state the batch")
        micro, batch = float(found[1]), float(found[2])
        run.assumed.append("batch as in the notes")
    if micro is None:
        micro = batch / dp / m if m else (1.0 if pp > 1 or batch / dp > 8 else batch / dp)
        micro = max(1.0, float(int(micro)))
        run.assumed.append(f"microbatches of {micro:g}")
    # a batch that the microbatches do not fill runs one more, smaller one
    steps = max(1, math.ceil(batch / dp / micro - 1e-9))
    if batch / dp < micro:
        micro = max(1.0, batch / dp)
    return Degrees(tp, pp, dp, cp, ep, chunks, int(micro), steps, int(batch))


def measured_s(
    run: Run, degrees: Degrees, parameters: float, *, masked: bool = False
) -> float | None:
    """Seconds of one step as the source gives them, by time, tokens or FLOP/s; None: it does not.

    FLOP/s are turned around with the formula that the source used: 6 or, where recomputation is
    counted, 8 FLOP per parameter and token in the products, and attention's: half of them under a
    causal mask, unless the source counts the `masked` ones too.

    Source: Narayanan et al., SC 2021, equation 3.
    """
    step = run.number("step_time_s")
    if step is not None:
        return step
    gpus, seq = run.count("gpus"), run.count("seq_len")
    tokens = run.number("tokens_per_s_per_gpu")
    if tokens is not None:
        return degrees.batch * seq / (tokens * gpus)
    rate = run.number("tflops_per_gpu")
    if rate is None:
        return None
    counted = "counts recompute" in run.text("notes") or "recompute counted" in run.text("notes")
    hidden, layers, vocab = run.count("hidden"), run.count("layers"), run.count("vocab")
    passes = 4.0 if counted else 3.0
    head = 2.0 * hidden * vocab
    body = parameters - hidden * vocab
    share = 1.0 if counted or masked else 0.5
    per_token = passes * (2.0 * body + 4.0 * share * layers * seq * hidden)
    flop = degrees.batch * seq * (per_token + 3.0 * head)
    return flop / (rate * 1e12 * gpus)
