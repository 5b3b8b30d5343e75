from __future__ import annotations

import http.client
import json
import shutil
import socket
import struct
import subprocess
from collections.abc import Iterator
from typing import Any

import httpx2
import openai
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton
from tritonclient.utils import InferenceServerException

from genserve.errors import GenserveError
from genserve.server.access.access_control import is_loopback
from genserve.server.api_server import Server
from genserve.settings import ServerSettings
from tests.support.live_server import LiveServer
from tests.support.python_models import write_model

FREE_PORTS = {"http_port": 0, "grpc_port": 0, "metrics_port": 0}
CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
UNLOAD = "/v2/repository/models/one/unload"
INFER = {"inputs": [{"name": "X", "datatype": "FP32", "shape": [1], "data": [1]}]}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    repository = tmp_path_factory.mktemp("repository")
    write_model(repository, "one")
    with LiveServer(repository, model_control_mode="explicit", load_model=("one",)) as live:
        yield live


@pytest.fixture
def untouched(server: LiveServer) -> Iterator[LiveServer]:
    """The server; checks that no request of the test reaches or unloads the model."""
    before = successes(server)
    yield server
    assert successes(server) == before


def successes(server: LiveServer) -> int:
    [model] = server.server.services.repository.served
    return model.statistics.success.count


def status(server: LiveServer, method: str, path: str, body: Any = None, **headers: str) -> int:
    """The status of a request with exactly these headers, and a Host header by default."""
    return exchange(server.url, method, path, body, **headers)[0]


def exchange(url: str, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, str]:
    connection = http.client.HTTPConnection(url.rpartition("/")[2], timeout=60)
    content = b"" if body is None else json.dumps(body).encode()
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    connection.putrequest(method, path, skip_host="host" in headers, skip_accept_encoding=True)
    for name, value in {"content-length": str(len(content)), **named}.items():
        connection.putheader(name, value)
    connection.endheaders(content)
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer.status, text


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "evil.example:8000",
        "127.0.0.1.evil.example",
        "localhost.evil.example",
        "evil.example#@localhost",
        "[x]:1",
        "",
    ],
)
def test_an_unknown_host_name_is_rejected(untouched, host):
    for path in ("/v2/models/one/infer", UNLOAD, "/v1/chat/completions", "/generate"):
        rejected = status(untouched, "POST", path, INFER, host=host, content_type="application/json")
        assert rejected == (400 if "#" in host else 403)  # not a name at all
    for path in ("/v2/health/live", "/metrics", "/docs", "/nowhere"):
        assert status(untouched, "GET", path, host=host) == (400 if "#" in host else 403)


@pytest.mark.parametrize(
    "host",
    ["localhost", "LOCALHOST:8000", "app.localhost", "localhost.", "127.0.0.1:1", "[::1]:8000", "10.1.2.3"],
)
def test_localhost_and_addresses_are_accepted_as_host(server, host):
    assert status(server, "POST", "/v2/models/one/infer", INFER, host=host) == 200


def test_a_host_name_is_allowed_by_name_or_pattern(tmp_path):
    write_model(tmp_path, "one")
    with LiveServer(tmp_path, allowed_hosts=("models.example", "*.Test")) as server:
        for name in ("models.example:80", "a.b.test"):
            assert status(server, "GET", "/v2", host=name) == 200
        assert status(server, "GET", "/v2", host="other.example") == 403
        assert status(server, "GET", "/v2", host="localhost") == 200
    with LiveServer(tmp_path, allowed_hosts=("*",)) as server:
        assert status(server, "GET", "/v2", host="any.example") == 200


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "http://evil.example"},
        {"origin": "null"},
        {"origin": "http://localhost:3000"},
        {"sec_fetch_site": "cross-site"},
        {"sec_fetch_site": "same-site", "origin": "http://localhost:3000"},
        {"sec_fetch_site": "cross-site", "sec_fetch_mode": "navigate", "sec_fetch_dest": "document"},
    ],
)
def test_a_page_of_another_origin_is_rejected(untouched, headers):
    for path in ("/v2/models/one/infer", UNLOAD, "/v1/chat/completions", "/generate", "/v2/logging"):
        assert status(untouched, "POST", path, INFER, content_type="application/json", **headers) == 403


