"""Measurements on disk: many writers, broken files, folders that cannot be used."""

import json
import pathlib
import subprocess
import sys
import warnings

import jax.numpy as jnp
import numpy as np
import pytest

import glax
from glax.execution.cache import Measurement
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
    monkeypatch.setattr("glax.execution.cache.libraries", lambda op_id: dict(jaxlib="99.0"))
    assert shipped.get(call(3)) == BlockConfig(8)
    assert cache(tmp_path).get(call(3)) is None


WRITER = """
import sys
from glax.execution.cache import Measurement
from tests.cumulative import BlockConfig
from tests.test_cache import cache, call
for i in range(20):
    cache(sys.argv[1]).put(call(100 * int(sys.argv[2]) + i), Measurement(BlockConfig(i), 1.0))
"""


def test_eight_writers_at_once_lose_nothing(tmp_path):
    root = pathlib.Path(__file__).parent.parent
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
    ],
    ids=["truncated", "a list", "foreign", "newer", "binary"],
)
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
