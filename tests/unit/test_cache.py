"""Measurements on disk: many writers, broken files, folders that cannot be used."""

import contextlib
import errno
import json
import os
import pathlib
import resource
import subprocess
import sys
import tempfile
import warnings

import jax.numpy as jnp
import numpy as np
import pytest

import glax
from glax._src.tuning.cache import Measurement
from tests.cumulative import BlockConfig, Cumulative

KERNEL = Cumulative()


def call(n: int) -> glax.Invocation:
    return glax.Invocation.of(KERNEL, (jnp.asarray(np.ones(n, np.float32)),), {})  # jnp.ones would compile


def cache(folder) -> glax.PersistentCache:
    return glax.PersistentCache("recurrent", folder=folder)


def test_what_is_put_comes_back_in_another_process(tmp_path):
    cache(tmp_path).put(
        call(3), Measurement(BlockConfig(8), 1.5, {"BlockConfig(block=8)": 1.5, "BlockConfig(block=3)": "failed"})
    )
    assert cache(tmp_path).get(call(3)) == BlockConfig(8)
    assert cache(tmp_path).get(call(4)) is None
    (path,) = tmp_path.rglob("*.json")
    stored = json.loads(path.read_text())
    assert stored["kernel"] == "cumulative"
    assert stored["entries"]["0.0=float32[3]"]["config"] == {"block": 8}
    assert path.name.startswith("cumulative@0+jaxlib")


def test_versions_have_their_own_files(tmp_path):
    cache(tmp_path).put(call(3), Measurement(BlockConfig(8), 1.0))
    newer = Cumulative()
    newer.version = 1
    assert cache(tmp_path).get(glax.Invocation.of(newer, (jnp.ones(3),), {})) is None


def test_what_is_shipped_serves_every_compiler(tmp_path, monkeypatch):
    shipped = glax.PersistentCache("tuned", folder=tmp_path, any_compiler=True)
    shipped.put(call(3), Measurement(BlockConfig(8), 1.0))
    (path,) = tmp_path.rglob("*.json")
    assert path.name == "cumulative@0.json" and path.parent.parent == tmp_path / "tuned"
    monkeypatch.setattr("glax._src.tuning.cache.libraries", lambda op_id: dict(jaxlib="99.0"))
    assert shipped.get(call(3)) == BlockConfig(8)
    assert cache(tmp_path).get(call(3)) is None


WRITER = """
import sys
from glax._src.tuning.cache import Measurement
from tests.cumulative import BlockConfig
from tests.unit.test_cache import cache, call
for i in range(20):
    cache(sys.argv[1]).put(call(100 * int(sys.argv[2]) + i), Measurement(BlockConfig(i), 1.0))
"""


