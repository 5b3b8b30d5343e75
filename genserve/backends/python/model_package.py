"""Model package: a model.py and the modules next to it, imported in isolation from those of other models."""

from __future__ import annotations

import builtins
import importlib
import importlib.util
import itertools
import re
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import (
    EXTENSION_SUFFIXES,
    SOURCE_SUFFIXES,
    ExtensionFileLoader,
    FileFinder,
    ModuleSpec,
    PathFinder,
    SourceFileLoader,
)
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, TypeAlias

from genserve.backends.libraries import importing
from genserve.backends.python.model_context import current_context

_PRIVATE = "_genserve_"  # prefix of the packages of models

_Execute: TypeAlias = Callable[[ModuleType, CodeType], None]

# `sys.meta_path` is replaced, not modified: a concurrent import that iterates over it could skip a finder.
_META_PATH = threading.RLock()
_numbers = itertools.count()  # a reloaded model gets another package
_proxied: set[str] = set()  # the names that proxies have had in `sys.modules`


class ModelPackage:
    """The modules of one instance of a model, in a private package.

    Import statements in them search `folders` first, so that equal module names of several models do not
    collide: `import helper` and `from .helper import x` are the same module. The standard library is never
    shadowed. Modules are compiled from the source on disk; bytecode is neither read nor written. Imports by
    name, by `importlib.import_module` or pickle, search `folders` last and return a proxy.

    Attributes:
        name: the name of the package.
    """

    def __init__(
        self, path: Path, *, model: str, folders: Sequence[Path], module_globals: Mapping[str, object]
    ) -> None:
        """Prepare the import of `path`; nothing is executed yet.

        Args:
            path: the model.py.
            model: the name of the model, part of the name of the package.
            folders: searched for modules, in this order; usually that of `path` is the first.
            module_globals: globals added to each module.
        """
        self._path = path
        self._globals = dict(module_globals)
        self._folders = [str(folder) for folder in folders]
        self.name = f"{_PRIVATE}{re.sub(r'[^0-9A-Za-z_]', '_', model)}_{next(_numbers)}"
        self._builtins = {**vars(builtins), "__import__": self._import}
        self._finder = _Finder(self.name, self._load_module)
        self._public_modules = _PublicModuleFinder(self.name)
        self._siblings: dict[str, bool] = {}

    def load(self) -> ModuleType:
        """Import the file.

        Raises:
            Exception: raised by the file.
        """
        package = ModuleType(self.name)
        package.__path__ = self._folders
        sys.modules[self.name] = package
        with _META_PATH:
            sys.meta_path = [self._finder, *sys.meta_path, self._public_modules]
        return importlib.import_module(f"{self.name}.{self._path.stem}")

    def unload(self) -> None:
        """Remove all modules of the package; their code is freed when nothing refers to it."""
        with _META_PATH:
            ours = (self._finder, self._public_modules)
            sys.meta_path = [finder for finder in sys.meta_path if finder not in ours]
        self._public_modules.remove_proxies()
        sys.modules.pop(self.name, None)
        prefix = f"{self.name}."
        for name in [name for name in list(sys.modules) if name.startswith(prefix)]:
            sys.modules.pop(name, None)

    def _load_module(self, module: ModuleType, code: CodeType) -> None:
        vars(module).update(self._globals)
        vars(module)["__builtins__"] = self._builtins
        exec(code, vars(module))

    def _import(
        self,
        name: str,
        globals: Mapping[str, object] | None = None,  # noqa: A002  # the names of `__import__`
        locals: Mapping[str, object] | None = None,  # noqa: A002
        fromlist: Sequence[str] | None = (),
        level: int = 0,
    ) -> Any:
        """Replace `__import__` in the modules of the model."""
        top = name.partition(".")[0]
        if level or not self._is_sibling(top):
            if isinstance(sys.modules.get(top), _ModuleProxy):
                del sys.modules[top]  # another model's
            with importing(name):
                return builtins.__import__(name, globals, locals, fromlist or (), level)
        private = f"{self.name}.{name}"
        if isinstance(fromlist, list):
            return importlib.import_module(name)  # from pickle, which then reads `sys.modules`
        if fromlist:
            return builtins.__import__(private, globals, locals, fromlist, 0)
        importlib.import_module(private)
        return sys.modules[f"{self.name}.{top}"]

    def _is_sibling(self, top: str) -> bool:
        known = self._siblings.get(top)
        if known is None:
            known = self._siblings[top] = self._find_sibling(top)
        return known

    def _find_sibling(self, top: str) -> bool:
        if top in sys.stdlib_module_names:
            return False
        spec = self._finder.find_spec(f"{self.name}.{top}", self._folders)
        if spec is None:
            return False
        # A folder without __init__.py may hold weights and have the name of the package that reads them.
        return spec.loader is not None or PathFinder.find_spec(top) is None


