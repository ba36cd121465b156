# SPDX-License-Identifier: Apache-2.0
"""nn.Module + example inputs -> Graph, through `torch.export`.

In: any module that `torch.export` accepts, on any device (meta too), and one global batch. Out: a
`Captured`: the torch-free `Graph`, and what the executor needs to run it (constants, the structure
of inputs and outputs). The module object, its tensors and the caller's random state are untouched:
the trace runs on a structural copy that shares the tensors.

Reading the exported graph is `builder.py`'s; rewriting ATen calls into autoplan's own few ops lives
in `canonical.py`. Backward is not captured (DESIGN 2).
"""

from __future__ import annotations

import contextlib
import copy
import io
import random
import re
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn
from torch.utils import _pytree as pytree  # checked on 2.13; torch.export's own containers use it

from autoplan.capture.builder import build_graph
from autoplan.capture.custom_backward import check_calls, watched
from autoplan.capture.hand_written import kept_calls
from autoplan.capture.known import KnownValues, RandomBranchError
from autoplan.capture.no_grad import detach_regions
from autoplan.capture.structure import InputLeaf, OutputTree, flatten_output, input_leaves
from autoplan.errors import CaptureError
from autoplan.graph import Graph

ExampleInputs = Mapping[str, object] | tuple[object, ...]
LossFn = Callable[[object, object], torch.Tensor]


@dataclass(frozen=True)
class Captured:
    """A captured model: the graph, and what ties it back to the module.

    Attributes:
        graph: What is computed.
        leaves: The flattened example inputs, tensors and constants, in order.
        output: The model's own output structure.
        constants: Tensors the trace lifted out of the code, by value name.
        positional: The example inputs were a tuple.
    """

    graph: Graph
    leaves: tuple[InputLeaf, ...]
    output: OutputTree
    constants: Mapping[str, torch.Tensor]
    positional: bool


def capture(
    model: nn.Module,
    example_inputs: ExampleInputs,
    *,
    loss_fn: LossFn | None = None,
    mode: str = "train",
    precision: str | None = None,
) -> Captured:
    """The model's graph for one global batch.

    Args:
        model: Any module; not modified.
        example_inputs: The global batch: a dict of keyword inputs or a tuple of positional ones;
            leaves may be non-tensors.
        loss_fn: loss_fn(outputs, example_inputs) -> scalar; part of the graph. Default: the model's
            own loss.
        mode: "train" (a loss is required) or "infer".
        precision: None keeps the model's dtypes; "bf16-mixed" holds floating parameters in float32
            and casts them to bfloat16 for use.

    Raises:
        CaptureError: The model has no loss in train mode, branches on data, or cannot be exported;
            names module and line.
    """
    positional = not isinstance(example_inputs, Mapping)
    given: tuple[tuple[object, ...], dict[str, object]] = (
        ((), dict(example_inputs))
        if isinstance(example_inputs, Mapping)
        else (tuple(example_inputs), {})
    )
    args, kwargs = _without_aliases(given)
    copied = _structural_copy(model, precision)
    note = _OutputNote()
    wrapper = _WithLoss(copied, loss_fn, mode, positional, note)
    leaves = input_leaves(args, kwargs)
    with kept_calls():
        exported = _export(wrapper, args, kwargs)
        assert note.tree is not None, "the trace has run the wrapper"
        graph, constants = build_graph(model, exported, note.num_tensors, leaves, precision)
    if mode == "train" and (graph.loss is None or not graph.values[graph.loss].requires_grad):
        raise CaptureError(
            f"{type(model).__name__} gives no loss that depends on a trainable parameter. Train "
            "mode needs one: pass labels so that the model returns its own loss (a scalar, `.loss` "
            "or ['loss']), pass loss_fn(outputs, batch) -> scalar, or use mode='infer'."
        )
    graph.verify()
    return Captured(graph, leaves, note.tree, constants, positional)


@dataclass
class _OutputNote:
    """What the trace learns of the output's structure."""

    tree: OutputTree | None = None
    num_tensors: int = 0


class _WithLoss(nn.Module):
    """Runs the model and its loss, and notes the structure of the output while it is traced."""

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFn | None,
        mode: str,
        positional: bool,
        note: _OutputNote,
    ) -> None:
        super().__init__()
        self.model = model
        self._loss_fn = loss_fn
        self.mode = mode
        self._positional = positional
        self.note = note  # torch.export undoes assignments to a module's own attributes
        self.training = model.training
        self._device = next((p.device for p in model.parameters()), None)

    def forward(self, *args: object, **kwargs: object) -> tuple[torch.Tensor, ...]:
        with KnownValues(self._device):
            outputs = self.model(*args, **kwargs)
        tensors: list[torch.Tensor] = []
        self.note.tree = flatten_output(outputs, tensors)
        self.note.num_tensors = len(tensors)
        loss = None
        if self.mode == "train":
            loss = (
                _own_loss(outputs)
                if self._loss_fn is None
                else self._loss_fn(outputs, args if self._positional else kwargs)
            )
        return (*tensors, loss) if loss is not None else tuple(tensors)


