"""What completes words in a shell knows the commands, their options and values, and the shipped algorithms."""

import re
import shutil
import subprocess
from contextlib import redirect_stdout, suppress

import pytest

from flowrl import shipped
from flowrl.cli import main
from flowrl.cli.help import COMMANDS


@pytest.fixture(scope="module")
def scripts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("completion")
    for shell in ("bash", "zsh", "fish"):
        with (folder / shell).open("w") as file, redirect_stdout(file):
            assert main(["completion", shell]) == 0
    return folder


def completed(scripts, *words):
    """What bash has for the last of the words."""
    typed = " ".join(f"'{word}'" for word in ("flowrl", *words))
    lines = (
        f'source {scripts / "bash"}; COMP_WORDS=({typed}); COMP_CWORD={len(words)}; _flowrl; echo "${{COMPREPLY[@]}}"'
    )
    done = subprocess.run(["bash", "--norc", "-c", lines], capture_output=True, text=True, check=True)
    return done.stdout.split()


def test_commands_and_their_words_are_completed(scripts):
    assert completed(scripts, "") == list(COMMANDS)
    assert completed(scripts, "re") == ["reshard", "replay"]
    assert completed(scripts, "run", "") == shipped.names() == completed(scripts, "new", "")
    assert completed(scripts, "run", "gr") == ["grpo"]
    assert completed(scripts, "run", "grpo", "--keep") == ["--keep-last", "--keep-best", "--keep-sampled"]
    assert completed(scripts, "run", "grpo", "--runtime", "") == ["local", "eager", "ray"]
    assert completed(scripts, "doctor", "--") == ["--help", "--test", "--format", "--out"]
    assert completed(scripts, "doctor", "runs/") == [] == completed(scripts, "run", "mine")  # files: the shell's own


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_of_a_command_is_completed(scripts, command, capsys):
    with suppress(SystemExit):
        main([command, "--help"])
    options = {
        o
        for line in re.findall(r"^  (-.*?)(?:  |$)", capsys.readouterr().out, re.M)
        for o in re.findall(r"--[\w-]+", line)
    }
    assert options and options == set(completed(scripts, command, "--"))


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_reads_it(scripts, shell):
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    done = subprocess.run([shell, "-n", scripts / shell], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.skipif(shutil.which("fish") is None, reason="fish is not installed")
def test_fish_completes(scripts):
    def asked(line):
        words = ["fish", "--no-config", "-c", f"source {scripts / 'fish'}; complete -C '{line}'"]
        done = subprocess.run(words, capture_output=True, text=True, check=True)
        return [found.partition("\t")[0] for found in done.stdout.splitlines()]

    assert asked("flowrl dia") == [] and asked("flowrl dif") == ["diff"]
    assert asked("flowrl run grpo --keep") == ["--keep-best", "--keep-last"]
    assert asked("flowrl run grpo --runtime ") == ["eager", "local", "ray"]
