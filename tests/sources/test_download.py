"""Downloads from a server on this machine: resumed, verified, there only when whole."""

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
    """A server that can break off, lack ranges, or answer otherwise than asked."""

    def do_GET(self):
        server = self.server
        server.asked.append(self.headers.get("Range"))
        if self.path in server.sends_on:
            self.send_response(302)
            self.send_header("Location", server.sends_on[self.path])
            return self.end_headers()
        whole = server.files.get(self.path)
        if whole is None:
            return self.send_error(404)
        start = int(re.match(r"bytes=(\d+)-", self.headers["Range"])[1]) if self.headers.get("Range") else None
        if start is not None and server.ranges and start >= len(whole):
            self.send_response(416)
            self.send_header("Content-Range", f"bytes */{len(whole)}")
            return self.end_headers()
        body = whole[start:] if start is not None and server.ranges else whole
        self.send_response(206 if start is not None and server.ranges else 200)
        if start is not None and server.ranges:
            first = start + server.shift
            self.send_header("Content-Range", f"bytes {first}-{len(whole) - 1}/{len(whole)}")
        if server.announces:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body[: server.breaks.pop(0)] if server.breaks else body)

    def log_message(self, *args):
        pass


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.files, server.asked, server.breaks = {"/a.bin": CONTENT}, [], []
    server.ranges, server.announces, server.shift, server.sends_on = True, True, 0, {}
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


def test_a_download_with_progress(server, file, tmp_path, capsys):
    download_file(file, tmp_path / "new" / "a.bin")
    assert (tmp_path / "new" / "a.bin").read_bytes() == CONTENT
    assert [p.name for p in (tmp_path / "new").iterdir()] == ["a.bin"]
    assert "a.bin" in capsys.readouterr().err and server.asked == [None]


def test_a_connection_that_breaks_is_taken_up_again(server, file, tmp_path):
    server.breaks = [300_000, 100_000]
    download_file(file, tmp_path / "a.bin")
    assert (tmp_path / "a.bin").read_bytes() == CONTENT
    assert server.asked == [None, "bytes=300000-", "bytes=400000-"]


def test_an_interrupted_download_goes_on_at_the_next_call(server, file, tmp_path):
    server.breaks = [100_000] * 3
    with pytest.raises(
        OSError, match=r"ended after 300,000 of 1,024,000 bytes. 300,000 bytes are kept in .*a.bin.part"
    ):
        download_file(file, tmp_path / "a.bin")
    assert not (tmp_path / "a.bin").exists() and (tmp_path / "a.bin.part").stat().st_size == 300_000
    download_file(file, tmp_path / "a.bin")
    assert (tmp_path / "a.bin").read_bytes() == CONTENT and server.asked[-1] == "bytes=300000-"
    assert not (tmp_path / "a.bin.part").exists()


def test_a_server_without_ranges_sends_all_again(server, file, tmp_path):
    server.ranges = False
    (tmp_path / "a.bin.part").write_bytes(CONTENT[:5000])
    download_file(file, tmp_path / "a.bin")
    assert (tmp_path / "a.bin").read_bytes() == CONTENT


def test_a_server_that_announces_no_length(server, file, tmp_path):
    server.announces = False
    download_file(file, tmp_path / "a.bin")
    assert (tmp_path / "a.bin").read_bytes() == CONTENT


def test_an_end_without_an_announced_length_may_be_early(server, file, tmp_path):
    server.announces, server.breaks = False, [300_000]
    download_file(file, tmp_path / "a.bin")
    assert (tmp_path / "a.bin").read_bytes() == CONTENT and server.asked == [None, "bytes=300000-"]
    server.breaks = [100_000] * 3
    with pytest.raises(
        OSError, match=r"it ended after 300,000 bytes, without .* 300,000 bytes are kept in .*b.bin.part"
    ):
        download_file(file, tmp_path / "b.bin")
    download_file(file, tmp_path / "b.bin")
    assert (tmp_path / "b.bin").read_bytes() == CONTENT and server.asked[-1] == "bytes=300000-"
    with pytest.raises(ValueError, match=r"is damaged: its md5 is .*The downloaded file has been removed."):
        download_file(replace(file, md5="0" * 32), tmp_path / "c.bin")  # the server says that there is no more


