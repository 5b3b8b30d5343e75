from __future__ import annotations

import genserve


def test_every_public_name_exists_and_is_in_dir() -> None:
    assert dir(genserve) == sorted(genserve.__all__)
    assert all(getattr(genserve, name) is not None for name in genserve.__all__)
