import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading

import pytest
from synthetic import log_normal

from gradguard.cli import main
from gradguard.errors import InvalidValueError, RecordError
from gradguard.monitoring.record.file import RecordWriter
from gradguard.monitoring.show import serve as serve_module
from gradguard.monitoring.show.serve import ADDRESS, LivePage, page_server, serve


@pytest.fixture
def writer(tmp_path):
    """A run in progress, of 60 steps so far."""
    with RecordWriter(tmp_path / "run.jsonl") as writer:
        writer.write("meta", argv=["train.py"], optimizers=["SGD"], params=[{"name": "weight", "numel": 3}])
        add_steps(writer, 60)
        yield writer


def add_steps(writer, count, first=0):
    for place, norm in enumerate(log_normal(count)):
        writer.write("step", i=first + place, norm=norm, loss=1.0)
    writer.flush()


@pytest.fixture
def answers(writer, tmp_path):
    """A function that asks a server on this record: method, path and headers to response and content."""
    page = LivePage([tmp_path])
    page.look()
    with page_server(page, 0) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()

        def ask(path="/", host="127.0.0.1:{port}", method="GET"):
            connection = http.client.HTTPConnection(ADDRESS, server.server_port, timeout=60)
            connection.putrequest(method, path, skip_host=True)
            if host is not None:
                connection.putheader("Host", host.format(port=server.server_port))
            connection.endheaders()
            response = connection.getresponse()
            content = response.read()
            connection.close()
            return response, content

        yield ask
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(
    ("path", "host", "method", "status"),
    [
        ("/", "127.0.0.1:{port}", "GET", 200),
        ("/", "localhost:{port}", "GET", 200),
        ("/", "localhost:9000", "GET", 200),  # through a tunnel
        ("/", "localhost", "GET", 200),
        ("/version", "127.0.0.1:{port}", "GET", 200),
        ("/", "rebound.example:{port}", "GET", 421),
        ("/version", "rebound.example", "GET", 421),
        ("/", "127.0.0.1.rebound.example", "GET", 421),
        ("/", "rebound.example:1@127.0.0.1", "GET", 421),
        ("/", "", "GET", 421),
        ("/", None, "GET", 421),
        ("/run.jsonl", "127.0.0.1:{port}", "GET", 404),
        ("/../run.jsonl", "127.0.0.1:{port}", "GET", 404),
        ("//etc/passwd", "127.0.0.1:{port}", "GET", 404),
        ("/version?now", "127.0.0.1:{port}", "GET", 200),
        ("/?x=1", "127.0.0.1:{port}", "GET", 200),
        ("/run.jsonl?/", "127.0.0.1:{port}", "GET", 404),
        ("/?x=1", "127.0.0.1:{port}", "HEAD", 200),
        ("/", "rebound.example", "HEAD", 421),
        ("/", "127.0.0.1:{port}", "POST", 501),
        ("/", "127.0.0.1:{port}", "DELETE", 501),
    ],
)
def test_only_the_page_and_its_version_and_only_by_the_name_of_this_machine(answers, path, host, method, status):
    response, content = answers(path, host, method)
    assert response.status == status
    assert (b"train.py" in content) == (status == 200 and path.split("?")[0] == "/" and method == "GET")
    assert (content == b"") == (method == "HEAD")


def test_the_page_may_load_nothing_and_nobody_may_keep_it(answers):
    response, content = answers()
    assert "default-src 'none'" in response.headers["Content-Security-Policy"]
    assert response.headers["Cache-Control"] == "no-store"
    assert "Access-Control-Allow-Origin" not in response.headers
    version = json.loads(answers("/version")[1])
    assert f'<body data-version="{version["version"]}">'.encode() in content
    assert version["words"] == "The page follows the run."
    assert re.fullmatch(r"Step 59, \d+ s ago\.", version["age"])


def test_the_page_says_which_step_it_shows_and_how_long_ago_that_was_written(writer, tmp_path):
    path, page = tmp_path / "run.jsonl", LivePage([tmp_path])
    add_steps(writer, 1263, first=60)
    os.utime(path, (1000, 1000))
    page.look()
    assert [page.view.age(now) for now in (1004.0, 1130.0)] == ["Step 1,322, 4 s ago.", "Step 1,322, 2 min 10 s ago."]
    add_steps(writer, 1, first=1323)  # not drawn yet
    assert page.view.age(1004.0) == "Step 1,322, 4 s ago."
    os.utime(path, (1005, 1005))
    with RecordWriter(tmp_path / "other.jsonl") as other:
        other.write("meta", argv=["other.py"])
    os.utime(tmp_path / "other.jsonl", (1001, 1001))
    both = LivePage([path, tmp_path / "other.jsonl"])
    both.look()
    assert both.view.age(1006.0) == "run: Step 1,323, 1 s ago; other: No step yet, 5 s ago."
    writer.write("end", steps=1324, wall=1.0, exit=0)
    writer.flush()
    page.look()
    assert page.view.age(2000.0) == ""


def test_it_listens_on_this_machine_alone(tmp_path):
    with page_server(LivePage([tmp_path]), 0) as server:
        assert server.server_address[0] == ADDRESS == "127.0.0.1"


