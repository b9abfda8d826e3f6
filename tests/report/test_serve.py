import threading
import urllib.error
import urllib.request

import pytest

pytest.importorskip("cyclopts")
from tests.report.test_html import result

from everlearn.report.serve import page, server


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
