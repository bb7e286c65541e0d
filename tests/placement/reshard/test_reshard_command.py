import json

import pytest

from flowrl.cli.reshard import read_devices, reshard_command
from flowrl.errors import PlanError, UsageError

SEVENTY = ["--src", "tp=8,pp=4,dp=4", "--dst", "tp=8", "--model", "llama-70b"]


def test_json_is_one_record(capsys):
    assert reshard_command([*SEVENTY, "--format", "json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["model_bytes"] == 137_953_296_384
    assert len(found["bytes_received"]) == len(found["peak_bytes"]) == len(found["redundant_bytes"]) == 128
    assert max(found["bytes_received"]) == pytest.approx((32 - 8) / (8 * 32) * found["model_bytes"], rel=0.005)
    assert set(found["redundant_bytes"]) == {0}


def test_table_puts_equal_devices_together(capsys):
    reshard_command(
        ["--src", "fsdp=8", "--dst", "tp=2", "--model", "llama-7b", "--cluster", "h100-80:2x4", "--inside-node"]
    )
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "llama-7b  M = 13.477 GB  fsdp=8 -> tp=2 x 4  grouping overlap"
    assert lines[1] == "received per device: 5.896 GB on average, 6.491 GB at most"
    assert lines[2] == "all devices: 20.216 GB inside nodes, 26.955 GB between nodes"
    assert lines[4].split() == ["devices", "rank", "received", "of", "M", "peak", "of", "M", "redundant", "of", "M"]
    assert len(lines) < 14


def test_devices_are_read_as_ranges():
    assert read_devices("--dst-devices", "0-3, 8") == (0, 1, 2, 3, 8)
    assert read_devices("--dst-devices", None) is None
    with pytest.raises(UsageError, match="'3-x' is no device or range"):
        read_devices("--dst-devices", "0,3-x")


@pytest.mark.parametrize(
    ("words", "error", "said"),
    [
        (["--dts", "tp=8"], UsageError, "Did you mean --dst"),
        (["--src", "tp=8"], UsageError, "needs --dst"),
        ([*SEVENTY, "--format", "jsn"], UsageError, "Did you mean json"),
        ([*SEVENTY, "--grouping", "hybridlow"], PlanError, "Did you mean 'hybridflow'"),
        ([*SEVENTY[:3], "tp=3", *SEVENTY[4:]], PlanError, "64 attention heads"),
    ],
)
def test_wrong_words_say_the_nearest(words, error, said):
    with pytest.raises(error, match=said):
        reshard_command(words)
