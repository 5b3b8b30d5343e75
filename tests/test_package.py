"""What holds for the source of the whole package, which is parsed once for all these tests."""

from __future__ import annotations

import ast
import gc
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from graphlib import TopologicalSorter
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
    ("cli/completion_command.py", "shell"): "the name of a shell, for argcomplete",
    ("deploy/calls/message_codec.py", "pickle"): "of listed classes, between processes that share a secret",
    ("export/checkpoint_reader.py", "pickle"): "the class of its error",
    ("export/checkpoint_reader.py", "torch.load"): "weights_only, and only with --allow-pickled-weights",
}


def test_every_public_name_exists_and_is_in_dir() -> None:
    assert dir(genserve) == sorted(genserve.__all__)
    assert all(getattr(genserve, name) is not None for name in genserve.__all__)


@pytest.fixture(scope="module")
def modules() -> Iterator[dict[Path, list[ast.AST]]]:
    """The nodes of each module, the module itself first: half a million, none of which is garbage."""
    gc.disable()
    paths = sorted(ROOT.rglob("*.py"))
    yield {path: list(ast.walk(ast.parse(path.read_text(encoding="utf-8")))) for path in paths}
    gc.enable()


@pytest.fixture(scope="module")
def nodes(modules: Mapping[Path, list[ast.AST]]) -> list[tuple[Path, ast.AST]]:
    """The classes, attributes and calls of all modules."""
    kinds = (ast.ClassDef, ast.Attribute, ast.Call)
    return [(path, node) for path, found in modules.items() for node in found if isinstance(node, kinds)]


def test_no_two_classes_of_a_folder_have_the_same_name(nodes) -> None:
    classes = Counter((path.parent, node.name) for path, node in nodes if isinstance(node, ast.ClassDef))
    assert [name for (_, name), count in classes.items() if count > 1] == []


def test_no_modules_import_each_other_in_a_circle(modules) -> None:
    """Imports for type checkers count; imports in functions do not."""
    trees = {_name(path): nodes[0] for path, nodes in modules.items()}
    imported = {name: set(_imported(tree, trees)) for name, tree in trees.items()}
    TopologicalSorter(imported).prepare()   # raises CycleError, which names a circle


def _name(path: Path) -> str:
    """Return the name of the module in a file."""
    return ".".join(path.relative_to(ROOT.parent).with_suffix("").parts).removesuffix(".__init__")


def _imported(tree: ast.Module, modules: Mapping[str, ast.Module]) -> Iterator[str]:
    statements = list(tree.body)
    for statement in statements:
        if isinstance(statement, ast.If | ast.Try):
            statements += statement.body
        names = [alias.name for alias in getattr(statement, "names", ()) if isinstance(alias, ast.alias)]
        if isinstance(statement, ast.Import):
            yield from (name for name in names if name in modules)
        elif isinstance(statement, ast.ImportFrom) and statement.module in modules:
            for name in names:
                submodule = f"{statement.module}.{name}"
                yield submodule if submodule in modules else statement.module


def test_no_process_is_forked(nodes) -> None:
    """A fork of a process with threads inherits locks that nobody releases."""
    forking = {"fork", "forkpty", "ProcessPoolExecutor", "Pool", "set_start_method"}
    for path, node in nodes:
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            assert not (node.value.id in ("os", "pty") and node.attr in forking), path
            assert not (node.value.id == "multiprocessing" and node.attr in (*forking, "Process")), path
        if isinstance(node, ast.Call):
            assert "preexec_fn" not in [keyword.arg for keyword in node.keywords], path
            if isinstance(node.func, ast.Attribute) and node.func.attr == "get_context" and node.args:
                assert ast.unparse(node.args[0]) == "'spawn'", path


def test_the_wall_clock_is_read_for_stamps_only(nodes) -> None:
    """Whatever waits or expires goes by `time.monotonic`, which no correction of the clock changes."""
    reading = {
        path.relative_to(ROOT).as_posix()
        for path, node in nodes
        if isinstance(node, ast.Attribute)
        and node.attr in ("time", "time_ns", "now", "utcnow")
        and ast.unparse(node) in ("time.time", "time.time_ns", "datetime.now", "datetime.utcnow")
    }
    assert reading <= {
        "cli/bench_report.py",                # when a benchmark began
        "engine/block_files.py",              # the age of files that nobody finishes
        "server/dialects/ollama/routes.py",   # the times of answers
        "server/dialects/openai/protocol.py",
        "server/dialects/openai/responses.py",
        "server/dialects/openai/responses_body.py",
        "textmodel/adapters.py",              # when a model was loaded
        "textmodel/text_model.py",            # when a model was loaded
        "text/template_renderer.py",          # `strftime_now` of chat templates
        "inference_statistics.py",            # `last_inference`
        "server/dialects/rerank.py",         # `created`, as vLLM writes it
        "server/dialects/systemone.py",
        "server/observe/metrics_text.py",     # `vllm:lora_requests_info`, as vLLM writes it
        "server/observe/request_spans.py",    # OpenTelemetry's times
    }


def dotted(node: ast.expr) -> str:
    """`os.system` of a name or an attribute of names; empty for any other expression."""
    match node:
        case ast.Name():
            return node.id
        case ast.Attribute():
            owner = dotted(node.value)
            return f"{owner}.{node.attr}" if owner else ""
    return ""


def found_in(nodes: Sequence[ast.AST]) -> set[str]:
    """The forbidden names and arguments that a module uses."""
    found = set()
    names: dict[str, str] = {}      # local name: what it is
    for node in nodes:
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
    for node in nodes:
        if isinstance(node, (ast.Name, ast.Attribute)):
            first, _, rest = dotted(node).partition(".")
            full = names.get(first, first) + (f".{rest}" if rest else "")
            found |= {full} & FORBIDDEN
        elif isinstance(node, ast.Call):
            for argument in node.keywords:
                is_false = isinstance(argument.value, ast.Constant) and not argument.value.value
                if argument.arg in FORBIDDEN_ARGUMENTS and not is_false:
                    found.add(str(argument.arg))
            is_said = any(argument.arg == "trust_remote_code" for argument in node.keywords)
            if REMOTE_CODE.fullmatch(dotted(node.func)) and not is_said:
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
    assert found_in(list(ast.walk(ast.parse(source)))) == names


def test_no_module_runs_code_from_data_without_a_reason(modules):
    """Every call that could is in `ALLOWED`, or fails this test."""
    found = {
        (str(path.relative_to(ROOT)), name) for path, nodes in modules.items() for name in found_in(nodes)
    }
    assert found == ALLOWED.keys()
