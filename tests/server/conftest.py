"""The checkpoint, and one server of it for all tests of a module."""

import pytest

from tests.server.serving import Alone, make_folder, running


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("served") / "tiny-gla")


@pytest.fixture(scope="session")
def alone(folder):
    return Alone(folder)


@pytest.fixture(scope="module")
def server(folder):
    with running(folder, "--capacity", "4", "--rows", "32", "--max-length", "600", "--queue", "16") as found:
        yield found
        found.wait_until_free()
