"""Puts a wrong change into our own source while it is imported; no file is changed or written.

The change travels in one environment variable, so it reaches every process that a test starts:
``sitecustomize`` beside this file installs the hook in each of them. Standard library only.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import json
import os
import sys
from collections.abc import Sequence
from types import CodeType, ModuleType

VARIABLE = "KVLEDGER_MUTANT"
"""JSON: list of [module, text before, text after]."""

Edits = list[tuple[str, str, str]]


class StaleMutantError(Exception):
    """The text to replace does not occur exactly once: the source has changed since."""


def substitute(source: str, module: str, edits: Edits) -> str:
    """The module's source with its edits made, one after the other.

    Raises:
        StaleMutantError: see there.
    """
    for where, before, after in edits:
        if where == module:
            count = source.count(before)
            if count != 1:
                raise StaleMutantError(f"{module} has {count} places like {before!r}, not one")
            source = source.replace(before, after)
    return source


class MutatingLoader(importlib.machinery.SourceFileLoader):
    """Compiles the changed source; neither reads nor writes a cached compilation."""

    def __init__(self, name: str, path: str, edits: Edits) -> None:
        super().__init__(name, path)
        self._edits = edits

    def get_code(self, fullname: str) -> CodeType:
        source = self.get_data(self.path).decode()
        changed = substitute(source, fullname, self._edits)
        return compile(changed, self.path, "exec", dont_inherit=True)


class MutatingFinder(importlib.abc.MetaPathFinder):
    """Finds the modules of the edits, and no others."""

    def __init__(self, edits: Edits) -> None:
        self._edits = edits
        self._modules = {module for module, _, _ in edits}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in self._modules:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        assert spec is not None, f"there is no module {fullname}"
        assert spec.origin is not None, f"{fullname} has no source"
        spec.loader = MutatingLoader(fullname, spec.origin, self._edits)
        return spec


def install(edits: Edits) -> None:
    """Change these modules when this process imports them, which it must not have done yet."""
    imported = {module for module, _, _ in edits} & sys.modules.keys()
    assert not imported, f"imported before the change was made: {imported}"
    sys.meta_path.insert(0, MutatingFinder(edits))


def install_from_environment() -> None:
    """Like :func:`install`, with what the parent process has asked for, if anything."""
    text = os.environ.get(VARIABLE)
    if text:
        install([(module, before, after) for module, before, after in json.loads(text)])