def _own_loss(outputs: object) -> torch.Tensor | None:
    """The scalar that the model itself returns.

    The output, its `.loss` or ["loss"], or the first of a tuple.
    """
    found = outputs
    if isinstance(outputs, Mapping):
        found = outputs.get("loss")
    elif hasattr(outputs, "loss"):
        found = outputs.loss
    elif isinstance(outputs, tuple | list) and outputs:
        found = outputs[0]
    if isinstance(found, torch.Tensor) and found.numel() == 1 and found.is_floating_point():
        return found
    return None


def _without_aliases(
    tree: tuple[tuple[object, ...], dict[str, object]],
) -> tuple[tuple[object, ...], dict[str, object]]:
    """The same inputs with a tensor that is passed twice cloned.

    torch.export wires both uses to one input otherwise.
    """
    seen: set[int] = set()

    def once(leaf: object) -> object:
        if isinstance(leaf, torch.Tensor):
            if id(leaf) in seen:
                return leaf.clone()
            seen.add(id(leaf))
        return leaf

    result: tuple[tuple[object, ...], dict[str, object]] = pytree.tree_map(once, tree)
    return result


def _structural_copy(model: nn.Module, precision: str | None) -> nn.Module:
    """A copy of the module objects that shares every tensor.

    With "bf16-mixed" its parameters are in bfloat16 on the same device. Of a model that is on meta
    in part (some libraries make tensors on the CPU whatever the default device is), all of the copy
    is on meta: tensors of two devices do not meet, and no value matters here.
    """
    if precision not in (None, "bf16-mixed"):
        raise CaptureError(
            f"precision {precision!r} is not known. Use None (the model's own dtypes) or "
            "'bf16-mixed'."
        )
    memo: dict[int, object] = {}
    tensors = (*model.parameters(), *model.buffers())
    in_part = len({t.is_meta for t in tensors}) > 1
    for tensor in tensors:
        is_parameter = isinstance(tensor, nn.Parameter)
        mixed = precision == "bf16-mixed" and is_parameter and tensor.is_floating_point()
        used = tensor.detach().to("meta") if in_part else tensor.detach()
        used = used.to(torch.bfloat16) if mixed else used
        changed = in_part or mixed
        if is_parameter and changed:
            used = nn.Parameter(used, requires_grad=tensor.requires_grad)
        memo[id(tensor)] = used if changed else tensor
    return copy.deepcopy(model, memo)


@contextlib.contextmanager
def _random_state_kept() -> Iterator[None]:
    python, numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng():
        yield
    random.setstate(python)
    np.random.set_state(numpy)


@contextlib.contextmanager
def _said_if_successful() -> Iterator[None]:
    """Keeps what is written to stderr until the end: torch.export writes the whole graph there
    before it refuses a model, over the message that says why.
    """
    with contextlib.redirect_stderr(io.StringIO()) as said:
        yield
    sys.stderr.write(said.getvalue())


def _export(
    wrapper: _WithLoss, args: tuple[object, ...], kwargs: dict[str, object]
) -> torch.export.ExportedProgram:
    try:
        with _random_state_kept(), _said_if_successful(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch.export warns of its own internals
            with watched() as calls:
                exported = torch.export.export(wrapper, args, kwargs, strict=False)
            if wrapper.mode == "train":
                whole = check_calls(calls, wrapper.model)
                if whole:
                    with watched(whole):
                        exported = torch.export.export(wrapper, args, kwargs, strict=False)
                detach_regions(exported)
            plain: torch.export.ExportedProgram = exported.run_decompositions({})
            return plain
    except CaptureError:
        raise
    except Exception as error:  # torch.export has no base class of its own for what it refuses
        raise CaptureError(_explain(error, wrapper)) from error


def _explain(error: Exception, wrapper: _WithLoss) -> str:
    """torch.export's refusal as one message: what, where in the model's code, what to do."""
    text = str(error)
    frames = re.findall(r'File "([^"]+)", line (\d+), in (\w+)', text)
    paths = {id(m): name for name, m in wrapper.model.named_modules()}
    inside = None
    for frame, line in traceback.walk_tb(error.__traceback__):
        code = frame.f_code
        frames.append((code.co_filename, str(line), code.co_name))
        owner = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
        inside = owner if id(owner) in paths else inside  # the innermost module whose method runs
    ours = ("/torch/", "/autoplan/")
    own = [f for f in frames if not any(part in f[0] for part in ours) and f[2] != "<module>"]
    where = f" at {own[-1][0].rsplit('/', 1)[-1]}:{own[-1][1]} in {own[-1][2]}" if own else ""
    if inside is not None:
        path = paths[id(inside)]
        where += f" ({f'module {path!r}, a ' if path else ''}{type(inside).__name__})"
    if isinstance(error, RandomBranchError):
        return (
            f"the model cannot be captured{where}: a random number decides whether a part of it "
            "runs, and a plan runs the same ops in every step. Set that probability (layer drop, "
            "stochastic depth) to 0, or multiply by a random mask."
        )
    says_so = "data-dependent" in text or "Could not guard" in text
    if says_so or "DataDependent" in type(error).__name__:
        return (
            f"the model cannot be captured{where}: the code branches on the values of a tensor, "
            "which a plan cannot know. Make the branch depend on shapes or configuration only, or "
            "use torch.where."
        )
    first = next((line.strip() for line in text.splitlines() if line.strip()), type(error).__name__)
    return f"torch.export cannot capture the model{where}: {first[:300]}"