@pytest.mark.rest
def test_eight_writers_at_once_lose_nothing(tmp_path):
    root = pathlib.Path(__file__).parents[2]
    writers = [subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path), str(n)], cwd=root) for n in range(8)]
    assert [writer.wait() for writer in writers] == [0] * 8
    stored = cache(tmp_path)
    for n in range(8):
        for i in range(20):
            assert stored.get(call(100 * n + i)) == BlockConfig(i)
    assert len(list(tmp_path.rglob("*.json"))) == 1


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ('{"format": 1, "entr', "Unterminated string"),
        ("[1, 2]", "not a file of glax"),
        ('{"hello": 1}', "not a file of glax"),
        ('{"format": 2, "entries": {}}', "its format is 2, this version of glax reads 1"),
        (b"\\xff\\x00", "decode"),
        ("[" * 100_000, "nested deeper"),
        ('{"format": 1, "entries": {"x": ' + "[" * 100 + "]" * 100 + "}}", "nested deeper"),
        ("true", "not a file of glax"),
        (str(10**19), "not a file of glax"),
        ('{"format": true, "entries": {}}', "its format is True"),
        ('{"format": 1, "entries": {"x": NaN}}', "NaN, which is not finite"),
        ('{"format": 1, "entries": {"x": 1e999}}', "1e999, which is not finite"),
        ('{"format": 1, "entries": {}, "entries": {}}', "'entries' stands twice"),
    ],
    ids=["truncated", "a list", "foreign", "newer", "binary", "deep", "too deep to write", "true", "a number",
         "true for 1", "NaN", "infinity", "twice"],
)  # fmt: skip
def test_a_file_that_cannot_be_read_is_set_aside_once(tmp_path, content, reason):
    path = cache(tmp_path).path(call(3))
    path.parent.mkdir(parents=True)
    path.write_bytes(content.encode() if isinstance(content, str) else b"\xff\x00\xfe")
    stored = cache(tmp_path)
    with pytest.warns(UserWarning, match="set aside") as caught:
        assert stored.get(call(3)) is None
    assert len(caught) == 1
    assert reason in str(caught[0].message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert stored.get(call(3)) is None
        stored.put(call(3), Measurement(BlockConfig(8), 1.0))
        assert cache(tmp_path).get(call(3)) == BlockConfig(8)
    assert path.with_name(path.name + ".unreadable").exists()


def test_a_config_that_no_longer_fits_is_a_miss(tmp_path):
    cache(tmp_path).put(call(3), Measurement(BlockConfig(8), 1.0))
    (path,) = tmp_path.rglob("*.json")
    path.write_text(path.read_text().replace('"block"', '"tile"'))
    with pytest.warns(UserWarning, match="ignores the stored config"):
        assert cache(tmp_path).get(call(3)) is None


@pytest.mark.parametrize(
    "change",
    [
        True,
        10**19,
        dict(config=dict(block=True)),
        dict(config=dict(block=8.0)),
        dict(config=dict(block=10**12)),
        dict(config=dict(block=[8])),
        dict(config=dict(block=None)),
        dict(config={}),
        dict(config=dict(block=8, more=1)),
        dict(type="Other"),
        dict(ms=10**400),
        dict(ms=-1.0),
    ],
    ids=str,
)
def test_an_impossible_entry_is_a_miss_said_once(tmp_path, change):
    """Nothing that a file holds reaches a kernel but what the config's class and annotations allow."""
    path = cache(tmp_path).path(call(3))
    path.parent.mkdir(parents=True)
    sound = dict(type="BlockConfig", config=dict(block=8), ms=1.0, candidates={})
    entries = {call(3).key: sound | change if isinstance(change, dict) else change, call(4).key: sound}
    path.write_text(json.dumps(dict(format=1, entries=entries)))
    stored = cache(tmp_path)
    with pytest.warns(UserWarning, match="ignores the stored config") as caught:
        assert stored.get(call(3)) is stored.get(call(3)) is None
    assert len(caught) == 1
    assert stored.get(call(4)) == BlockConfig(8)


def test_a_file_of_gigabytes_is_not_read(tmp_path):
    path = cache(tmp_path).path(call(3))
    path.parent.mkdir(parents=True)
    with path.open("wb") as file:
        file.truncate(1 << 40)  # sparse
    with pytest.warns(UserWarning, match="set aside.*larger than 64 MiB"):
        assert cache(tmp_path).get(call(3)) is None


@pytest.mark.parametrize("kind", ["a FIFO", "a device", "a directory"])
def test_what_is_no_file_is_left_alone(tmp_path, kind):
    """A FIFO would wait for its writer, a device has no end."""
    path = cache(tmp_path).path(call(3))
    path.parent.mkdir(parents=True)
    if kind == "a FIFO":
        os.mkfifo(path)
    elif kind == "a device":
        path.symlink_to("/dev/zero")
    else:
        path.mkdir()
    stored = cache(tmp_path)
    with pytest.warns(UserWarning, match=f"Not a regular file, but {kind}") as caught:
        assert stored.get(call(3)) is stored.get(call(3)) is None
        stored.put(call(3), Measurement(BlockConfig(8), 1.0))
    assert len(caught) == 2 and path.exists() and not path.is_file()


SOUND = dict(format=1, entries={"0.0=float32[3]": dict(type="BlockConfig", config=dict(block=8), ms=1.0)})


@pytest.fixture
def sound_file(tmp_path):
    return written(tmp_path)


def written(folder) -> pathlib.Path:
    path = cache(folder).path(call(3))
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(SOUND))
    return path


def test_too_many_open_files_take_no_file_away(tmp_path, sound_file):
    stored, inv = cache(tmp_path), call(3)
    stored.put(call(4), Measurement(BlockConfig(16), 1.0))  # what is imported at the first use is there
    before = sound_file.read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with pytest.warns(UserWarning, match="Too many open files") as caught:
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
        try:
            assert stored.get(inv) is None
            stored.put(inv, Measurement(BlockConfig(16), 1.0))
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert [("stays as it is" in str(w.message), "cannot write" in str(w.message)) for w in caught] == [
        (True, False),
        (False, True),
    ]
    assert sound_file.read_bytes() == before and stored.get(inv) == BlockConfig(8)


@contextlib.contextmanager
def unprivileged():
    """Inside, the process is no root, who may do everything."""
    root = os.geteuid() == 0
    if root:
        os.seteuid(54321)
    try:
        yield
    finally:
        if root:
            os.seteuid(0)


