from __future__ import annotations

from pathlib import Path

import tritonclient.grpc as triton

from tests.support.live_server import LiveServer
from tests.support.python_models import write_model


def test_a_model_is_loaded_from_the_files_of_the_request(tmp_path: Path) -> None:
    folder = write_model(tmp_path, "one")
    source = (folder / "1" / "model.py").read_bytes()
    with (
        LiveServer(tmp_path, model_control_mode="explicit", allow_uploaded_code=True) as server,
        triton.InferenceServerClient(server.grpc_url) as client,
    ):
        client.load_model("fresh", config='{"backend": "python"}', files={"file:1/model.py": source})
        assert client.is_model_ready("fresh")