def test_a_part_that_is_whole_already(server, file, tmp_path):
    for known in (file, replace(file, size=len(CONTENT))):
        (tmp_path / "a.bin.part").write_bytes(CONTENT)
        download_file(known, tmp_path / "a.bin")
        assert (tmp_path / "a.bin").read_bytes() == CONTENT


@pytest.mark.parametrize("shift", [0, 7])
def test_a_part_that_does_not_fit_is_thrown_away(server, file, shift, tmp_path):
    server.shift = shift
    (tmp_path / "a.bin.part").write_bytes(CONTENT[:999] if shift else CONTENT + b"more")
    download_file(file, tmp_path / "a.bin")
    assert (tmp_path / "a.bin").read_bytes() == CONTENT and server.asked[-1] is None


def test_a_wrong_checksum_removes_the_file(server, file, tmp_path):
    with pytest.raises(ValueError, match=r"is damaged: its md5 is .*The downloaded file has been removed."):
        download_file(replace(file, md5="0" * 32), tmp_path / "a.bin")
    with pytest.raises(ValueError, match=r"has 1,024,000 bytes, not 2,000,000.*removed"):
        download_file(replace(file, md5=None, size=2_000_000), tmp_path / "a.bin")
    assert not list(tmp_path.iterdir())


def test_a_server_that_sends_too_much(server, file, tmp_path):
    with pytest.raises(ValueError, match="sends more than the 1,000 bytes"):
        download_file(replace(file, size=1000), tmp_path / "a.bin")
    assert not list(tmp_path.iterdir())


def test_without_checksum_or_size_nothing_is_resumed(server, file, tmp_path):
    (tmp_path / "a.bin.part").write_bytes(b"of another version")
    download_file(replace(file, md5=None), tmp_path / "a.bin")
    assert (tmp_path / "a.bin").read_bytes() == CONTENT and server.asked == [None]


def test_what_cannot_be_got(server, file, tmp_path):
    with pytest.raises(OSError, match=r"Could not download .*/b.bin: HTTP Error 404.*put it at"):
        download_file(replace(file, url=f"{server.url}/b.bin"), tmp_path / "a.bin")
    assert len(server.asked) == 1, "a refusal is not asked again"
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


def test_being_sent_on_to_plain_http_needs_a_checksum_too(server, file, tmp_path, monkeypatch):
    monkeypatch.setattr("everlearn.sources.download.LOCAL_HOSTS", ("localhost",))
    server.sends_on = {"/moved.bin": f"{server.url}/a.bin"}
    moved = f"{server.url}/moved.bin".replace("127.0.0.1", "localhost")
    with pytest.raises(ValueError, match=r"comes from http://127.0.0.1:\d+/a.bin, which is not encrypted"):
        download_file(replace(file, url=moved, md5=None), tmp_path / "b.bin")
    assert not (tmp_path / "b.bin").exists()
    download_file(replace(file, url=moved), tmp_path / "b.bin")


@pytest.fixture
def files(server, without_checksums, tmp_path, monkeypatch):
    """A small MNIST in ``tmp_path`` and on the server, with checksums."""
    layouts.write_mnist(tmp_path / "mnist")
    row = SOURCES["mnist"]
    files = []
    for one in row.layouts[0].files:
        server.files[f"/{one.name}"] = (tmp_path / "mnist" / one.name).read_bytes()
        files.append(replace(one, md5=md5(tmp_path / "mnist" / one.name), url=f"{server.url}/{one.name}"))
    layout = replace(row.layouts[0], files=tuple(files))
    monkeypatch.setitem(SOURCES, "mnist", replace(row, layouts=(layout,)))
    return files


