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
    assert lines[2] == "sent per device of the source: 5.896 GB on average, 7.681 GB at most"
    assert lines[3] == "all devices: 33.694 GB inside nodes, 13.477 GB between nodes"
    assert lines[4].startswith("the busiest node: 6.738") and lines[4].endswith(" GB come to it")
    assert lines[6].split() == ["devices", "rank", "received", "of", "M", "peak", "of", "M", "redundant", "of", "M"]
    assert len(lines) < 16


def test_devices_are_read_as_ranges():
    assert read_devices("--dst-devices", "0-3, 8") == (0, 1, 2, 3, 8)
    assert read_devices("--dst-devices", None) is None
    with pytest.raises(UsageError, match="'3-x' is no device or range"):
        read_devices("--dst-devices", "0,3-x")


EIGHT = ["--src", "fsdp=8", "--dst", "tp=4", "--dst-devices", "8-11", "--model", "qwen3-8b", "--engine", "vllm"]


def test_an_engine_lays_the_destination_out(capsys):
    words = [
        "--src",
        "tp=2",
        "--dst",
        "pp=4",
        "--dst-devices",
        "8-11",
        "--model",
        "qwen3-235b-a22b",
        "--format",
        "json",
    ]
    received = []
    for extra in ([], ["--engine", "vllm"]):
        reshard_command([*words, *extra])
        received.append(json.loads(capsys.readouterr().out)["bytes_received"])
    plain, engine = received  # of 94 layers the engine gives 24 to the second and third stage, not to the first two
    assert sum(plain) == sum(engine)
    assert plain[0] - engine[0] == engine[2] - plain[2] > 0 and plain[1::2] == engine[1::2]


def test_parameters_of_a_rank_are_printed_with_the_boxes_in_them(capsys):
    reshard_command([*EIGHT, "--parameters", "3"])
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.split() == ["parameter", "shape", "rows", "and", "columns", "are", "those", "of", "weight"]
    assert [line.split("  ")[0] for line in lines if "qkv" in line] == [
        "model.layers.0-35.self_attn.qkv_proj.weight"
    ] * 3
    keys = next(line for line in lines if line.endswith("k_proj.weight"))
    assert [c.strip() for c in keys.split("  ") if c][1:4] == ["1536 x 4096", "1024:1280, 0:4096", "768:1024, 0:4096"]
    assert lines[-1].split()[:4] == ["lm_head.weight", "37984", "x", "4096"]
    reshard_command([*EIGHT, "--parameters", "3", "--format", "json"])
    found = {p["name"]: p for p in json.loads(capsys.readouterr().out)}
    assert [part["at"][0] for part in found["model.layers.35.self_attn.qkv_proj.weight"]["parts"]] == [
        [0, 1024],
        [1024, 1280],
        [1280, 1536],
    ]


@pytest.mark.parametrize(
    ("words", "error", "said"),
    [
        ([*EIGHT, "--parameters", "4"], UsageError, "no such rank.*\n.*from 0 to 3"),
        ([*EIGHT[:-1], "vlm"], PlanError, "Did you mean 'vllm'"),
        (["--src", "tp=8", "--dst", "fsdp=8", *SEVENTY[4:], "--parameters", "0"], UsageError, "that fsdp splits"),
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
