"""Task folders of Harbor: those that need no container are played as they are, others are refused with the reason."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from real_package import ROOT, expect_trained, installed, said_by

from flowrl.environments import HarborEnvironment
from flowrl.environments.verify import Limits
from flowrl.errors import WorkerError

nightly = [pytest.mark.nightly, pytest.mark.timeout(900)]
LIMITS = Limits(cpu_seconds=5, seconds=60.0, memory_mb=512, file_mb=2, output_kb=16, processes=16)
FOLDER = {
    "task.toml": "[agent]\ntimeout_sec = 60.0\n[verifier]\ntimeout_sec = 30.0\n",
    "instruction.md": "Write the sum of the numbers to sum.txt.",
    "environment/Dockerfile": "FROM ubuntu:24.04\n# data\nWORKDIR /app\nCOPY numbers.txt ./\nENV WORD=sum OTHER='a b'\n",
    "environment/numbers.txt": "1\n2\n",
    "tests/test.sh": "mkdir -p /logs/verifier\ncmp -s sum.txt /tests/right.txt && echo 1 > /logs/verifier/reward.txt || echo 0 > /logs/verifier/reward.txt\n",
    "tests/right.txt": "3\n",
}


def written(folder: Path, changed=None) -> Path:
    for name, text in {**FOLDER, **(changed or {})}.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if text is None:
            path.unlink(missing_ok=True)
        else:
            path.write_text(text)
    return folder


def call(command: str) -> str:
    import json

    return f"<tool_call>{json.dumps({'name': 'bash', 'arguments': {'command': command}})}</tool_call>"


def begun(folder: Path, **how):
    env = HarborEnvironment(str(folder), limits=LIMITS, **how)
    [row] = env.rows()
    return env, env.reset(row, seed=0)[0]


def test_a_policy_works_in_a_shell_and_the_tests_grade_what_it_leaves(tmp_path):
    env, state = begun(written(tmp_path / "sums"))
    assert state.row == {"prompt": FOLDER["instruction.md"], "task": "sums"}
    _, said, _, over = env.step(state, call("pwd; cat numbers.txt; echo $WORD $OTHER; echo 1 > sum.txt; ls /tests"))
    assert (said, over) == ("/app\n1\n2\nsum a b\n", False), "the tests are not there yet"
    assert env.step(state, call("echo $(( $(cat numbers.txt | paste -sd+) )) > sum.txt; false"))[1] == "[exit status 1]"
    assert env.step(state, "It is done.")[3] is True
    reward, scores = env.grade(state)
    assert reward == 1.0 and scores["tests"] == scores["reward"] == 1.0 and scores["commands"] == 2
    env, state = begun(tmp_path / "sums")
    assert env.grade(state)[0] == 0.0


def test_what_the_policy_leaves_for_the_tests_is_not_there(tmp_path):
    env, state = begun(written(tmp_path))
    cheat = "mkdir -p /logs/verifier /tests; echo 1 > /logs/verifier/reward.txt; echo 'echo 1' > /tests/test.sh; echo >> /tests/right.txt"
    env.step(state, call(cheat))
    env.step(state, call("(while :; do mkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.json; done) & echo"))
    assert env.grade(state)[0] == 0.0


def test_several_rewards_are_scores_and_one_of_them_counts(tmp_path):
    script = 'mkdir -p /logs/verifier\necho \'{"right": 0.5, "short": 1}\' > /logs/verifier/reward.json\n'
    env, state = begun(written(tmp_path, {"tests/test.sh": script}), rewarded="right")
    reward, scores = env.grade(state)
    assert reward == 0.5 and scores["right"] == 0.5 and scores["short"] == 1
    env, state = begun(tmp_path)
    with pytest.raises(ValueError, match="the tests give right, short and no 'reward'; name one by rewarded="):
        env.grade(state)


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("echo so it is", "write no reward; they say 'so it is"),
        ("mkdir -p /logs/verifier; echo much > /logs/verifier/reward.txt", "reward.txt is no reward: 'much"),
        ("mkdir -p /logs/verifier; echo nan > /logs/verifier/reward.txt", "reward is nan"),
        ("mkdir -p /logs/verifier; echo '{}' > /logs/verifier/reward.json", "reward.json has no reward"),
        ("mkdir -p /logs/verifier; echo '{\"a\": true}' > /logs/verifier/reward.json", "a is True"),
        ("yes", "broke the limit of output"),
    ],
)
def test_tests_that_give_no_reward_fail_and_are_no_zero(tmp_path, script, said):
    env, state = begun(written(tmp_path, {"tests/test.sh": script}))
    with pytest.raises(ValueError, match=said):
        env.grade(state)


def test_commands_that_break_a_limit_are_told_and_counted(tmp_path):
    env, state = begun(written(tmp_path, {"task.toml": "[agent]\ntimeout_sec = 6.0\n"}))
    assert env.step(state, call("yes"))[1].endswith("[it broke the limit of output]")
    assert "it broke the limit of files" in env.step(state, call("for i in 1 2 3; do truncate -s 1900k $i; done"))[1]
    assert env.step(state, call("sleep 600"))[3] == "agent_timeout"
    assert env.grade(state)[0] == 0.0
    assert state.scores["commands_killed"] == 2 and state.scores["commands_timed_out"] == 1


REFUSED = [
    ({"environment/Dockerfile": "FROM ubuntu\nRUN apt-get update && \\\n  apt-get install -y git\n"}, r"Dockerfile: line 2: RUN apt-get update"),
    ({"environment/Dockerfile": "FROM ghcr.io/org/box:1\n"}, r"Dockerfile: line 1: FROM: it needs the image ghcr.io/org/box:1"),
    ({"environment/Dockerfile": "FROM python\nCOPY --from=ghcr.io/uv /uv /app/\n"}, "line 2: COPY .*it takes files of another image"),
    ({"environment/Dockerfile": "FROM python\nFROM ubuntu\n"}, "it is built from several images"),
    ({"environment/Dockerfile": "FROM python\nUSER agent\n"}, "line 2: USER agent: an image has to be built"),
    ({"environment/Dockerfile": "FROM python\nCOPY ../../secret /app/\n"}, "it is not in environment/"),
    ({"environment/Dockerfile": "FROM python\nCOPY numbers.txt /usr/bin/\n"}, "lies in /usr"),
    ({"environment/Dockerfile": "FROM python\nADD https://example.com/x /app/\n"}, "it is no file of the folder"),
    ({"environment/Dockerfile": "FROM python\nWORKDIR /app/../etc\n"}, "is no plain path"),
    ({"environment/Dockerfile": None}, "task.toml names no docker_image"),
    ({"environment/docker-compose.yaml": "services: {}"}, "docker-compose.yaml: it needs several containers"),
    ({"task.toml": "[environment]\ndocker_image = 'alexgshaw/box:1'"}, "task.toml: .*it needs the image alexgshaw/box:1"),
    ({"task.toml": "[environment]\ngpus = 1"}, "it needs a GPU"),
    ({"task.toml": "[environment]\nmemory_mb = 4096"}, "it needs 4096 MB, and limits= gives 512"),
    ({"task.toml": "[environment]\nos = 'windows'"}, "it needs windows"),
    ({"task.toml": "[environment]\nallowed_hosts = ['pypi.org']"}, "it needs the network"),
    ({"task.toml": "[[environment.mcp_servers]]\nname = 'x'"}, "it needs servers of tools"),
    ({"task.toml": "[verifier]\nenvironment_mode = 'separate'"}, "its tests have a container of their own"),
    ({"task.toml": "[verifier.env]\nKEY = '${OPENAI_API_KEY}'"}, "KEY: it takes a variable of whoever runs it"),
    ({"task.toml": "[[steps]]\nname = 'one'"}, "it has several steps"),
    ({"tests/test.sh": "#!/bin/bash\n# no curl\napt-get update\n"}, "test.sh: line 3 runs apt-get, which needs the network"),
    ({"tests/test.sh": "cd /app && uvx pytest /tests\n"}, "line 1 runs uvx"),
]  # fmt: skip


@pytest.mark.parametrize(("changed", "said"), REFUSED, ids=[said for _, said in REFUSED])
def test_a_task_that_needs_a_container_is_refused_with_the_file_and_the_reason(tmp_path, changed, said):
    with pytest.raises(WorkerError, match=said):
        HarborEnvironment(str(written(tmp_path, changed)), limits=LIMITS).rows()


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"task.toml": "[agent"}, "task.toml cannot be read"),
        ({"instruction.md": None}, "instruction.md is not there"),
        ({"tests/test.sh": None}, "test.sh is not there"),
        ({"task.toml": None}, "has no task of Harbor"),
    ],
)
def test_a_folder_that_is_no_task_is_refused(tmp_path, changed, said):
    with pytest.raises(WorkerError, match=said):
        HarborEnvironment(str(written(tmp_path, changed))).rows()


def test_a_folder_of_tasks_has_their_names_and_its_canary_is_not_shown(tmp_path):
    written(tmp_path / "a", {"instruction.md": "<!-- a canary -->\n\nDo it.\n"})
    written(tmp_path / "b", {"task.toml": "[task]\nname = 'org/b'"})
    rows = list(HarborEnvironment(str(tmp_path), limits=LIMITS).rows())
    assert [(row["task"], row["prompt"]) for row in rows] == [("a", "Do it.\n"), ("org/b", FOLDER["instruction.md"])]
    shutil.copytree(tmp_path / "b", tmp_path / "c")
    with pytest.raises(WorkerError, match="Two tasks of .* have the name 'org/b'"):
        HarborEnvironment(str(tmp_path), limits=LIMITS).rows()
    with pytest.raises(WorkerError, match="there is no folder 'nowhere'"):
        HarborEnvironment("nowhere").rows()


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    own = ["--no-deps", "--ignore-requires-python", "harbor>=0.25,<0.26"]
    folder = installed("harbor", tmp_path_factory.mktemp("site"), own, ["pydantic", "toml", "pyyaml", "pathspec"])
    return said_by("harbor_play.py", folder)


class TestPlayed:
    """Tasks that Harbor's own code assembles, and the templates that it begins tasks from."""

    pytestmark = nightly

    def test_rewards_are_those_of_the_tasks_own_program_for_what_was_written(self, found):
        rows = found["check"]["rows"]
        assert len(rows) == 12 and found["check"]["delivered"] == 1
        for row in rows:
            assert row["reward"] == row["scores"]["reward"] == row["theirs"], row
            assert row["scores"].get("commands", 0) == row["commands"]
            assert row["outcome"] in ("finished", "truncated_turns", "truncated_tokens")
        assert {row["reward"] for row in rows} == {0.0, 1.0}

    def test_instructions_names_and_seconds_are_those_that_harbor_reads(self, found):
        assert len(found["tasks"]) == 2
        assert all(all(task.values()) for task in found["tasks"])

    def test_a_template_whose_tests_write_no_reward_is_a_failure_and_no_zero(self, found):
        for row in found["silent"]:
            assert row["outcome"] == "grader_failure" and row["reward"] != row["reward"]
            assert "write no reward" in row["why"]

    def test_the_program_of_the_page_trains(self, found):
        expect_trained({**found["page"], "metrics": [_named(line) for line in found["page"]["metrics"]]})

    def test_templates_that_need_the_network_or_a_build_are_refused(self, found):
        network, build, nothing, none = found["refused"]
        assert "test.sh: line 5 runs apt-get, which needs the network" in network
        assert "Dockerfile: line 6: RUN apt-get update" in build
        assert "instruction.md is not there" in nothing
        assert "has no task of Harbor" in none


def _named(line):
    """The metrics of a page whose environment is named otherwise."""
    return {name.replace("shell/", "game/"): value for name, value in line.items()}


def test_the_page_says_what_is_refused():
    page = (ROOT / "docs" / "adapters.md").read_text()
    for word in ("compose", "`RUN`", "`apt-get`", "GPU", "`COPY --from`"):
        assert word in page
