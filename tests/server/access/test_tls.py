from __future__ import annotations

import logging
import ssl
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import grpc
import httpx2
import openai
import pytest
import tritonclient.grpc as triton
import trustme
from cryptography.hazmat.primitives import serialization
from grpc_health.v1 import health_pb2, health_pb2_grpc

from genserve import Client
from genserve.errors import GenserveError, InvalidRequest, Unreachable
from genserve.server.access import watched_files
from genserve.server.access.tls import TlsFiles
from genserve.server.api_server import Server
from genserve.settings import ServerSettings
from tests.support.command_line import invoke
from tests.support.live_server import LiveServer, wait_until


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificates:
    """Files in PEM format."""

    authority: Path
    server: Path            # certificate alone
    server_key: Path
    client: Path            # certificate and key


@pytest.fixture(scope="module")
def pem(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    folder = tmp_path_factory.mktemp("certificates")
    authority = trustme.CA()
    of_server = authority.issue_cert("127.0.0.1", "localhost")
    of_client = authority.issue_cert("client@example.com")
    files = Certificates(
        authority=folder / "ca.pem",
        server=folder / "server.pem",
        server_key=folder / "server.key",
        client=folder / "client.pem",
    )
    authority.cert_pem.write_to_path(files.authority)
    of_server.cert_chain_pems[0].write_to_path(files.server)
    of_server.private_key_pem.write_to_path(files.server_key)
    of_client.private_key_and_cert_chain_pem.write_to_path(files.client)
    return files


@pytest.fixture(scope="module")
def server(tiny_repository: Path, pem: Certificates) -> Iterator[LiveServer]:
    with LiveServer(tiny_repository, ssl_certfile=pem.server, ssl_keyfile=pem.server_key) as live:
        yield live


@pytest.fixture
def trusting(pem: Certificates) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=pem.authority)


def test_http_with_tls_rejects_plain_text(server, trusting):
    assert server.url.startswith("https://")
    with httpx2.Client(base_url=server.url, verify=trusting) as http:
        assert http.get("/health").json() == {"status": "ok"}
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", http_client=http) as client:
            assert client.models.list().data
    with pytest.raises(httpx2.HTTPError):
        httpx2.get(server.url.replace("https:", "http:"))


def test_our_client_trusts_the_authorities_of_the_environment(server, pem, monkeypatch):
    monkeypatch.setenv("SSL_CERT_FILE", str(pem.authority))
    with Client(server.url) as client:
        assert client.generate("hi", max_tokens=2).text


@pytest.mark.parametrize("words", ["models", "chat tiny hi", "generate hi --max-tokens 2", "bench"])
def test_the_command_line_names_an_untrusted_certificate_and_takes_its_authority(server, pem, words):
    result = invoke([*words.split(), "--url", server.url])
    assert result.exit_code == 1
    assert f"the certificate of {server.url}" in result.error
    assert "is not trusted: unable to get local issuer certificate" in result.error
    assert "--ca FILE" in result.error
    if words == "bench":
        return      # measures for seconds; `tests/bench` does so over TLS
    for trust in (["--ca", str(pem.authority)], ["--insecure"]):
        assert invoke([*words.split(), "--url", server.url, *trust]).exit_code == 0


def test_a_client_says_what_is_wrong_with_tls(server, trusting, tiny_server):
    with Client(server.url, verify=trusting) as client:
        assert client.models()
    other_name = server.url.replace("127.0.0.1", "127.1")
    plain = tiny_server.url.replace("http:", "https:")
    without = server.url.replace("https:", "http:")
    wrong = ((other_name, "Hostname mismatch"), (plain, "does not speak TLS"), (without, "needs https://"))
    for url, words in wrong:
        with Client(url, verify=trusting) as client, pytest.raises(Unreachable, match=words):
            client.models()


def test_a_slow_tls_handshake_does_not_block_the_metrics_port(server, trusting):
    import socket

    host, port = server.info.metrics_url.split("/")[2].split(":")
    with socket.create_connection((host, int(port))):  # never shakes hands
        assert "genserve_" in httpx2.get(server.info.metrics_url, verify=trusting).text


def test_grpc_speaks_tls(server, pem):
    with triton.InferenceServerClient(
        server.grpc_url, ssl=True, root_certificates=str(pem.authority)
    ) as client:
        assert client.is_server_live()
    with grpc.insecure_channel(server.grpc_url) as channel, pytest.raises(grpc.RpcError):
        health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=5)


