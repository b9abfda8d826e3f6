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
from everlearn.results.report.serve import ReportPage, create_server
from tests.results.report.test_html import result


def page(folder, refresh):
    return ReportPage(folder, refresh).render()


def test_the_page_waits_for_results_and_skips_unfinished_files(tmp_path):
    assert "No results in" in page(tmp_path / "none", 5) and 'content="5"' in page(tmp_path / "none", 5)
    result("EWC").save(tmp_path)
    (tmp_path / "unfinished.json").write_text('{"format": 1, "acc')
    text = page(tmp_path, 5)
    assert '"method":"EWC"' in text and '<meta http-equiv="refresh" content="5">' in text
    assert "refresh" not in page(tmp_path, 0).split("<style>")[0]


def test_names_are_escaped(tmp_path):
    assert "<b>" not in page(tmp_path / "<b>", 1)


@pytest.mark.enable_socket
def test_the_page_is_current_and_served_to_this_machine_only(tmp_path):
    with create_server(tmp_path) as web:
        assert web.server_address[0] == "127.0.0.1"
        threading.Thread(target=web.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{web.server_port}"

        def get(path="/"):
            with urllib.request.urlopen(address + path, timeout=10) as response:
                return response.read().decode()

        assert "No results" in get()
        result("SI").save(tmp_path)
        assert '"method":"SI"' in get()
        with pytest.raises(urllib.error.HTTPError):
            get("/../../etc/passwd")
        web.shutdown()


@contextlib.contextmanager
def serving(folder):
    with create_server(folder) as web:
        threading.Thread(target=web.serve_forever, daemon=True).start()
        try:
            yield web
        finally:
            web.shutdown()


def request(web, host, method="GET", path="/"):
    """Send a request with these Host headers, and return status, content and headers."""
    client = http.client.HTTPConnection("127.0.0.1", web.server_port, timeout=10)
    try:
        client.putrequest(method, path, skip_host=True)
        for name in [host] if isinstance(host, str) else host:
            client.putheader("Host", name)
        client.endheaders()
        response = client.getresponse()
        return response.status, response.read(), dict(response.getheaders())
    finally:
        client.close()


@pytest.mark.enable_socket
def test_other_names_for_this_machine_are_refused(tmp_path):
    result("EWC").save(tmp_path)
    with serving(tmp_path) as web:
        port = web.server_port
        for host in ("localhost", "LOCALHOST", f"localhost:{port}", f"127.0.0.1:{port}", f"[::1]:{port}", "[::1]"):
            assert request(web, host)[0] == 200, host
        foreign_hosts = (
            "evil.example",
            f"evil.example:{port}",
            "localhost.evil.example",
            "127.0.0.1.evil.example",
            "",
            "a@localhost",
        )
        for host in (*foreign_hosts, "localhost/evil", [], ["localhost", "evil.example"]):
            status, content, _ = request(web, host)
            assert status == 421 and b"EWC" not in content and web.url.encode() in content, host


@pytest.mark.enable_socket
def test_head_sends_the_headers_of_get(tmp_path):
    result("EWC").save(tmp_path)
    with serving(tmp_path) as web:
        _, page_content, _ = request(web, "localhost")
        status, content, headers = request(web, "localhost", "HEAD")
        assert status == 200 and content == b"" and headers["Content-Length"] == str(len(page_content))
        assert request(web, "localhost", "HEAD", "/other")[0] == 404
        assert request(web, "localhost", path="/?query")[0] == 200


@pytest.mark.enable_socket
def test_inactive_clients_are_disconnected_and_lost_ones_are_not_reported(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(serve._Handler, "timeout", 0.2)
    for i in range(40):
        result(f"method {i}", tasks=30).save(tmp_path)
    with serving(tmp_path) as web:
        with socket.create_connection(("127.0.0.1", web.server_port), timeout=10) as inactive:
            assert inactive.recv(1) == b"", "the server has closed the connection"
        for _ in range(3):
            client = socket.create_connection(("127.0.0.1", web.server_port), timeout=10)
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            client.sendall(b"GET / HTTP/1.0\r\nHost: localhost\r\n\r\n")
            client.close()  # with a reset, while the page is sent
        time.sleep(0.5)
        assert request(web, "localhost")[0] == 200
    printed = capsys.readouterr()
    assert printed.out == printed.err == ""


@pytest.mark.enable_socket
def test_an_error_of_the_page_is_printed_in_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(ReportPage, "render", lambda self: 1 / 0)
    with serving(tmp_path) as web, pytest.raises((http.client.HTTPException, ConnectionError)):
        request(web, "localhost")
    assert capsys.readouterr().err == "everlearn: The page could not be served: ZeroDivisionError: division by zero\n"


def test_only_changed_files_are_read_again(tmp_path, monkeypatch):
    read = []
    rendered = []
    load = serve.Result.load
    html = serve.html
    monkeypatch.setattr(serve.Result, "load", lambda path: read.append(path.name) or load(path))
    monkeypatch.setattr(serve, "html", lambda *args: rendered.append(1) or html(*args))
    first = result("EWC").save(tmp_path)
    (tmp_path / "unfinished.json").write_text("{")
    report = ReportPage(tmp_path, 5)
    text = report.render()
    assert sorted(read) == sorted([first.name, "unfinished.json"])
    assert report.render() == text and len(read) == 2 and len(rendered) == 1
    second = result("SI").save(tmp_path)
    assert '"method":"SI"' in report.render() and read[2:] == [second.name] and len(rendered) == 2
    first.write_bytes(first.read_bytes().replace(b"EWC", b"MAS"))
    assert '"method":"MAS"' in report.render() and read[3:] == [first.name]
    first.unlink()
    assert '"method":"MAS"' not in report.render() and len(read) == 4
    second.unlink()
    assert "No results in" in report.render()
