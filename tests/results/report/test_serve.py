import contextlib
import http.client
import socket
import struct
import threading
import time
import urllib.error
import urllib.request

import pytest

pytest.importorskip("cyclopts")
from everlearn.results.report import serve
from everlearn.results.report.serve import Pages, page, server
from tests.results.report.test_html import result


def test_it_waits_for_results_and_leaves_out_what_is_torn(tmp_path):
    assert "No results in" in page(tmp_path / "none", 5) and 'content="5"' in page(tmp_path / "none", 5)
    result("EWC").save(tmp_path)
    (tmp_path / "torn.json").write_text('{"format": 1, "acc')
    text = page(tmp_path, 5)
    assert '"method":"EWC"' in text and '<meta http-equiv="refresh" content="5">' in text
    assert "refresh" not in page(tmp_path, 0).split("<style>")[0]


def test_names_are_escaped(tmp_path):
    assert "<b>" not in page(tmp_path / "<b>", 1)


@pytest.mark.enable_socket
def test_it_is_served_anew_each_time_and_to_this_machine_alone(tmp_path):
    with server(tmp_path) as web:
        assert web.server_address[0] == "127.0.0.1"
        threading.Thread(target=web.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{web.server_port}"

        def get(path="/"):
            with urllib.request.urlopen(address + path, timeout=10) as answer:
                return answer.read().decode()

        assert "No results" in get()
        result("SI").save(tmp_path)
        assert '"method":"SI"' in get()
        with pytest.raises(urllib.error.HTTPError):
            get("/../../etc/passwd")
        web.shutdown()


@contextlib.contextmanager
def serving(folder):
    with server(folder) as web:
        threading.Thread(target=web.serve_forever, daemon=True).start()
        try:
            yield web
        finally:
            web.shutdown()


def answer(web, host, method="GET", path="/"):
    """Status and content, for a client that says it wants this host."""
    client = http.client.HTTPConnection("127.0.0.1", web.server_port, timeout=10)
    try:
        client.putrequest(method, path, skip_host=True)
        for name in [host] if isinstance(host, str) else host:
            client.putheader("Host", name)
        client.endheaders()
        got = client.getresponse()
        return got.status, got.read(), dict(got.getheaders())
    finally:
        client.close()


@pytest.mark.enable_socket
def test_other_names_for_this_machine_are_refused(tmp_path):
    result("EWC").save(tmp_path)
    with serving(tmp_path) as web:
        port = web.server_port
        for own in ("localhost", "LOCALHOST", f"localhost:{port}", f"127.0.0.1:{port}", f"[::1]:{port}", "[::1]"):
            assert answer(web, own)[0] == 200, own
        others = (
            "evil.example",
            f"evil.example:{port}",
            "localhost.evil.example",
            "127.0.0.1.evil.example",
            "",
            "a@localhost",
        )
        for other in (*others, "localhost/evil", [], ["localhost", "evil.example"]):
            status, content, _ = answer(web, other)
            assert status == 421 and b"EWC" not in content and web.url.encode() in content, other


@pytest.mark.enable_socket
def test_head_says_what_get_would(tmp_path):
    result("EWC").save(tmp_path)
    with serving(tmp_path) as web:
        got, asked = answer(web, "localhost"), answer(web, "localhost", "HEAD")
        assert asked[0] == 200 and asked[1] == b"" and asked[2]["Content-Length"] == str(len(got[1]))
        assert answer(web, "localhost", "HEAD", "/other")[0] == 404
        assert answer(web, "localhost", path="/?again")[0] == 200


@pytest.mark.enable_socket
def test_who_says_nothing_is_left_and_who_leaves_is_not_told_of(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(serve._Page, "timeout", 0.2)
    for i in range(40):
        result(f"method {i}", tasks=30).save(tmp_path)
    with serving(tmp_path) as web:
        with socket.create_connection(("127.0.0.1", web.server_port), timeout=10) as silent:
            assert silent.recv(1) == b"", "it is hung up on"
        for _ in range(3):
            leaving = socket.create_connection(("127.0.0.1", web.server_port), timeout=10)
            leaving.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            leaving.sendall(b"GET / HTTP/1.0\r\nHost: localhost\r\n\r\n")
            leaving.close()  # with a reset, while the page is on its way
        time.sleep(0.5)
        assert answer(web, "localhost")[0] == 200
    said = capsys.readouterr()
    assert said.out == said.err == ""


@pytest.mark.enable_socket
def test_a_failure_of_the_page_is_told_in_a_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(Pages, "current", lambda self: 1 / 0)
    with serving(tmp_path) as web, pytest.raises((http.client.HTTPException, ConnectionError)):
        answer(web, "localhost")
    assert capsys.readouterr().err == "everlearn: The page could not be served: ZeroDivisionError: division by zero\n"


def test_only_what_has_changed_is_read_again(tmp_path, monkeypatch):
    read, made = [], []
    load, html = serve.Result.load, serve.html
    monkeypatch.setattr(serve.Result, "load", lambda path: read.append(path.name) or load(path))
    monkeypatch.setattr(serve, "html", lambda *given: made.append(1) or html(*given))
    first = result("EWC").save(tmp_path)
    (tmp_path / "torn.json").write_text("{")
    pages = Pages(tmp_path, 5)
    once = pages.current()
    assert sorted(read) == sorted([first.name, "torn.json"])
    assert pages.current() == once and len(read) == 2 and len(made) == 1
    second = result("SI").save(tmp_path)
    assert '"method":"SI"' in pages.current() and read[2:] == [second.name] and len(made) == 2
    first.write_bytes(first.read_bytes().replace(b"EWC", b"MAS"))
    assert '"method":"MAS"' in pages.current() and read[3:] == [first.name]
    first.unlink()
    assert '"method":"MAS"' not in pages.current() and len(read) == 4
    second.unlink()
    assert "No results in" in pages.current()
