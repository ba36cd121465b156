# SPDX-License-Identifier: Apache-2.0
"""Pages drawn from a Plan alone: `render_text` and `explain_text`. No torch in here."""

from __future__ import annotations

from autoplan.render.explain import explain_text
from autoplan.render.text import render_text

__all__ = ["explain_text", "render_text"]
