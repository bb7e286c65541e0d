"""The page on ranks: its plans check with the driver, its scripts parse, its commands have options that there are."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from flowrl.cli import main

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "ranks.md").read_text()
PLANS = dict(re.findall(r"^```yaml\n# (\w+\.yaml)\n(.*?)^```", PAGE, re.M | re.S))


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.M | re.S)


@pytest.mark.parametrize("name", PLANS)
def test_a_plan_of_the_page_has_no_mistake(name, tmp_path, capsys):
    (tmp_path / name).write_text(PLANS[name])
    words = ["check", str(ROOT / "algorithms" / "grpo.py"), "--plan", str(tmp_path / name), "--model", "actor=qwen3-8b"]
    assert main(words) == 0
    assert capsys.readouterr().out.startswith("grpo: fine")


def test_the_plan_for_two_nodes_is_that_of_the_scripts():
    assert set(PLANS) == {"eight_gpus.yaml", "two_nodes.yaml"}
    assert "--plan two_nodes.yaml" in blocks("bash")[0] and "/shared/two_nodes.yaml" in PAGE


def test_the_batch_script_parses():
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("there is no bash")
    (script,) = blocks("bash")
    assert subprocess.run([bash, "-n"], input=script, text=True, capture_output=True).stderr == ""


def test_the_job_for_kubernetes_is_one_cluster_whose_pods_share_what_they_need():
    (text,) = (b for b in blocks("yaml") if "kind: RayJob" in b)
    config, job = yaml.safe_load_all(text)
    assert job["spec"]["entrypoint"] == "bash /opt/run/run.sh" and list(config["data"]) == ["run.sh"]
    cluster = job["spec"]["rayClusterSpec"]
    head, (workers,) = cluster["headGroupSpec"], cluster["workerGroupSpecs"]
    assert workers["replicas"] == workers["minReplicas"] == workers["maxReplicas"] == 2
    for group in (head, workers):
        spec = group["template"]["spec"]
        (container,) = spec["containers"]
        assert {m["name"] for m in container["volumeMounts"]} == {v["name"] for v in spec["volumes"]}
        assert "/shared" in [m["mountPath"] for m in container["volumeMounts"]]
        assert all(isinstance(v, str) for v in group["rayStartParams"].values()), "KubeRay takes texts"
    assert workers["template"]["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == 8


def test_options_of_run_are_there(capsys):
    with pytest.raises(SystemExit):
        main(["run", str(ROOT / "algorithms" / "grpo.py"), "--help"])
    known = set(re.findall(r"--[a-z-]+", capsys.readouterr().out))
    used = {w for line in re.findall(r"flowrl run [^\n]*", PAGE) for w in re.findall(r" (--[a-z-]+)", line)}
    used |= {w for line in re.findall(r"words\+?=\((.*)\)$", PAGE, re.M) for w in re.findall(r"(--[a-z-]+)", line)}
    assert {"--address", "--runtime", "--resume", "--plan"} <= used and used <= known, used - known
