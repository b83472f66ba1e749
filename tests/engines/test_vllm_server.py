"""A vLLM server as its client sees it, without vLLM: what is asked, what is refused and how.

tests/engines/test_vllm_pipeline.py talks to a real one.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from conftest import PARAMS, Cli, environment
from hacpo.engines.interface import SamplingParameters, SamplingRequest
from hacpo.engines.vllm import connection, refusals
from hacpo.engines.vllm import server as vllm_server
from hacpo.engines.vllm.server import VllmServer
from hacpo.engines.vllm.servers import HOSTS_VARIABLE, KEY_VARIABLE, Server, server_of, server_url
from hacpo.errors import BusyError, DataError, ModelError, SettingsError
from hacpo.pipeline.execution import serving
from hacpo.settings.engine import EngineSettings

EOS = [1]
SETTINGS = EngineSettings(name="vllm_server", batch_size=3)
PARAMETERS = SamplingParameters(0.7, 50, 0.9, 20, ("\n\n",))


class Stub:
    """As much of vLLM's server as the client talks to. It answers a prompt with its first token, and EOS."""

    def __init__(self) -> None:
        self.url = ""
        self.models = ["ada"]
        self.key: str | None = None
        self.guards = "/v1"
        """Where the key is asked for: vLLM's own rule, or everywhere."""
        self.facts: dict[str, Any] = {
            "ticket": "",
            "dtype": "float32",
            "logprobs_mode": "processed_logprobs",
            "longest": 64,
            "finds": True,
        }
        self.copies = 1
        self.answers: dict[str, tuple[int, Any]] = {}
        """Path -> status and content that are sent whatever is asked."""
        self.sends: dict[str, Callable[[BaseHTTPRequestHandler], None]] = {}
        """Path -> what writes an answer that is none."""
        self.drop = 0
        """Completions whose connection is cut."""
        self.taken_over = False
        """Whether somebody else loads weights during the first completion."""
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.at_once = self.most_at_once = 0
        self.lock = threading.Lock()

    def answer(self, path: str, body: dict[str, Any], key: str) -> tuple[int, Any]:
        if self.key is not None and path.startswith(self.guards) and key != f"Bearer {self.key}":
            return 401, {"error": "Unauthorized"}
        if path in self.answers:
            return self.answers[path]
        if path == "/v1/models":
            return 200, {"data": [{"id": name} for name in self.models]}
        if path == "/server_info?config_format=json":
            return 200, {"vllm_config": {"parallel_config": {"data_parallel_size": self.copies}}}
        if path == "/reset_prefix_cache":
            return 200, {"success": True}
        if path == "/collective_rpc" and body["method"] == "hacpo_facts":
            return 200, {"results": [self.facts]}
        if path == "/collective_rpc":
            self.facts["ticket"] = body["args"][1]
            return 200, {"results": [None]}
        if self.taken_over:
            self.facts["ticket"] = "somebody else's"
        time.sleep(0.02)
        token_ids = [body["prompt"][0], *EOS]
        logprobs = {"token_logprobs": [-0.10000000149011612, -9999.0]}
        return 200, {"choices": [{"token_ids": token_ids, "logprobs": logprobs, "finish_reason": "stop"}]}


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stub]:
    """A server on this machine; `stub.url` is where."""
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")  # must not be asked
    state = Stub()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self.do_POST()

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or b"{}")
            if self.path in state.sends:
                self.close_connection = True
                with contextlib.suppress(OSError):  # nobody listens any more
                    state.sends[self.path](self)
                return
            with state.lock:
                state.asked.append((self.path, body))
                dropped = self.path == vllm_server.COMPLETIONS and state.drop > 0
                state.drop -= dropped
                state.at_once += 1
                state.most_at_once = max(state.most_at_once, state.at_once)
            if dropped:
                self.close_connection = True
                status, content = 0, None
            else:
                status, content = state.answer(self.path, body, self.headers.get("Authorization", ""))
            with state.lock:
                state.at_once -= 1
            if status:
                sent = json.dumps(content).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(sent)))
                self.end_headers()
                with contextlib.suppress(OSError):  # it was too much
                    self.wfile.write(sent)

        def log_message(self, *_: object) -> None:
            pass

    class Server(ThreadingHTTPServer):
        def handle_error(self, *about: Any) -> None:
            if not isinstance(sys.exception(), ConnectionError):  # of a client that has read enough
                super().handle_error(*about)

    with Server(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        state.url = f"http://127.0.0.1:{server.server_address[1]}"
        yield state
        server.shutdown()


def text_of(token_ids: list[int]) -> str:
    """Tokens are characters."""
    return "".join(map(chr, token_ids))


def completion(token_ids: Any, reason: Any = "stop", logprobs: Any = None) -> dict[str, Any]:
    """What the server sends for one prompt; -1 is every token's log-probability."""
    said = [-1.0] * len(token_ids) if logprobs is None else logprobs
    return {"choices": [{"token_ids": token_ids, "logprobs": {"token_logprobs": said}, "finish_reason": reason}]}


def connect(stub: Stub, key: str | None = None, settings: EngineSettings = SETTINGS) -> VllmServer:
    return VllmServer(stub.url, "ada", Path("models/ada"), settings, eos_token_ids=EOS, decode=text_of, key=key)


def test_everything_that_says_how_to_sample_is_sent(stub: Stub) -> None:
    server = connect(stub)
    done: list[tuple[int, int]] = []
    requests = [SamplingRequest([10 + number] * (number + 1), seed=number) for number in range(20)]
    responses = server.sample(requests, PARAMETERS, lambda *progress: done.append(progress))

    assert [response.token_ids for response in responses] == [[10 + number, 1] for number in range(20)]  # in order
    assert responses[0].logprobs.tolist() == [np.float32(-0.1), np.float32(-9999.0)]  # to the bit
    assert responses[0].finish_reason == "stop"
    assert done == [(number, 20) for number in range(1, 21)]
    assert 2 <= stub.most_at_once <= SETTINGS.batch_size
    bodies = {body["seed"]: body for path, body in stub.asked if path == vllm_server.COMPLETIONS}
    assert bodies[19] == {
        "model": "ada",
        "prompt": [29] * 20,
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 20,
        "max_tokens": 44,  # of the server's 64 tokens the prompt takes 20; 50 were asked for
        "seed": 19,
        "stop": ["\n\n"],
        "stop_token_ids": [1],
        "ignore_eos": True,
        "logprobs": 0,
        "return_token_ids": True,
    }
    assert bodies[0]["max_tokens"] == 50


def test_a_folder_is_loaded_and_old_prefixes_are_forgotten(stub: Stub) -> None:
    server = connect(stub)
    server.load(Path("models/bo"))
    loads = [body["args"] for _, body in stub.asked if body.get("method") == "hacpo_load"]
    assert [args[0] for args in loads] == [str(Path(f"models/{name}").resolve()) for name in ("ada", "bo")]
    assert loads[0][1] != loads[1][1]
    assert [path for path, _ in stub.asked].count("/reset_prefix_cache") == 2


def test_every_copy_is_probed(stub: Stub) -> None:
    stub.copies = 2
    stub.answers[vllm_server.COMPLETIONS] = (
        200,
        {"choices": [{"prompt_logprobs": [None, {"7": {"logprob": -1.5}}, {"8": {"logprob": -2.5}, "9": {}}]}]},
    )
    settings = SETTINGS.model_copy(update={"vllm": SETTINGS.vllm.model_copy(update={"data_parallel": 2})})
    found = connect(stub, settings=settings).probe([6, 7, 8])
    assert [each.tolist() for each in found] == [[-1.5, -2.5], [-1.5, -2.5]]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"models": ["bo"]}, "the vLLM server serves bo. Name the server of ada in servers.yaml"),
        ({"key": "secret"}, "the vLLM server wants a key. Name its key_file in servers.yaml"),
        (
            {"answers": {"/server_info?config_format=json": (404, {})}},
            "has no /server_info: vLLM's development mode is off",
        ),
        (
            {"answers": {"/collective_rpc": (500, {"error": "'Worker' object has no attribute 'hacpo_facts'"})}},
            "was started without hacpo's worker extension. Restart `hacpo serve` for ada",
        ),
        ({"answers": {"/reset_prefix_cache": (200, {"success": False})}}, "is at work for somebody else"),
        ({"answers": {"/v1/models": (500, {"error": "out of\nmemory"})}}, "answers /v1/models with 500"),
        ({"finds": False}, "does not find weights in"),
        ({"logprobs_mode": "raw_logprobs"}, "with logprobs_mode raw_logprobs, and the run wants processed_logprobs"),
        ({"dtype": "bfloat16"}, "was started with dtype bfloat16, and the run wants float32"),
        ({"copies": 10**12}, "was started with data_parallel_size 1000000000000, and the run wants 1"),
        ({"copies": 0}, "answers something else than vLLM does: a data_parallel_size of 0. Correct servers.yaml"),
        ({"copies": -1}, "a data_parallel_size of -1"),
        ({"copies": True}, "a data_parallel_size of True"),
        ({"copies": "1"}, "a data_parallel_size of 1"),
    ],
)
def test_a_server_that_cannot_be_used_is_one_line(stub: Stub, change: dict[str, Any], says: str) -> None:
    for name, value in change.items():
        if name in stub.facts:
            stub.facts[name] = value
        else:
            setattr(stub, name, value)
    with pytest.raises(ModelError) as refused:
        connect(stub)
    assert says in str(refused.value)
    assert str(refused.value).startswith(f"{stub.url}: the vLLM server ")
    assert "\n" not in str(refused.value)


