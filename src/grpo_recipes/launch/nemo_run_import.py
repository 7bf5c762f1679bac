"""Importing NeMo-Run without what a local or Slurm run never touches: 3.7 s instead of 10 s on a two-core machine.

`import nemo_run` imports torch (to teach its YAML writer about torch.dtype, and it copes with its absence) and
leptonai, for the Lepton executor, which brings a web framework. Both are hidden while it is imported, and only then.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any


class _EmptyModules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds every module of one package, each of which holds an empty class of any name that is asked of it."""

    def __init__(self, package: str) -> None:
        self._package = package

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] != self._package:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def exec_module(self, module: ModuleType) -> None:
        def empty_class(name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            return type(name, (), {})

        module.__getattr__ = empty_class  # type: ignore[method-assign]


@contextmanager
def _hidden(absent: str, empty: str) -> Iterator[None]:
    """`import absent` fails and `empty` is a package of empty classes, inside; already imported modules stay."""
    finder = _EmptyModules(empty)
    hide = absent not in sys.modules
    if hide:
        sys.modules[absent] = None  # type: ignore[assignment]
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        if hide:
            del sys.modules[absent]
        for name in [name for name, module in sys.modules.items() if getattr(module, "__loader__", None) is finder]:
            del sys.modules[name]


def import_nemo_run() -> ModuleType:
    """The module `nemo_run`; its LeptonExecutor is of no use unless nemo_run had been imported before."""
    with _hidden(absent="torch", empty="leptonai"):
        return importlib.import_module("nemo_run")
