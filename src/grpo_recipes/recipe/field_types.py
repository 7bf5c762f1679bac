"""What a field of a library's configuration accepts: written down where the library is, checked where it is not.

`entry` makes a snapshot's line of an annotation; `type_problems` holds a recipe's value against that line.
"""

from __future__ import annotations

import dataclasses
import enum
import inspect
import math
import types
from collections.abc import Iterator
from typing import Any, Literal, Union, get_args, get_origin

from grpo_recipes.recipe.problems import Problem, nearest

_PLAIN = {int: "int", float: "float", bool: "bool", str: "str", type(None): "null", list: "list", tuple: "list"}
_DTYPES = ("float32", "bfloat16", "float16", "uint8")


def type_problems(
    path: str, value: Any, accepts: list[str], choices: list[Any] | tuple[str, ...] | None
) -> Iterator[Problem]:
    kind = {bool: "bool", int: "int", float: "float", str: "str", list: "list", type(None): "null"}.get(
        type(value), "mapping"
    )
    fits = kind in accepts or (kind == "int" and "float" in accepts) or (kind == "str" and "dtype" in accepts)
    if not fits:
        yield Problem(path, f"should be {' or '.join(accepts)}, is {value!r}", "correct it")
    elif isinstance(value, float) and not math.isfinite(value):
        yield Problem(path, f"should be finite, is {value!r}", "correct it")
    elif kind == "str" and "str" not in accepts and value not in _DTYPES:
        yield Problem(path, f"should name a torch dtype ({', '.join(_DTYPES)}), is {value!r}", closest(value, _DTYPES))
    elif choices and kind in ("str", "int") and value not in choices:
        listed = ", ".join(str(choice) for choice in choices)
        yield Problem(path, f"should be one of {listed}, is {value!r}", closest(value, [str(c) for c in choices]))


def closest(value: Any, choices: list[str] | tuple[str, ...]) -> str:
    close = nearest(str(value), choices)
    return f"did you mean {close[0]}?" if close else "choose one of them"


def entry(annotation: Any, default: Any) -> dict[str, Any]:
    choices = sorted(_choices(annotation), key=str)
    accepts = sorted(_accepts(annotation) | ({"null"} if default is None else set()))
    required = default in (dataclasses.MISSING, inspect.Parameter.empty)
    shown = "required" if required else f"function {default.__name__}" if callable(default) else repr(default)
    return {"type": _type_name(annotation), "default": shown, "accepts": accepts, "choices": choices or None}


def _type_name(annotation: Any) -> str:
    return annotation.__name__ if isinstance(annotation, type) else str(annotation).replace("typing.", "")


def _accepts(annotation: Any) -> set[str]:
    origin = get_origin(annotation)
    if annotation in _PLAIN or origin in (list, tuple):
        return {_PLAIN[origin or annotation]}
    if getattr(annotation, "__module__", "") == "torch" and annotation.__name__ == "dtype":
        return {"dtype"}
    if origin is Literal:
        return {_PLAIN[type(choice)] for choice in get_args(annotation)}
    if origin in (Union, types.UnionType):
        return set().union(*(_accepts(member) for member in get_args(annotation)))
    return {"str"} if isinstance(annotation, type) and issubclass(annotation, enum.Enum) else set()


def _choices(annotation: Any) -> set[Any]:
    """Empty where any text of a union is admissible."""
    origin = get_origin(annotation)
    if origin is Literal:
        return set(get_args(annotation))
    if isinstance(annotation, type) and issubclass(annotation, enum.Enum):
        return set(annotation.__members__)
    if origin in (Union, types.UnionType) and str not in get_args(annotation):
        return set().union(*(_choices(member) for member in get_args(annotation)))
    return set()
