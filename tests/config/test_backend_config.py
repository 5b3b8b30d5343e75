from __future__ import annotations

from pathlib import Path

import pytest

from genserve.config.backends import BackendConfig
from genserve.errors import GenserveError


def test_a_setting_of_one_backend_counts_more_than_one_for_all():
    for words in (
        ["default-max-batch-size=16", "onnxruntime,default-max-batch-size=8"],
        ["onnxruntime,default-max-batch-size=8", "default-max-batch-size=16"],
    ):
        assert BackendConfig.parse(words) == BackendConfig(default_max_batch_size=8)
    assert BackendConfig.parse(["default-max-batch-size=16"]).default_max_batch_size == 16
    assert BackendConfig.parse([]) == BackendConfig(default_max_batch_size=4)


def test_the_folder_of_backends_may_be_named_as_a_setting(tmp_path):
    words = [f"backend-directory={tmp_path}"]
    assert BackendConfig.parse(words).backend_directory == tmp_path
    assert BackendConfig.parse(words, backend_directory=tmp_path).backend_directory == tmp_path
    with pytest.raises(GenserveError, match="--backend-config sets"):
        BackendConfig.parse(words, backend_directory=Path("/other"))


@pytest.mark.parametrize(
    ("word", "reason"),
    [
        ("python,shm-default-byte-size=16777216", "through a pipe"),
        ("python,stub-timeout-seconds=60", "until it exits"),
        ("onnxruntime,enable-global-threadpool=1", "`intra_op_thread_count` in the model's parameters"),
        ("tensorflow,gpu-memory-fraction=0.5", "TensorFlow takes memory as it needs it"),
        ("mine,shm-region-prefix-name=a,b", "through a pipe"),
    ],
)
def test_a_setting_about_resources_alone_is_passed_over_with_the_reason(tmp_path, caplog, word, reason):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "model.py").touch()
    assert BackendConfig.parse([word], backend_directory=tmp_path).default_max_batch_size == 4
    (record,) = caplog.records
    assert f"--backend-config={word} is ignored: " in record.getMessage()
    assert reason in record.getMessage()


@pytest.mark.parametrize(
    ("word", "message", "remedy"),
    [
        ("default-max-batch-size", "is not BACKEND,SETTING=VALUE", "onnxruntime,default-max-batch-size=8"),
        (",default-max-batch-size=8", "is not BACKEND,SETTING=VALUE", ""),
        ("onnxruntime,default-max-batch-size=", "is not BACKEND,SETTING=VALUE", ""),
        ("onnxruntime,default-max-batch-size=-1", "to '-1', which is not a batch size", "integer"),
        ("tensorrt,version=8", "an unknown backend 'tensorrt'", "known backends: tensorflow, onnx"),
        ("python,shm-size=4", "'shm-size', which is not a setting of the backend 'python'", "shm-default"),
        ("pytorch,threads=4", "which is not a setting of the backend 'pytorch'", "'pytorch': none"),
        ("min-compute-capability=6.0", "is not a setting for all backends", "backend-directory, default-"),
    ],
)
def test_what_is_not_known_is_refused_with_what_is(word, message, remedy):
    with pytest.raises(GenserveError) as raised:
        BackendConfig.parse([word])
    assert message in raised.value.message
    assert remedy in raised.value.remedy
