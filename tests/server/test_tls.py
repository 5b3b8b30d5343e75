from __future__ import annotations

import ssl
from collections.abc import Iterator
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
from genserve.errors import GenserveError
from genserve.server.api_server import Server
from genserve.settings import ServerSettings
from tests.support.live_server import LiveServer


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
    with pytest.raises(GenserveError, match="encrypted"):
        Server(ServerSettings(model_repository=(tiny_repository,), **settings))


def test_client_certificates_are_enough_for_a_public_address(tiny_repository, pem):
    settings = {"ssl_certfile": pem.server, "ssl_keyfile": pem.server_key, "ssl_ca_certs": pem.authority}
    Server(ServerSettings(model_repository=(tiny_repository,), host="0.0.0.0", **settings))


def test_unusable_certificate_files_are_named_at_startup(tiny_repository, pem, tmp_path):
    (tmp_path / "text.pem").write_text("hello")
    cases = [
        {"ssl_certfile": tmp_path / "none.pem"},
        {"ssl_certfile": tmp_path / "text.pem"},
        {"ssl_certfile": pem.server, "ssl_keyfile": pem.client},
        {"ssl_certfile": pem.server},
        {"ssl_certfile": pem.server, "ssl_keyfile": pem.server_key, "ssl_ca_certs": tmp_path / "text.pem"},
        {"ssl_keyfile": pem.server_key},
    ]
    for settings in cases:
        with pytest.raises(GenserveError, match=r"cannot be used|need --ssl-certfile") as caught:
            Server(ServerSettings(model_repository=(tiny_repository,), **settings))
        assert caught.value.remedy
