"""Archives are unpacked whole or not at all, and never outside their folder."""

import io
import stat
import tarfile
import zipfile

import pytest

from everlearn.sources.archives import extract_folder

GOOD = {"set/a.txt": b"a", "set/deep/b.txt": b"b" * 1000}


def tar(path, members=GOOD, extra=None):
    with tarfile.open(path, "w:gz") as tape:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tape.addfile(info, io.BytesIO(content))
        if extra is not None:
            tape.addfile(extra)
    return path


def packed(path, members=GOOD, link=None):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        for name, content in members.items():
            file.writestr(name, content)
        if link:
            info = zipfile.ZipInfo(link)
            info.external_attr = (stat.S_IFLNK | 0o777) << 16
            file.writestr(info, "/etc/passwd")
    return path


def content(folder):
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.fixture
def into(tmp_path):
    (tmp_path / "into").mkdir()
    yield tmp_path / "into"
    assert {p.name for p in tmp_path.iterdir()} <= {"into", "a.zip", "a.tar.gz"}, "nothing appears beside the folder"


@pytest.mark.parametrize(("make", "name"), [(tar, "a.tar.gz"), (packed, "a.zip")])
def test_a_good_archive(make, name, into):
    members = {**GOOD, "other/c.txt": b"c"}
    assert extract_folder(make(into.parent / name, members), "set", into) == into / "set"
    assert content(into) == GOOD, "only the folder that was asked for, and no remains"
    with pytest.raises(FileExistsError, match="exists but is incomplete: remove it"):
        extract_folder(into.parent / name, "set", into)


@pytest.mark.parametrize(("make", "name"), [(tar, "a.tar.gz"), (packed, "a.zip")])
@pytest.mark.parametrize(
    "path", ["../evil", "set/../../evil", "/tmp/evil", "set\\..\\..\\evil", "C:\\evil", "\\\\server\\evil", "C:evil"]
)
def test_a_path_that_leads_out_is_refused(make, name, path, into):
    archive = make(into.parent / name, {**GOOD, path: b"evil"})
    with pytest.raises(ValueError, match="is a path that leads out of the folder"):
        extract_folder(archive, "set", into)
    assert not list(into.iterdir())


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.FIFOTYPE])
def test_links_and_devices_are_refused(kind, into):
    info = tarfile.TarInfo("set/link")
    info.type, info.linkname = kind, "/etc/passwd"
    with pytest.raises(ValueError, match="'set/link' is a link or a device"):
        extract_folder(tar(into.parent / "a.tar.gz", extra=info), "set", into)
    assert not list(into.iterdir())


def test_a_link_in_a_zip_is_refused(into):
    with pytest.raises(ValueError, match="'set/link' is a link or a device"):
        extract_folder(packed(into.parent / "a.zip", link="set/link"), "set", into)
    assert not list(into.iterdir())


@pytest.mark.parametrize(("make", "name"), [(tar, "a.tar.gz"), (packed, "a.zip")])
def test_more_than_is_allowed_is_refused_while_it_comes(make, name, into):
    archive = make(into.parent / name, {"set/huge": b"\0" * 5_000_000})
    with pytest.raises(ValueError, match="unpacks to more than 1,000,000 bytes"):
        extract_folder(archive, "set", into, max_bytes=1_000_000)
    assert not list(into.iterdir())


def test_more_files_than_is_allowed_are_refused(into):
    archive = packed(into.parent / "a.zip", {f"set/{i}": b"" for i in range(300)})
    with pytest.raises(ValueError, match="unpacks to more than 1,000,000 bytes"):
        extract_folder(archive, "set", into, max_bytes=1_000_000)


@pytest.mark.parametrize(("make", "name"), [(tar, "a.tar.gz"), (packed, "a.zip")])
def test_a_damaged_or_other_archive(make, name, into):
    archive = make(into.parent / name)
    with pytest.raises(ValueError, match="has no folder 'wanted' inside"):
        extract_folder(archive, "wanted", into)
    whole = archive.read_bytes()
    archive.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match="cannot be unpacked"):
        extract_folder(archive, "set", into)
    assert not list(into.iterdir())