@pytest.fixture
def reachable():
    """A folder that every user can reach, which pytest's are not."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        yield pathlib.Path(folder)


@pytest.mark.parametrize("content", ["sound", "broken"])
def test_in_a_folder_that_cannot_be_written_nothing_untrue_is_said(reachable, content):
    path, stored, inv = written(reachable), cache(reachable), call(3)
    if content == "broken":
        path.write_text("{")
    path.parent.chmod(0o555)
    with warnings.catch_warnings(record=True) as caught, unprivileged():
        warnings.simplefilter("always")
        assert stored.get(inv) == (BlockConfig(8) if content == "sound" else None)
        stored.put(inv, Measurement(BlockConfig(8), 1.0))
    said = [str(warning.message) for warning in caught]
    assert ["cannot be renamed" in text for text in said] == ([True, False] if content == "broken" else [False])
    assert "keeps its measurements in memory only" in said[-1] and "Permission denied" in said[-1]
    assert os.listdir(path.parent) == [path.name]
    path.parent.chmod(0o755)


def test_a_file_without_permission_stays(reachable):
    path, stored, inv = written(reachable), cache(reachable), call(3)
    before = path.read_bytes()
    path.parent.chmod(0o777)
    path.chmod(0)
    with unprivileged():
        with pytest.warns(UserWarning, match="stays as it is.*Permission denied"):
            assert stored.get(inv) is None
        with pytest.warns(UserWarning, match="in memory only.*Permission denied"):
            stored.put(inv, Measurement(BlockConfig(8), 1.0))  # does not replace what it cannot read
    path.chmod(0o644)
    assert not list(path.parent.glob("*.unreadable*")) and path.read_bytes() == before


def test_every_broken_file_is_set_aside_under_a_name_of_its_own(sound_file, tmp_path):
    for i in range(3):
        sound_file.write_text(f"broken {i}")
        with pytest.warns(UserWarning, match="set aside"):
            assert cache(tmp_path).get(call(3)) is None
    aside = {
        path.name.removeprefix(sound_file.name): path.read_text() for path in sound_file.parent.glob("*.unreadable*")
    }
    assert aside == {".unreadable": "broken 0", ".unreadable.1": "broken 1", ".unreadable.2": "broken 2"}


def test_no_link_is_written_through(sound_file, tmp_path):
    """In a folder that others may write, links planted wherever glax makes a file leave their targets as they are."""
    victim = tmp_path / "victim"
    victim.write_text("precious")
    sound_file.write_text("broken")
    for suffix in (".unreadable", ".unreadable.1", f".{os.getpid()}"):
        sound_file.with_name(sound_file.name + suffix).symlink_to(victim)
    with pytest.warns(UserWarning, match=r"set aside.*\.unreadable\.2"):
        assert cache(tmp_path).get(call(3)) is None
    sound_file.symlink_to(victim)
    with pytest.warns(UserWarning, match="set aside"):
        cache(tmp_path).put(call(3), Measurement(BlockConfig(8), 1.0))
    assert not sound_file.is_symlink() and cache(tmp_path).get(call(3)) == BlockConfig(8)
    lock = sound_file.with_name(f"{sound_file.name}.lock")
    lock.unlink()
    lock.symlink_to(victim)
    with pytest.warns(UserWarning, match="in memory only"):
        cache(tmp_path).put(call(4), Measurement(BlockConfig(8), 1.0))
    assert victim.read_text() == "precious"


def test_a_full_disk_leaves_the_old_file_and_nothing_else(sound_file, tmp_path, monkeypatch):
    def full(path, text, encoding=None):
        path.write_bytes(text[: len(text) // 2].encode())
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    stored = cache(tmp_path)
    stored.put(call(4), Measurement(BlockConfig(16), 1.0))
    before, names = sound_file.read_bytes(), set(os.listdir(sound_file.parent))
    monkeypatch.setattr(pathlib.Path, "write_text", full)
    with pytest.warns(UserWarning, match="in memory only.*No space left"):
        stored.put(call(5), Measurement(BlockConfig(16), 1.0))
    assert sound_file.read_bytes() == before and set(os.listdir(sound_file.parent)) == names


def test_a_user_without_a_home_has_no_files(monkeypatch):
    for name in ("GLAX_CACHE_DIR", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)

    def unknown(uid):
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    monkeypatch.setattr("pwd.getpwuid", unknown)
    stored = glax.PersistentCache("recurrent")
    with pytest.warns(UserWarning, match="set GLAX_CACHE_DIR") as caught:
        assert stored.get(call(3)) is stored.get(call(4)) is None
        stored.put(call(3), Measurement(BlockConfig(8), 1.0))
    assert len(caught) == 1 and stored.folder is None and list(stored.files()) == []


def test_a_folder_that_cannot_be_written_is_not_fatal(tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    stored = cache(blocked)
    assert stored.get(call(3)) is None
    with pytest.warns(UserWarning, match="keeps its measurements in memory only") as caught:
        stored.put(call(3), Measurement(BlockConfig(8), 1.0))
        stored.put(call(4), Measurement(BlockConfig(8), 1.0))
    assert len(caught) == 1


def test_where_it_lies(tmp_path, monkeypatch):
    monkeypatch.setenv("GLAX_CACHE_DIR", str(tmp_path))
    assert glax.PersistentCache("recurrent").folder == tmp_path / "recurrent"
    monkeypatch.delenv("GLAX_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert glax.PersistentCache("recurrent").folder == tmp_path / "xdg" / "glax" / "recurrent"