def test_a_server_for_shorter_sequences_is_refused_and_one_for_longer_ones_is_not_used_up(
    stub: Stub, tmp_path: Path
) -> None:
    def connected(folder: Path, longest: int | None) -> VllmServer:
        settings = SETTINGS.model_copy(update={"vllm": SETTINGS.vllm.model_copy(update={"max_model_len": longest})})
        return VllmServer(stub.url, "ada", folder, settings, eos_token_ids=EOS, decode=text_of)

    assert connected(tmp_path, 32).longest == 32
    with pytest.raises(ModelError, match="takes at most 64 tokens, and the run wants 65"):
        connected(tmp_path, 65)
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 96}')
    with pytest.raises(ModelError, match="takes at most 64 tokens, and the run wants 96"):
        connected(tmp_path, None)


def test_the_key_of_the_environment_or_of_the_file_that_the_entry_names_goes_with_every_request(
    stub: Stub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stub.key, stub.guards = "secret", "/"
    servers = tmp_path / "servers.yaml"
    servers.write_text(f"ada: {stub.url}")
    monkeypatch.setenv(KEY_VARIABLE, "secret")
    assert connect(stub, server_of(tmp_path, "ada").key).longest == 64

    monkeypatch.setenv(KEY_VARIABLE, "that of another server")
    (tmp_path / ".keys").mkdir()
    (tmp_path / ".keys/ada-8000").write_text("secret\n")
    servers.write_text(f"ada: {{url: '{stub.url}', key_file: .keys/ada-8000}}")
    server = server_of(tmp_path, "ada")
    assert connect(stub, server.key).sample([SamplingRequest([5], 0)], PARAMETERS)[0].token_ids == [5, 1]
    assert "secret" not in repr(server)
    with pytest.raises(ModelError, match="wants another key"):
        connect(stub, "that of yesterday")


@pytest.mark.parametrize(
    ("url", "hosts", "key"),
    [
        ("https://example.com", "", None),
        ("https://example.com", "gpu.example.org, Example.com", "secret"),
        ("https://example.com.evil.org", "example.com", None),
        ("HTTP://LOCALHOST:8000", "", "secret"),
    ],
)
def test_the_key_of_the_environment_goes_only_where_the_environment_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, url: str, hosts: str, key: str | None
) -> None:
    monkeypatch.setenv(KEY_VARIABLE, "secret")
    monkeypatch.setenv(HOSTS_VARIABLE, hosts)
    (tmp_path / "servers.yaml").write_text(f"ada: {url}")
    assert server_of(tmp_path, "ada") == Server(url, key)


