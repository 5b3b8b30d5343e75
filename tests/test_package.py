from __future__ import annotations

import genserve


def test_every_public_name_is_there_and_is_offered_to_whoever_completes_it() -> None:
    assert dir(genserve) == sorted(genserve.__all__)
    assert all(getattr(genserve, name) is not None for name in genserve.__all__)
