# SPDX-License-Identifier: Apache-2.0
"""The form of a rule: which factor every dim of an op's tensors is made of.

A tensor dim is a product of atoms, left to right; an atom has a letter, or None where it is never
split, and a size. Most dims are one atom. `OpRule` is a rule at an op's own sizes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from autoplan.graph import TensorMeta


@dataclass(frozen=True, slots=True)
class Atom:
    """One factor of a dim: its letter (None: never split) and its size."""

    letter: str | None
    size: int


Dims = tuple[tuple[Atom, ...], ...]


def plain(letters: tuple[str | None, ...], meta: TensorMeta) -> Dims:
    """Dims of one atom each; a dim of size 1 has no letter, it is broadcast or empty of choice."""
    return tuple(
        (Atom(letter if size > 1 else None, size),) for letter, size in zip(letters, meta.shape)
    )


@dataclass(frozen=True)
class OpRule:
    """The rule of one op at its sizes.

    Attributes:
        inputs, outputs: Atoms per dim of each tensor.
        linear: Sets of input slots; when exactly these are Partial, the outputs are Partial.
        additive: Input slots that are summands beside a contraction.
        completes: Letters whose reduction the op's local form finishes itself.
        contiguous: Letters that are split in one block only: the local form needs to know where its
            part starts.
    """

    inputs: tuple[Dims, ...]
    outputs: tuple[Dims, ...]
    linear: tuple[frozenset[int], ...] = ()
    additive: frozenset[int] = frozenset()
    completes: frozenset[str] = frozenset()
    contiguous: frozenset[str] = frozenset()

    @cached_property
    def letters(self) -> tuple[str, ...]:
        """Every letter that may be split, in order of appearance, outputs first."""
        seen: dict[str, None] = {}
        for dims in (*self.outputs, *self.inputs):
            for _, atom, _ in atoms_of(dims):
                if atom.letter is not None:
                    seen[atom.letter] = None
        return tuple(seen)

    @cached_property
    def places(self) -> dict[str, tuple[tuple[int, int, int, int, int], ...]]:
        """letter -> (tensor, dim, atom, blocks to its left, size); tensors count inputs first, then
        outputs.
        """
        found: dict[str, list[tuple[int, int, int, int, int]]] = {
            letter: [] for letter in self.letters
        }
        for tensor, dims in enumerate((*self.inputs, *self.outputs)):
            for dim, atoms in enumerate(dims):
                left = 1
                for i, atom in enumerate(atoms):
                    if atom.letter is not None:
                        found[atom.letter].append((tensor, dim, i, left, atom.size))
                    left *= atom.size
        return {letter: tuple(where) for letter, where in found.items()}


def atoms_of(dims: Dims) -> Iterator[tuple[int, Atom, int]]:
    """(dim, atom, index of the atom in its dim) of every atom."""
    for dim, atoms in enumerate(dims):
        for i, atom in enumerate(atoms):
            yield dim, atom, i