def test_with_client_authorities_only_clients_with_a_certificate_connect(tiny_repository, pem, trusting):
    settings = {"ssl_certfile": pem.server, "ssl_keyfile": pem.server_key, "ssl_ca_certs": pem.authority}
    with LiveServer(tiny_repository, **settings) as server:
        for url in (f"{server.url}/health", server.info.metrics_url):
            with pytest.raises(httpx2.HTTPError):
                httpx2.get(url, verify=trusting)
        with_certificate = ssl.create_default_context(cafile=pem.authority)
        with_certificate.load_cert_chain(pem.client)
        for url in (f"{server.url}/health", server.info.metrics_url):
            assert httpx2.get(url, verify=with_certificate).status_code == 200
        roots = pem.authority.read_bytes()
        both = pem.client.read_bytes()
        for credentials, is_let_in in (
            (grpc.ssl_channel_credentials(roots), False),
            (grpc.ssl_channel_credentials(roots, both, both), True),
        ):
            with grpc.secure_channel(server.grpc_url, credentials) as channel:
                call = health_pb2_grpc.HealthStub(channel).Check.with_call
                if is_let_in:
                    assert call(health_pb2.HealthCheckRequest(), timeout=20)[0].status
                else:
                    with pytest.raises(grpc.RpcError):
                        call(health_pb2.HealthCheckRequest(), timeout=5)


def test_the_sdk_and_the_command_line_show_a_client_certificate(tiny_repository, pem, tmp_path, monkeypatch):
    settings = {"ssl_certfile": pem.server, "ssl_keyfile": pem.server_key, "ssl_ca_certs": pem.authority}
    monkeypatch.setenv("SSL_CERT_FILE", str(pem.authority))
    with LiveServer(tiny_repository, **settings) as server:
        with Client(server.url, max_retries=0) as client, pytest.raises(Unreachable):
            client.models()
        monkeypatch.setenv("GENSERVE_CLIENT_CERT", str(pem.client))
        with Client(server.url) as client:
            assert client.models()
        (tmp_path / "in.jsonl").write_text('{"prompt": "hi", "max_tokens": 1}\n')
        command = [sys.executable, "-m", "genserve", "generate", f"--url={server.url}"]
        command += [f"--input={tmp_path}/in.jsonl", f"--output={tmp_path}/out.jsonl"]
        subprocess.run(command, check=True, capture_output=True)
        assert '"text"' in (tmp_path / "out.jsonl").read_text()
    monkeypatch.setenv("GENSERVE_CLIENT_CERT", str(pem.server_key))
    with pytest.raises(InvalidRequest, match="GENSERVE_CLIENT_CERT"):
        Client(server.url)


def test_an_encrypted_key_is_rejected_without_a_prompt(tiny_repository, pem, tmp_path):
    key = serialization.load_pem_private_key(pem.server_key.read_bytes(), password=None)
    encrypted = tmp_path / "encrypted.key"
    encrypted.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(b"word"),
        )
    )
    settings = {"ssl_certfile": pem.server, "ssl_keyfile": encrypted}
    with pytest.raises(GenserveError) as caught:
        Server(ServerSettings(model_repository=(tiny_repository,), **settings))
    assert "openssl pkey" in caught.value.remedy


def test_client_certificates_are_enough_for_a_public_address(tiny_repository, pem):
    settings = {"ssl_certfile": pem.server, "ssl_keyfile": pem.server_key, "ssl_ca_certs": pem.authority}
    Server(ServerSettings(model_repository=(tiny_repository,), host="0.0.0.0", **settings))


def test_unusable_certificate_files_are_named_at_startup(tiny_repository, pem, tmp_path):
    (tmp_path / "text.pem").write_text("hello")
    none, text, key = tmp_path / "none.pem", tmp_path / "text.pem", pem.server_key
    pair = {"ssl_certfile": pem.server, "ssl_keyfile": key}
    for settings, named in (
        ({"ssl_certfile": none}, str(none)),
        ({"ssl_certfile": text}, str(text)),
        ({"ssl_certfile": pem.server, "ssl_keyfile": pem.client}, f"{pem.server} and {pem.client}"),
        ({"ssl_certfile": pem.server}, str(pem.server)),    # without a key
        (pair | {"ssl_ca_certs": text}, f"--ssl-ca-certs in {text}"),
        ({"ssl_keyfile": key}, "--ssl-certfile"),
    ):
        with pytest.raises(GenserveError) as caught:
            Server(ServerSettings(model_repository=(tiny_repository,), **settings))
        assert named in caught.value.message
        assert "None" not in caught.value.message
        assert caught.value.remedy