def test_own_pages_and_links_from_elsewhere_are_accepted(server):
    origin = server.url
    assert status(server, "POST", "/v2/models/one/infer", INFER, origin=origin) == 200
    own = {"origin": origin, "sec_fetch_site": "same-origin", "sec_fetch_mode": "cors"}
    assert status(server, "POST", "/v2/models/one/infer", INFER, **own) == 200
    link = {"sec_fetch_site": "cross-site", "sec_fetch_mode": "navigate", "sec_fetch_dest": "document"}
    assert status(server, "GET", "/docs", **link) == 200
    assert status(server, "GET", "/docs", **{**link, "sec_fetch_dest": "iframe"}) == 403
    assert status(server, "GET", "/docs", sec_fetch_site="cross-site", sec_fetch_mode="no-cors") == 403


def test_an_allowed_origin_can_send_and_read(tmp_path):
    write_model(tmp_path, "one")
    with LiveServer(tmp_path, allowed_origins=("https://app.example",)) as server:
        page = {"Origin": "https://app.example", "Sec-Fetch-Site": "cross-site"}
        answer = httpx2.post(f"{server.url}/v2/models/one/infer", json=INFER, headers=page)
        assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, page["Origin"])
        preflight = {**page, "Access-Control-Request-Method": "POST"}
        assert httpx2.options(f"{server.url}/v1/chat/completions", headers=preflight).status_code == 200
        other = {**page, "Origin": "https://other.example"}
        answer = httpx2.post(f"{server.url}/v2/models/one/infer", json=INFER, headers=other)
        assert (answer.status_code, "access-control-allow-origin" in answer.headers) == (403, False)


CLIENT_HEADERS = (
    "authorization", "content-type", "x-api-key", "anthropic-version", "x-request-id", "traceparent",
    "anthropic-dangerous-direct-browser-access", "openai-organization", "x-stainless-retry-count",
)  # fmt: skip


def test_a_page_of_an_allowed_origin_calls_every_dialect_with_a_key(tiny_repository):
    """As browsers do: the preflight has no key and names the headers; then the page may read the answer."""
    with LiveServer(tiny_repository, allowed_origins=("https://App.example",), api_key="key") as server:
        page = {"Origin": "https://app.example", "Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "cors"}
        asked = {"Access-Control-Request-Method": "POST"}
        asked["Access-Control-Request-Headers"] = ",".join(CLIENT_HEADERS)
        with httpx2.Client(base_url=server.url, headers=page) as client:
            for path in ("/v1/chat/completions", "/generate_stream", "/v2/models/tiny/infer"):
                preflight = client.options(path, headers=asked)
                allowed = {
                    name.removeprefix("access-control-allow-"): value
                    for name, value in preflight.headers.items()
                }
                assert (preflight.status_code, allowed["origin"]) == (200, page["Origin"])
                assert "POST" in allowed["methods"]
                assert {name.strip() for name in allowed["headers"].split(",")} >= set(CLIENT_HEADERS)
            body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2, "stream": True}
            for headers, status_code in (({"Authorization": "Bearer key"}, 200), ({}, 401)):
                answer = client.post("/v1/chat/completions", json=body, headers=headers)
                assert answer.status_code == status_code
                assert answer.headers["access-control-allow-origin"] == page["Origin"]
                assert answer.headers["access-control-expose-headers"] == "*"


def test_without_the_flag_no_page_of_another_origin_is_allowed(untouched):
    asked = {"Origin": "https://app.example", "Access-Control-Request-Method": "POST"}
    answer = httpx2.options(f"{untouched.url}/v1/chat/completions", headers=asked)
    assert answer.status_code == 403
    assert not [name for name in answer.headers if name.startswith("access-control-")]


@pytest.mark.parametrize(
    "content_type",
    [
        "text/plain",
        "Text/Plain;charset=UTF-8",
        "application/x-www-form-urlencoded",
        "multipart/form-data; boundary=x",
    ],
)
def test_content_types_of_forms_are_rejected(untouched, content_type):
    for path in ("/v2/models/one/infer", UNLOAD, "/v2/repository/index", "/v2/logging", "/generate"):
        code, text = exchange(untouched.url, "POST", path, INFER, content_type=content_type)
        assert code == 415
        assert "application/json" in json.loads(text)["remedy"]


