"""What clients may do to the server: broken and huge bodies, slowness, leaving, and wanting more than there is."""

import asyncio
import concurrent.futures
import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time

import openai
import pytest
import uvicorn
from uvicorn.server import ServerState

import glax.server.app
import glax.server.listening
from glax_cli import main
from tests.server.serving import NAME, connected, running

PATHS = ["/v1/completions", "/v1/chat/completions"]
LONG = dict(model=NAME, prompt="The", temperature=0, max_tokens=580)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "body, said",
    [
        (b"", "JSON"),
        (b"{", "JSON"),
        (b"null", "object"),
        (b"[1]", "object"),
        (b'"x"', "object"),
        (b"\xff\xfe{}", "JSON"),
        (b'{"model": "\xc3"}', "JSON"),
        (b"{}\x00", "JSON"),
        ('{"model": "x"}'.encode("utf-16"), "JSON"),
        (b"[" * 100_000, "nested"),
        (b'{"a":' * 100_000, "nested"),
        (b"[" * 500 + b"]" * 500, "nested"),
        (b'{"temperature": NaN}', "finite"),
        (b'{"temperature": -Infinity}', "finite"),
        (b'{"temperature": 1e999}', "finite"),
        (b'{"max_tokens": ' + b"9" * 100_000 + b"}", "JSON"),
        (b'{"n": 1, "n": 2}', "twice"),
        (b'{"\\ud800": 1}', "field"),
        (b'{"model": "\\ud800"}', "model"),
        (b'{"model": {"a": [[[[[[[[[[[[1]]]]]]]]]]]]}}', "model"),
        (b"{" + b",".join(b'"k%d": 1' % i for i in range(100_000)) + b', "k1": 1}', "twice"),
    ],
    ids=range(21),
)
def test_a_broken_body_is_refused(server, path, body, said):
    began = time.monotonic()
    status, headers, content = server.call("POST", path, body)
    error = json.loads(content)["error"]
    assert status in (400, 404) and headers["content-type"] == "application/json"
    assert said in error["message"] and len(error["message"]) < 400
    assert time.monotonic() - began < 10


@pytest.mark.parametrize("name", ["prompt", "stop", "an unknown field", "stream_options", "logit_bias"])
@pytest.mark.parametrize("value", [[[[[{}]]]], {"\ud800": "\udc00"}, "\ud800", [None], {"a": {"b": []}}])
def test_any_kind_of_value_is_refused_by_name_or_read(server, name, value):
    body = dict(model=NAME, prompt="The", max_tokens=1) | {name: value}
    status, _, content = server.call("POST", "/v1/completions", json.dumps(body))
    assert status == 200 if (name, value) == ("stop", "\ud800") else status == 400, content
    assert json.loads(content)