@dataclass(frozen=True, slots=True, kw_only=True)
class Issued:
    """An authority, and what it has issued."""

    authority: trustme.CA
    server: trustme.LeafCert
    client: trustme.LeafCert

    @classmethod
    def new(cls) -> Issued:
        authority = trustme.CA()
        return cls(
            authority=authority,
            server=authority.issue_cert("127.0.0.1", "localhost"),
            client=authority.issue_cert("client@example.com"),
        )

    def write(self, folder: Path) -> dict[str, Path]:
        """Write the files of a server that accepts this authority's clients; return its settings."""
        files = {name: folder / f"{name}.pem" for name in ("ssl_certfile", "ssl_keyfile", "ssl_ca_certs")}
        # As administrators replace them: one after the other, each by a rename.
        contents = (self.server.cert_chain_pems[0], self.server.private_key_pem, self.authority.cert_pem)
        for file, content in zip(files.values(), contents, strict=True):
            content.write_to_path(folder / "new")
            (folder / "new").replace(file)
        return files

    def context(self, *, client: Issued | None = None) -> ssl.SSLContext:
        """Return the context of a client that trusts this authority, with its own or another certificate."""
        context = ssl.create_default_context()
        self.authority.configure_trust(context)
        (client or self).client.configure_cert(context)
        return context

    def channel(self, address: str, *, client: Issued | None = None) -> grpc.Channel:
        issued = (client or self).client
        pem = issued.private_key_and_cert_chain_pem.bytes()
        roots = self.authority.cert_pem.bytes()
        return grpc.secure_channel(address, grpc.ssl_channel_credentials(roots, pem, pem))


def reaches(url: str, context: ssl.SSLContext) -> bool:
    try:
        return httpx2.get(url, verify=context).status_code == 200
    except httpx2.HTTPError:
        return False


def serves(channel: grpc.Channel) -> bool:
    call = health_pb2_grpc.HealthStub(channel).Check
    try:
        return bool(call(health_pb2.HealthCheckRequest(), timeout=5).status)
    except grpc.RpcError:
        return False


def test_replaced_files_hold_for_new_connections_on_all_ports_and_close_none(
    tiny_repository, tmp_path, monkeypatch, caplog
):
    monkeypatch.setattr(watched_files, "_INTERVAL_S", 0.02)
    caplog.set_level(logging.INFO)
    old, new = Issued.new(), Issued.new()
    body = {"prompt": "hi", "max_tokens": 40, "ignore_eos": True, "stream": True}
    with (
        LiveServer(tiny_repository, **old.write(tmp_path)) as server,
        httpx2.Client(base_url=server.url, verify=old.context()) as http,
        old.channel(server.grpc_url) as channel,
    ):
        urls = (f"{server.url}/health", server.info.metrics_url)
        assert serves(channel)
        with http.stream("POST", "/v1/completions", json=body) as stream:
            chunks = stream.iter_bytes()
            received = next(chunks)
            new.write(tmp_path)
            wait_until(lambda: reaches(urls[0], new.context()))
            received += b"".join(chunks)
        assert received.endswith(b"data: [DONE]\n\n")
        assert http.get("/health").status_code == 200       # on the connection from before
        assert serves(channel)
        assert all(reaches(url, new.context()) for url in urls)
        assert not any(reaches(url, old.context()) for url in urls)
        assert not any(reaches(url, new.context(client=old)) for url in urls)
        for client, is_let_in in ((new, True), (old, False)):
            with new.channel(server.grpc_url, client=client) as later:
                assert serves(later) == is_let_in
        (tmp_path / "ssl_keyfile.pem").write_text("broken")
        wait_until(lambda: "TLS is unchanged: the certificate and key in" in caplog.text)
        assert all(reaches(url, new.context()) for url in urls)
        with new.channel(server.grpc_url) as later:
            assert serves(later)


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3], ids=str)
def test_a_session_from_before_does_not_let_a_client_in(tmp_path, version):
    """A resumed session would skip the check of the client's certificate."""
    old, new = Issued.new(), Issued.new()
    files = old.write(tmp_path)
    tls = TlsFiles(files["ssl_certfile"], key=files["ssl_keyfile"], authorities=files["ssl_ca_certs"])
    context = old.context()
    new.authority.configure_trust(context)
    context.maximum_version = version
    first = Handshake(tls, context)
    assert first.complete()
    again = Handshake(tls, context, session=first.client.session)
    assert again.complete()
    assert again.client.session_reused
    new.write(tmp_path)
    tls.reload()
    later = Handshake(tls, context, session=first.client.session)
    assert not later.complete()
    assert not later.client.session_reused


class Handshake:
    """A client and a server in memory."""

    def __init__(self, tls: TlsFiles, context: ssl.SSLContext, *, session: ssl.SSLSession | None = None):
        up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
        self.server = tls.context.wrap_bio(up, down, server_side=True)
        self.client = context.wrap_bio(down, up, server_hostname="127.0.0.1", session=session)

    def complete(self) -> bool:
        """Exchange what is needed for a first word of the server, with the session; False: it fails."""
        try:
            for _ in range(4):
                for side in (self.client, self.server):
                    with suppress(ssl.SSLWantReadError):
                        side.do_handshake()
            self.server.write(b"x")
            return self.client.read(1) == b"x"
        except ssl.SSLError:
            return False
