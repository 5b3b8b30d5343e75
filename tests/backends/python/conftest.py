from __future__ import annotations

import pytest

from tests.backends.python.models import Models


@pytest.fixture
def models(tmp_path):
    models = Models(tmp_path)
    yield models
    models.close()
