"""QA workspace: lays out the folders that Triton's qa scripts expect, as Dockerfile.QA does for a container.

Triton's sources are copied, and absolute paths are rewritten in the copy. tritonserver is a script that
starts genserve, and the custom C++ backends are Python models that answer the same.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
PROJECT = HERE.parents[1]
# The files that Dockerfile.QA copies from the sources of the server to a folder of qa/.
_EXAMPLES = {
    "L0_http/models": "simple simple_dyna_sequence simple_identity simple_sequence simple_string",
    "L0_grpc/models": "simple simple_dyna_sequence simple_int8 simple_identity simple_sequence simple_string",
    **{
        f"{group}/models": "simple"
        for group in ("L0_shared_memory", "L0_https", "L0_secure_grpc", "L0_data_compression")
    },
}
_TEST_MODELS = {
    "L0_decoupled/models": "repeat_int32 square_int32",
    "L0_grpc_state_cleanup/models": "repeat_int32",
    "L0_backend_identity/models": "identity_fp32",
}
_FOLDERS = (
    "L0_decoupled/models/{repeat_int32,square_int32,identity_int32,simple_repeat,fan_repeat,sequence_repeat,"
    "repeat_square,nested_square}/1",
    "L0_grpc_state_cleanup/models/repeat_int32/1",
    "L0_backend_identity/models/identity_fp32/1",
)
# Libraries that scripts copy next to a model: empty files, since the model is written in Python.
_LIBRARIES = (
    "custom_models/custom_sequence_int32/1/libtriton_sequence.so",
    "custom_models/custom_dyna_sequence_int32/1/libtriton_dyna_sequence.so",
    "L0_lifecycle/libtriton_identity.so",
    "L0_model_config/libtriton_repeat.so",
)
# The scripts that write models, each with the folder of the models and its arguments.
_GENERATED = (
    ("qa_model_repository", "gen_qa_models.py --onnx"),
    ("qa_model_repository", "gen_qa_models.py --libtorch"),
    ("qa_variable_model_repository", "gen_qa_models.py --onnx --variable"),
    ("qa_variable_model_repository", "gen_qa_models.py --libtorch --variable"),
    ("qa_identity_model_repository", "gen_qa_identity_models.py --onnx"),
    ("qa_identity_model_repository", "gen_qa_identity_models.py --libtorch"),
    ("qa_reshape_model_repository", "gen_qa_reshape_models.py --onnx --variable"),
    ("qa_reshape_model_repository", "gen_qa_reshape_models.py --libtorch --variable"),
    ("qa_sequence_model_repository", "gen_qa_sequence_models.py --onnx"),
    ("qa_sequence_model_repository", "gen_qa_sequence_models.py --libtorch"),
    ("qa_variable_sequence_model_repository", "gen_qa_sequence_models.py --onnx --variable"),
    ("qa_variable_sequence_model_repository", "gen_qa_sequence_models.py --libtorch --variable"),
    (
        "qa_sequence_initial_state_implicit_model_repository",
        "gen_qa_implicit_models.py --onnx --initial-state zero",
    ),
    ("qa_sequence_implicit_model_repository", "gen_qa_implicit_models.py --onnx"),
    ("qa_sequence_implicit_model_repository", "gen_qa_implicit_models.py --libtorch"),
    ("qa_variable_sequence_implicit_model_repository", "gen_qa_implicit_models.py --onnx --variable"),
    ("qa_dyna_sequence_model_repository", "gen_qa_dyna_sequence_models.py --onnx"),
    ("qa_dyna_sequence_model_repository", "gen_qa_dyna_sequence_models.py --libtorch"),
    ("qa_dyna_sequence_implicit_model_repository", "gen_qa_dyna_sequence_implicit_models.py --onnx"),
    ("qa_ragged_model_repository", "gen_qa_ragged_models.py --onnx"),
    ("qa_ragged_model_repository", "gen_qa_ragged_models.py --libtorch"),
    ("qa_scalar_models", "gen_qa_ort_scalar_models.py --onnx_opset=0"),
    ("qa_ensemble_model_repository/qa_model_repository", "gen_qa_models.py --ensemble"),
    ("qa_ensemble_model_repository/qa_variable_model_repository", "gen_qa_models.py --ensemble --variable"),
    ("qa_ensemble_model_repository/qa_reshape_model_repository", "gen_qa_reshape_models.py --ensemble"),
    ("qa_ensemble_model_repository/qa_identity_model_repository", "gen_qa_identity_models.py --ensemble"),
    ("qa_ensemble_model_repository/qa_sequence_model_repository", "gen_qa_sequence_models.py --ensemble"),
    (
        "qa_ensemble_model_repository/qa_variable_sequence_model_repository",
        "gen_qa_sequence_models.py --ensemble --variable",
    ),
)
# Programs that the scripts call to prepare a container. They do nothing here.
_NOTHING = "pip pip3 apt apt-get yum service nvidia-smi gdb ldconfig redis-server redis-cli"
# The same packages as in Dockerfile.QA: numpy below 2, whose aliases the tests use, and the onnx that writes
# the models.
_PACKAGES = (
    "numpy<2 tritonclient[grpc,http] pillow grpcio protobuf<7 requests six prettytable pytest pytest-asyncio "
    "psutil aiohttp future onnx==1.20.1 boofuzz"
)
_TEXTS = (".sh", ".py", ".pbtxt", ".json", ".conf")
VERSION = "main"
# Ensembles of TensorRT models, and a type that ONNX Runtime does not compute on a CPU.
_NOT_HERE = ("*_plan_*", "onnx*_bf16_*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """Checkouts of Triton's repositories."""

    server: Path
    client: Path
    python_backend: Path


