"""--push-to-hub: a hub that answers is given the folder as one commit; who cannot push is told before anything is done."""

from __future__ import annotations

import base64
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from huggingface_hub import constants

from flowrl.cli import main
from flowrl.cli.push_to_hub import open_hub
from flowrl.errors import UsageError


class Hub(BaseHTTPRequestHandler):
    """What the hub's protocol needs for one commit of small files."""

    asked: list[tuple[str, str, bytes]]
    refuses = False

    def do_GET(self) -> None:
        self.answer({"name": "me", "type": "user"})

    def do_POST(self) -> None:
        raw = self.rfile.read(int(self.headers["Content-Length"]))
        self.asked.append((self.path, self.headers["Authorization"], raw))
        if self.path.endswith("/create"):
            self.answer({"url": f"{self.server_url}/me/mine"}, 403 if self.refuses else 200)
        elif "/preupload/" in self.path:
            files = json.loads(raw)["files"]
            self.answer({"files": [{"path": f["path"], "uploadMode": "regular", "shouldIgnore": False} for f in files]})
        else:
            where = {"commitUrl": f"{self.server_url}/me/mine/commit/1", "commitOid": "1", "pullRequestUrl": None}
            self.answer({**where, "success": True})

    @property
    def server_url(self) -> str:
        return f"http://{self.headers['Host']}"

    def answer(self, record: object, status: int = 200) -> None:
        raw = json.dumps(record).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


@pytest.fixture
def hub(monkeypatch):
    """A hub on loopback, which keeps what it is asked."""
    kind = type("KeptHub", (Hub,), {"asked": []})
    server = ThreadingHTTPServer(("127.0.0.1", 0), kind)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.server_address[1]}")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_TOKEN", "hf_abc")
    yield kind
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def folder(tmp_path) -> Path:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "model" / "README.md").write_text("---\nlibrary_name: transformers\n---\n# card")
    return tmp_path / "model"


def test_a_folder_is_one_commit_of_a_private_repository(hub, folder) -> None:
    address = open_hub("me/mine").push(folder, private=True)
    assert address.endswith("/me/mine/commit/1") or address.endswith("/me/mine/tree/main/")
    created = json.loads(next(raw for path, _, raw in hub.asked if path.endswith("/create")))
    assert created["name"] == "mine" and (created.get("private") or created.get("visibility") == "private")
    [(_, token, commit)] = [asked for asked in hub.asked if "/commit/" in asked[0]]
    lines = [json.loads(line) for line in commit.splitlines()]
    files = {line["value"]["path"]: line["value"]["content"] for line in lines if line["key"] == "file"}
    assert {name: base64.b64decode(content).decode() for name, content in files.items()} == {
        path.name: path.read_text() for path in folder.iterdir()
    }
    assert token == "Bearer hf_abc"


def test_a_hub_that_refuses_leaves_the_folder_and_says_how_to_go_on(hub, folder) -> None:
    hub.refuses = True
    with pytest.raises(UsageError, match="me/mine was not pushed") as told:
        open_hub("me/mine").push(folder, private=True)
    assert f"The model is in {folder}" in told.value.report() and (folder / "config.json").exists()


def refused(tmp_path, capsys, name: str = "me/mine") -> str:
    """What is said before anything is looked at; the run is not even there."""
    assert main(["export", str(tmp_path / "none"), str(tmp_path / "out"), "--push-to-hub", name]) == 2
    return capsys.readouterr().err


def test_offline(tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "HF_HUB_OFFLINE is set, so nothing may leave this machine" in refused(tmp_path, capsys)


def test_without_a_token(hub, tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    assert "this machine has no token of the hub" in refused(tmp_path, capsys)
    assert hub.asked == []


def test_a_hub_that_cannot_be_reached(hub, tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:1")
    said = refused(tmp_path, capsys)
    assert "http://127.0.0.1:1 does not let us in" in said and "upload_folder" in said


def test_a_name_that_is_none(hub, tmp_path, capsys) -> None:
    assert "Write it as USER/NAME." in refused(tmp_path, capsys, "me/mine/more")
