from __future__ import annotations

from pathlib import Path

from genserve.repository.options import ControlMode, RepositoryOptions
from genserve.repository.repository import Repository
from tests.support.python_models import ask, write_model

LOADS = """
    from pathlib import Path
    import triton_python_backend_utils as pb_utils

    class TritonPythonModel:
        def execute(self, requests):
            source = Path(pb_utils.get_model_dir(), "../../one/1/model.py").read_bytes()
            pb_utils.load_model("fresh", config='{"backend": "python"}', files={"file:1/model.py": source})
            return [pb_utils.InferenceResponse([]) for _ in requests]
"""


def test_a_model_is_loaded_from_files_of_another_model(tmp_path: Path) -> None:
    write_model(tmp_path, "one")
    write_model(tmp_path, "loader", code=LOADS)
    repository = Repository([tmp_path], options=RepositoryOptions(control_mode=ControlMode.EXPLICIT))
    repository.start(["loader"])
    try:
        assert ask(repository, "loader", X=[1]).error is None
        assert repository.is_ready("fresh")
    finally:
        repository.close()