def test_curl_works_as_in_tritons_documentation(server):
    def curl(*arguments: str) -> str:
        command = ["curl", "-s", "-w", "%{http_code}", *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    if shutil.which("curl") is None:
        pytest.skip("there is no curl")
    assert curl("-X", "POST", f"{server.url}/v2/models/one/infer", "-d", json.dumps(INFER)).endswith("200")
    assert curl("-X", "POST", f"{server.url}/v2/repository/index").endswith("200")


def test_a_body_that_curl_declares_as_a_form_is_read_as_json_in_every_dialect(tiny_server):
    """As in the examples of Ollama's documentation."""
    headers = {"content-type": "application/x-www-form-urlencoded", "user-agent": "curl/8.14.1"}
    bodies = {
        "/api/generate": {"model": "tiny", "prompt": "a", "options": {"num_predict": 1}},
        "/v1/completions": {"prompt": "a", "max_tokens": 1},
        "/tokenize": {"content": "a"},
    }
    for path, body in bodies.items():
        answer = httpx2.post(tiny_server.url + path, content=json.dumps(body), headers=headers)
        assert answer.status_code == 200, answer.text
    rejected = httpx2.post(tiny_server.url + path, content="{", headers=headers).json()["error"]
    assert rejected["code"] == "invalid_request"


def test_tritons_cpp_client_may_declare_a_form(server):
    form = {"content_type": "application/x-www-form-urlencoded"}
    index = "/v2/repository/index"
    assert status(server, "POST", index, {}, user_agent="libcurl-agent/1.0", **form) == 200
    assert status(server, "POST", index, {}, user_agent="Mozilla/5.0 curl/8", **form) == 415


def test_the_usual_clients_are_accepted(tiny_server):
    url = tiny_server.url
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none") as client:
        assert client.chat.completions.create(model="tiny", **CHAT).choices
    client = triton.InferenceServerClient(url.removeprefix("http://"))
    assert client.is_server_ready()
    assert client.get_model_repository_index()
    client.close()


def test_a_text_request_needs_no_content_type_as_litellm_sends_to_ollama(tiny_server):
    for path in ("/v1/chat/completions", "/api/chat"):
        content = json.dumps({"model": "tiny", "stream": False, **CHAT})
        answer = httpx2.post(tiny_server.url + path, content=content)
        assert "content-type" not in answer.request.headers
        assert answer.status_code == 200, answer.text


def test_each_dialect_has_its_own_error_body_for_a_rejection(tiny_repository):
    with LiveServer(tiny_repository, api_key="secret") as server:
        paths = ("/v1/completions", "/v1/messages", "/generate", "/v2/logging")
        answers = {path: httpx2.post(server.url + path, json={}) for path in paths}
    assert {answer.status_code for answer in answers.values()} == {401}
    assert {answer.headers["www-authenticate"] for answer in answers.values()} == {"Bearer"}
    text = answers["/v2/logging"].json()["error"]
    openai_error = answers["/v1/completions"].json()["error"]
    shown = f"{text}; {openai_error['remedy']}"
    assert (openai_error["message"], openai_error["type"]) == (shown, "authentication_error")
    anthropic_error = answers["/v1/messages"].json()["error"]
    assert (anthropic_error["message"], anthropic_error["type"]) == (text, "authentication_error")
    assert answers["/generate"].json()["error"] == text
    assert answers["/generate"].json()["code"] == "unauthenticated"
    assert answers["/v1/completions"].headers["x-request-id"]


@pytest.mark.parametrize(
    ("settings", "flag"),
    [
        ({"host": "0.0.0.0"}, "--host"),
        ({"host": ""}, "--host"),
        ({"host": "::"}, "--host"),
        ({"grpc_host": "0.0.0.0"}, "--grpc-address"),
        ({"metrics_host": "192.0.2.7"}, "--metrics-address"),
    ],
)
def test_a_public_address_needs_a_key_or_allow_unauthenticated(tmp_path, settings, flag):
    write_model(tmp_path, "one")
    with pytest.raises(GenserveError, match=flag) as caught:
        Server(ServerSettings(model_repository=(tmp_path,), **FREE_PORTS, **settings))
    assert "GENSERVE_API_KEY" in caught.value.remedy
    assert "--allow-unauthenticated" in caught.value.remedy
    for decided in ({"api_key": "secret"}, {"allow_unauthenticated": True}):
        Server(ServerSettings(model_repository=(tmp_path,), **FREE_PORTS, **settings, **decided))


def test_without_a_key_host_names_are_checked_on_public_addresses_too(tmp_path):
    write_model(tmp_path, "one")
    public: dict[str, Any] = {"host": "0.0.0.0"}
    with LiveServer(tmp_path, allow_unauthenticated=True, **public) as server:
        url = server.url.replace("0.0.0.0", "127.0.0.1")
        assert exchange(url, "GET", "/v2", host="evil.example")[0] == 403
    with LiveServer(tmp_path, api_key="secret", **public) as server:
        url = server.url.replace("0.0.0.0", "127.0.0.1")
        known = {"host": "models.example", "authorization": "Bearer secret"}
        assert exchange(url, "GET", "/v2", **known)[0] == 200


def test_single_label_names_are_accepted_on_public_addresses(tmp_path, server):
    write_model(tmp_path, "one")
    with LiveServer(tmp_path, allow_unauthenticated=True, host="0.0.0.0") as public:
        url = public.url.replace("0.0.0.0", "127.0.0.1")
        assert exchange(url, "GET", "/v2", host="genserve:8000")[0] == 200
    assert status(server, "GET", "/v2", host="genserve:8000") == 403


def test_an_unauthenticated_metrics_port_accepts_any_host_name(tmp_path):
    write_model(tmp_path, "one")
    settings = {"api_key": "secret", "allowed_hosts": ("api.example",), "allow_unauthenticated_metrics": True}
    with LiveServer(tmp_path, host="0.0.0.0", **settings) as public:
        metrics = public.info.metrics_url.replace("0.0.0.0", "127.0.0.1").removesuffix("/metrics")
        assert exchange(metrics, "GET", "/metrics", host="genserve.monitoring.svc:8002")[0] == 200


def test_a_key_in_any_of_its_headers_and_default_ports_are_accepted(tmp_path):
    write_model(tmp_path, "one")
    with LiveServer(tmp_path, api_key="secret") as server:
        assert status(server, "GET", "/v2", authorization="bearer secret") == 200
        assert status(server, "GET", "/v2", authorization="bearer Secret") == 401
        assert status(server, "GET", "/v2", **{"x-api-key": "secret"}) == 200
        assert status(server, "GET", "/v2", **{"x-goog-api-key": "secret"}) == 200
        assert status(server, "GET", "/v2", **{"x-goog-api-key": "Secret"}) == 401
        assert status(server, "GET", "/v2", **{"x-api-key": "Secret", "authorization": ""}) == 401
        key = {"authorization": "Bearer secret"}
        assert status(server, "GET", "/v2", origin="http://localhost", host="localhost:80", **key) == 200
        assert status(server, "GET", "/v2", origin="http://localhost:81", host="localhost:80", **key) == 403


@pytest.mark.parametrize(
    "settings",
    [
        {"allowed_hosts": ("a.example:8000",)},
        {"allowed_hosts": ("http://a.example",)},
        {"allowed_origins": ("a.example",)},
        {"allowed_origins": ("https://a.example/",)},
    ],
)
def test_an_impossible_host_name_or_origin_ends_startup(tmp_path, settings):
    write_model(tmp_path, "one")
    with pytest.raises(GenserveError, match="--allowed-") as caught:
        Server(ServerSettings(model_repository=(tmp_path,), **FREE_PORTS, **settings))
    assert caught.value.remedy


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1", True),
        ("127.8.9.1", True),
        ("::1", True),
        ("::ffff:127.0.0.1", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("::", False),
        ("10.0.0.1", False),
        ("", False),
    ],
)
def test_only_addresses_of_this_machine_are_loopback(host, expected):
    assert is_loopback(host) is expected


