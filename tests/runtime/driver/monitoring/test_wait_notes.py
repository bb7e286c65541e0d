"""What a run waits for is written down while it takes long, also before its first call."""

from __future__ import annotations

import time

from flows import module_of

from flowrl.runtime.driver.monitoring import wait_notes
from flowrl.runtime.local.executor import LocalExecutor
from flowrl.runtime.storage.wait_record import WaitRecord, read_waits


def test_a_worker_that_takes_long_to_open_is_noted(tmp_path, monkeypatch):
    monkeypatch.setattr(wait_notes, "LONG", 0.0)
    monkeypatch.setattr(wait_notes, "LOOK", 0.01)
    out, found, open_worker = tmp_path / "run", list[WaitRecord](), LocalExecutor.open

    def open_slowly(executor, name):
        end = time.monotonic() + 60
        while not found and time.monotonic() < end:
            waits = read_waits(out)
            found.extend([waits] if waits is not None and waits.opening else [])
            time.sleep(0.01)
        return open_worker(executor, name)

    monkeypatch.setattr(LocalExecutor, "open", open_slowly)
    module_of("small_flow").flow.run("train", out=out, steps=1, quiet=True)
    assert found[0].opening == "worker 'counter'" and found[0].calls == ()
    assert not (out / "waits.json").exists()
