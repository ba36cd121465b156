# SPDX-License-Identifier: Apache-2.0
"""Ops that ATen has under two names with the same arguments: rules, costs and local forms know one
of them.
"""

from __future__ import annotations

# a second name -> the one that is kept
SYNONYMS = {
    f"aten.{name}": f"aten.{known}"
    for name, known in (
        ("min.other", "minimum.default"),
        ("max.other", "maximum.default"),
        ("concat.default", "cat.default"),
        ("concatenate.default", "cat.default"),
        ("clip.default", "clamp.default"),
        ("clip.Tensor", "clamp.Tensor"),
        ("absolute.default", "abs.default"),
        ("negative.default", "neg.default"),
        ("subtract.Tensor", "sub.Tensor"),
        ("true_divide.Tensor", "div.Tensor"),
        *((f"multiply.{x}", f"mul.{x}") for x in ("Tensor", "Scalar")),
        *((f"divide.{x}", f"div.{x}") for x in ("Tensor", "Scalar")),
        *((f"greater.{x}", f"gt.{x}") for x in ("Tensor", "Scalar")),
        *((f"greater_equal.{x}", f"ge.{x}") for x in ("Tensor", "Scalar")),
        *((f"less.{x}", f"lt.{x}") for x in ("Tensor", "Scalar")),
        *((f"less_equal.{x}", f"le.{x}") for x in ("Tensor", "Scalar")),
        *((f"not_equal.{x}", f"ne.{x}") for x in ("Tensor", "Scalar")),
    )
}