@pytest.mark.parametrize("named", [".keys/ada-8000", "mine"])
def test_the_key_of_a_file_goes_only_where_the_environment_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: str
) -> None:
    """servers.yaml may be a stranger's, and `.keys/<agent>-<port>` can be guessed."""
    (tmp_path / ".keys").mkdir()
    (tmp_path / named).write_text("secret\n")
    (tmp_path / "servers.yaml").write_text(f"ada: {{url: 'https://evil.example:443', key_file: {named}}}")
    monkeypatch.delenv(HOSTS_VARIABLE, raising=False)
    with pytest.raises(SettingsError) as refused:
        server_of(tmp_path, "ada")
    assert "its key would go to another machine, which nobody here has named (found evil.example)" in str(refused.value)
    assert "VLLM_API_KEY_HOSTS=evil.example" in str(refused.value)
    assert "secret" not in str(refused.value)
    monkeypatch.setenv(HOSTS_VARIABLE, "evil.example")
    assert server_of(tmp_path, "ada").key == "secret"


@pytest.mark.parametrize("url", ["http://127.0.0.999:8000", "http://127.1.2.3.4:80", "http://127.0.0.256"])
def test_an_address_that_is_none_is_not_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    monkeypatch.setenv(KEY_VARIABLE, "secret")
    (tmp_path / "servers.yaml").write_text(f"ada: {url}")
    assert server_of(tmp_path, "ada") == Server(url, None)


