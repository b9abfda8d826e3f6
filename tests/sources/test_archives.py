"""Archives are extracted completely or not at all, and never outside their folder."""

import io
import stat
import tarfile
import zipfile

import pytest

from everlearn.sources.archives import extract_folder

MEMBERS = {"set/a.txt": b"a", "set/deep/b.txt": b"b" * 1000}


def write_tar(path, members=MEMBERS, extra=None):
    with tarfile.open(path, "w:gz") as archive:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
        if extra is not None:
            archive.addfile(extra)
    return path


def write_zip(path, members=MEMBERS, link=None):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
        if link:
            info = zipfile.ZipInfo(link)
            info.external_attr = (stat.S_IFLNK | 0o777) << 16
            archive.writestr(info, "/etc/passwd")
    return path


def read_folder(folder):
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def target_folder(tmp_path):
    (tmp_path / "target").mkdir()
    yield tmp_path / "target"
    assert {path.name for path in tmp_path.iterdir()} <= {"target", "a.zip", "a.tar.gz"}, (
        "nothing is written outside the folder"
    )


@pytest.mark.parametrize(("write_archive", "name"), [(write_tar, "a.tar.gz"), (write_zip, "a.zip")])
def test_archive_is_extracted(write_archive, name, target_folder):
    members = {**MEMBERS, "other/c.txt": b"c"}
    assert (
        extract_folder(write_archive(target_folder.parent / name, members), "set", target_folder)
        == target_folder / "set"
    )
    assert read_folder(target_folder) == MEMBERS, "only the requested folder, and no temporary files"
    with pytest.raises(FileExistsError, match="exists but is incomplete: remove it"):
        extract_folder(target_folder.parent / name, "set", target_folder)


@pytest.mark.parametrize(("write_archive", "name"), [(write_tar, "a.tar.gz"), (write_zip, "a.zip")])
@pytest.mark.parametrize(
    "path", ["../evil", "set/../../evil", "/tmp/evil", "set\\..\\..\\evil", "C:\\evil", "\\\\server\\evil", "C:evil"]
)
def test_path_outside_folder_is_refused(write_archive, name, path, target_folder):
    archive = write_archive(target_folder.parent / name, {**MEMBERS, path: b"evil"})
    with pytest.raises(ValueError, match="is a path that leads out of the folder"):
        extract_folder(archive, "set", target_folder)
    assert not list(target_folder.iterdir())


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.FIFOTYPE])
def test_links_and_devices_are_refused(kind, target_folder):
    info = tarfile.TarInfo("set/link")
    info.type = kind
    info.linkname = "/etc/passwd"
    with pytest.raises(ValueError, match="'set/link' is a link or a device"):
        extract_folder(write_tar(target_folder.parent / "a.tar.gz", extra=info), "set", target_folder)
    assert not list(target_folder.iterdir())


def test_link_in_zip_is_refused(target_folder):
    with pytest.raises(ValueError, match="'set/link' is a link or a device"):
        extract_folder(write_zip(target_folder.parent / "a.zip", link="set/link"), "set", target_folder)
    assert not list(target_folder.iterdir())


@pytest.mark.parametrize(("write_archive", "name"), [(write_tar, "a.tar.gz"), (write_zip, "a.zip")])
def test_extraction_stops_at_size_limit(write_archive, name, target_folder):
    archive = write_archive(target_folder.parent / name, {"set/huge": b"\0" * 5_000_000})
    with pytest.raises(ValueError, match="unpacks to more than 1,000,000 bytes"):
        extract_folder(archive, "set", target_folder, max_bytes=1_000_000)
    assert not list(target_folder.iterdir())


def test_extraction_stops_at_number_of_files(target_folder):
    archive = write_zip(target_folder.parent / "a.zip", {f"set/{i}": b"" for i in range(300)})
    with pytest.raises(ValueError, match="unpacks to more than 1,000,000 bytes"):
        extract_folder(archive, "set", target_folder, max_bytes=1_000_000)


@pytest.mark.parametrize(("write_archive", "name"), [(write_tar, "a.tar.gz"), (write_zip, "a.zip")])
def test_damaged_archive_and_missing_folder(write_archive, name, target_folder):
    archive = write_archive(target_folder.parent / name)
    with pytest.raises(ValueError, match="has no folder 'wanted' inside"):
        extract_folder(archive, "wanted", target_folder)
    complete_archive = archive.read_bytes()
    archive.write_bytes(complete_archive[: len(complete_archive) // 2])
    with pytest.raises(ValueError, match="cannot be unpacked"):
        extract_folder(archive, "set", target_folder)
    assert not list(target_folder.iterdir())
