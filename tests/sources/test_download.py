"""Downloads from a local server: resumed, verified, and renamed when complete."""

import hashlib
import http.server
import re
import tarfile
import threading
from dataclasses import replace

import pytest
import torch

from everlearn.sources import SOURCES, load
from everlearn.sources.checksums import File, md5
from everlearn.sources.download import download_file
from tests import layouts

pytestmark = pytest.mark.enable_socket
CONTENT = bytes(range(256)) * 4000


class Handler(http.server.BaseHTTPRequestHandler):
    """A server that can cut connections, lack ranges, or send wrong ranges."""

    def do_GET(self):
        server = self.server
        server.requested_ranges.append(self.headers.get("Range"))
        if self.path in server.redirects:
            self.send_response(302)
            self.send_header("Location", server.redirects[self.path])
            return self.end_headers()
        content = server.files.get(self.path)
        if content is None:
            return self.send_error(404)
        start = int(re.match(r"bytes=(\d+)-", self.headers["Range"])[1]) if self.headers.get("Range") else None
        if start is not None and server.supports_ranges and start >= len(content):
            self.send_response(416)
            self.send_header("Content-Range", f"bytes */{len(content)}")
            return self.end_headers()
        body = content[start:] if start is not None and server.supports_ranges else content
        self.send_response(206 if start is not None and server.supports_ranges else 200)
        if start is not None and server.supports_ranges:
            first = start + server.range_shift
            self.send_header("Content-Range", f"bytes {first}-{len(content) - 1}/{len(content)}")
        if server.sends_length:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body[: server.cut_lengths.pop(0)] if server.cut_lengths else body)

    def log_message(self, *args):
        pass


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.files = {"/a.bin": CONTENT}
    server.requested_ranges = []
    server.cut_lengths = []
    server.supports_ranges = True
    server.sends_length = True
    server.range_shift = 0
    server.redirects = {}
    server.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def file(server):
    return File("a.bin", hashlib.md5(CONTENT, usedforsecurity=False).hexdigest(), url=f"{server.url}/a.bin")


def test_download_with_progress(server, file, tmp_path, capsys):
    download_file(file, tmp_path / "new" / "a.bin")
    assert (tmp_path / "new" / "a.bin").read_bytes() == CONTENT
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["a.bin"]
    assert "a.bin" in capsys.readouterr().err and server.requested_ranges == [None]


def test_broken_connection_is_resumed(server, file, tmp_path):
    server.cut_lengths = [300_000, 100_000]
    download_file(file, tmp_path / "a.bin")
    assert (tmp_path / "a.bin").read_bytes() == CONTENT
    assert server.requested_ranges == [None, "bytes=300000-", "bytes=400000-"]


def test_interrupted_download_is_resumed_by_next_call(server, file, tmp_path):
    server.cut_lengths = [100_000] * 3
    with pytest.raises(
        OSError, match=r"ended after 300,000 of 1,024,000 bytes. 300,000 bytes are kept in .*a.bin.part"
    ):
        download_file(file, tmp_path / "a.bin")
    assert not (tmp_path / "a.bin").exists() and (tmp_path / "a.bin.part").stat().st_size == 300_000
    download_file(file, tmp_path / "a.bin")
    assert (tmp_path / "a.bin").read_bytes() == CONTENT and server.requested_ranges[-1] == "bytes=300000-"
    assert not (tmp_path / "a.bin.part").exists()


def test_server_without_ranges_sends_complete_file(server, file, tmp_path):
    server.supports_ranges = False
    (tmp_path / "a.bin.part").write_bytes(CONTENT[:5000])
    download_file(file, tmp_path / "a.bin")
    assert (tmp_path / "a.bin").read_bytes() == CONTENT


def test_server_without_content_length(server, file, tmp_path):
    server.sends_length = False
    download_file(file, tmp_path / "a.bin")
    assert (tmp_path / "a.bin").read_bytes() == CONTENT


def test_truncated_download_without_content_length_is_resumed(server, file, tmp_path):
    server.sends_length = False
    server.cut_lengths = [300_000]
    download_file(file, tmp_path / "a.bin")
    assert (tmp_path / "a.bin").read_bytes() == CONTENT and server.requested_ranges == [None, "bytes=300000-"]
    server.cut_lengths = [100_000] * 3
    with pytest.raises(
        OSError, match=r"it ended after 300,000 bytes, without .* 300,000 bytes are kept in .*b.bin.part"
    ):
        download_file(file, tmp_path / "b.bin")
    download_file(file, tmp_path / "b.bin")
    assert (tmp_path / "b.bin").read_bytes() == CONTENT and server.requested_ranges[-1] == "bytes=300000-"
    with pytest.raises(ValueError, match=r"is damaged: its md5 is .*The downloaded file has been removed."):
        download_file(replace(file, md5="0" * 32), tmp_path / "c.bin")  # the server reports that the file is complete