@dataclass(frozen=True, slots=True)
class Workspace:
    """The folders of one run, under `root`."""

    root: Path

    @property
    def qa(self) -> Path:
        """The copy of Triton's qa folder."""
        return self.triton / "qa"

    @property
    def data(self) -> Path:
        """The models that Triton's scripts have written."""
        return self.root / "data" / "inferenceserver" / VERSION

    @property
    def triton(self) -> Path:
        """The folder that stands for /opt/tritonserver."""
        return self.root / "opt" / "tritonserver"

    @property
    def programs(self) -> Path:
        """The first folder of PATH."""
        return self.root / "bin"

    @property
    def environment(self) -> Path:
        """The Python environment of the tests, with the packages that Dockerfile.QA installs."""
        return self.root / "environment"


def lay_out(root: Path, sources: Sources) -> Workspace:
    """Create the workspace; models that an earlier run wrote are kept."""
    workspace = Workspace(root.absolute())
    shutil.rmtree(workspace.triton, ignore_errors=True)
    for folder in ("qa", "docs/examples", "src/test/models", "python"):
        shutil.copytree(sources.server / folder, workspace.triton / folder)
    shutil.copytree(sources.client / "src/python/examples", workspace.qa / "clients")
    for example in (workspace.qa / "clients").glob("*.py"):     # replace the examples in C++
        _program(example.with_suffix(""), f'#!/bin/sh\nexec python "{example}"\n')
    _copy_models(workspace, sources)
    _install_programs(workspace)
    _install_backends(workspace, sources)
    _rewrite_paths(workspace)
    _write_models(workspace)
    return workspace


def _copy_models(workspace: Workspace, sources: Sources) -> None:
    server = workspace.triton
    for table, models in ((_EXAMPLES, "docs/examples/model_repository"), (_TEST_MODELS, "src/test/models")):
        for folder, names in table.items():
            for name in names.split():
                shutil.copytree(server / models / name, workspace.qa / folder / name, dirs_exist_ok=True)
    for group, versions in (("L0_simple_ensemble", (1, 2)), ("L0_socket", (1,))):
        for version in versions:
            target = workspace.qa / group / "models/simple" / str(version) / "model.onnx"
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(server / "docs/examples/model_repository/simple/1/model.onnx", target)
    for pattern in _FOLDERS:
        for folder in _braces(pattern):
            (workspace.qa / folder).mkdir(parents=True, exist_ok=True)
    for library in _LIBRARIES:
        (workspace.qa / library).parent.mkdir(parents=True, exist_ok=True)
        (workspace.qa / library).touch()
    decoupled = workspace.qa / "L0_decoupled"
    shutil.copytree(decoupled / "models", decoupled / "python_models", dirs_exist_ok=True)
    for name in ("repeat", "square"):
        example = sources.python_backend / "examples/decoupled"
        model = decoupled / f"python_models/{name}_int32"
        shutil.copy(example / f"{name}_model.py", model / "1" / "model.py")
        shutil.copy(example / f"{name}_config.pbtxt", model / "config.pbtxt")