@pytest.mark.parametrize(
    "url", ["http://local\\thost:1", "http://local\\nhost:1", "http://loc alhost:1", "http://lo\\u017fcalhost"]
)
def test_a_url_that_libraries_read_differently_is_refused(tmp_path: Path, url: str) -> None:
    (tmp_path / "servers.yaml").write_text(f'ada: "{url}"')
    with pytest.raises(SettingsError, match="is no URL of a server"):
        server_of(tmp_path, "ada")


def test_certificates_are_checked_however_https_is_spelled(monkeypatch: pytest.MonkeyPatch) -> None:
    """RFC 3986, section 3.1: schemes are case-insensitive."""
    options: list[dict[str, Any]] = []

    class NotedError(Exception):
        pass

    def note(**given: Any) -> None:
        options.append(given)
        raise NotedError

    monkeypatch.setattr(connection.httpx2, "AsyncClient", note)
    for url in ("https://127.0.0.1:1", "HTTPS://127.0.0.1:1", "http://127.0.0.1:1"):
        with pytest.raises(NotedError):
            VllmServer(url, "ada", Path("models/ada"), SETTINGS, eos_token_ids=EOS, decode=text_of, key="secret")
    assert [given["verify"] for given in options] == [True, True, False]


@pytest.mark.parametrize(
    ("named", "says"),
    [
        (".keys/none", "there is no such file, so the server has ended (found .keys/none). Start `hacpo serve "),
        ("../private", "is no file of the pipeline's folder"),
        ("link", "is no file of the pipeline's folder"),
        ("/etc/hostname", "is no file of the pipeline's folder"),
        ("pipe", "cannot be read: not a regular file"),
        ("folder", "cannot be read: Is a directory"),
        ("words", "is no key (expected 1 to 4096 ASCII characters without spaces)"),
        ("5", "is no file of the pipeline's folder"),
    ],
)
def test_a_file_that_is_no_key_is_sent_nowhere(tmp_path: Path, named: str, says: str) -> None:
    folder = tmp_path / "pipeline"
    (folder / "folder").mkdir(parents=True)
    (tmp_path / "private").write_text("hunter2")
    (folder / "link").symlink_to(tmp_path / "private")
    (folder / "words").write_text("two words")
    os.mkfifo(folder / "pipe")
    (folder / "servers.yaml").write_text(f"ada: {{url: https://example.com, key_file: {named}}}")
    with pytest.raises(SettingsError) as refused:
        server_of(folder, "ada")
    assert says in str(refused.value)
    assert "hunter2" not in str(refused.value)
    assert "two words" not in str(refused.value)


