"""Bad input: one clear error each, the right exit status or HTTP code, and nothing left half started."""

import json
import pathlib
import shutil
import socket
import subprocess
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "support"))
from fleet import BIN, SOURCE, Fleet, main, pieces, script_fleet, words  # noqa: E402


def run(program, *args):
    done = subprocess.run([str(BIN / program), *args], cwd=SOURCE, capture_output=True, text=True, timeout=60)
    return done.returncode, done.stderr.strip()


def configuration_errors_name_the_place():
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "bad.toml"
        path.write_text("[log]\nlevel = \"info\"\n\nbogus = 1\n")
        for program in ("di-router", "di-meta", "di-kvd", "di-prefill", "di-decode"):
            code, error = run(program, "-n", "-f", str(path))
            assert code == 78, (program, code, error)
            assert f"{path}:4:1" in error and "bogus" in error, error
        path.write_text("[log]\nlevel = 3\n")
        code, error = run("di-router", "-n", "-f", str(path))
        assert code == 78 and f"{path}:2:" in error, error
        path.write_text('[kvd]\nrole = "store"\n[store]\ncapacity = "1MiB"\nsegment_bytes = 8388608\n')
        code, error = run("di-kvd", "-n", "-f", str(path))
        assert code == 78 and f"{path}:4:12: store.capacity: " in error, error
        path.write_text("[log\n")
        code, error = run("di-router", "-n", "-f", str(path))
        assert code == 78 and f"{path}:1:" in error, error
    assert run("di-router", "--bogus")[0] == 64
    assert run("di-router", "-n", "extra")[0] == 64
    assert run("di-router", "-n", "-f", "/nonexistent.toml")[0] == 78


def failed_start(*overrides, conf="etc/local"):
    fleet = Fleet(conf, overrides, expect_failure=True)
    try:
        return fleet.up_fails()
    finally:
        fleet.close()


def broken_models_are_refused():
    with tempfile.TemporaryDirectory() as folder:
        model = pathlib.Path(folder) / "model"
        assert str(model) in failed_start(f"di-prefill:model.path={model}")
        shutil.copytree(SOURCE / "etc" / "model-demo", model)
        weights = next(model.glob("*.safetensors"))
        data = weights.read_bytes()
        weights.write_bytes(data[: len(data) // 2])
        error = failed_start(f"di-prefill:model.path={model}")
        assert "safetensors" in error, error
        weights.write_bytes(b"\xff" * 64)
        error = failed_start(f"di-prefill:model.path={model}")
        assert "safetensors" in error, error


def a_port_in_use_is_one_error():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        error = failed_start(f"di-router:http.listen=127.0.0.1:{port}")
        assert str(port) in error, error


def http_errors():
    with script_fleet([{"match": "", "pieces": pieces("ok")}]) as fleet:
        def post(body, headers=None):
            status, head, data = fleet.request("POST", "/v1/chat/completions", body, headers)
            error = json.loads(data)["error"]
            assert head["x-request-id"], head
            assert set(error) == {"message", "type", "param", "code"}, error
            return status, error
        ask = {"model": "demo", "messages": [{"role": "user", "content": "x"}]}
        assert post("{not json")[0] == 400
        status, error = post(json.dumps({**ask, "temperature": "hot"}))
        assert status == 400 and error["param"] == "temperature", error
        status, error = post(json.dumps({**ask, "messages": "hello"}))
        assert status == 400 and error["param"] == "messages", error
        status, error = post(json.dumps({**ask, "n": 2}))
        assert status == 400 and error["param"] == "n", error
        status, error = post(json.dumps({**ask, "model": "other"}))
        assert status == 404 and error["code"] == "model_not_found", error
        status, error = post(json.dumps({**ask, "messages": [{"role": "user", "content": words(20000)}]}))
        assert status == 400 and error["code"] == "context_length_exceeded", error
        status, error = post(json.dumps(ask), {"Content-Type": "application/json"})
        assert status == 401, error
        status, error = post(json.dumps(ask), {"Authorization": "Bearer sk-di-wrong"})
        assert status == 401 and error["code"] == "invalid_api_key", error
        # Unknown fields are ignored, neutral values accepted.
        status, _, data = fleet.request("POST", "/v1/chat/completions", json.dumps(
            {**ask, "unknown_field": 1, "presence_penalty": 0, "logprobs": False, "tools": [], "user": "u"}))
        assert status == 200 and json.loads(data)["choices"][0]["message"]["content"] == "ok", data
        assert fleet.request("GET", "/nothing")[0] == 404
        assert fleet.request("GET", "/v1/chat/completions")[0] == 405
        assert fleet.request("GET", "/health", headers={})[0] == 200
        assert fleet.request("GET", "/health/live", headers={})[0] == 200
        assert fleet.request("GET", "/health/ready", headers={})[0] == 200
        models = json.loads(fleet.request("GET", "/v1/models")[2])
        assert models["data"][0]["id"] == "demo" and models["data"][0]["max_model_len"] == 16384, models
        assert fleet.request("GET", "/v1/models/demo")[0] == 200
        assert fleet.request("GET", "/v1/models/other")[0] == 404
        fleet.await_idle()


def every_route_but_health_needs_a_key():
    with script_fleet([{"match": "", "pieces": pieces("ok")}]) as fleet:
        for method, path in (("POST", "/v1/chat/completions"), ("POST", "/chat/completions"), ("POST", "/v1/completions"),
                             ("POST", "/completions"), ("POST", "/tokenize"), ("POST", "/v1/tokenize"),
                             ("POST", "/detokenize"), ("POST", "/v1/detokenize"), ("GET", "/v1/models"),
                             ("GET", "/models"), ("GET", "/v1/models/demo")):
            status, head, _ = fleet.request(method, path, "{}" if method == "POST" else None, {})
            assert status == 401, (path, status)
            assert head["www-authenticate"].startswith("Bearer"), head


if __name__ == "__main__":
    main([configuration_errors_name_the_place, http_errors, every_route_but_health_needs_a_key, a_port_in_use_is_one_error,
          broken_models_are_refused])