def test_partial_file_that_is_complete(server, file, tmp_path):
    for known_file in (file, replace(file, size=len(CONTENT))):
        (tmp_path / "a.bin.part").write_bytes(CONTENT)
        download_file(known_file, tmp_path / "a.bin")
        assert (tmp_path / "a.bin").read_bytes() == CONTENT


@pytest.mark.parametrize("shift", [0, 7])
def test_partial_file_that_does_not_match_is_discarded(server, file, shift, tmp_path):
    server.range_shift = shift
    (tmp_path / "a.bin.part").write_bytes(CONTENT[:999] if shift else CONTENT + b"more")
    download_file(file, tmp_path / "a.bin")
    assert (tmp_path / "a.bin").read_bytes() == CONTENT and server.requested_ranges[-1] is None


def test_wrong_checksum_removes_file(server, file, tmp_path):
    with pytest.raises(ValueError, match=r"is damaged: its md5 is .*The downloaded file has been removed."):
        download_file(replace(file, md5="0" * 32), tmp_path / "a.bin")
    with pytest.raises(ValueError, match=r"has 1,024,000 bytes, not 2,000,000.*removed"):
        download_file(replace(file, md5=None, size=2_000_000), tmp_path / "a.bin")
    assert not list(tmp_path.iterdir())


def test_server_that_sends_too_much(server, file, tmp_path):
    with pytest.raises(ValueError, match="sends more than the 1,000 bytes"):
        download_file(replace(file, size=1000), tmp_path / "a.bin")
    assert not list(tmp_path.iterdir())


def test_download_without_checksum_or_size_is_not_resumed(server, file, tmp_path):
    (tmp_path / "a.bin.part").write_bytes(b"of another version")
    download_file(replace(file, md5=None), tmp_path / "a.bin")
    assert (tmp_path / "a.bin").read_bytes() == CONTENT and server.requested_ranges == [None]


def test_failed_downloads(server, file, tmp_path):
    with pytest.raises(OSError, match=r"Could not download .*/b.bin: HTTP Error 404.*put it at"):
        download_file(replace(file, url=f"{server.url}/b.bin"), tmp_path / "a.bin")
    assert len(server.requested_ranges) == 1, "a refused request is not repeated"
    with pytest.raises(OSError, match="Could not download"):
        download_file(replace(file, url="http://127.0.0.1:9/a.bin"), tmp_path / "a.bin")
    with pytest.raises(ValueError, match="from http:// and https:// addresses only, got 'file:///etc/passwd'"):
        download_file(replace(file, url="file:///etc/passwd"), tmp_path / "a.bin")


def test_plain_http_needs_a_checksum(server, file, tmp_path, monkeypatch):
    with pytest.raises(
        ValueError, match=r"a.bin comes from http://example.org/a.bin, which is not encrypted, and has no"
    ):
        download_file(replace(file, url="http://example.org/a.bin", md5=None, size=len(CONTENT)), tmp_path / "a.bin")
    monkeypatch.setattr("everlearn.sources.download.LOCAL_HOSTS", ())
    download_file(file, tmp_path / "a.bin")
    assert (tmp_path / "a.bin").read_bytes() == CONTENT


def test_redirect_to_plain_http_needs_a_checksum(server, file, tmp_path, monkeypatch):
    monkeypatch.setattr("everlearn.sources.download.LOCAL_HOSTS", ("localhost",))
    server.redirects = {"/moved.bin": f"{server.url}/a.bin"}
    redirected_url = f"{server.url}/moved.bin".replace("127.0.0.1", "localhost")
    with pytest.raises(ValueError, match=r"comes from http://127.0.0.1:\d+/a.bin, which is not encrypted"):
        download_file(replace(file, url=redirected_url, md5=None), tmp_path / "b.bin")
    assert not (tmp_path / "b.bin").exists()
    download_file(replace(file, url=redirected_url), tmp_path / "b.bin")