def test_serve_issues_a_key_that_its_owner_alone_can_read_and_git_does_not_see(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    with serving.issued_key(tmp_path, "ada", 8000) as (key, file):
        assert file == ".keys/ada-8000"
        assert (tmp_path / file).read_text() == f"{key}\n"
        assert (tmp_path / file).stat().st_mode & 0o777 == 0o600
        assert (tmp_path / ".keys/.gitignore").read_text() == "*\n"
        line = serving.entry_of("ada", "http://127.0.0.1:8000", file)
        assert key not in line
        (tmp_path / "servers.yaml").write_text(line)
        assert server_of(tmp_path, "ada") == Server("http://127.0.0.1:8000", key)
        with serving.issued_key(tmp_path, "ada", 8001) as (other, _):
            assert other != key
        with (
            pytest.raises(BusyError, match="another `hacpo serve` of ada has port 8000"),
            serving.issued_key(tmp_path, "ada", 8000),
        ):
            pass
        assert (tmp_path / file).read_text() == f"{key}\n"
    with serving.issued_key(tmp_path, "ada", 8000) as (_, file):
        (tmp_path / file).write_text("another's\n")
    (tmp_path / file).unlink()
    assert not (tmp_path / ".keys/ada-8000").exists()

    monkeypatch.setenv(KEY_VARIABLE, "mine")
    with serving.issued_key(tmp_path, "ada", 8000) as issued:
        assert issued == ("mine", None)
    monkeypatch.setenv(KEY_VARIABLE, "no key")
    with pytest.raises(SettingsError, match="VLLM_API_KEY: is no key"), serving.issued_key(tmp_path, "ada", 8000):
        pass


def test_servers_of_several_agents_start_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    code = (
        "import sys; from pathlib import Path; from hacpo.pipeline.execution.serving import issued_key\n"
        "print('ready', flush=True); sys.stdin.readline()\n"
        "for turn in range(60):\n"
        "    with issued_key(Path(sys.argv[1]) / str(turn), sys.argv[2], 8000): pass\n"
    )
    servers = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(tmp_path), agent],
            env=environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for agent in ("ada", "bo", "cy")
    ]
    for server in servers:
        assert server.stdout is not None
        assert server.stdout.readline() == "ready\n"
    for server in servers:
        assert server.stdin is not None
        server.stdin.write("go\n")
        server.stdin.flush()
    assert [(server.communicate()[1], server.returncode) for server in servers] == [("", 0)] * 3
    assert {path.read_text() for path in tmp_path.glob("*/.keys/.gitignore")} == {"*\n"}


def test_the_command_that_starts_vllm_holds_no_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY_VARIABLE, "hunter2")
    command = serving.server_command(tmp_path, "ada", SETTINGS, "127.0.0.1", 8000)
    assert command[command.index("--middleware") + 1] == "hacpo.engines.vllm.server_key.KeyRequired"
    assert "hunter2" not in " ".join(command)
    assert "--middleware" not in serving.server_command(tmp_path, "ada", SETTINGS, "::1", 8000, guarded=False)


@pytest.mark.parametrize(
    ("path", "answer"),
    [
        ("/v1/models", {"data": ["ada"]}),
        ("/v1/models", {"data": 5}),
        ("/server_info?config_format=json", {"vllm_config": []}),
        ("/collective_rpc", {"results": []}),
        ("/collective_rpc", {"results": [{"longest": "many"}]}),
    ],
)
def test_other_json_than_vllms_is_refused_in_one_line(stub: Stub, path: str, answer: Any) -> None:
    stub.answers[path] = 200, answer
    with pytest.raises(ModelError, match="answers something else than vLLM does"):
        connect(stub)


def test_nested_and_odd_completions_are_refused_in_one_line(stub: Stub) -> None:
    server = connect(stub)
    for answer in ({"choices": []}, {"choices": [{"logprobs": None, "token_ids": []}]}):
        stub.answers[vllm_server.COMPLETIONS] = 200, answer
        with pytest.raises(ModelError, match="answers something else than vLLM does"):
            server.sample([SamplingRequest([5], 0)], PARAMETERS)


