"""Public names: the modules beside a model, as pickles and `importlib.import_module` call them."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from genserve.backends.python.host import current_host

__all__ = ["PRIVATE", "PublicModule", "PublicNames"]

PRIVATE = "_genserve_"  # begins the packages of models


class PublicNames(MetaPathFinder, Loader):
    """Finds what nobody else does, for the code of one model alone."""

    def __init__(self, package: str) -> None:
        self._package = package

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of a stand-in for a module in the model's package; None: there is none."""
        host = current_host()
        if fullname.startswith(PRIVATE) or host is None or host.package != self._package:
            return None
        try:
            spec = importlib.util.find_spec(f"{self._package}.{fullname}")
        except ModuleNotFoundError:  # what it would be in is no package
            return None
        return None if spec is None else ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return the stand-in."""
        return PublicModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Import what it stands for."""
        importlib.import_module(f"{self._package}.{module.__name__}")

    @staticmethod
    def forget() -> None:
        """Drop all stand-ins; those that other models need come back when they ask."""
        # By name: pairs are new tuples, for which garbage may be collected, and that may call this again.
        for name in list(sys.modules):
            if isinstance(sys.modules.get(name), PublicModule):
                sys.modules.pop(name, None)


class PublicModule(ModuleType):
    """Stands in `sys.modules` for the modules of this name beside several models: each sees its own."""

    def __getattr__(self, name: str) -> Any:
        host = current_host()
        foreign = f"module {self.__name__!r} has no attribute {name!r} outside of its model"
        if host is None or not host.package:
            raise AttributeError(foreign)
        try:
            own = importlib.import_module(f"{host.package}.{self.__name__}")
        except ModuleNotFoundError:
            raise AttributeError(foreign) from None
        return getattr(own, name)