def test_the_metrics_port_needs_the_key_unless_it_is_unauthenticated(tmp_path):
    write_model(tmp_path, "one")
    key = {"Authorization": "Bearer secret"}
    with LiveServer(tmp_path, api_key="secret") as server:
        assert httpx2.get(server.info.metrics_url).status_code == 401
        assert "nv_inference" in httpx2.get(server.info.metrics_url, headers=key).text
        assert status(server, "GET", "/metrics") == 401
    with LiveServer(tmp_path, api_key="secret", allow_unauthenticated_metrics=True) as server:
        assert "nv_inference" in httpx2.get(server.info.metrics_url).text
        assert status(server, "GET", "/metrics") == 401


def test_the_metrics_port_logs_rejections_and_not_disconnects(server, caplog, capfd):
    url = server.info.metrics_url.removesuffix("/metrics")
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as client:
        client.sendall(b"GET /metr")
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # a reset
    assert exchange(url, "HEAD", "/metrics") == (200, "")
    assert exchange(url, "GET", "/metrics", host="evil.example")[0] == 403
    assert "GET /metrics was rejected: forbidden" in caplog.text
    assert "Traceback" not in capfd.readouterr().err + caplog.text


def test_the_metrics_port_rejects_web_pages(server):
    url = server.info.metrics_url.removesuffix("/metrics")
    assert exchange(url, "GET", "/metrics")[0] == 200
    assert exchange(url, "GET", "/metrics", host="evil.example")[0] == 403
    assert exchange(url, "GET", "/metrics", origin="http://evil.example")[0] == 403


