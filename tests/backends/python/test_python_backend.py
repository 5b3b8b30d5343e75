from __future__ import annotations

import re

import pytest
from google.protobuf import text_format

from genserve.backends.python.pb_utils import pb_config
from genserve.backends.python.python_backend import PythonBackend, python_based
from genserve.config.schema import new_model_config
from genserve.errors import InferenceError, RepositoryError
from tests.backends.python.models import HEADER, floats

COMPLETES = """
    class TritonPythonModel:
        @staticmethod
        def auto_complete_config(config):
            config.set_max_batch_size(4)
            config.add_input({"name": "X", "data_type": "TYPE_FP32", "dims": [-1]})
            config.add_output({"name": "Y", "data_type": "TYPE_STRING", "dims": [2, -1]})
            config.set_dynamic_batching()
            config.set_model_transaction_policy({"decoupled": True})
            return config
"""


COMPLETING = "class TritonPythonModel:\n    @staticmethod\n    def auto_complete_config(c):"


def completed(models, source, text="", **files):
    models.write("m", source, text, **files)
    message = text_format.Parse(f'name: "m" {text}', new_model_config())
    PythonBackend.auto_complete(message, path=models.root / "m", version=1, default_max_batch_size=4)
    return message


def test_a_model_completes_its_config(models):
    message = completed(models, COMPLETES, "instance_group [{ count: 2 kind: KIND_CPU }]")
    assert message == text_format.Parse(
        """
        name: "m" max_batch_size: 4 dynamic_batching {} model_transaction_policy { decoupled: true }
        input [{ name: "X" data_type: TYPE_FP32 dims: [-1] }]
        output [{ name: "Y" data_type: TYPE_STRING dims: [2, -1] }]
        instance_group [{ count: 2 kind: KIND_CPU }]
        """,
        new_model_config(),
    )


def test_a_class_that_inherits_from_a_helper_completes_its_config(models):
    helper = "import triton_python_backend_utils\n" + COMPLETES.replace(
        "TritonPythonModel", "Parent"
    ).replace("\n    ", "\n")
    message = completed(
        models, "import helper\nclass TritonPythonModel(helper.Parent): pass", **{"helper.py": helper}
    )
    assert message.max_batch_size == 4


def test_a_model_that_completes_nothing_is_not_imported_for_it(models):
    message = completed(models, "raise ValueError\nclass TritonPythonModel:\n    pass", "max_batch_size: 2")
    assert message == text_format.Parse('name: "m" max_batch_size: 2', new_model_config())


@pytest.mark.parametrize(
    ("source", "text"),
    [
        (
            f"{COMPLETING}\n        raise ValueError('auto')",
            "ValueError: auto\n\nAt:\n  {path}(22): auto_complete_config\n",
        ),
        (
            f"{COMPLETING} pass",
            "auto_complete_config function in model 'm' must return a valid pb.ModelConfig object.",
        ),
        (
            f"{COMPLETING}\n        c.set_max_batch_size(1)",
            "ValueError: configuration specified max_batch_size 8, but in auto-complete-config function for "
            "model 'm' specified max_batch_size 1\n\nAt:\n"
            "  {config}: set_max_batch_size\n  {path}(22): auto_complete_config\n",
        ),
    ],
)
def test_a_model_that_cannot_complete_says_why(models, source, text):
    with pytest.raises(InferenceError) as raised:
        completed(models, source, "max_batch_size: 8")
    message = re.sub(re.escape(pb_config.__file__) + r"\(\d+\)", "CONFIG", raised.value.message)
    assert message == text.format(path=models.root / "m" / "1" / "model.py", config="CONFIG")


def test_an_invalid_completed_config_is_rejected(models):
    source = """
        class TritonPythonModel:
            @staticmethod
            def auto_complete_config(config):
                config.as_dict()["inputs"] = []
                return config
    """
    with pytest.raises(RepositoryError, match="inputs"):
        completed(models, source)


def test_another_model_file_can_be_configured(models):
    folder = models.write("m", "", 'default_model_filename: "other.py"')
    (folder / "model.py").rename(folder / "other.py")
    with (folder / "other.py").open("a") as file:
        file.write(
            "class TritonPythonModel:\n"
            "    def execute(self, requests):\n"
            "        return [answer(np.ones(1))]\n"
        )
    models.start("m")
    assert models.infer("m", floats(1)).array == [1]


def test_a_python_based_backend_runs_models_without_a_model_py(models, tmp_path):
    folder = tmp_path / "backends" / "own"
    folder.mkdir(parents=True)
    (folder / "helper.py").write_text("name = 'helper'")
    (folder / "model.py").write_text(
        HEADER
        + """
import helper

class TritonPythonModel:
    @staticmethod
    def auto_complete_config(config):
        config.add_input({"name": "X", "data_type": "TYPE_FP32", "dims": [-1]})
        return config
    def initialize(self, args):
        with open(args["model_repository"] + "/1/model.json") as file:
            self.text = file.read()
    def execute(self, requests):
        return [answer(np.array([helper.name, self.text, pb_utils.get_model_dir()], dtype=object))]
"""
    )
    (models.write("m", "") / "model.py").rename(models.root / "m" / "1" / "model.json")
    (models.root / "m" / "1" / "model.json").write_text("weights")
    models.start("m", python_based(folder))
    assert models.configs["m"].input("X") is not None
    assert models.infer("m", floats(1)).array.tolist() == [
        b"helper",
        b"weights",
        str(models.root / "m" / "1").encode(),
    ]