@pytest.mark.parametrize(
    ("token_ids", "reason"),
    [
        ([7, 1], "stop"),
        ([7, 10, 10], "stop"),  # the stop string, two line ends
        ([7] * 50, "length"),  # as many as were asked for
        ([*[7] * 49, 1], "stop"),
    ],
)
def test_a_response_ends_by_eos_a_stop_string_or_its_length(stub: Stub, token_ids: list[int], reason: str) -> None:
    server = connect(stub)
    stub.answers[vllm_server.COMPLETIONS] = 200, completion(token_ids, reason)
    (response,) = server.sample([SamplingRequest([5], 0)], PARAMETERS)
    assert (response.token_ids, response.finish_reason) == (token_ids, reason)


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (completion([7, 10, 7]), "ends otherwise than by 'stop'"),  # neither EOS nor a stop string
        (completion([7, 1, 7, 1]), "ends otherwise than by 'stop'"),  # an EOS that ended nothing
        (completion([7, 1], "length"), "ends otherwise than by 'length'"),
        (completion([7] * 49, "length"), "ends otherwise than by 'length'"),
        (completion([7] * 50, "abort"), "ends otherwise than by 'abort'"),
        (completion([7] * 50, {}), "ends otherwise than by {}"),
        (completion([7, 1], logprobs=[-1.0, 0.5]), "not a finite number up to 0"),
        (completion([7, 1], logprobs=[-1.0, -1e300]), "not a finite number up to 0"),
        (completion([7, 1], logprobs=[-1.0, "-1.0"]), "not a finite number up to 0"),
        (completion([7, 1], logprobs=[-1.0, None]), "not a finite number up to 0"),
        (completion([7, 1], logprobs=[-1.0]), "not a finite number up to 0 for each token"),
        (completion([True, 1]), "token True of a model"),
        (completion([7.0, 1]), "token 7.0 of a model"),
        (completion([1 << 31, 1]), "token 2147483648 of a model"),
    ],
)
def test_a_response_that_cannot_have_been_drawn_is_refused_in_one_line(stub: Stub, answer: Any, says: str) -> None:
    server = connect(stub)
    stub.answers[vllm_server.COMPLETIONS] = 200, answer
    with pytest.raises(ModelError) as refused:
        server.sample([SamplingRequest([5], 0)], PARAMETERS)
    assert str(refused.value).startswith(f"{stub.url}: the vLLM server answers something else than vLLM does: ")
    assert says in str(refused.value)


