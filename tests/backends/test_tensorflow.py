from __future__ import annotations

import sys
from importlib.util import find_spec

import numpy as np
import pytest

from genserve.backends.tensorflow import TensorFlowBackend
from genserve.errors import MissingDependency, RepositoryError
from tests.backends.inferences import answers, ask, config_of, started

INSTALLED = find_spec("tensorflow") is not None
needs_tensorflow = pytest.mark.skipif(
    not INSTALLED, reason="TensorFlow is not installed: pip install 'genserve[tensorflow]'"
)

RANK = """
platform: "tensorflow_savedmodel"
max_batch_size: 128
input [ { name: "input_ids" data_type: TYPE_INT32 dims: [ 128 ] },
        { name: "input_mask" data_type: TYPE_INT32 dims: [ 128 ] } ]
output [ { name: "output" data_type: TYPE_FP32 dims: [ 1 ] } ]
dynamic_batching { }
"""


@pytest.fixture
def rank_model(tmp_path):
    """A SavedModel: the mean of the ids that the mask lets through."""
    import tensorflow as tf

    ids = tf.TensorSpec([None, 128], tf.int32)

    class Rank(tf.Module):
        @tf.function(input_signature=[ids, ids])
        def score(self, input_ids, input_mask):
            kept = tf.cast(input_ids * input_mask, tf.float32)
            return {"output": tf.reduce_mean(kept, axis=1, keepdims=True)}

    model = Rank()
    tf.saved_model.save(
        model, str(tmp_path / "1" / "model.savedmodel"), signatures={"serving_default": model.score}
    )
    return tmp_path


@pytest.mark.extended    # imports TensorFlow
@needs_tensorflow
def test_a_saved_model_answers_a_batch(rank_model):
    backend = started(TensorFlowBackend, config_of(RANK), rank_model)
    mask = np.ones((1, 128), dtype=np.int32)
    batch = [ask({"input_ids": mask * value, "input_mask": mask}) for value in (3, 4)]
    assert [answer["output"].tolist() for answer in answers(backend, *batch)] == [[[3]], [[4]]]


@pytest.mark.extended
@needs_tensorflow
def test_an_input_that_the_signature_lacks_is_rejected(rank_model):
    with pytest.raises(RepositoryError, match="unexpected inference input 'ids', allowed inputs are"):
        started(TensorFlowBackend, config_of(RANK.replace("input_ids", "ids")), rank_model)


def test_without_tensorflow_the_load_names_the_package_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorflow", None)    # importing it raises ModuleNotFoundError
    (tmp_path / "1" / "model.savedmodel").mkdir(parents=True)
    with pytest.raises(MissingDependency) as raised:
        started(TensorFlowBackend, config_of(RANK), tmp_path)
    assert raised.value.remedy == "pip install 'genserve[tensorflow]'"


def test_a_missing_folder_is_an_error_in_tritons_words(tmp_path):
    with pytest.raises(RepositoryError, match=r"unable to find '.*1/model.savedmodel' for model"):
        started(TensorFlowBackend, config_of(RANK), tmp_path)
