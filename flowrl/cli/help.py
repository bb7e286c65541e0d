"""What the commands are for: the overview that ``flowrl`` prints, and the help of each command."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class About:
    """A command: ``About("SCRIPT", "find its mistakes; nothing is loaded", ("flowrl check grpo.py",))``."""

    takes: str
    does: str
    examples: Sequence[str] = ()


#: By group and command, as the overview lists them.
GROUPS: dict[str, dict[str, About]] = {
    "before anything is loaded": {
        "check": About(
            "SCRIPT",
            "find the mistakes of its programs, and of a plan",
            ("flowrl check grpo.py", "flowrl check grpo.py --plan cluster.yaml --model actor=llama-7b"),
        ),
        "graph": About(
            "SCRIPT",
            "show the dataflow graph of a program, or of a run by its folder",
            (
                "flowrl graph grpo.py",
                "flowrl graph grpo.py --plan cluster.yaml --format html --out grpo.html",
                "flowrl graph runs/grpo --format html --out grpo.html",
            ),
        ),
        "plan": About(
            "SCRIPT",
            "show who sits where, or search for the best placement on a cluster",
            ("flowrl plan --show cluster.yaml", "flowrl plan grpo.py --cluster h100-80:4x8 --out cluster.yaml"),
        ),
        "simulate": About(
            "SCRIPT",
            "fly a program with the real schedule on a virtual clock",
            (
                "flowrl simulate grpo.py --plan cluster.yaml --steps 10",
                "flowrl simulate grpo.py --plan cluster.yaml --costs costs.yaml --format html --out gantt.html",
            ),
        ),
        "reshard": About("", "plan the movement of weights between two layouts"),
    },
    "run": {
        "new": About(
            "NAME FOLDER",
            "write a project from a shipped algorithm: driver, task, plan and test",
            ("flowrl new grpo my_project",),
        ),
        "run": About(
            "SCRIPT",
            "check the programs of a script, then run them",
            (
                "flowrl run grpo.py --steps 200 --out runs/grpo",
                "flowrl run grpo.py --program warmup,grpo --plan split.yaml",
                "flowrl run grpo.py --arg actor.lr=2e-6 --arg 'actor.lora={r: 16}'",
                "flowrl run grpo.py --evaluate evaluate:20 --stop-when accuracy:3 --keep-best accuracy",
                "flowrl run grpo.py --out runs/grpo --resume",
                "flowrl run runs/grpo --program evaluate --checkpoint best",
            ),
        ),
    },
    "after a run": {
        "show": About(
            "RUN",
            "open a page with all of it: curves, rows, graph, times; also of a run that goes on, or of several",
            ("flowrl show runs/grpo", "flowrl show runs --port 9000 --no-browser"),
        ),
        "timeline": About(
            "RUN",
            "show what ran when, also of a run that failed or goes on",
            (
                "flowrl timeline runs/grpo",
                "flowrl timeline runs/grpo --format trace --out trace.json",
            ),
        ),
        "calibrate": About("RUN", "fit costs to its timeline, with the error of their prediction"),
        "gap": About(
            "RUN",
            "say what explains the gap between the engine that sampled and the trainer",
            ("flowrl gap runs/grpo", "flowrl gap runs/grpo --step 50 --format json"),
        ),
        "diff": About(
            "RUN1 RUN2",
            "name the first step, call, field and row in which two runs part",
            ("flowrl diff runs/a runs/b", "flowrl diff runs/a runs/b --format json"),
        ),
        "replay": About(
            "RUN",
            "do it, or a step of it, again, and say whether that gives the same to the last bit",
            ("flowrl replay runs/grpo", "flowrl replay runs/grpo --step 120 --node actor.update"),
        ),
        "doctor": About(
            "[RUN]",
            "tell what a run waits for, dead or alive; without one, what this machine has and can run",
            ("flowrl doctor runs/grpo", "flowrl doctor --test"),
        ),
        "eval": About(
            "ENV",
            "play an environment with a model and save the results, or compare two of them",
            (
                "flowrl eval tasks/calculator.py:Calculator --policy runs/tools/model/actor --greedy --out after",
                "flowrl eval tasks/sums.py:Sums --policy Qwen/Qwen3-0.6B --n 16 --plan engine.yaml --out sums",
                "flowrl eval --compare before after",
            ),
        ),
        "export": About(
            "RUN FOLDER",
            "write the model of a checkpoint as a Hugging Face folder, or the conversations of a run as a file",
            (
                "flowrl export runs/grpo my_model",
                "flowrl export runs/grpo my_model --checkpoint best --dtype bf16 --push-to-hub me/my_model",
                "flowrl export runs/tools good.jsonl --least reward=1",
            ),
        ),
    },
    "in the shell": {
        "completion": About(
            "SHELL", "print what completes these commands in bash, zsh or fish", ("flowrl completion bash",)
        ),
    },
}
COMMANDS: dict[str, About] = {name: about for group in GROUPS.values() for name, about in group.items()}


def overview() -> str:
    """Return what ``flowrl --help`` prints."""
    lines = ["usage: flowrl COMMAND [SCRIPT] [options]", "", "RL algorithms as programs over typed workers."]
    for group, commands in GROUPS.items():
        lines += ["", f"{group}:"]
        lines += [f"  {f'{name} {about.takes}':<18}{about.does}" for name, about in commands.items()]
    return "\n".join(
        [
            *lines,
            "",
            "flowrl COMMAND --help          its options, with examples",
            "flowrl COMMAND SCRIPT --help   with the parameters of the script's program, too",
            "python SCRIPT                  is flowrl run SCRIPT",
            "SCRIPT                         a file, or a shipped algorithm by its name: flowrl run grpo",
        ]
    )


def new_parser(command: str, script: str = "SCRIPT") -> argparse.ArgumentParser:
    """A parser for a command of a script, with a short usage line and examples."""
    about = COMMANDS[command]
    examples = "".join(f"\n  {line}" for line in about.examples)
    return argparse.ArgumentParser(
        prog=f"flowrl {command} {script}",
        usage=as_is(f"flowrl {command} {script} [options]"),
        description=about.does[0].upper() + about.does[1:] + ".",
        epilog=f"examples:{examples}" if examples else None,
        formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(prog, max_help_position=32, width=100),
        allow_abbrev=False,
        exit_on_error=False,
    )


def as_is(text: str) -> str:
    """A text of a user, such as a default, as argparse shows it: that takes ``%`` for one of its own names."""
    return text.replace("%", "%%")
