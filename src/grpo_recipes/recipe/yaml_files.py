"""YAML as recipes use it: the scalars of YAML 1.2 (1e-4 is a number, yes and on are text), no duplicate keys.

PyYAML's own defaults are those of YAML 1.1.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, ClassVar

import yaml

from grpo_recipes.errors import UserError

_FLOAT = re.compile(
    r"^[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?$|^[-+]?\.(?:inf|Inf|INF)$|^\.(?:nan|NaN|NAN)$"
)
_INT = re.compile(r"^[-+]?[0-9]+$|^0o[0-7]+$|^0x[0-9a-fA-F]+$")
_BOOL = re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$")
_NULL = re.compile(r"^(?:~|null|Null|NULL|)$")


class _Loader(yaml.CSafeLoader if yaml.__with_libyaml__ else yaml.SafeLoader):  # type: ignore[misc]
    yaml_implicit_resolvers: ClassVar[dict[str, Any]] = {}

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        return super().construct_object(node, deep=True)  # else an alias may stand for what it lies in

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for index, ((key_node, _), key) in enumerate(zip(node.value, keys, strict=True)):
            if not isinstance(key, str) or "." in key:
                raise yaml.MarkedYAMLError(
                    problem=f"the key {key!r} must be text without a dot", problem_mark=key_node.start_mark
                )
            if key in keys[:index]:
                raise yaml.MarkedYAMLError(problem=f"the key {key!r} occurs twice", problem_mark=key_node.start_mark)
        mapping: dict[Any, Any] = super().construct_mapping(node, deep)
        return mapping


def _construct_int(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> int:
    text = loader.construct_scalar(node)
    if len(text) > 100:
        raise yaml.MarkedYAMLError(problem=f"a number of {len(text)} digits", problem_mark=node.start_mark)
    return int(text, 0) if text.startswith(("0x", "0o")) else int(text)


_Loader.add_implicit_resolver("tag:yaml.org,2002:bool", _BOOL, list("tTfF"))
_Loader.add_implicit_resolver("tag:yaml.org,2002:null", _NULL, ["~", "n", "N", ""])
_Loader.add_implicit_resolver("tag:yaml.org,2002:int", _INT, list("-+0123456789"))
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+.0123456789"))
_Loader.add_constructor("tag:yaml.org,2002:int", _construct_int)


class _Dumper(yaml.SafeDumper):
    """Quotes whatever YAML 1.1 or 1.2 would take for something other than text."""


_Dumper.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+.0123456789"))
_Dumper.add_implicit_resolver("tag:yaml.org,2002:int", _INT, list("-+0123456789"))


def parse(text: str, where: str) -> Any:
    """The value that `text` stands for.

    Raises:
        UserError: not valid YAML; `where` names the file or key it came from.
    """
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = f"{where}, line {mark.line + 1}, column {mark.column + 1}" if mark else where
        raise UserError(f"not valid YAML: {error.problem}", where=place, mend="correct it, or quote the text") from None
    except yaml.YAMLError as error:
        raise UserError(f"not valid YAML: {error}", where=where, mend="correct it, or quote the text") from None


def load_mapping(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file.

    Raises:
        UserError: unreadable, not YAML, or not a mapping.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot be read: {error}", where=str(path), mend="give a readable YAML file") from None
    data = parse(text, str(path))
    if not isinstance(data, dict):
        raise UserError("holds no mapping of keys", where=str(path), mend="write `key: value` lines")
    return data


def dump(data: Any) -> str:
    """Block YAML that `parse` reads back to the same value."""
    text: str = yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)
    return text