def test_generate_writes_no_rollouts_that_a_server_cannot_have_drawn(
    project: Path, cli: Cli, stub: Stub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that holds the right weights, as the probe finds, and answers one prompt otherwise than vLLM does."""
    from hacpo.engines.models.checkpoint import load_model
    from hacpo.engines.transformers import TransformersEngine

    params = Path("pipelines/small/params.yaml")
    params.write_text(PARAMS.replace("engine: {device", "engine: {name: vllm_server, device"))
    for command in (("resolve",), ("prepare",), ("warmup", "--agent", "ada")):
        assert cli(command[0], "pipelines/small", *command[1:]).code == 0
    Path("pipelines/small/servers.yaml").write_text(f"ada: {stub.url}")
    model = load_model(Path("artifacts/small/checkpoints/step=0000/agent=ada"), EngineSettings(device="cpu"))
    scorer = TransformersEngine(model, eos_token_ids=[], pad_token_id=0, batch_size=1)
    rows, plain = model.config.vocab_size, stub.answer
    sent: list[dict[str, Any]] = []

    def answer(path: str, body: dict[str, Any], key: str) -> tuple[int, Any]:
        if path != vllm_server.COMPLETIONS:
            return plain(path, body, key)
        if "prompt_logprobs" not in body:
            return 200, sent[0] if sent else completion([5, body["stop_token_ids"][0]])
        prompt = body["prompt"]
        (logprobs,) = scorer.score([(prompt[:1], prompt[1:])], temperature=1.0)
        entries = [{str(token): {"logprob": float(one)}} for token, one in zip(prompt[1:], logprobs, strict=True)]
        return 200, {"choices": [{"prompt_logprobs": [None, *entries]}]}

    monkeypatch.setattr(stub, "answer", answer)
    stub.facts["longest"] = 4096
    for odd, says in (
        (completion([5] * 300), "a response of 300 tokens, not of 1 to 26"),
        (completion([]), "a response of 0 tokens, not of 1 to 26"),
        (completion([99999]), f"token 99999 of a model that has {rows}"),
        (completion([-7]), f"token -7 of a model that has {rows}"),
        (completion(["evil"]), f"token 'evil' of a model that has {rows}"),
        (completion([5] * 26, "length", [float("nan")] * 26), "answers something else than vLLM does"),
    ):
        sent[:] = [odd]
        refused = cli("generate", "pipelines/small", "--step", 1, "--agent", "ada")
        assert refused.code == 6
        assert f"{stub.url}: the vLLM server answers something else than vLLM does" in refused.error
        assert says in refused.error
        assert not Path("artifacts/small/rollouts").exists()
    sent.clear()
    assert cli("generate", "pipelines/small", "--step", 1, "--agent", "ada").code == 0


@pytest.mark.parametrize(
    ("path", "content", "most"),
    [
        ("/v1/models", {"data": [[]] * (1 << 21)}, "4096 KiB"),
        # Asked of a prompt of 1 token are 50: 64 KiB and 51 more.
        (vllm_server.COMPLETIONS, {**completion([7, 1]), "x": [[]] * (1 << 15)}, "115 KiB"),
    ],
)
def test_an_answer_is_read_no_further_than_an_answer_is_long(stub: Stub, path: str, content: Any, most: str) -> None:
    stub.answers[path] = 200, content
    with pytest.raises(ModelError, match=f"answers {path} with more than {most}. Correct servers.yaml"):
        connect(stub).sample([SamplingRequest([5], 0)], PARAMETERS)


def test_the_longest_completion_that_may_be_asked_for_has_room(stub: Stub) -> None:
    """A token of 8 bytes takes 150: its text three times, its log-probability twice, its id and its place."""
    server = connect(stub)
    texts = ["<|\u4f8b|>"] * 50
    answer = completion([7] * 50, "length")
    answer["choices"][0]["logprobs"] |= {"tokens": texts, "top_logprobs": [{text: -1.0 / 3} for text in texts]}
    stub.answers[vllm_server.COMPLETIONS] = 200, answer
    assert server.sample([SamplingRequest([5], 0)], PARAMETERS)[0].token_ids == [7] * 50


def test_nothing_but_tokens_and_their_logprobs_is_kept_of_an_answer(stub: Stub) -> None:
    """Each answer brings 16,384 empty lists, 56 bytes each: of 20 answers 18 MiB, of which 3 are read at once."""
    server = connect(stub)
    stub.answers[vllm_server.COMPLETIONS] = 200, {**completion([7, 1]), "x": [[]] * (1 << 14)}
    tracemalloc.start()
    try:
        server.sample([SamplingRequest([5], seed) for seed in range(20)], PARAMETERS)
        assert tracemalloc.get_traced_memory()[1] < 9 << 20
    finally:
        tracemalloc.stop()


def test_of_an_error_no_more_is_read_than_its_beginning(stub: Stub) -> None:
    def without_end(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(500)
        handler.end_headers()
        while True:
            handler.wfile.write(b"ab " * 30_000)

    stub.sends["/v1/models"] = without_end
    with pytest.raises(ModelError, match="answers /v1/models with 500: ab ab ab") as refused:
        connect(stub)
    assert len(str(refused.value)) < 500


def drips(handler: BaseHTTPRequestHandler) -> None:
    handler.send_response(200)
    handler.send_header("Content-Length", "1000000")
    handler.end_headers()
    while True:
        handler.wfile.write(b" ")
        handler.wfile.flush()
        time.sleep(0.02)


def hints(handler: BaseHTTPRequestHandler) -> None:
    while True:
        handler.wfile.write(b"HTTP/1.1 103 Early Hints\r\nLink: </>\r\n\r\n" * 100)
        time.sleep(0.02)


@pytest.mark.parametrize("send", [drips, hints])
@pytest.mark.parametrize("path", ["/v1/models", vllm_server.COMPLETIONS])
def test_nobody_waits_for_an_answer_without_end(
    stub: Stub, monkeypatch: pytest.MonkeyPatch, send: Callable[[BaseHTTPRequestHandler], None], path: str
) -> None:
    monkeypatch.setattr(connection, "ANSWER_SECONDS", 1.5)
    stub.sends[path] = send
    with pytest.raises(ModelError, match=r"gave no whole answer in \d+ s. Restart `hacpo serve` for ada"):
        connect(stub).sample([SamplingRequest([5], 0)], PARAMETERS)


@pytest.mark.parametrize("change", [{"models": ["\x1b[31m\n" * 10_000]}, {"dtype": "q\x1b" * 10_000}])
def test_of_what_a_server_says_a_line_shows_the_beginning(stub: Stub, change: dict[str, Any]) -> None:
    stub.models = change.get("models", stub.models)
    stub.facts |= {name: value for name, value in change.items() if name in stub.facts}
    with pytest.raises(ModelError) as refused:
        connect(stub)
    assert len(str(refused.value)) < 4 * 300 + 300  # a character may be spelled out with four
    assert "\x1b" not in str(refused.value)


def test_responses_of_weights_that_somebody_else_loaded_do_not_count(stub: Stub) -> None:
    server = connect(stub)
    stub.taken_over = True
    with pytest.raises(ModelError, match="given other weights while it was sampled from"):
        server.sample([SamplingRequest([5], 0)], PARAMETERS)


def test_a_cut_connection_is_tried_again_but_not_for_ever(stub: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    server = connect(stub)
    monkeypatch.setattr(connection, "ATTEMPTS", 2)
    stub.drop = 1
    assert server.sample([SamplingRequest([5], 0)], PARAMETERS)[0].token_ids == [5, 1]
    stub.drop = 2
    with pytest.raises(ModelError, match="cannot be reached"):
        server.sample([SamplingRequest([5], 0)], PARAMETERS)


def test_a_prompt_that_fills_the_context_is_refused(stub: Stub) -> None:
    with pytest.raises(DataError, match="a prompt of 64 tokens leaves no room for a response"):
        connect(stub).sample([SamplingRequest([5] * 64, 0)], PARAMETERS)


def test_nothing_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "ATTEMPTS", 1)
    with pytest.raises(
        ModelError, match=r"127.0.0.1:9: the vLLM server cannot be reached .* `hacpo serve` for agent ada"
    ):
        VllmServer("http://127.0.0.1:9", "ada", Path("models/ada"), SETTINGS, eos_token_ids=EOS, decode=text_of)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "no file says where the servers are"),
        ("bo: http://127.0.0.1:8000", "names no server for agent 'ada'"),
        ("ada: 127.0.0.1:8000", "is no URL of a server (expected such as http://127.0.0.1:8000, found '127.0.0.1"),
        ("ada: [8000]", "is no URL"),
        ("ada: {", "not valid YAML"),
        ("- ada", "names no server"),
    ],
)
def test_where_servers_are_is_a_file_beside_the_settings(tmp_path: Path, content: str | None, says: str) -> None:
    if content is not None:
        (tmp_path / "servers.yaml").write_text(content)
    with pytest.raises(SettingsError) as refused:
        server_url(tmp_path, "ada")
    assert says in str(refused.value)
    assert str(tmp_path / "servers.yaml") in str(refused.value)


def test_a_url(tmp_path: Path) -> None:
    (tmp_path / "servers.yaml").write_text("ada: https://node-3:8000/\n")
    assert server_url(tmp_path, "ada") == "https://node-3:8000"


def test_a_run_whose_servers_are_nowhere_is_refused_before_the_weights_are_read(project: Path, cli: Cli) -> None:
    params = Path("pipelines/small/params.yaml")
    params.write_text(PARAMS.replace("engine: {device", "engine: {name: vllm_server, device"))
    for command in (("resolve",), ("prepare",), ("warmup", "--agent", "ada")):
        assert cli(command[0], "pipelines/small", *command[1:]).code == 0
    refused = cli("generate", "pipelines/small", "--step", 1, "--agent", "ada")
    assert refused.code == 2
    assert "start `hacpo serve pipelines/small --agent ada`" in refused.error.replace("Start", "start")


def test_serve_says_what_is_missing(project: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "no agent 'cy'" in cli("serve", "pipelines/small", "--agent", "cy").error
    missing = cli("serve", "pipelines/small", "--agent", "ada")
    assert (missing.code, "run `hacpo warmup pipelines/small --agent ada`" in missing.error.lower()) == (3, True)

    for command in (("resolve",), ("warmup", "--agent", "ada")):
        assert cli(command[0], "pipelines/small", *command[1:]).code == 0
    monkeypatch.setattr(refusals, "check_vllm", lambda *_: None)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        refused = cli("serve", "pipelines/small", "--agent", "ada", "--port", port)
    assert (refused.code, f"127.0.0.1:{port}: cannot listen there" in refused.error) == (2, True)

    monkeypatch.setattr(serving, "server_command", lambda *_, **__: [sys.executable, "-c", "raise SystemExit(3)"])
    ended = cli("serve", "pipelines/small", "--agent", "ada", "--port", port)
    assert (ended.code, "the vLLM server ended at its start, with exit code 3" in ended.error) == (6, True)
