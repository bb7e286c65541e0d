"""The folder and the token of a Ray that is started here: this user's alone, whatever others have put there before."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

import pytest

pytest.importorskip("ray", reason="the extra [ray] is not installed")

from flowrl.runtime.distributed.ray import private_ray
from flowrl.runtime.distributed.ray.private_ray import PrivateRay, private_folder


@pytest.fixture
def base(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr("flowrl.runtime.distributed.ray.private_ray._LONGEST", 4096)
    return tmp_path


def mode(path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


def test_the_folder_is_kept_to_its_user(base):
    folder = private_folder()
    assert folder == base / f"flowrl-{os.getuid()}" and mode(folder) == 0o700
    assert private_folder() == folder, "logs of runs are found in one place"


def shared(folder):
    folder.mkdir()
    folder.chmod(0o777)


def of_somebody_else(folder):
    if os.getuid():
        pytest.skip("only root can give files away")
    folder.mkdir(mode=0o700)
    os.chown(folder, 65534, 65534)


def linked(folder):
    (folder.parent / "theirs").mkdir(mode=0o700)
    folder.symlink_to(folder.parent / "theirs")


def a_file(folder):
    folder.write_text("")


@pytest.mark.parametrize("taken", [shared, of_somebody_else, linked, a_file])
def test_a_folder_that_others_have_a_hand_in_is_not_used(base, taken):
    name = base / f"flowrl-{os.getuid()}"
    taken(name)
    folder = private_folder()
    assert folder != name and folder.parent == base and mode(folder) == 0o700


def test_a_long_name_leaves_room_for_sockets(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / ("x" * 60)))
    assert private_folder().parent == type(tmp_path)("/tmp")


def test_a_token_lives_as_long_as_its_ray_and_the_environment_is_put_back(base, monkeypatch):
    monkeypatch.setenv("RAY_AUTH_TOKEN", "of another cluster")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    monkeypatch.delenv("RAY_prestart_worker_first_driver", raising=False)
    before, ours, tokens = dict(os.environ), PrivateRay(), []
    for _ in range(2):
        settings = ours.open()
        token = os.environ["RAY_AUTH_TOKEN_PATH"]
        assert os.environ["RAY_AUTH_MODE"] == "token" and "RAY_AUTH_TOKEN" not in os.environ
        assert os.environ["GLOO_SOCKET_IFNAME"] == "eth7", "what the user has said holds"
        assert private_ray.IDLE.items() <= os.environ.items(), "no process is started that no rank uses"
        assert settings["_temp_dir"].startswith(str(base)) and not settings["include_dashboard"]
        assert stat.S_IMODE(os.stat(token).st_mode) == 0o600
        tokens.append(Path(token).read_text())
        assert len(tokens[-1]) == 64
        ours.close()
        assert not os.path.exists(token) and dict(os.environ) == before
    assert tokens[0] != tokens[1]
    ours.close()