def test_too_long_a_body_is_refused(folder):
    with running(folder, "--body-bytes", "1000") as server:
        body = json.dumps(dict(model=NAME, prompt="a" * 1000))
        status, _, content = server.call("POST", PATHS[0], body)
        assert status == 413 and "at most 1000 bytes" in json.loads(content)["error"]["message"]
        with connected(server.port) as client:  # chunks without an end
            client.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n")
            sent = send_without_end(client)
            assert sent < 1 << 24
        with connected(server.port) as client:  # a length that lies
            client.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99999999999\r\n\r\n{")
            assert b" 413 " in client.recv(1000)
        assert server.call("GET", "/health")[0] == 200 and server.is_free()


def send_without_end(client: socket.socket) -> int:
    """Send chunks until the server takes no more, and return how many bytes it took."""
    client.settimeout(0.5)
    sent = 0
    with contextlib.suppress(OSError):
        while sent < 1 << 24:
            client.sendall(b"400\r\n" + b" " * 1024 + b"\r\n")
            sent += 1024
    client.settimeout(30)
    return sent


@pytest.mark.parametrize("head", [b"", b"POST /v1/comp", b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nX: "])
def test_a_slow_head_is_cut_off(server, monkeypatch, head):
    monkeypatch.setattr(glax.server.listening, "HEAD_SECONDS", 0.3)
    with connected(server.port) as client:
        client.sendall(head)
        began = time.monotonic()
        assert client.recv(1000) == b"" and time.monotonic() - began < 10


def test_a_slow_head_on_a_used_connection_is_cut_off(server, monkeypatch):
    monkeypatch.setattr(glax.server.listening, "HEAD_SECONDS", 0.3)
    with connected(server.port) as client:
        client.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        while b"}" not in client.recv(1000):
            pass
        client.sendall(b"GET /hea")
        assert client.recv(1000) == b""


def test_a_slow_body_is_refused(server, monkeypatch):
    monkeypatch.setattr(glax.server.app, "BODY_SECONDS", 0.3)
    with connected(server.port) as client:
        client.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{")
        assert b" 408 " in client.recv(1000)


def test_a_huge_head_is_refused(server):
    with connected(server.port) as client:
        client.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * 200_000)
        assert client.recv(1000)[:12] in (b"HTTP/1.1 400", b"HTTP/1.1 431")


def test_a_client_that_does_not_read_is_cut_off(monkeypatch):
    """The timer runs while the buffer of answers is full."""
    monkeypatch.setattr(glax.server.listening, "STALL_SECONDS", 0.05)
    aborted = threading.Event()

    async def stalls(is_read: bool):
        class Transport(asyncio.Transport):
            def abort(self):
                aborted.set()

        protocol = glax.server.listening.Protocol(uvicorn.Config(lambda: None), ServerState(), {})
        protocol.connection_made(Transport())
        protocol.pause_writing()
        if is_read:
            protocol.resume_writing()
        await asyncio.sleep(0.3)
        protocol.connection_lost(OSError())

    asyncio.run(stalls(True))
    assert not aborted.is_set()
    asyncio.run(stalls(False))
    assert aborted.is_set()


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("n", [1, 6])
def test_a_client_that_leaves_frees_its_slots(server, alone, stream, n):
    before = server.scheduler.counts().finished.get("cancelled", 0)
    body = json.dumps(LONG | dict(stream=stream, n=n)).encode()
    with connected(server.port) as client:
        head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(body)
        client.sendall(head + body)
        if stream:
            assert b"200 OK" in client.recv(100)
        server.wait_until(lambda: server.scheduler.counts().running)
    server.wait_until_free()
    assert server.scheduler.counts().finished["cancelled"] == before + n
    assert server.complete("The quick", max_tokens=9).choices[0].text == alone.text("The quick", 9)


def test_calls_beyond_the_queue_are_told_to_come_again(folder):
    with running(folder, "--capacity", "1", "--queue", "1", "--max-length", "4000") as server:
        body = json.dumps(LONG | dict(max_tokens=3900, stream=True))
        held = [http.client.HTTPConnection("127.0.0.1", server.port, timeout=60) for _ in range(2)]
        for i, connection in enumerate(held):
            connection.request("POST", PATHS[0], body)
            server.wait_until(
                lambda i=i: (server.scheduler.counts().running, server.scheduler.counts().waiting) == (1, i)
            )
        status, headers, content = server.call("POST", PATHS[0], json.dumps(LONG))
        error = json.loads(content)["error"]
        assert (status, headers["retry-after"], error["code"]) == (429, "1", "queue_full")
        with pytest.raises(openai.RateLimitError):
            server.complete("The")
        assert server.call("GET", "/health")[0] == 200
        metrics = server.call("GET", "/metrics")[2].decode()
        assert "\nglax_running 1\n" in metrics and "\nglax_waiting 1\n" in metrics
        assert 'glax_http_responses_total{status="429"} 2' in metrics
        held[1].close()  # its request still waits
        server.wait_until(lambda: not server.scheduler.counts().waiting)
        held[0].close()
        server.wait_until_free()


def test_samples_that_do_not_all_fit_leave_none_behind(folder):
    with running(folder, "--capacity", "1", "--queue", "4", "--max-length", "4000") as server:
        with connected(server.port) as client:
            body = json.dumps(LONG | dict(max_tokens=3900, stream=True, n=3)).encode()
            client.sendall(
                b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(body) + body
            )
            assert client.recv(10)
            server.wait_until(lambda: server.scheduler.counts().running)
            with server.scheduler.turn:  # no round takes away what would wait
                with pytest.raises(openai.RateLimitError):
                    server.complete("The", n=4)
                assert server.scheduler.counts().waiting == 2
        server.wait_until_free()


def test_a_request_ends_after_its_time(folder):
    with running(folder, "--timeout", "0.2", "--max-length", "8000") as server:
        with pytest.raises(openai.InternalServerError) as ended:
            server.complete("The", max_tokens=7900)
        assert ended.value.status_code == 504 and ended.value.code == "timeout"
        assert ended.value.response.headers["x-should-retry"] == "false"
        with pytest.raises(openai.APIError, match=r"its deadline of 0\.2 s has passed"):
            server.complete("The", max_tokens=7900, stream=True)
        server.wait_until_free()


def test_a_request_without_finite_logits_fails_alone(server, alone):
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        prompts = [f"The {i}" for i in range(4)]
        found = [pool.submit(server.complete, prompt, max_tokens=500) for prompt in prompts]
        server.wait_until(server.poison)
        errors = [each.exception() for each in found]
    assert sum(error is not None for error in errors) == 1
    (error,) = [error for error in errors if error is not None]
    assert isinstance(error, openai.InternalServerError) and "not finite" in str(error)
    for prompt, each in zip(prompts, found, strict=True):
        if each.exception() is None:
            assert each.result().choices[0].text.startswith(alone.text(prompt, 32).rstrip("\N{REPLACEMENT CHARACTER}"))
    for _ in range(8):  # no slot keeps what was poisoned
        assert server.complete("The quick", max_tokens=9).choices[0].text == alone.text("The quick", 9)


@pytest.mark.parametrize(
    "given", [None, "Bearer the key", "Bearer ", "the key é", "Basic the key é", "Bearer the key é é"]
)
def test_a_key_is_asked_for(folder, given):
    with running(folder, key="the key é") as server:
        header = {} if given is None else dict(Authorization=given.encode())
        for method, path in (("GET", "/v1/models"), ("GET", "/metrics"), ("POST", PATHS[0]), ("GET", "/x")):
            status, headers, content = server.call(method, path, **header)
            assert status == 401 and headers["www-authenticate"] == "Bearer"
            assert json.loads(content)["error"]["code"] == "invalid_api_key"
        assert server.call("GET", "/health")[0] == 200


def test_a_key_opens_the_server(folder):
    with running(folder, key="the key é") as server:
        assert server.call("GET", "/v1/models", Authorization="bearer the key é".encode())[0] == 200
    with running(folder, key="\udcff à") as server:  # ends with the byte of a space in Latin-1
        assert server.call("GET", "/v1/models", Authorization=b"Bearer \xff \xc3\xa0 ")[0] == 200
    with running(folder, key="abc") as server, server.client(api_key="abc") as client:
        assert client.models.retrieve(NAME).id == NAME


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_no_host_opens_the_server(folder, host):
    """A client writes the Host itself: what stands there is no path."""
    with running(folder, "--host", host, key="abc") as server:
        for named in ("localhost/health?", "localhost/health#", "localhost/health?x=", "/health?", "[", "é"):
            for method, path in (("GET", "/v1/models"), ("POST", PATHS[0]), ("GET", "/nowhere")):
                status, _, content = server.call(method, path, Host=named.encode())
                assert status in (401, 403) and b"error" in content, (named, path)
        assert server.call("GET", "/nowhere", Host="[", Authorization="Bearer abc")[0] in (403, 404)


def test_pages_of_other_sites_may_not_call(server):
    own = f"127.0.0.1:{server.port}"
    for headers in (
        dict(Origin="http://evil.example"),
        dict(Origin="null"),
        dict(Origin="http://["),
        dict(Host="evil.example"),
        dict(Host=""),
        dict(Host="["),
        dict(Host="é".encode()),
    ):
        assert server.call("POST", PATHS[0], json.dumps(LONG), **headers)[0] == 403
    assert server.call("GET", "/v1/models", Origin=f"http://{own}")[0] == 200
    assert server.call("GET", "/v1/models", Host=f"localhost:{server.port}")[0] == 200
    assert server.call("GET", "/v1/models", Host=f"[::1]:{server.port}")[0] == 200


@pytest.mark.parametrize("method, path, status", [("GET", PATHS[0], 405), ("POST", "/health", 405), ("GET", "/", 404)])
def test_errors_of_http_are_errors_of_the_interface(server, method, path, status):
    found, _, content = server.call(method, path)
    assert found == status and json.loads(content)["error"]["type"] == "invalid_request_error"


def test_metrics_are_in_the_text_format(server):
    server.complete("The", max_tokens=3)
    status, headers, content = server.call("GET", "/metrics")
    assert status == 200 and headers["content-type"].startswith("text/plain; version=0.0.4")
    kinds, values = {}, {}
    for line in content.decode().splitlines():
        if line.startswith("# TYPE "):
            _, _, name, kind = line.split()
            kinds[name] = kind
        elif not line.startswith("#"):
            name, value = line.rsplit(" ", 1)
            values[name] = float(value)
    assert all(any(name.startswith(kind) for kind in kinds) for name in values)
    assert values["glax_free_slots"] == 4 and values["glax_written_tokens_total"] >= 3
    assert values["glax_answer_seconds_count"] == values['glax_answer_seconds_bucket{le="+Inf"}'] > 0


@pytest.mark.parametrize("grace, reason", [("30", "length"), ("0", "cancelled")])
def test_a_server_that_stops_refuses_calls_and_ends_the_open_ones(folder, grace, reason):
    with running(folder, "--grace", grace, "--max-length", "3000") as server:
        with concurrent.futures.ThreadPoolExecutor(2) as pool, server.client() as client:
            client.models.list()  # a connection that stays
            one = pool.submit(server.complete, "The", max_tokens=1000 if reason == "length" else 2900)
            server.wait_until(lambda: server.scheduler.counts().running)
            loop = server.listener.servers[0].get_loop()
            loop.call_soon_threadsafe(server.listener.begin_end, signal.SIGTERM)
            if reason == "length":
                server.wait_until(lambda: server.app.is_stopping)
                assert server.call("GET", "/health")[::2] == (503, b'{"status":"stopping"}')
                with pytest.raises(openai.InternalServerError, match="stopping"):
                    server.complete("The")
                assert one.result().choices[0].finish_reason == "length"
            else:
                with pytest.raises(openai.InternalServerError, match="the server stops"):
                    one.result()
        deadline = time.monotonic() + 10
        while not server.listener.should_exit and time.monotonic() < deadline:
            time.sleep(0.01)
        assert server.listener.should_exit and server.scheduler.counts().running == 0


def test_the_command_serves_and_ends_with_0(folder, tmp_path):
    (tmp_path / "key").write_text("secret\n")
    options = ["--port", "0", "--api-key-file", str(tmp_path / "key"), "--no-compilation-cache"]
    process = subprocess.Popen(
        [sys.executable, "-m", "glax", "serve", str(folder), *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | dict(XLA_FLAGS=""),
    )
    try:
        line = process.stdout.readline()
        assert line.startswith(f"{NAME} answers at http://127.0.0.1:"), process.stderr.read()
        with openai.OpenAI(base_url=line.split()[-1], api_key="secret", max_retries=0) as client:
            found = client.completions.create(model=NAME, prompt="The", max_tokens=3)
        assert found.usage.completion_tokens == 3
    finally:
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (0, "", "")


@pytest.mark.parametrize(
    "options, said",
    [
        (["--host", "a" * 70], "cannot be listened at"),
        (["--host", "no-such-host.invalid"], "--host no-such-host.invalid and --port 8000 cannot be listened at"),
        (["--api-key-file", "no-such-file"], "--api-key-file cannot be read"),
        (["--port", "70000"], "must be at most 65535"),
        (["--prefix-bytes", "1", "--port", "0"], "prefix_bytes"),
        (["--state-bytes", "1", "--port", "0"], "state_bytes"),
        (["--tensor", "9", "--port", "0"], "--tensor must be at most 8, the number of devices, got 9"),
    ],
)
def test_wrong_options_are_one_line(folder, capsys, options, said):
    try:
        status = main(["serve", str(folder), *options])
    except SystemExit as end:
        status = end.code
    error = capsys.readouterr().err
    assert status == 2 and said in error and len(error.splitlines()) == 1


def test_a_taken_port_and_an_empty_key_are_one_line(folder, capsys, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert main(["serve", str(folder), "--port", str(taken.getsockname()[1])]) == 2
    assert "Address already in use" in capsys.readouterr().err
    monkeypatch.setenv("GLAX_API_KEY", " ")
    assert main(["serve", str(folder), "--port", "0"]) == 2
    assert "the key of GLAX_API_KEY is empty" in capsys.readouterr().err
    monkeypatch.setenv("GLAX_API_KEY", "one\ntwo")
    assert main(["serve", str(folder), "--port", "0"]) == 2
    assert "the key of GLAX_API_KEY must be one line" in capsys.readouterr().err


def test_a_missing_package_is_one_line(folder, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    assert main(["serve", str(folder)]) == 2
    assert capsys.readouterr().err == "glax serve: uvicorn not installed: pip install uvicorn\n"
