"""The file of keys: what it may hold, and what happens when it changes."""

from __future__ import annotations

import logging
from hashlib import sha256
from pathlib import Path

import pytest

from genserve.errors import ControlForbidden, GenserveError, Unauthenticated
from genserve.server.access.key_ring import KeyRing
from genserve.settings import ServerSettings

FILE = f"""
[alice]
key = "swordfish-alice"
requests_per_minute = 5

[ops]
sha256 = "{sha256(b"swordfish-ops").hexdigest()}"
control = true
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "keys.toml"
    write(path, FILE)
    return path


def write(path: Path, text: str | bytes, *, mode: int = 0o600) -> None:
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    path.chmod(mode)


def ring(file: Path | None = None, **keys: str) -> KeyRing:
    return KeyRing(ServerSettings(api_key_file=file, **keys))


def name(ring: KeyRing, value: bytes) -> str:
    key = ring.find([value])
    return key.name if key else ""


def test_a_key_is_found_by_its_value_or_its_hash(file):
    keys = ring(file, api_key="main", control_key="root")
    assert keys.is_required
    found = {value: name(keys, value) for value in (b"swordfish-alice", b"swordfish-ops", b"main", b"root")}
    assert list(found.values()) == ["alice", "ops", "GENSERVE_API_KEY", "GENSERVE_CONTROL_KEY"]
    for wrong in (b"", b"swordfish-alic", b"swordfish-alice ", b"alice", sha256(b"swordfish-ops").digest()):
        assert name(keys, wrong) == ""


@pytest.mark.parametrize(
    ("settings", "controlling"),
    [
        ({"api_key": "main"}, {"main"}),
        ({"api_key": "main", "control_key": "root"}, {"root"}),
        ({"control_key": "root"}, {"root"}),
        ({"api_key_file": True}, {"swordfish-ops"}),
        ({"api_key_file": True, "api_key": "main"}, {"swordfish-ops", "main"}),
        ({}, {"", "main", "root", "swordfish-alice", "swordfish-ops"}),
    ],
)
def test_which_keys_control_the_server(file, settings, controlling):
    if settings.get("api_key_file"):
        settings = {**settings, "api_key_file": file}
    keys = KeyRing(ServerSettings(**settings))
    allowed = set()
    for value in ("", "main", "root", "swordfish-alice", "swordfish-ops"):
        try:
            keys.check(keys.find([value.encode()] if value else []), controls=True)
            allowed.add(value)
        except (Unauthenticated, ControlForbidden):
            pass
    assert allowed == controlling


def test_with_a_control_key_alone_other_requests_need_no_key():
    keys = ring(control_key="root")
    keys.check(None, controls=False)
    with pytest.raises(Unauthenticated):
        keys.check(None, controls=True)


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("", None),
        ("[alice", None),
        (b"\xff", None),
        ('alice = "swordfish"', "alice"),
        ("[alice]", "alice.key"),
        ("[alice]\nkey = 5", "alice.key"),
        ('[alice]\nkey = ""', "alice.key"),
        ('[alice]\nkey = "swörd"', "alice.key"),
        ('[alice]\nkey = "swordfish"\nsha256 = "00"', "alice.key"),
        ('[alice]\nsha256 = "swordfish"', "alice.sha256"),
        ('[alice]\nkey = "swordfish"\ncontrol = 1', "alice.control"),
        ('[alice]\nkey = "swordfish"\nrequests_per_minut = 1', "alice.requests_per_minut"),
        ('[alice]\nkey = "swordfish"\nrequests_per_minute = 0', "alice.requests_per_minute"),
        ('[alice]\nkey = "swordfish"\ntokens_per_minute = true', "alice.tokens_per_minute"),
        ('["a b"]\nkey = "swordfish"', "a b"),
        ('["a\\nb"]\nkey = "swordfish"', "a\nb"),
        ('[GENSERVE_API_KEY]\nkey = "swordfish"', "GENSERVE_API_KEY"),
        ('[a]\nkey = "swordfish"\n[b]\nkey = "swordfish"', "b"),
    ],
)
def test_a_wrong_file_is_rejected_and_not_quoted(file, text, field):
    write(file, text)
    with pytest.raises(GenserveError) as caught:
        ring(file)
    assert caught.value.field == field
    assert "sword" not in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def test_a_file_that_others_may_write_is_rejected_and_one_that_they_may_read_is_remarked_on(file, caplog):
    for mode in (0o620, 0o602):
        write(file, FILE, mode=mode)
        with pytest.raises(GenserveError) as caught:
            ring(file)
        assert "chmod 600" in caught.value.remedy
    for mode, text, is_exposed in (
        (0o600, FILE, False),
        (0o640, FILE, False),
        (0o444, FILE, True),
        (0o444, FILE[FILE.index("[ops]") :], False),
    ):
        file.unlink()
        write(file, text, mode=mode)
        caplog.clear()
        ring(file).report()
        assert ("other users can read the API keys" in caplog.text) == is_exposed


def test_a_missing_file_ends_startup(tmp_path):
    with pytest.raises(GenserveError, match=r"none\.toml"):
        ring(tmp_path / "none.toml")


def test_a_changed_file_is_read_again_and_a_broken_one_keeps_the_keys(file, caplog):
    caplog.set_level(logging.INFO)
    keys = ring(file, api_key="main")
    write(file, '[bob]\nkey = "swordfish-bob"')
    keys.reload()
    assert [name(keys, value) for value in (b"swordfish-bob", b"swordfish-alice", b"main")] == [
        "bob", "", "GENSERVE_API_KEY",
    ]  # fmt: skip
    assert "API keys: GENSERVE_API_KEY (control), bob" in caplog.text
    for broken in ("", "[bob", '[bob]\nkey = "swordfish-bob"\nlimit = 5'):
        write(file, broken)
        keys.reload()
        assert name(keys, b"swordfish-bob") == "bob"
        assert "the API keys are unchanged: --api-key-file" in caplog.text
    file.unlink()
    keys.reload()
    assert name(keys, b"swordfish-bob") == "bob"
    assert "sword" not in caplog.text


def test_a_key_is_in_no_repr(file):
    settings = ServerSettings(api_key="swordfish-main", http_restricted_api=("trace:key=swordfish",))
    keys = KeyRing(ServerSettings(api_key_file=file))
    assert "swordfish" not in f"{settings!r} {keys._keys!r}"