def _braces(pattern: str) -> Iterator[str]:
    before, _, rest = pattern.partition("{")
    words, _, after = rest.partition("}")
    yield from (f"{before}{word}{after}" for word in words.split(","))


def _install_programs(workspace: Workspace) -> None:
    """Write tritonserver, the programs that do nothing, and the packages of the tests."""
    server = (
        '#!/bin/bash\n'
        'case "$*" in *backend-directory*) ;; *) set -- "$@" --backend-directory='
        f'"{workspace.triton}/backends";; esac\n'
        'case "$*" in *--id=*|*--id\\ *) ;; *) set -- "$@" --id=triton;; esac\n'
        f'exec env -u QA_RESULTS PYTHONPATH="{PROJECT}" "{sys.executable}" -m genserve serve '
        '--allow-uploaded-code "$@"\n'
    )
    _program(workspace.triton / "bin/tritonserver", server)
    shutil.rmtree(workspace.programs, ignore_errors=True)
    for name in _NOTHING.split():
        _program(workspace.programs / name, "#!/bin/sh\nexit 0\n")
    if not workspace.environment.exists():
        subprocess.run([sys.executable, "-m", "venv", str(workspace.environment)], check=True)
        command = [str(workspace.environment / "bin/pip"), "install", "-q", *_PACKAGES.split()]
        subprocess.run(command, check=True)


def _program(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8")
    file.chmod(0o755)


def _install_backends(workspace: Workspace, sources: Sources) -> None:
    """Install the backends; scripts clone the examples of python_backend from `organization`."""
    clone = workspace.root / "organization" / "python_backend"
    shutil.rmtree(clone, ignore_errors=True)
    subprocess.run(["git", "clone", "-q", str(sources.python_backend.absolute()), str(clone)], check=True)
    subprocess.run(["git", "-C", str(clone), "checkout", "-q", "-B", VERSION], check=True)
    backends = workspace.triton / "backends"
    shutil.copytree(HERE / "backends", backends)
    (backends / "square").mkdir()
    shutil.copy(
        sources.python_backend / "examples/decoupled/square_model.py", backends / "square" / "model.py"
    )


def _rewrite_paths(workspace: Workspace) -> None:
    for file in workspace.qa.rglob("*"):
        if file.suffix in _TEXTS and file.is_file() and not file.is_symlink():
            text = file.read_text(encoding="utf-8", errors="surrogateescape")
            new = re.sub(r"(?<![\w.}])/opt/tritonserver", str(workspace.triton), text)
            new = re.sub(r"(?<![\w.}])/data/inferenceserver", str(workspace.data.parent), new)
            new = re.sub(r"\bnp\.NINF\b", "-np.inf", new)   # genserve runs models with numpy 2
            if new != text:
                file.write_text(new, encoding="utf-8", errors="surrogateescape")


def _write_models(workspace: Workspace) -> None:
    """Run the scripts that write models; each leaves out models that it cannot write, such as libtorch's."""
    for folder, command in _GENERATED:
        target = workspace.data / folder
        script, *arguments = command.split()
        mark = target / (".written-" + "".join(arguments).replace("/", "") + ".log")
        if mark.exists():
            continue
        target.mkdir(parents=True, exist_ok=True)
        python = sys.executable if "--libtorch" in arguments else str(workspace.environment / "bin/python")
        words = [python, str(workspace.qa / "common" / script), *arguments, f"--models_dir={target}"]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        mark.write_text(done.stdout + done.stderr, encoding="utf-8")
        if done.returncode:
            print(f"{command}: {done.stderr.strip().splitlines()[-1:]}")
    for pattern in _NOT_HERE:
        for folder in workspace.data.rglob(pattern):
            shutil.rmtree(folder)
