"""Plays task folders that Harbor's own code assembles by a policy; prints the rows, and what Harbor says of them."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import a_later_typing  # noqa: F401 - before Harbor, which is written for Python 3.12
import harbor
from adapter_play import page_trained, played
from harbor.analyze.checker import PROMPTS_DIR, assemble_check_task
from harbor.analyze.models import build_check_response_model, load_rubric
from harbor.models.task.task import Task

from flowrl.environments import HarborEnvironment
from flowrl.environments.verify import Limits
from flowrl.errors import WorkerError

TEMPLATES = Path(str(harbor.__file__)).parent / "cli"
LIMITS = Limits(cpu_seconds=10, seconds=20.0, memory_mb=1024, file_mb=16, output_kb=64, processes=32)


def call(command):
    return f"<tool_call>{json.dumps({'name': 'bash', 'arguments': {'command': command}})}</tool_call>"


def assembled(folder):
    """Two tasks in which a template of Harbor is to be reviewed, as `harbor check` gives them to an agent."""
    rubric = load_rubric(None)
    for name, subject in (("init", "template-task"), ("adapter", "template-adapter/task-template")):
        assemble_check_task(
            task_dir=TEMPLATES / subject,
            rubric=rubric,
            template=(PROMPTS_DIR / "check.txt").read_text(),
            output_schema=build_check_response_model(rubric).model_json_schema(),
            dest=Path(folder) / f"check-{name}",
        )
    return {criterion.name: {"outcome": "pass", "explanation": "it is so"} for criterion in rubric.criteria}


def validated(task, text):
    """Whether Harbor's own program takes a review."""
    with tempfile.TemporaryDirectory() as folder:
        if text is not None:
            (Path(folder) / "check-result.json").write_text(text)
        program = [sys.executable, str(task / "tests" / "validate.py"), "check-result.json"]
        return float(subprocess.run(program, cwd=folder, capture_output=True).returncode == 0)


def refused(folder):
    try:
        return len(list(HarborEnvironment(str(folder), limits=LIMITS).rows()))
    except WorkerError as error:
        return str(error)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        tasks = Path(folder) / "tasks"
        right = assembled(tasks)
        reviews = [json.dumps(right), json.dumps({**right, "more": 1}), "{}"]
        writes = [call(f"cat > check-result.json <<'END'\n{review}\nEND\nls task | head -1") for review in reviews]
        words = [*writes, call("cat task/task.toml | wc -l"), call("no-such-program"), "ready"]
        env = HarborEnvironment(str(tasks), limits=LIMITS)
        found: dict[str, Any] = {"check": played(env, words, tasks=2, n=6, max_tokens=1, turns=4)}
        for row in found["check"]["rows"]:
            written = [reviews[writes.index(text)] for text in row["texts"] if text in writes]
            task = tasks / row["task"]["task"]
            row["theirs"] = validated(task, written[-1] if written else None)
            row["commands"] = sum(text.startswith("<tool_call>") for text in row["texts"])
        asked = [row["prompt"] for row in env.rows()]  # long, and each a word of the small model
        found["tasks"] = [
            {
                "instruction": row["prompt"] == Task(tasks / row["task"]).instruction,
                "seconds": env._tasks[row["task"]].agent_seconds == Task(tasks / row["task"]).config.agent.timeout_sec,
                "name": row["task"] == Task(tasks / row["task"]).name,
            }
            for row in env.rows()
        ]
        shown = json.dumps(str(tasks))
        found["page"] = page_trained(
            "Task folders of Harbor", [*words, *asked], {'"tasks/"': shown, "n=8, turns=20": "n=4, turns=3"}
        )
        begun = Path(folder) / "begun"  # as `harbor init` begins a task, with and without its tests by pytest
        shutil.copytree(TEMPLATES / "template-task", begun)
        (begun / "instruction.md").write_text("Do it.")
        silent = played(HarborEnvironment(str(begun), limits=LIMITS), words, tasks=1, n=2, max_tokens=1, turns=1)
        found["silent"] = silent["rows"]
        shutil.copy(begun / "shared-pytest-tests" / "test.sh", begun / "tests" / "test.sh")
        found["refused"] = [
            refused(begun),
            refused(TEMPLATES / "template-adapter" / "task-template"),
            refused(TEMPLATES / "annotator" / "annotate-task-template"),
            refused(TEMPLATES / "annotator" / "annotate-task-template" / "tests"),
        ]
    print(f"\n{json.dumps(found)}")
