"""Starting, asking and stopping a server, against small stand-ins for SGLang's own."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from kvshare_eval import servers
from kvshare_eval.servers import Server, ServerError

pytestmark = pytest.mark.unit

#: Serves what the client needs, and keeps a child that ignores SIGTERM, as a stuck worker would.
FAKE = """
    import http.server, json, subprocess, sys, time
    child = subprocess.Popen([sys.executable, "-c",
        "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(600)"])
    open(sys.argv[2], "w").write(str(child.pid))
    class Handler(http.server.BaseHTTPRequestHandler):
        polls = 0
        def reply(self, status, body):
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body)
        def do_GET(self):
            Handler.polls += 1
            self.reply(200 if Handler.polls > 1 else 503, b"{}")
        def do_POST(self):
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            if self.path != "/generate":
                return self.reply(400, b"busy")
            asked = json.loads(body)
            if asked["input_ids"] == [13]:
                return self.reply(400, b"bad luck")
            self.reply(200, b"")
            if asked["input_ids"] == [0]:
                return
            for count, text in enumerate(["", "a", "ab"]):
                time.sleep(0.2)
                meta = {"completion_tokens": count, "prompt_tokens": 2, "cached_tokens": 1,
                        "asked": asked["sampling_params"],
                        "cached_tokens_details": {"kvshare": {"reused_tokens": 1}}}
                chunk = json.dumps({"text": text, "meta_info": meta})
                self.wfile.write(f"data: {chunk}\\n\\n".encode())
                self.wfile.flush()
            self.wfile.write(b"data: [DONE]\\n\\n")
    http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


class FakeServer(Server):
    """A server whose program is given as text; it gets the port and a file for its child's id."""

    def __init__(self, tmp_path: Path, program: str = FAKE, ready_seconds: float = 60.0) -> None:
        super().__init__("m", log=tmp_path / "log", ready_seconds=ready_seconds)
        self.program = textwrap.dedent(program)
        self.child_file = tmp_path / "child"

    def command(self) -> list[str]:
        return [sys.executable, "-c", self.program, str(self.port), str(self.child_file)]

    def child(self) -> int:
        return int(self.child_file.read_text())


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def wait_until_gone(pid: int) -> bool:
    deadline = time.monotonic() + 10
    while is_running(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not is_running(pid)


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers, "STOP_SECONDS", 5.0)
    monkeypatch.setattr(servers, "_POLL_SECONDS", 0.05)


def test_a_stream_is_timed_to_its_first_token(tmp_path: Path) -> None:
    with FakeServer(tmp_path) as server:
        answer = server.generate([1, 2], max_new_tokens=2, kvshare={"reuse": "off"})
    # The first chunk, after 0.2 s, holds no token yet; the third comes after 0.6 s.
    assert answer.ttft > 0.39
    assert (answer.text, answer.prompt_tokens, answer.cached_tokens) == ("ab", 2, 1)
    assert answer.report == {"reused_tokens": 1}
    assert answer.meta["asked"] == {
        "temperature": 0.0,
        "max_new_tokens": 2,
        "custom_params": {"kvshare": {"reuse": "off"}},
    }


def test_refusals_say_what_the_server_said(tmp_path: Path) -> None:
    with FakeServer(tmp_path) as server:
        with pytest.raises(ServerError, match="/generate answered 400: bad luck"):
            server.generate([13], max_new_tokens=1)
        with pytest.raises(ServerError, match="without a token"):
            server.generate([0], max_new_tokens=1)
        with pytest.raises(ServerError, match="400: busy"):
            server.flush_cache()


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_an_error_in_the_block_ends_the_whole_group(
    tmp_path: Path, error: type[BaseException]
) -> None:
    server = FakeServer(tmp_path)

    def fail_within() -> None:
        with server:
            assert is_running(server.child())
            raise error

    with pytest.raises(error):
        fail_within()
    assert wait_until_gone(server.child())


def test_leaving_ends_the_whole_group(tmp_path: Path) -> None:
    with FakeServer(tmp_path) as server:
        assert is_running(server.child())
    assert wait_until_gone(server.child())
    server.stop()  # once more does no harm


def test_a_server_that_dies_at_the_start_shows_its_log(tmp_path: Path) -> None:
    began = time.monotonic()
    program = "import sys; print('no such model'); sys.exit(3)"
    with (
        pytest.raises(ServerError, match=r"code 3 while starting.*log:\nno such model"),
        FakeServer(tmp_path, program),
    ):
        pass
    assert time.monotonic() - began < 10


def test_a_server_that_never_serves_is_ended(tmp_path: Path) -> None:
    program = "import os, sys, time; open(sys.argv[2], 'w').write(str(os.getpid())); time.sleep(99)"
    server = FakeServer(tmp_path, program, ready_seconds=1.0)
    with pytest.raises(ServerError, match="not ready after 1 s"), server:
        pass
    assert wait_until_gone(server.child())


def test_a_server_that_dies_later_is_reported(tmp_path: Path) -> None:
    with FakeServer(tmp_path) as server:
        assert server._process is not None
        os.killpg(server._process.pid, signal.SIGKILL)
        with pytest.raises(ServerError, match="/generate broke off"):
            server.generate([1], max_new_tokens=1)


@pytest.mark.skipif(sys.platform != "linux", reason="prctl")
def test_the_server_does_not_outlive_a_killed_client(tmp_path: Path) -> None:
    pid_file = tmp_path / "server"
    client = f"""
        import os, signal, sys
        from pathlib import Path
        from kvshare_eval.servers import Server
        class Sleeper(Server):
            def command(self):
                return [sys.executable, "-c", "import time; time.sleep(600)"]
            def _wait_until_ready(self, deadline):
                Path({str(pid_file)!r}).write_text(str(self._process.pid))
        with Sleeper("m", log=Path({str(tmp_path / "log")!r})):
            os.kill(os.getpid(), signal.SIGKILL)
    """
    ended = subprocess.run([sys.executable, "-c", textwrap.dedent(client)])
    assert ended.returncode == -signal.SIGKILL
    assert wait_until_gone(int(pid_file.read_text()))


def test_stock_is_the_same_command_without_kvshare(tmp_path: Path) -> None:
    ours, stock = (
        Server("m", mode=mode, args=["--page-size", "16"], log=tmp_path / "log")
        for mode in ("kvshare", "stock")
    )
    assert [word for word in ours.command() if word != "--kvshare"] == stock.command()
    assert "--kvshare" in ours.command()


def test_environment_of_each_mode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVSHARE_SEAM_TOKENS", "4")
    monkeypatch.setenv("OTHER", "kept")
    ours = Server("m", log=tmp_path / "log", env={"MORE": "1"}).environment()
    assert {key for key in ours if key.startswith("KVSHARE")} == {"KVSHARE_SEAM_TOKENS"}
    assert (ours["OTHER"], ours["MORE"]) == ("kept", "1")
    stock = Server("m", mode="stock", log=tmp_path / "log").environment()
    assert {key for key in stock if key.startswith("KVSHARE")} == {"KVSHARE"}
    assert stock["SGLANG_PLUGINS"] == "kvshare_cpu"