class _Finder(MetaPathFinder):
    """Finds the modules of one package."""

    def __init__(self, package: str, execute: _Execute) -> None:
        self._prefix = f"{package}."
        self._execute = execute

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of a module; None: it is not in this package."""
        if not fullname.startswith(self._prefix):
            return None
        portions: list[str] = []
        for folder in path or ():
            spec = self._in_folder(fullname, folder)
            if spec is not None and spec.loader is not None:
                return spec
            if spec is not None:
                portions += spec.submodule_search_locations or []
        if not portions:
            return None
        namespace = ModuleSpec(fullname, None, is_package=True)
        namespace.submodule_search_locations = portions
        return namespace

    def _in_folder(self, fullname: str, folder: str) -> ModuleSpec | None:
        source: Any = partial(_Source, self._execute)
        finder = FileFinder(folder, (ExtensionFileLoader, EXTENSION_SUFFIXES), (source, SOURCE_SUFFIXES))
        return finder.find_spec(fullname)


class _Source(SourceFileLoader):
    """Compiles a module from its source, without bytecode."""

    def __init__(self, execute: _Execute, fullname: str, path: str) -> None:
        super().__init__(fullname, path)
        self._execute = execute

    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        code: CodeType = self.source_to_code(self.get_data(path), path)
        return code

    def exec_module(self, module: ModuleType) -> None:
        self._execute(module, self.get_code(module.__name__))


class _PublicModuleFinder(MetaPathFinder, Loader):
    """Finds modules by their public names, after all other finders, for the code of one model only."""

    def __init__(self, package: str) -> None:
        self._package = package

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of a proxy for a module in the model's package; None: there is no such module."""
        context = current_context()
        if fullname.startswith(_PRIVATE) or context is None or context.package != self._package:
            return None
        try:
            spec = importlib.util.find_spec(f"{self._package}.{fullname}")
        except ModuleNotFoundError:  # its parent is not a package
            return None
        return None if spec is None else ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return the proxy."""
        _proxied.add(spec.name)
        return _ModuleProxy(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Import the module behind the proxy."""
        importlib.import_module(f"{self._package}.{module.__name__}")

    @staticmethod
    def remove_proxies() -> None:
        """Remove all proxies; other models import theirs again."""
        # A copy: a garbage collection may call this function again.
        for name in list(_proxied):
            if isinstance(sys.modules.get(name), _ModuleProxy):
                sys.modules.pop(name, None)


class _ModuleProxy(ModuleType):
    """A proxy in `sys.modules` for the modules of one name of several models: each model sees its own."""

    def __getattr__(self, name: str) -> Any:
        context = current_context()
        foreign = f"module {self.__name__!r} has no attribute {name!r} outside of its model"
        if context is None or not context.package:
            raise AttributeError(foreign)
        try:
            own = importlib.import_module(f"{context.package}.{self.__name__}")
        except ModuleNotFoundError:
            raise AttributeError(foreign) from None
        return getattr(own, name)
