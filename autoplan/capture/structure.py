# SPDX-License-Identifier: Apache-2.0
"""The structure of a model's inputs and outputs.

Which leaves are tensors, and how the output object is built again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch.utils import _pytree as pytree  # checked on 2.13; torch.export's own containers use it

from autoplan.errors import CaptureError


@dataclass(frozen=True, slots=True)
class InputLeaf:
    """One leaf of the example inputs.

    Attributes:
        path: "input_ids", "0", "features.1".
        value: The graph's name of the tensor, or None for a constant.
        constant: The non-tensor value (number, string, bool, None).
        shape, dtype: Of a tensor, global.
    """

    path: str
    value: str | None
    constant: object = None
    shape: tuple[int, ...] = ()
    dtype: str = ""


@dataclass(frozen=True, slots=True)
class OutputTree:
    """The model's own output structure; leaves are positions in `Graph.outputs` or constants.

    Attributes:
        kind: "tensor", "constant", "tuple", "list", "dict" or "object" (a dataclass or library
            output object).
        type: The Python type to rebuild, for containers.
        keys: Field names or keys, for "dict" and "object".
        children: Parts, for containers.
        leaf: Position in `Graph.outputs` for "tensor", the value itself for "constant".
    """

    kind: str
    type: type | None = None
    keys: tuple[object, ...] = ()
    children: tuple[OutputTree, ...] = ()
    leaf: object = None

    def rebuild(self, tensors: list[torch.Tensor | None]) -> object:
        """The output object with these tensors as its leaves."""
        if self.kind == "tensor":
            assert isinstance(self.leaf, int), "a tensor leaf holds its position"
            return tensors[self.leaf]
        if self.kind == "constant":
            return self.leaf
        parts = [child.rebuild(tensors) for child in self.children]
        assert self.type is not None, "containers carry their type"
        if self.kind in ("dict", "object"):
            pairs = zip(self.keys, parts)
            if self.kind == "dict":
                return self.type(pairs)
            return self.type(**{str(key): part for key, part in pairs})
        if hasattr(self.type, "_fields"):
            return self.type(*parts)
        return self.type(parts)


def flatten_output(value: object, tensors: list[torch.Tensor]) -> OutputTree:
    """The structure of an output; its tensors are appended to `tensors`."""
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return OutputTree("tensor", leaf=len(tensors) - 1)
    if isinstance(value, Mapping):
        kind = "object" if dataclasses.is_dataclass(value) else "dict"
        return OutputTree(
            kind,
            type(value),
            tuple(value.keys()),
            tuple(flatten_output(v, tensors) for v in value.values()),
        )
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [(f.name, getattr(value, f.name)) for f in dataclasses.fields(value) if f.init]
        return OutputTree(
            "object",
            type(value),
            tuple(k for k, _ in fields),
            tuple(flatten_output(v, tensors) for _, v in fields),
        )
    if isinstance(value, tuple | list):
        return OutputTree(
            "tuple" if isinstance(value, tuple) else "list",
            type(value),
            (),
            tuple(flatten_output(v, tensors) for v in value),
        )
    # anything else, such as a cache object, is state of a run, not a result of the plan
    plain = value is None or isinstance(value, bool | int | float | str)
    return OutputTree("constant", leaf=value if plain else None)


def leaf_path(keys: tuple[object, ...]) -> str:
    """The name of one leaf of (args, kwargs): "input_ids", "0", "features.1"."""
    return ".".join(
        str(getattr(k, "key", getattr(k, "idx", getattr(k, "name", k)))) for k in keys[1:]
    )


def input_leaves(args: tuple[object, ...], kwargs: dict[str, object]) -> tuple[InputLeaf, ...]:
    """The flattened example inputs, in order.

    Raises:
        CaptureError: A leaf is neither a tensor nor a plain value.
    """
    leaves = []
    for path, leaf in pytree.tree_flatten_with_path((args, kwargs))[0]:
        name = leaf_path(path)
        if isinstance(leaf, torch.Tensor):
            leaves.append(InputLeaf(name, name, None, tuple(leaf.shape), dtype_name(leaf.dtype)))
        elif leaf is None or isinstance(leaf, bool | int | float | str):
            leaves.append(InputLeaf(name, None, leaf))
        else:
            raise CaptureError(
                f"input {name!r} is a {type(leaf).__name__}. Inputs are tensors, numbers, strings, "
                "None and nests of them."
            )
    return tuple(leaves)


def dtype_name(dtype: torch.dtype) -> str:
    """ "float32" of torch.float32."""
    return str(dtype).removeprefix("torch.")