@pytest.fixture
def files(server, without_checksums, tmp_path, monkeypatch):
    """A small MNIST in ``tmp_path`` and on the server, with checksums."""
    layouts.write_mnist(tmp_path / "mnist")
    source = SOURCES["mnist"]
    files = []
    for file in source.layouts[0].files:
        server.files[f"/{file.name}"] = (tmp_path / "mnist" / file.name).read_bytes()
        files.append(replace(file, md5=md5(tmp_path / "mnist" / file.name), url=f"{server.url}/{file.name}"))
    layout = replace(source.layouts[0], files=tuple(files))
    monkeypatch.setitem(SOURCES, "mnist", replace(source, layouts=(layout,)))
    return files


def test_load_downloads_files(server, files, tmp_path):
    expected = load("mnist", tmp_path)
    assert torch.equal(load("mnist", tmp_path / "new", download=True)[0][0], expected[0][0])
    (tmp_path / "new" / "mnist" / files[1].name).unlink()
    num_requests = len(server.requested_ranges)
    load("mnist", tmp_path / "new", download=True)
    assert len(server.requested_ranges) == num_requests + 1, "only the missing file"
    load("mnist", tmp_path / "new", download=True)
    assert len(server.requested_ranges) == num_requests + 1


def test_load_downloads_only_missing_files(server, files, tmp_path):
    folder = tmp_path / "mnist"
    (folder / files[1].name).unlink()
    load("mnist", folder, download=True)
    assert len(server.requested_ranges) == 1
    assert sorted(path.name for path in folder.iterdir()) == sorted(file.name for file in files)


def test_load_replaces_damaged_file(server, files, tmp_path):
    folder = tmp_path / "mnist"
    intact = server.files[f"/{files[1].name}"]
    for root in (tmp_path, folder):
        (folder / files[1].name).write_bytes(b"damaged")
        with pytest.raises(ValueError, match="is damaged"):
            load("mnist", root)
        server.files[f"/{files[1].name}"] = b"as bad"
        with pytest.raises(ValueError, match=r"The downloaded file has been removed"):
            load("mnist", root, download=True)
        assert (folder / files[1].name).read_bytes() == b"damaged", "kept until an intact file is downloaded"
        server.files[f"/{files[1].name}"] = intact
        load("mnist", root, download=True)
        assert (folder / files[1].name).read_bytes() == intact


def test_load_does_not_replace_another_data_set(server, files, tmp_path):
    other_folder = tmp_path / "clothes"
    layouts.write_mnist(other_folder, (50, 30), seed=9)
    files_before = {path: path.read_bytes() for path in other_folder.iterdir()}
    load("mnist", other_folder, download=True)
    assert all(path.read_bytes() == content for path, content in files_before.items())
    assert (other_folder / "mnist").is_dir()


@pytest.mark.usefixtures("without_checksums")
def test_load_downloads_and_extracts_archive(server, tmp_path, monkeypatch):
    layouts.write_cifar100(tmp_path / "cifar-100-binary")
    expected = load("cifar100", tmp_path)
    with tarfile.open(tmp_path / "cifar-100-binary.tar.gz", "w:gz") as tar:
        tar.add(tmp_path / "cifar-100-binary", "cifar-100-binary")
    archive = tmp_path / "cifar-100-binary.tar.gz"
    server.files["/c.tar.gz"] = archive.read_bytes()
    source = SOURCES["cifar100"]
    known_file = replace(source.layouts[0].archives[0], url=f"{server.url}/c.tar.gz", md5=md5(archive))
    monkeypatch.setitem(
        SOURCES, "cifar100", replace(source, layouts=(replace(source.layouts[0], archives=(known_file,)),))
    )
    assert torch.equal(load("cifar100", tmp_path / "new", download=True)[0][0], expected[0][0])
    (tmp_path / "manual").mkdir()
    archive.rename(tmp_path / "manual" / archive.name)
    load("cifar100", tmp_path / "manual", download=True)
    assert len(server.requested_ranges) == 1, "a local archive is extracted without a download"


def test_data_set_without_url_is_reported(tmp_path, monkeypatch):
    monkeypatch.delenv("EVERLEARN_DATA", raising=False)
    with pytest.raises(FileNotFoundError, match=r"missing .*batch10.dat; get it from archive.ics.uci.edu"):
        load("gas_drift", tmp_path, download=True)
    with pytest.raises(FileNotFoundError, match=r"Where is mnist\?"):
        load("mnist", download=True)
    (tmp_path / "chars74k_fnt_28.npz").write_bytes(b"damaged")
    with pytest.raises(ValueError, match=r"is damaged: its md5 is"):
        load("chars74k", tmp_path, download=True)