def test_the_page_is_drawn_again_only_when_the_record_has_grown(writer, tmp_path):
    page = LivePage([tmp_path / "run.jsonl"])
    assert page.look()
    first = page.view
    assert not page.look()
    assert page.view is first
    assert b"No clipping in 60 steps." in plain(first.page)
    add_steps(writer, 40, first=60)
    assert page.look()
    assert page.view.version != first.version
    assert b"No clipping in 100 steps." in plain(page.view.page)
    writer.write("end", steps=100, wall=1.0, exit=0)
    writer.flush()
    assert page.look()
    assert page.view.words == "The run has ended."


def plain(page: bytes) -> bytes:
    return page.replace(b'<a class="term" href="#term-clip">', b"").replace(b"clipping</a>", b"clipping")


def test_records_that_are_not_there_yet_are_waited_for(tmp_path):
    folder, other = tmp_path / "runs", tmp_path / "other.jsonl"
    page = LivePage([folder, other])
    page.look()
    assert page.view.words.startswith(f"Waiting for {folder}, {other}, which gradguard run")
    assert page.view.words.encode() in page.view.page
    folder.mkdir()
    (folder / "run.jsonl").touch()  # made, and nothing in it
    page.look()
    assert page.view.words.startswith(f"Waiting for {folder / 'run.jsonl'}, {other}")
    with RecordWriter(other) as writer:
        writer.write("meta", argv=["other.py"])
        add_steps(writer, 5)
    page.look()
    assert page.view.words.startswith(f"The page follows the run. Waiting for {folder / 'run.jsonl'}, which")
    assert b"<h1>other.py</h1>" in page.view.page
    (folder / "run.jsonl").write_text('{"t": "meta", "argv": ["first.py"]}\n')
    page.look()
    assert page.view.words == "The page follows the runs."
    assert b"<h1>first.py, other.py</h1>" in page.view.page


@pytest.mark.parametrize(("age", "told"), [(0, False), (3600, True)])
def test_a_line_that_is_being_written_is_no_damage(writer, tmp_path, age, told):
    path = tmp_path / "run.jsonl"
    with path.open("a") as file:
        file.write('{"t": "step", "i": 60, "no')
    written = path.stat().st_mtime - age
    os.utime(path, (written, written))
    page = LivePage([path])
    page.look()
    assert (b"the run was probably killed" in page.view.page) == told


def test_a_record_that_breaks_is_told_on_the_page_and_mended(tmp_path):
    path = tmp_path / "<b>.jsonl"
    path.write_text('{"t": "meta"}\n')
    page = LivePage([path])
    page.look()
    assert page.fault is None
    path.write_text("a letter\n")
    page.look()
    assert page.view.words.startswith("This page cannot be drawn: ")
    assert b"&lt;b&gt;.jsonl is not a gradguard record" in page.view.page
    path.write_text('{"t": "meta"}\n{"t": "step", "i": 0}\n')
    page.look()
    assert page.fault is None


def test_what_is_no_record_is_refused_at_once(tmp_path):
    (tmp_path / "run.jsonl").write_text("a letter\n")
    with pytest.raises(RecordError, match="is not a gradguard record"):
        serve([tmp_path])


def test_the_command_says_what_is_wrong_in_one_line(tmp_path, capsys):
    (tmp_path / "run.jsonl").write_text("a letter\n")
    assert main(["serve", str(tmp_path)]) == 2
    assert re.fullmatch(r"gradguard: error: .* is not a gradguard record.*\n", capsys.readouterr().err)
    assert main(["serve", str(tmp_path), "--port", "70000"]) == 2


@pytest.mark.parametrize("port", [-1, 65536])
def test_an_impossible_port(port, tmp_path):
    with pytest.raises(InvalidValueError, match=f"expected a port from 0 to 65535, got {port}"):
        serve([tmp_path], port)


def test_a_port_that_is_taken(tmp_path):
    with socket.create_server((ADDRESS, 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(InvalidValueError, match=f"cannot listen on port {port}: .*Leave out --port"):
            serve([tmp_path], port)


@pytest.mark.parametrize(("drawing", "pause"), [(0.01, 1.0), (2.0, 18.0)])
def test_drawing_takes_at_most_a_tenth_of_a_core(monkeypatch, tmp_path, drawing, pause):
    times, slept = iter([0.0, drawing]), []  # of the processor: what a busy machine waits for is no work
    monkeypatch.setattr(serve_module.time, "thread_time", lambda: next(times))

    def sleep(seconds):
        slept.append(seconds)
        raise KeyboardInterrupt("enough")

    monkeypatch.setattr(serve_module.time, "sleep", sleep)
    with pytest.raises(KeyboardInterrupt, match="enough"):
        LivePage([tmp_path]).follow()
    assert slept == [pytest.approx(pause)]


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has another Ctrl-C")
def test_ctrl_c_ends_it_without_a_word(writer, tmp_path):
    command = [sys.executable, "-m", "gradguard", "serve", str(tmp_path)]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line.startswith("http://127.0.0.1:")
    assert line.endswith(f"/ shows {tmp_path}; Ctrl-C ends it\n")
    process.send_signal(signal.SIGINT)
    assert (*process.communicate(timeout=60), process.returncode) == ("", "", 0)


def test_who_says_nothing_is_not_waited_for(writer, tmp_path, monkeypatch):
    monkeypatch.setattr(serve_module._Handler, "timeout", 0.05)
    page = LivePage([tmp_path])
    with page_server(page, 0) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        with socket.create_connection((ADDRESS, server.server_port), timeout=60) as connection:
            connection.sendall(b"GET / HT")
            assert connection.recv(100) == b""  # the server has closed it
        server.shutdown()
        thread.join()
