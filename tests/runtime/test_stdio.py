"""Commands finish their work when their standard streams are closed."""

import errno
import io
import os
import subprocess
import sys

import pytest

pytest.importorskip("cyclopts")
from everlearn import results
from everlearn.runtime.stdio import output_error, survive_closed_streams
from tests.results.report.test_html import result

FAST = ["--epochs", "1", "--hidden", "8", "--threads", "1", "--methods", "finetune,l2", "--seeds", "3"]
POSIX = pytest.mark.skipif(os.name != "posix", reason="POSIX pipes and descriptors")


def everlearn(*arguments, options=(), close=(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL):
    """Run a command with some standard streams closed, and return its exit code."""

    def close_streams():
        for descriptor in close:
            os.close(descriptor)

    command = [sys.executable, *options, "-m", "everlearn", *map(str, arguments)]
    return subprocess.run(
        command, stdout=stdout, stderr=stderr, preexec_fn=close_streams, timeout=120, check=False
    ).returncode


@pytest.fixture
def broken_pipe():
    """Write end of a pipe whose reader has closed it, as ``head -1`` does."""
    reader, writer = os.pipe()
    os.close(reader)
    yield writer
    os.close(writer)


@pytest.mark.slow
@POSIX
def test_runs_finish_when_the_reader_has_closed_the_pipe(broken_pipe, tmp_path):
    assert everlearn("run", *FAST, "--out", tmp_path, stdout=broken_pipe, stderr=broken_pipe) == 0
    assert len(results.load(tmp_path)) == 6


@pytest.mark.slow
@POSIX
@pytest.mark.parametrize("close", [(1,), (2,)], ids=["stdout", "stderr"])
def test_runs_finish_with_closed_streams(close, tmp_path):
    assert everlearn("run", *FAST, "--out", tmp_path, close=close) == 0
    assert len(results.load(tmp_path)) == 6


@pytest.mark.slow
@POSIX
def test_workers_finish_with_closed_streams(tmp_path):
    assert everlearn("run", *FAST, "--workers", "2", "--out", tmp_path, close=(0, 1, 2)) == 0
    assert len(results.load(tmp_path)) == 6


@pytest.mark.slow
@POSIX
@pytest.mark.parametrize("options", [(), ("-u",)], ids=["buffered", "unbuffered"])
def test_a_report_is_written_when_the_reader_has_closed_the_pipe(options, broken_pipe, tmp_path):
    for i in range(30):  # more than the buffer of a pipe holds
        result(f"method {i} " + "x" * 200).save(tmp_path)
    assert everlearn("report", tmp_path, stdout=broken_pipe, options=options) == 0
    assert (tmp_path / "report.html").read_bytes().startswith(b"<!doctype html>")


@pytest.mark.slow
@POSIX
def test_errors_set_the_exit_code_without_stderr(tmp_path):
    assert everlearn("report", tmp_path / "nowhere", close=(2,)) == 1


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_is_reported_after_the_work_is_done(tmp_path):
    result().save(tmp_path)
    with open("/dev/full", "wb") as full:
        command = [sys.executable, "-m", "everlearn", "report", str(tmp_path)]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False, timeout=120)
    assert done.returncode == 1 and "could not be written (No space left on device)" in done.stderr
    assert (tmp_path / "report.html").exists()


class Raw(io.RawIOBase):
    """A file that fails from its second write on."""

    def __init__(self, number):
        self.number = number
        self.written = []

    def writable(self):
        return True

    def write(self, content):
        if self.written:
            raise OSError(self.number, os.strerror(self.number))
        self.written.append(bytes(content))
        return len(content)


@pytest.mark.parametrize(("number", "is_reported"), [(errno.EPIPE, False), (errno.ENOSPC, True)])
def test_output_stops_after_a_failed_write(number, is_reported, monkeypatch):
    raw = Raw(number)
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(io.BufferedWriter(raw), encoding="ascii", errors="strict"))
    monkeypatch.setattr("sys.stderr", None)
    monkeypatch.setattr("sys.stdin", None)
    survive_closed_streams()
    print("1 ± 2", flush=True)
    for _ in range(3):
        print("more", flush=True)
    assert raw.written == [b"1 ? 2\n"]
    error = output_error()
    if is_reported:
        assert error is not None and error.errno == number
    else:
        assert error is None
    print("nothing", file=sys.stderr, flush=True)
    assert sys.stdin.read() == ""
    sys.stderr.close()
    sys.stdin.close()
