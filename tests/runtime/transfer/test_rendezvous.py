"""Where processes meet, and whether they all see the folder."""

from __future__ import annotations

import threading
from pathlib import Path

from flowrl.runtime.transfer.rendezvous import forget_meetings, leave_sign, sees


def test_a_sign_is_seen_in_its_folder_until_it_is_forgotten(tmp_path):
    sign = leave_sign(tmp_path / "run")
    assert Path(sign).stat().st_mode & 0o077 == 0 and Path(sign).parent.stat().st_mode & 0o077 == 0
    assert sees(sign, 0.0) and sign != leave_sign(tmp_path / "run")
    forget_meetings(tmp_path / "run")
    assert not sees(sign, 0.0) and list((tmp_path / "run").iterdir()) == []


def test_a_sign_that_is_told_of_late_is_waited_for(tmp_path):
    """As by a file system over a network, which keeps what it knows of a folder for a while."""
    sign = tmp_path / "sign"
    late = threading.Timer(0.3, sign.touch)
    late.start()
    assert sees(str(sign), 30.0)
    late.join()