PLANT = """
from pathlib import Path
Path({marker!r}).touch()
class TritonPythonModel:
    def execute(self, requests): return []
"""


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_uploaded_code_runs_only_with_allow_uploaded_code(tmp_path, protocol):
    repository, marker = tmp_path / "repository", tmp_path / "planted"
    write_model(repository, "one")
    source = PLANT.format(marker=str(marker)).encode()
    files = {"file:1/model.py": source}
    settings = {"model_control_mode": "explicit"}
    with LiveServer(repository, **settings) as server, connect(server, protocol) as client:
        for config in ('{"backend": "python"}', "{}", '{"name": "evil", "max_batch_size": 0}'):
            with pytest.raises(InferenceServerException, match="backend 'python'") as caught:
                client.load_model("evil", config=config, files=files)
            assert caught.value.status() == ("501" if protocol == "http" else "StatusCode.UNIMPLEMENTED")
        assert not client.is_model_ready("evil")
    assert not marker.exists()
    with LiveServer(repository, allow_uploaded_code=True, **settings) as server:
        with connect(server, protocol) as client:
            client.load_model("evil", config='{"backend": "python"}', files=files)
        assert marker.exists()


def connect(server: LiveServer, protocol: str) -> Any:
    """One of Triton's clients."""
    if protocol == "http":
        return triton.InferenceServerClient(server.url.removeprefix("http://"))
    return triton_grpc.InferenceServerClient(server.grpc_url)


def test_an_uploaded_config_cannot_name_a_library_of_an_accelerator(server):
    options = {"precision_mode": "FP16", "trt_extra_plugin_lib_paths": "/tmp/evil.so"}
    accelerator = {"name": "tensorrt", "parameters": options}
    config = {
        "backend": "python",
        "input": [{"name": "X", "data_type": "TYPE_FP32", "dims": [-1]}],
        "output": [{"name": "Y", "data_type": "TYPE_FP32", "dims": [-1]}],
        "optimization": {"execution_accelerators": {"gpu_execution_accelerator": [accelerator]}},
    }
    with connect(server, "http") as client:
        with pytest.raises(InferenceServerException, match="trt_extra_plugin_lib_paths"):
            client.load_model("one", config=json.dumps(config))
        del options["trt_extra_plugin_lib_paths"]
        client.load_model("one", config=json.dumps(config))


@pytest.mark.parametrize(
    ("config", "backend"),
    [
        ('{"backend": "pytorch"}', "pytorch"),
        ('{"platform": "tensorflow_savedmodel"}', "tensorflow"),
        ("{}", "pytorch"),
    ],
)
def test_torchscript_and_saved_models_are_code_too(tmp_path, config, backend):
    write_model(tmp_path, "one")
    with (
        LiveServer(tmp_path, model_control_mode="explicit") as server,
        connect(server, "http") as client,
        pytest.raises(InferenceServerException, match=f"backend '{backend}'") as caught,
    ):
        client.load_model("evil", config=config, files={"file:1/model.pt": b"PK"})
    assert caught.value.status() == "501"
