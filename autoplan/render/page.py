# SPDX-License-Identifier: Apache-2.0
"""A plan as one HTML page that needs nothing else: `page_html`.

In comes a Plan, out goes the template of `web/` with its style, its scripts and the plan's data
inside. The page may load nothing (its Content-Security-Policy names the inline style and script by
hash), and what the plan says reaches it as JSON alone, never as markup. Not here: what the data
are (page_data.py), how they are drawn (web/).
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
from functools import cache
from importlib.resources import files
from typing import Any

from autoplan.plan import Plan
from autoplan.render.page_data import page_data

# in the order in which the page runs them
SCRIPTS = ("state.js", "elements.js", "timeline.js", "views.js", "tables.js", "main.js")
STYLE, TEMPLATE = "page.css", "page.html"
# what means something to a reader of HTML -> the same as a JSON escape
_ESCAPES = {ord(c): f"\\u{ord(c):04x}" for c in "<>&"}


def page_html(plan: Plan) -> str:
    """The page of a plan: self-contained HTML, all ASCII, the same bytes for the same plan."""
    style, script = _read(STYLE), "\n".join(map(_read, SCRIPTS))
    parts = {
        "POLICY": _policy(style, script),
        "TITLE": _ascii(html.escape(f"{plan.model.name}: plan")),
        "STYLE": style,
        "DATA": script_json(page_data(plan)),
        "SCRIPT": script,
    }
    pieces = _read(TEMPLATE).split("%%")  # text, name, text, name, ...: parts are never searched
    return "".join(parts[piece] if i % 2 else piece for i, piece in enumerate(pieces))


def script_json(data: dict[str, Any]) -> str:
    """JSON that may stand in a script element: ASCII without <, > and &.

    Raises:
        ValueError: A number is not finite.
    """
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    return text.translate(_ESCAPES)


def _ascii(text: str) -> str:
    return text.encode("ascii", "xmlcharrefreplace").decode()


def _policy(style: str, script: str) -> str:
    """A policy under which the page runs this style and this script, and loads nothing."""
    return (
        f"default-src 'none'; script-src '{_digest(script)}'; style-src '{_digest(style)}'; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


@cache
def _read(name: str) -> str:
    return (files("autoplan.render") / "web" / name).read_text("utf-8")
