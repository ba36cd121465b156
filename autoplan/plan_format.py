# SPDX-License-Identifier: Apache-2.0
"""A document of plain data as a JSON file: written the same every time, read strictly.

In comes a msgspec struct or a text, out goes the other. What the schema does not know is refused
with its JSON path: a repeated or unknown key, a wrong type, another schema version. Nothing that a
text names is imported or executed. Not here: what the parts of a plan mean (`plan.py`) and whether
they belong together (`plan_checks.py`).
"""

from __future__ import annotations

import difflib
import json
import os
import re
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from msgspec import inspect

from autoplan.errors import PlanError

LINE_WIDTH = 160  # of the JSON file, so that a parameter is one line: diffs then read by parameter

_Struct = TypeVar("_Struct", bound=msgspec.Struct)


def write_document(document: msgspec.Struct) -> str:
    """The document as JSON: sorted keys, no timestamps, the same bytes every time.

    Raises:
        TypeError, ValueError: A field holds what JSON cannot say (NaN, an array, a tensor).
    """
    return _layout_json(msgspec.to_builtins(document), "") + "\n"


def read_document(text: str, kind: type[_Struct], version: int, source: str) -> _Struct:
    """The document of that kind in `text`; `source` is what messages call it.

    Raises:
        PlanError: Not JSON, not this schema, or not `schema_version` `version`.
    """
    raw = _parse_json(text, source)
    _check_version(raw, version, source)
    try:
        return msgspec.convert(raw, kind)
    except msgspec.ValidationError as error:
        problem = _find_problem(raw, inspect.type_info(kind), "$") or str(error)
        raise PlanError(f"{source}: {problem}") from error


def save_text(text: str, path: str | os.PathLike[str]) -> Path:
    """Writes the text as UTF-8 to `path`, whole or not at all, and returns the path.

    Raises:
        PlanError: The file cannot be written.
    """
    return save_bytes(text.encode("utf-8"), path)


def save_bytes(content: bytes, path: str | os.PathLike[str]) -> Path:
    """Writes a file, whole or not at all, and returns the path.

    Raises:
        PlanError: The file cannot be written.
    """
    target = Path(path)
    partial = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        partial.write_bytes(content)
        os.replace(partial, target)
    except OSError as error:
        if partial.is_file():
            partial.unlink()
        raise PlanError(
            f"cannot write {target}: {error.strerror}. Name a file in a folder that exists."
        ) from error
    return target


def load_text(path: str | os.PathLike[str]) -> str:
    """The text of a plan file.

    Raises:
        PlanError: No such file, a directory, or not UTF-8 text.
    """
    try:
        return Path(path).read_bytes().decode("utf-8")
    except FileNotFoundError as error:
        raise PlanError(
            f"no plan file at {path}, expected JSON that Plan.save wrote. Make it with: "
            f"autoplan plan FILE.py:FUNCTION --cluster NAME -o {path}"
        ) from error
    except UnicodeDecodeError as error:
        raise PlanError(
            f"{path} is not UTF-8 text (byte {error.start}), expected JSON. Save it again."
        ) from error
    except OSError as error:  # a directory, no permission
        raise PlanError(
            f"cannot read {path}: {error.strerror}, expected a plan file. Name the JSON file."
        ) from error


def json_path(path: str, key: str | int) -> str:
    """JSON path of a member: `$.stages[0]`, `$.parameters["lm_head.weight"]`."""
    if isinstance(key, int):
        return f"{path}[{key}]"
    return f"{path}.{key}" if re.fullmatch(r"\w+", key) else f"{path}[{json.dumps(key)}]"


def _layout_json(value: Any, indent: str) -> str:
    """`value` as JSON with sorted keys; what is short stays on one line, else one line an item."""
    flat = json.dumps(value, sort_keys=True, allow_nan=False)
    if not isinstance(value, (dict, list, tuple)) or (indent and len(flat) <= LINE_WIDTH):
        return flat
    inner = indent + " "
    if isinstance(value, dict):
        items = [f"{json.dumps(k)}: {_layout_json(value[k], inner)}" for k in sorted(value)]
        return "{\n" + ",\n".join(inner + item for item in items) + f"\n{indent}}}"
    return "[\n" + ",\n".join(inner + _layout_json(item, inner) for item in value) + f"\n{indent}]"


