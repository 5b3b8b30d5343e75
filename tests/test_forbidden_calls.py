"""No module runs code from data: every call that could is here, with its reason, or fails this test."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import genserve

ROOT = Path(genserve.__file__).parent

# Names that are not called, and modules that are not imported.
FORBIDDEN = frozenset({
    "eval", "exec", "compile", "__import__",
    "pickle", "cPickle", "_pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib",
    "os.system", "os.popen", "pty.spawn", "subprocess.getoutput", "subprocess.getstatusoutput",
    "torch.load", "torch.hub.load", "torch.package.PackageImporter", "yaml.load", "yaml.unsafe_load",
    "tarfile.open", "shutil.unpack_archive", "zipfile.ZipFile.extractall",
    "runpy.run_path", "runpy.run_module",
    "multiprocessing.connection", "multiprocessing.reduction",
})  # fmt: skip
# Keyword arguments that no call has with a true value.
FORBIDDEN_ARGUMENTS = frozenset({"shell", "allow_pickle", "trust_remote_code"})
# Methods of transformers that ask the user if it is not said.
REMOTE_CODE = re.compile(r"Auto\w+\.from_(config|pretrained)")
ALLOWED = {
    ("backends/python/model_package.py", "exec"): "the model.py of the operator",
    ("backends/python/stub.py", "multiprocessing.connection"): "a pipe to a process of the server's own",
    ("backends/python/stub_channel.py", "multiprocessing.connection"): "likewise",
    ("backends/python/stub_channel.py", "multiprocessing.reduction"): "likewise",
    ("backends/python/stub_process.py", "multiprocessing.connection"): "likewise",
    ("deploy/calls/call_protocol.py", "pickle"): "between processes of a cluster, behind a replica's secret",
    ("export/checkpoint_reader.py", "pickle"): "the class of its error",
    ("export/checkpoint_reader.py", "torch.load"): "weights_only, and only with --allow-pickled-weights",
}


def found_in(source: str) -> set[str]:
    """The forbidden names and arguments that a module uses."""
    found = set()
    names: dict[str, str] = {}      # local name: what it is
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                package = alias.name.partition(".")[0]
                names[alias.asname or package] = alias.name if alias.asname else package
                found |= {alias.name, package} & FORBIDDEN
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found |= {node.module, node.module.partition(".")[0]} & FORBIDDEN
            for alias in node.names:
                names[alias.asname or alias.name] = f"{node.module}.{alias.name}"
                found |= {f"{node.module}.{alias.name}"} & FORBIDDEN
    for node in ast.walk(tree):
        if isinstance(node, (ast.Name, ast.Attribute)):
            first, _, rest = ast.unparse(node).partition(".")
            full = names.get(first, first) + (f".{rest}" if rest else "")
            found |= {full} & FORBIDDEN
        elif isinstance(node, ast.Call):
            for argument in node.keywords:
                is_false = isinstance(argument.value, ast.Constant) and not argument.value.value
                if argument.arg in FORBIDDEN_ARGUMENTS and not is_false:
                    found.add(str(argument.arg))
            is_said = any(argument.arg == "trust_remote_code" for argument in node.keywords)
            if REMOTE_CODE.fullmatch(ast.unparse(node.func)) and not is_said:
                found.add("trust_remote_code")
    return found


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("import pickle as p\np.loads(b'')", {"pickle"}),
        ("from pickle import loads", {"pickle"}),
        ("import torch\ntorch.load('x')", {"torch.load"}),
        ("from torch import load as read\nread('x')", {"torch.load"}),
        ("import numpy as np\nnp.load('x', allow_pickle=True)", {"allow_pickle"}),
        ("import numpy as np\nnp.load('x', allow_pickle=False)", set()),
        ("subprocess.run('x', shell=flag)", {"shell"}),
        ("f = eval\nf('1')", {"eval"}),
        ("model.eval()", set()),
        ("request.exec()", set()),
        ("re.compile('x')", set()),
        ("AutoModel.from_pretrained('x', trust_remote_code=True)", {"trust_remote_code"}),
        ("AutoModel.from_config(config)", {"trust_remote_code"}),
        ("AutoModel.from_config(config, trust_remote_code=False)", set()),
        ("from multiprocessing import connection", {"multiprocessing.connection"}),
        ("from os import system\nsystem('x')", {"os.system"}),
    ],
)
def test_uses_are_found_under_any_name(source, names):
    assert found_in(source) == names


def test_no_module_uses_what_runs_code_without_a_reason():
    found = {
        (str(path.relative_to(ROOT)), name)
        for path in ROOT.rglob("*.py")
        for name in found_in(path.read_text(encoding="utf-8"))
    }
    assert found == ALLOWED.keys()
