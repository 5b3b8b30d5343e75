"""Which ONNX Runtime is there."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path

import pytest

from genserve.backends import libraries, onnx_session
from genserve.backends.libraries import import_onnxruntime
from genserve.backends.onnx_session import num_cores, register_kernels
from genserve.errors import GenserveError, MissingDependency


def test_where_the_system_tells_no_one_s_cores_all_of_them_are_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(os, "sched_getaffinity")    # as on macOS
    monkeypatch.setattr(os, "cpu_count", lambda: 12)
    assert num_cores() == 12


def test_two_packages_in_one_folder_are_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for package in ("onnxruntime", "onnxruntime_gpu"):
        info = tmp_path / f"{package}-1.31.1.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Name: {package.replace('_', '-')}\nVersion: 1.31.1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    libraries._warn_of_two_packages.cache_clear()
    with caplog.at_level(logging.WARNING):
        import_onnxruntime()
        import_onnxruntime()
    [record] = caplog.records
    assert "both onnxruntime and onnxruntime-gpu are installed" in record.getMessage()


def test_without_a_package_the_error_names_both_extras(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(MissingDependency) as caught:
        import_onnxruntime()
    assert "genserve[cpu]" in caught.value.remedy
    assert "genserve[gpu]" in caught.value.remedy


def test_kernels_that_cannot_be_loaded_are_an_error_with_a_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    half = tmp_path / "libgenserve_avx2.so"
    half.write_bytes(b"\x7fELF")
    monkeypatch.setattr(onnx_session, "library_path", lambda: half)
    with pytest.raises(GenserveError, match=r"cannot load the kernels .*build them again"):
        register_kernels(import_onnxruntime().SessionOptions())