def _parse_json(text: str, source: str) -> dict[str, Any]:
    """The JSON object in `text`; repeated keys and numbers that JSON does not have are refused."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        keys = dict(pairs)
        if len(keys) < len(pairs):
            twice = next(k for i, (k, _) in enumerate(pairs) if k in dict(pairs[:i]))
            raise PlanError(
                f'{source}: the key "{twice}" occurs twice in an object, expected once. Remove one.'
            )
        return keys

    def refuse(number: str) -> float:
        raise PlanError(f"{source}: {number} is not a JSON number. Write a finite number, or null.")

    try:
        raw = json.loads(text, object_pairs_hook=unique, parse_constant=refuse)
    except json.JSONDecodeError as error:
        ended = error.pos >= len(text.rstrip()) or error.msg.startswith("Unterminated")
        cut = " The file looks truncated." if ended else ""
        raise PlanError(
            f"{source}: not JSON at line {error.lineno} column {error.colno}: {error.msg}.{cut} "
            "Save the plan again, or repair that line."
        ) from error
    except RecursionError as error:
        raise PlanError(
            f"{source}: nested too deeply to be a plan. Save the plan again."
        ) from error
    if not isinstance(raw, dict):
        raise PlanError(
            f"{source}: $ is {_kind(raw)}, expected an object. Give a file that Plan.save wrote."
        )
    return raw


def _check_version(raw: dict[str, Any], expected: int, source: str) -> None:
    version = raw.get("schema_version")
    reads = f"this autoplan reads schema_version {expected}"
    if "schema_version" not in raw:
        raise PlanError(
            f"{source}: $.schema_version is missing; {reads}. Give a file that Plan.save wrote."
        )
    if type(version) is not int:
        raise PlanError(
            f"{source}: $.schema_version is {_kind(version)}, expected an integer; {reads}. Repair."
        )
    if version > expected:
        raise PlanError(
            f"{source}: schema_version {version} is newer; {reads}. Upgrade autoplan or plan again."
        )
    if version < expected:
        raise PlanError(
            f"{source}: schema_version {version} is older; {reads}. Plan again with this version."
        )


_LEAVES: dict[type, tuple[str, tuple[type, ...]]] = {
    inspect.IntType: ("an integer", (int,)),
    inspect.FloatType: ("a number", (int, float)),
    inspect.StrType: ("a string", (str,)),
    inspect.BoolType: ("true or false", (bool,)),
    inspect.NoneType: ("null", (type(None),)),
}


def _kind(raw: Any) -> str:
    """What a JSON value is, in words."""
    if isinstance(raw, (dict, list)):
        return "an object" if isinstance(raw, dict) else "an array"
    text = json.dumps(raw)
    return text if len(text) <= 40 else text[:37] + "..."


def _find_problem(raw: Any, kind: inspect.Type, path: str) -> str | None:
    """The first place where `raw` is not of `kind`; msgspec's messages leave out keys of dicts."""
    if isinstance(kind, inspect.StructType):
        return _find_in_object(raw, kind, path)
    if isinstance(kind, (inspect.DictType, inspect.VarTupleType)):
        expected, word = (dict, "object") if isinstance(kind, inspect.DictType) else (list, "array")
        if not isinstance(raw, expected):
            return f"{path} is {_kind(raw)}, expected an {word}. Repair it."
        item_type = kind.value_type if isinstance(kind, inspect.DictType) else kind.item_type
        for key, item in raw.items() if isinstance(raw, dict) else enumerate(raw):
            problem = _find_problem(item, item_type, json_path(path, key))
            if problem:
                return problem
        return None
    kinds = kind.types if isinstance(kind, inspect.UnionType) else (kind,)
    parts = [k for k in kinds if isinstance(k, inspect.StructType)]
    if parts and raw is not None:
        return _find_problem(raw, parts[0], path)
    leaves = [_LEAVES[type(k)] for k in kinds if type(k) in _LEAVES]
    if not leaves or any(type(raw) in types for _, types in leaves):
        return None
    return f"{path} is {_kind(raw)}, expected {' or '.join(word for word, _ in leaves)}. Repair it."


def _find_in_object(raw: Any, kind: inspect.StructType, path: str) -> str | None:
    if not isinstance(raw, dict):
        return f"{path} is {_kind(raw)}, expected an object. Repair it."
    fields = {field.encode_name: field for field in kind.fields}
    for key in raw:
        if key not in fields:
            near = difflib.get_close_matches(key, fields, n=1)
            hint = f'did you mean "{near[0]}"?' if near else f"known: {', '.join(fields)}."
            return f"unknown key {json_path(path, key)}; {hint} Rename or remove it."
    for name, field in fields.items():
        if name in raw:
            problem = _find_problem(raw[name], field.type, json_path(path, name))
            if problem:
                return problem
        elif field.required:
            return f"{json_path(path, name)} is missing, expected in every plan. Plan again."
    return None
