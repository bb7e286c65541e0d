"""A wheel, installed in a new environment, has the shipped algorithms and plans: what it does in an empty folder."""

import ast
import json
import os
import re
import shlex
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from flowrl.cli.machine import machine_report

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    words = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", folder, ROOT]
    subprocess.run(words, check=True, env={**os.environ, "FLOWRL_URL": "https://example.org/a/flowrl"})
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """The folder of the commands of an environment that has the wheel; other packages are those of this one."""
    environment = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
    python = environment / "bin" / "python"
    asked = "import sysconfig; print(sysconfig.get_path('purelib'))"
    packages = Path(subprocess.run([python, "-c", asked], check=True, capture_output=True, text=True).stdout.strip())
    (packages / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    words = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", "--no-index", wheel]
    subprocess.run(words, check=True)
    return environment / "bin"


@pytest.fixture
def in_empty_folder(installed, tmp_path):
    """Run words in an empty folder, with the commands of the new environment before others."""

    def run(*words: str) -> str:
        environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
        environment["PATH"] = f"{installed}{os.pathsep}{environment['PATH']}"
        done = subprocess.run(
            [installed / words[0], *words[1:]], cwd=tmp_path, env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return run


def test_it_has_the_drivers_and_what_lies_beside_them(wheel):
    held = set(zipfile.ZipFile(wheel).namelist())
    files = [
        p.relative_to(ROOT / "algorithms") for p in (ROOT / "algorithms").rglob("*") if p.suffix in (".py", ".yaml")
    ]
    assert files and {f"flowrl/drivers/{file}" for file in files} <= held
    assert not [name for name in held if not name.startswith(("flowrl/", "flowrl_lm-"))]


def test_it_has_the_licences_of_what_is_in_it(wheel):
    """uPlot, which draws the curves of ``flowrl show``, is under another licence."""
    file = zipfile.ZipFile(wheel)
    page = next(name for name in file.namelist() if name.endswith("/METADATA"))
    head = file.read(page).decode().partition("\n\n")[0].splitlines()
    assert "License-Expression: Apache-2.0 AND MIT" in head
    named = [line.partition(": ")[2] for line in head if line.startswith("License-File: ")]
    texts = {name: file.read(f"{page.rpartition('/')[0]}/licenses/{name}").decode() for name in named}
    assert set(texts) == {"LICENSE", "flowrl/show/page/uPlot.LICENSE"}
    assert "Apache License" in texts["LICENSE"]
    mit = texts["flowrl/show/page/uPlot.LICENSE"]
    assert "The MIT License" in mit and "Leon Sorokin" in mit and "AS IS" in mit
    assert "flowrl/show/page/uPlot.LICENSE" in file.namelist() and "flowrl/show/page/memory.js" in file.namelist()


def test_its_page_has_links_that_work_there(wheel):
    page = next(n for n in zipfile.ZipFile(wheel).namelist() if n.endswith("/METADATA"))
    head, _, text = zipfile.ZipFile(wheel).read(page).decode().partition("\n\n")
    found = [a or b for a, b in re.findall(r'\]\(([^)]+)\)|(?:src|srcset)="([^"]+)"', text)]
    links = [link for link in found if "arxiv.org" not in link]
    assert len(links) > 20 and {link.partition("/a/flowrl/")[0] for link in links} == {"https://example.org"}
    for link in links:
        assert (ROOT / re.sub(r".*/(blob|raw)/main/", "", link)).exists()
    assert "Project-URL: Source, https://example.org/a/flowrl\n" in head
    assert all(f"Classifier: Programming Language :: Python :: {v}\n" in head for v in ("3.11", "3.12", "3.13"))


def test_commands_find_them_by_name(in_empty_folder, installed):
    """The driver counts as a script of the user's: graphs and messages name its lines."""
    assert "flowrl/drivers/grpo.py" in (text := in_empty_folder("flowrl", "graph", "grpo", "--plan", "split_cpu"))
    line = next(
        n for n, t in enumerate((ROOT / "algorithms/grpo.py").read_text().splitlines(), 1) if "actor.update(" in t
    )
    assert f"# :{line}\n" in next(t for t in text.splitlines(keepends=True) if "actor.update(" in t)
    told = in_empty_folder(
        "python", "-c", "from flowrl.algorithms import grpo as m; print(m.__file__, m.flow.check().text())"
    )
    assert (
        told
        == f"{installed.parent}/lib/python3.{sys.version_info[1]}/site-packages/flowrl/drivers/grpo.py grpo: fine\n"
    )


def test_the_doctor_knows_what_it_needs_without_the_source_tree(in_empty_folder):
    asked = "from flowrl.cli.machine import machine_report as machine; found = machine._requirements(); "
    asked += "print({extra: sorted(map(machine._bare, wanted)) for extra, wanted in found.items()})"
    of_wheel, of_tree = ast.literal_eval(in_empty_folder("python", "-c", asked)), machine_report._requirements()
    assert set(of_wheel) == set(of_tree) and len(of_tree["ray"]) == 2
    assert of_wheel == {extra: sorted(map(machine_report._bare, wanted)) for extra, wanted in of_tree.items()}


@pytest.mark.nightly
def test_two_commands_lead_to_a_trained_model(in_empty_folder, tmp_path):
    """The second is the one that the first prints."""
    printed = in_empty_folder("flowrl", "new", "grpo", "my_project")
    train = next(line for line in printed.splitlines() if line.startswith("train it:"))
    in_empty_folder(*shlex.split(train.partition("  ")[2]))
    run = tmp_path / "my_project" / "runs" / "first"
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    rewards = [line["reward"] for line in lines if line["program"] == "grpo"]
    first, last = sum(rewards[:10]) / 10, sum(rewards[-10:]) / 10
    assert len(rewards) == 150 and last > 0.7 and last > first + 0.3, (first, last)
    assert (run / "model" / "actor" / "model.safetensors").exists() and (run / "reward.png").exists()
