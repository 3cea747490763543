"""CUDA programs on disk run in the user's process: only what this user, and nobody else, can have written is read."""

import hashlib
import os
import pathlib
import warnings

import pytest

from glax._src.core.files import LIMIT
from glax._src.kernels.common import stored
from glax._src.kernels.cuda import images
from glax._src.tuning.cache import Measurement, PersistentCache

pytestmark = pytest.mark.skipif(not hasattr(os, "getuid"), reason="Windows has neither owners nor modes of this form")
CODE = b"machine code"


@pytest.fixture
def base(tmp_path) -> pathlib.Path:
    return tmp_path / "cache"


@pytest.fixture
def image(base) -> pathlib.Path:
    path = base / "cuda" / "sm_90-nvrtc13.0" / "key.cubin"
    before = os.umask(0o002)
    try:
        images.PROGRAMS.write(path, base, CODE)
    finally:
        os.umask(before)
    return path


def test_what_is_stored_is_read_again_and_is_private(image, base):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert images.PROGRAMS.read(image, base) == CODE
        assert images.PROGRAMS.read(image.with_name("none"), base) is None
    modes = {path: path.lstat().st_mode & 0o777 for path in (base, *image.parents[:2], image)}
    assert modes == {base: 0o700, image.parents[1]: 0o700, image.parent: 0o700, image: 0o600}


def own(path: pathlib.Path, code: bytes = b"other code"):
    """Write an image with a right digest, as another user would."""
    path.write_bytes(images.PROGRAMS.mark + hashlib.sha256(code).digest() + code)


def of_another_owner(image, monkeypatch):
    user = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: user + 1)
    if user == 0:
        os.chown(image, 12345, -1)


def of_another_folder(image, monkeypatch):
    aside = image.parents[2].with_name("planted")
    aside.mkdir()
    own(aside / image.name)
    image.unlink()
    image.parent.rmdir()
    image.parent.symlink_to(aside)


def linked(image, monkeypatch):
    own(image.with_name("other"))
    image.unlink()
    image.symlink_to(image.with_name("other"))


def endless(image, monkeypatch):
    image.unlink()
    image.symlink_to("/dev/zero")


def fifo(image, monkeypatch):
    image.unlink()
    os.mkfifo(image)


def too_large(image, monkeypatch):
    with open(image, "r+b") as file:
        file.truncate(LIMIT + 1)


def written_by_all(image, monkeypatch):
    image.chmod(0o666)


def in_a_folder_of_all(image, monkeypatch):
    image.parent.chmod(0o775)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (of_another_owner, "Belongs to user"),
        (of_another_folder, "Not what glax makes there, but a link"),
        (linked, "Not what glax makes there, but a link"),
        (endless, "Not what glax makes there, but a link"),
        (fifo, "Not what glax makes there, but a FIFO"),
        (too_large, "Larger than 64 MiB"),
        (written_by_all, "Others can write to it"),
        (in_a_folder_of_all, "Others can write to it"),
    ],
)
def test_what_others_may_have_written_is_not_read(change, why, image, base, monkeypatch):
    change(image, monkeypatch)
    with pytest.warns(UserWarning, match=why):
        assert images.PROGRAMS.read(image, base) is None


def test_damaged_code_is_not_read(image, base):
    for content in (b"", images.PROGRAMS.mark, image.read_bytes()[:-1], b"x" + image.read_bytes()[1:]):
        image.write_bytes(content)
        assert images.PROGRAMS.read(image, base) is None


def test_the_oldest_files_of_a_full_folder_go(image, base, monkeypatch):
    size = image.stat().st_size
    os.utime(image, (1, 1))
    images.PROGRAMS.write(image.with_name("second.cubin"), base, CODE)
    assert len(list(image.parent.iterdir())) == 2
    monkeypatch.setattr(stored, "MOST_BYTES", 2 * size)
    images.PROGRAMS.write(image.with_name("third.cubin"), base, CODE)
    assert sorted(x.name for x in image.parent.iterdir()) == ["second.cubin", "third.cubin"]


def test_nothing_is_written_through_a_link(base, tmp_path):
    base.mkdir()
    (tmp_path / "elsewhere").mkdir()
    (base / "cuda").symlink_to(tmp_path / "elsewhere")
    with pytest.warns(UserWarning, match="Not a folder, but a link"):
        images.PROGRAMS.write(base / "cuda" / "sm_90-nvrtc13.0" / "key.cubin", base, CODE)
    assert not any((tmp_path / "elsewhere").iterdir())


def test_measurements_are_not_read_or_written_through_a_link(tmp_path, monkeypatch):
    monkeypatch.setenv("GLAX_CACHE_DIR", str(tmp_path / "cache"))
    cache = PersistentCache()
    folder, elsewhere = tmp_path / "cache" / "recurrent", tmp_path / "elsewhere"
    (elsewhere / "cpu").mkdir(parents=True)
    folder.parent.mkdir()
    folder.symlink_to(elsewhere)
    path = folder / "cpu" / "kernel@0.json"
    (elsewhere / "cpu" / path.name).write_text('{"format": 1, "entries": {}}')
    with pytest.warns(UserWarning, match="Not a folder, but a link"):
        assert cache.read(path) == {}
    with pytest.raises(OSError, match="Not a folder, but a link"):
        cache.merge(path, {}, {"call": dict(config={}, ms=1.0, type=Measurement.__name__)})
    assert sorted(x.name for x in (elsewhere / "cpu").iterdir()) == [path.name]