def test_load_downloads_the_files_of_a_set(server, files, tmp_path):
    truth = load("mnist", tmp_path)
    assert torch.equal(load("mnist", tmp_path / "new", download=True)[0][0], truth[0][0])
    (tmp_path / "new" / "mnist" / files[1].name).unlink()
    asked = len(server.asked)
    load("mnist", tmp_path / "new", download=True)
    assert len(server.asked) == asked + 1, "only what is missing"
    load("mnist", tmp_path / "new", download=True)
    assert len(server.asked) == asked + 1


def test_load_downloads_beside_what_is_there(server, files, tmp_path):
    own = tmp_path / "mnist"
    (own / files[1].name).unlink()
    load("mnist", own, download=True)
    assert len(server.asked) == 1 and sorted(p.name for p in own.iterdir()) == sorted(file.name for file in files)


def test_load_replaces_a_damaged_file_by_a_sound_one(server, files, tmp_path):
    own, sound = tmp_path / "mnist", server.files[f"/{files[1].name}"]
    for root in (tmp_path, own):
        (own / files[1].name).write_bytes(b"damaged")
        with pytest.raises(ValueError, match="is damaged"):
            load("mnist", root)
        server.files[f"/{files[1].name}"] = b"as bad"
        with pytest.raises(ValueError, match=r"The downloaded file has been removed"):
            load("mnist", root, download=True)
        assert (own / files[1].name).read_bytes() == b"damaged", "until there is a better one"
        server.files[f"/{files[1].name}"] = sound
        load("mnist", root, download=True)
        assert (own / files[1].name).read_bytes() == sound


def test_load_leaves_alone_what_is_another_set_of_the_same_names(server, files, tmp_path):
    other = tmp_path / "clothes"
    layouts.write_mnist(other, (50, 30), seed=9)
    before = {path: path.read_bytes() for path in other.iterdir()}
    load("mnist", other, download=True)
    assert all(path.read_bytes() == content for path, content in before.items()) and (other / "mnist").is_dir()


@pytest.mark.usefixtures("without_checksums")
def test_load_downloads_and_unpacks_an_archive(server, tmp_path, monkeypatch):
    layouts.write_cifar100(tmp_path / "cifar-100-binary")
    truth = load("cifar100", tmp_path)
    with tarfile.open(tmp_path / "cifar-100-binary.tar.gz", "w:gz") as tape:
        tape.add(tmp_path / "cifar-100-binary", "cifar-100-binary")
    archive = tmp_path / "cifar-100-binary.tar.gz"
    server.files["/c.tar.gz"] = archive.read_bytes()
    row = SOURCES["cifar100"]
    known = replace(row.layouts[0].archives[0], url=f"{server.url}/c.tar.gz", md5=md5(archive))
    monkeypatch.setitem(SOURCES, "cifar100", replace(row, layouts=(replace(row.layouts[0], archives=(known,)),)))
    assert torch.equal(load("cifar100", tmp_path / "new", download=True)[0][0], truth[0][0])
    (tmp_path / "by hand").mkdir()
    archive.rename(tmp_path / "by hand" / archive.name)
    load("cifar100", tmp_path / "by hand", download=True)
    assert len(server.asked) == 1, "an archive that is there is unpacked without the network"


def test_a_set_that_must_be_got_by_hand_says_so(tmp_path, monkeypatch):
    monkeypatch.delenv("EVERLEARN_DATA", raising=False)
    with pytest.raises(FileNotFoundError, match=r"missing .*batch10.dat; get it from archive.ics.uci.edu"):
        load("gas_drift", tmp_path, download=True)
    with pytest.raises(FileNotFoundError, match=r"Where is mnist\?"):
        load("mnist", download=True)
    (tmp_path / "chars74k_fnt_28.npz").write_bytes(b"damaged")
    with pytest.raises(ValueError, match=r"is damaged: its md5 is"):
        load("chars74k", tmp_path, download=True)
