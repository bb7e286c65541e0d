"""The command line: a script's parameters as flags, near misses, formats, exit statuses."""

import ast
import json
import re
import shlex
import signal
import subprocess
import sys
import time
from importlib import import_module
from pathlib import Path

import pytest

import flowrl
from flowrl.cli import OF_SCRIPTS, completion, diff, doctor, export, gap, main, new, replay, show
from flowrl.cli.eval import read_options as read_eval
from flowrl.cli.help import COMMANDS, new_parser
from flowrl.cli.timeline import read_options

#: What reads the words of commands that look at runs.
OF_RUNS = {
    "gap": gap.read_options,
    "diff": diff.read_options,
    "replay": replay.read_options,
    "doctor": doctor.read_options,
    "show": show.read_options,
    "eval": read_eval,
    "export": export.read_options,
    "new": new.read_options,
    "completion": completion.read_options,
}
SCRIPT = """
from pathlib import Path

import flowrl as fl
from flowrl import rl

prompts = fl.data.rows([{"prompt": "1+2=", "answer": "3"}], batch=1)
examples = fl.data.rows([{"prompt": "1+2=", "answer": "3"}], batch=1, response="answer")
told = Path(__file__).with_name("told")  # a trace leaves no mark on values, but on files
flow = fl.Flow("train")
actor = flow.worker(fl.Actor, model="a/model")
reward = flow.worker(fl.RewardModel, model="a/model")


@flow.program
def train(
    steps: int = 10,
    prompts_per_step: int = 4,
    lr_scale: float = 1.0,
    shuffle: bool = False,
    name: str = "x",
    best: int | None = None,
    share: "float | None" = 0.5,
    plain=2,
):
    told.open("a").write(f"{(steps, prompts_per_step, lr_scale, shuffle, name, best, share, plain)}\\n")
    for step, batch in flow.steps(prompts, steps):
        batch = rl.group_advantages(reward.score(actor.generate(batch, n=2)))
        flow.log(step, actor.update(batch, loss=rl.ppo_clip()))


@flow.program
def warmup(steps: int = 5, rows: int = 8):
    told.open("a").write(f"{('warmup', steps, rows)}\\n")
    for step, batch in flow.steps(examples, steps):
        flow.log(step, actor.update(batch, loss=rl.sft()))


if __name__ == "__main__":
    flow.main()
"""


@pytest.fixture(autouse=True)
def alone(monkeypatch, tmp_path):
    """Each test has a folder of its own."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return str(path)


@pytest.fixture
def run(capsys):
    """Run a command line; its exit status, what it printed, and what it complained of."""

    def call(*words):
        status = main([str(w) for w in words])
        said = capsys.readouterr()
        return status, said.out, said.err

    return call


def told_by(script):
    """The parameters that programs of the script were traced with."""
    return [ast.literal_eval(line) for line in Path(script).with_name("told").read_text().splitlines()]


def test_a_check_that_finds_nothing(run, script):
    assert run("check", script) == (0, "train: fine\n\nwarmup: fine\n", "")
    assert run("check", script, "--program", "warmup") == (0, "warmup: fine\n", "")


@pytest.mark.parametrize(
    ("words", "place", "value"),
    [
        (["--steps", "3"], 0, 3),
        (["--steps=1_000"], 0, 1000),
        (["--prompts-per-step", "8"], 1, 8),
        (["--prompts_per_step", "8"], 1, 8),
        (["--lr-scale", "1e-3"], 2, 1e-3),
        (["--shuffle"], 3, True),
        (["--shuffle", "yes"], 3, True),
        (["--shuffle=off"], 3, False),
        (["--name", "a b"], 4, "a b"),
        (["--best", "3"], 5, 3),
        (["--best", "none"], 5, None),
        (["--share", "0.25"], 6, 0.25),
        (["--share", "none"], 6, None),
        (["--plain", "7"], 7, 7),
    ],
)
def test_parameters_are_flags_with_the_type_of_their_annotation(run, script, words, place, value):
    assert run("check", script, "--program", "train", *words)[0] == 0
    given = told_by(script)[0][place]
    assert given == value and type(given) is type(value)


def test_flags_of_several_programs_are_told_apart_by_a_dot(run, script):
    words = ["--program", "warmup,train", "--warmup.steps", "2", "--train.steps=4", "--rows", "3", "--train.name", "y"]
    assert run("check", script, *words)[:2] == (0, "warmup: fine\n\ntrain: fine\n")
    assert {("warmup", 2, 3), (4, 4, 1.0, False, "y", None, 0.5, 2)} <= set(told_by(script))


def test_a_program_that_is_run_twice_is_checked_once(run, script):
    assert run("check", script, "--program", "warmup,train,warmup")[1] == "warmup: fine\n\ntrain: fine\n"


@pytest.mark.parametrize(
    ("words", "what", "fix"),
    [
        (["--stepz", "3"], "'--stepz' is no option here.", "Did you mean --steps?"),
        (["--promts-per-step=3"], "'--promts-per-step=3' is no option here.", "Did you mean --prompts-per-step?"),
        (["--qqq"], "'--qqq' is no option here.", "See flowrl check train.py --help."),
        (["--tap"], "'--tap' is no option here.", "See flowrl check train.py --help."),  # two dashes make it no --steps
        (["--no-qqq"], "'--no-qqq' is no option here.", "See flowrl check train.py --help."),
        (["--no-meant"], "'--no-meant' is no option here.", "See flowrl check train.py --help."),
        (["--no-shuffle"], "'--no-shuffle' is no option here.", "Write --shuffle false."),
        (["--no-shufle=1"], "'--no-shufle=1' is no option here.", "Write --shuffle false."),
        (["--no-steps"], "'--no-steps' is no option here.", "--steps is no switch: leave it out for its default."),
        (["--no-help"], "'--no-help' is no option here.", "Leave --help out."),
        (["stray"], "'stray' is no option here.", "See flowrl check train.py --help."),
        (["--steps", "x"], "argument --steps: invalid int value: 'x'.", None),
        (["--steps"], "argument --steps: expected one argument.", None),
        (["--shuffle", "maybe"], "argument --shuffle: invalid true or false value: 'maybe'.", None),
        (["--program", "trian"], "flow 'train' has no program 'trian'.", "Did you mean 'train'?"),
        (["--program", "train,warmpu"], "flow 'train' has no program 'warmpu'.", "Did you mean 'warmup'?"),
        (
            ["--program", "train,warmup", "--steps", "3"],
            "'--steps' is no option here.",
            "Several programs have it: write --train.steps or --warmup.steps.",
        ),
        (["--model", "acter=x"], "--model acter=...: flow 'train' has no worker 'acter'.", "Did you mean 'actor'?"),
        (["--model", "actor"], "--model actor: write --model WORKER=NAME.", None),
    ],
)
def test_wrong_words_are_named_with_the_near_miss(run, script, words, what, fix):
    status, out, err = run("check", script, *words)
    assert (status, out) == (2, "")
    assert err.splitlines()[0] == f"UsageError: {what}"
    assert (err.splitlines()[-1] == f"  fix  {fix}") if fix else "fix" not in err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["chek", "SCRIPT"],
            "'chek' is no command; the commands are check, graph, plan, simulate, reshard, new, run, show, timeline, calibrate, gap, diff, replay, doctor, eval, export, completion.\n  fix  Did you mean flowrl check?",
        ),
        (["check"], "flowrl check needs a script.\n  fix  Write flowrl check SCRIPT."),
        (["check", "--steps", "3"], "flowrl check needs a script."),
        (
            ["run", "--out", "a", "--resume"],
            "flowrl run needs a script.\n  fix  Write flowrl run SCRIPT, or to go on with",
        ),
        (["check", "trian.py"], "there is no script trian.py below FOLDER.\n  fix  Did you mean train.py?"),
        (
            ["check", "algorithms/grpo.py"],
            "there is no script algorithms/grpo.py below FOLDER.\n  fix  Did you mean grpo?",
        ),
        (
            ["check", "package.train"],
            "there is no script package.train below FOLDER.\n  fix  Did you mean package/train.py?",
        ),
        (
            ["check", "/nowhere/x.py"],
            "there is no script /nowhere/x.py.\n  fix  Name a file, or a shipped algorithm such",
        ),
        (["graph", "SCRIPT", "--format", "jsn"], "--format jsn: the formats are text, mermaid, dot, json, svg, html."),
        (["graph", "SCRIPT", "--program", "train,warmup"], "flowrl graph draws one program."),
        (
            ["run", "SCRIPT", "--resume"],
            "--resume needs to know which run.\n  fix  Name its folder: --out DIR --resume.",
        ),
        (["run", "SCRIPT", "--resume", "--out", "nowhere"], "--resume: nowhere holds no run."),
        (
            ["run", "SCRIPT", "--overwrite"],
            "--overwrite needs to know which run.\n  fix  Name its folder: --out DIR --ov",
        ),
        (["run", "SCRIPT", "--allow-changed"], "--allow-changed is for a run that goes on.\n  fix  Write --out DIR"),
        (["run", "SCRIPT", "--checkpoint-every", "0"], "--checkpoint-every 0: give 1 or more."),
        (["run", "SCRIPT", "--address", "auto"], "--address auto is for --runtime ray, and the runtime is local."),
        (["run", "SCRIPT", "--runtime", "cloud"], "argument --runtime: invalid choice: 'cloud'"),
    ],
)
def test_wrong_use_ends_with_status_2(run, script, tmp_path, words, said):
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "train.py").write_text(SCRIPT)
    status, _, err = run(*["train.py" if w == "SCRIPT" else w for w in words])
    assert status == 2 and err.startswith(f"UsageError: {said.replace('FOLDER', str(tmp_path))}")


def test_help_and_version(run, script):
    assert run()[0] == 2
    assert run("--help")[0] == 0
    overview = run("-h")[1]
    for name, about in COMMANDS.items():
        assert f"\n  {f'{name} {about.takes}':<18}{about.does}\n" in overview
    assert run("--version") == (0, f"flowrl {flowrl.__version__}\n", "")
    with pytest.raises(SystemExit) as ended:
        run("check", script, "--help")
    assert ended.value.code == 0


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_has_a_module_of_its_name(command):
    """It is loaded where the command is asked for."""
    module = import_module(f"flowrl.cli.{command}")
    assert callable(getattr(module, f"{command}_command"))
    assert (command in OF_SCRIPTS) == hasattr(module, "add_options")


@pytest.mark.parametrize("command", OF_SCRIPTS)
def test_each_command_has_its_own_help_without_a_script(run, command, capsys, script):
    status, said, _ = run(command, "--help")
    assert status == 0 and said.startswith(f"usage: flowrl {command} SCRIPT [options]\n")
    assert f"flowrl {command} " in said.partition("\nexamples:\n")[2]
    with pytest.raises(SystemExit):
        run(command, script, "--help")
    of_the_script = capsys.readouterr().out
    assert "parameters of train:" in of_the_script
    options = set(re.findall(r"^  (-.*?)(?:  |$)", said, re.M)) - {"--steps STEPS"}  # the program's own, there
    assert len(options) > 6
    assert options <= set(re.findall(r"^  (-.*?)(?:  |$)", of_the_script, re.M))


@pytest.mark.parametrize("command", COMMANDS)
def test_examples_of_the_help_are_commands(command, monkeypatch, tmp_path):
    """Each is read as the command that it is of; files that it names are made up."""
    from flowrl.cli.arguments.options import add_common

    for example in COMMANDS[command].examples:
        program, said, *words = example.split()
        assert (program, said) == ("flowrl", command)
        if words[0] == "--show":
            continue  # a plan alone, without a script
        if command == "timeline":
            assert read_options(words).run
            continue
        if command in OF_RUNS:
            assert OF_RUNS[command](words)
            continue
        parser = new_parser(command)
        add_common(parser)
        import_module(f"flowrl.cli.{command}").add_options(parser)
        _, unknown = parser.parse_known_args(words[1:])
        assert [w for w in unknown if w.startswith("-")] in ([], ["--steps"]), example


@pytest.mark.parametrize(("signals", "how"), [(1, "after a checkpoint"), (2, "at once")])
def test_after_ctrl_c_the_hint_is_a_command_that_runs(tmp_path, signals, how):
    """In a folder whose name has a blank, in a process of its own."""
    folder = tmp_path / "my runs"
    folder.mkdir()
    driver = folder / "small.py"
    driver.write_text((Path(__file__).parents[1] / "runtime" / "small_flow.py").read_text())
    words = ["--program", "train", "--steps", "100000", "--checkpoint-every", "1", "--out", str(folder / "a")]
    command = [sys.executable, "-m", "flowrl", "run", str(driver), *words]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=tmp_path)
    deadline = time.monotonic() + 120
    while not list((folder / "a" / "checkpoints").glob("*/manifest.json")) and time.monotonic() < deadline:
        time.sleep(0.05)
    for _ in range(signals):
        process.send_signal(signal.SIGINT)
        time.sleep(0.01)
    errors = process.communicate(timeout=120)[1]
    assert process.returncode == 130
    [said] = [line for line in errors.splitlines() if line.startswith("stopped ")]
    assert "; go on with: flowrl run " in said
    if said.startswith("stopped at once"):
        assert how == "at once"  # a first signal always lets the step end
    again = shlex.split(said.partition("go on with: ")[2])
    count = len((folder / "a" / "metrics.jsonl").read_text().splitlines())
    more = [sys.executable, "-m", *again, "--steps", str(count + 2)]
    done = subprocess.run(more, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert len((folder / "a" / "metrics.jsonl").read_text().splitlines()) == count + 2


def test_findings_end_with_status_1(run, script, tmp_path):
    path = tmp_path / "wrong.py"
    path.write_text(SCRIPT.replace("actor.generate(batch, n=2)", "batch"))
    status, out, err = run("check", path)
    assert status == 1 and err == ""
    assert out.startswith("FieldError: reward.score reads 'tokens', which no op before it adds.")
    assert out.rstrip().endswith("train: 3 errors, 0 lints\n\nwarmup: fine")
    assert [line.split(", which")[0] for line in out.splitlines() if "FieldError" in line] == [
        "FieldError: reward.score reads 'tokens'",
        "FieldError: rl.group_advantages reads 'response_mask'",
        "FieldError: actor.update with loss ppo_clip reads 'rollout_logprobs'",
    ]

    status, out, err = run("graph", path, "--format", "json")
    assert status == 1 and err.startswith("FieldError") and json.loads(out)["program"] == "train"
    status, out, err = run("run", path, "--out", tmp_path / "out")
    assert status == 1 and err.startswith("FieldError") and not (tmp_path / "out").exists()


def test_remarks_end_with_status_0(run, script, tmp_path):
    path = tmp_path / "remark.py"
    path.write_text(SCRIPT.replace("n=2)))", "n=2)))\n        float(batch.rewards.mean())"))
    status, out, _ = run("check", path)
    assert status == 0 and out.startswith("lint serial: this line waits for reward.score")
    assert "train: 0 errors, 1 lint" in out


def test_check_as_json(run, script, tmp_path):
    status, out, err = run("check", script, "--format", "json")
    assert (status, err) == (0, "")
    assert json.loads(out) == [{"program": p, "errors": [], "lints": []} for p in ("train", "warmup")]

    path = tmp_path / "wrong.py"
    path.write_text(SCRIPT.replace("fl.Actor, model=", "fl.Actor, modle="))
    status, out, err = run("check", path, "--format=json")
    assert (status, err) == (1, "")
    [report] = json.loads(out)
    assert report["program"] is None and report["errors"][0]["fix"] == "Write model= for modle=."
    assert report["errors"][0]["line"] == 11


def test_a_program_that_needs_parameters_is_left_out_until_it_is_asked_for(run, script, tmp_path):
    path = tmp_path / "needs.py"
    path.write_text(SCRIPT.replace("steps: int = 5", "steps: int"))
    status, out, _ = run("check", path)
    assert status == 0
    assert "lint unchecked: program 'warmup' needs a value for 'steps'. To check it, add --program warmup." in out
    assert run("check", path, "--program", "warmup")[0] == 2
    assert run("check", path, "--program", "warmup", "--steps", "3")[:2] == (0, "warmup: fine\n")


@pytest.mark.parametrize("form", ["text", "mermaid", "dot", "json"])
def test_graphs_are_printed_or_written(run, script, tmp_path, form):
    status, out, err = run("graph", script, "--program", "warmup", "--format", form)
    assert (status, err) == (0, "") and "update" in out
    file = tmp_path / f"graph.{form}"
    assert run("graph", script, "--program", "warmup", "--format", form, "-o", file) == (0, f"{file}\n", "")
    assert file.read_text().strip() == out.strip()


def test_another_model_takes_the_place_of_a_workers_own(run, script):
    assert run("check", script, "--model", "actor=other/model", "--model", "reward=folder")[0] == 0
    actor = sys.modules["train"].actor
    assert actor.arguments["model"].name == "other/model"


@pytest.mark.parametrize("path", ["/nowhere/model", "./modle", "../modle", "~/no such model"])
def test_a_check_looks_at_models_that_are_paths(run, script, path):
    status, out, _ = run("check", script, "--model", f"actor={path}")
    assert status == 1 and out.startswith(
        f"ModelError: There is no folder '{path}'.\n  at   --model actor={path}   in place of the one of train.py\n  fix  "
    )
    Path("model").mkdir()
    assert "holds no config.json" in run("check", script, "--model", "actor=./model")[1]
    Path("model", "config.json").write_text("{}")
    assert run("check", script, "--model", "actor=./model", "--model", "reward=qwen3-8b")[0] == 0, "a size for plans"


def test_a_path_may_be_on_the_cluster_of_the_plan(run, script, tmp_path):
    plan = tmp_path / "cluster.yaml"
    plan.write_text("cluster: {device: h100-80}\npools: {gpu: {devices: '0'}}\nplace: {}\n")
    status, out, _ = run("check", script, "--model", "actor=/nowhere/model", "--plan", plan)
    assert status == 0, out
    assert "lint folder: There is no folder '/nowhere/model'. It has to be on the cluster." in out


def test_a_path_of_the_driver_has_its_line(run, script, tmp_path):
    path = tmp_path / "wrong.py"
    path.write_text(SCRIPT.replace('RewardModel, model="a/model"', 'RewardModel, model="/nowhere/judge"'))
    status, out, _ = run("check", path)
    assert status == 1 and "There is no folder '/nowhere/judge'.\n  at   wrong.py:12" in out


def test_plans_are_checked(run, script, tmp_path):
    plan = tmp_path / "plan.yaml"
    plan.write_text("place:\n  acter: {pool: main}\n")
    status, _, err = run("check", script, "--plan", plan)
    assert status == 1 and "the plan places 'acter', which is no worker of this flow." in err
    assert "plan.yaml:2" in err and "Did you mean 'actor'?" in err
    plan.write_text("place:\n  actor: {pool: main}\n")
    assert run("check", script, "--plan", plan)[0] == 0


@pytest.mark.parametrize("text", ["", "# to come\n"])
def test_an_empty_plan_is_remarked(run, script, text):
    Path("empty.yaml").write_text(text)
    status, out, _ = run("check", script, "--plan", "empty.yaml", "--program", "warmup")
    what = "lint empty: this plan is empty: a run has one pool of this process, as without a plan.\n  at   empty.yaml\n"
    assert status == 0 and out.startswith(what) and out.count("lint empty") == 1
    Path("empty.yaml").write_text("pools: {main: {device: auto}}")
    assert run("check", script, "--plan", "empty.yaml", "--program", "warmup")[1].startswith("warmup: fine\n")


@pytest.mark.parametrize(
    "words", [["run", "--plan"], ["check", "--plan"], ["simulate", "--costs"], ["simulate", "--run"]]
)
def test_a_variable_of_the_shell_that_is_not_set_is_no_name(run, script, words):
    status, _, err = run(words[0], script, words[1], "")
    assert (status, err.splitlines()[0]) == (
        2,
        f"UsageError: argument {words[1]}: the name is empty, as of a variable of the shell that is not set.",
    )


def test_a_parameter_with_the_name_of_an_option_is_given_with_its_program(run, tmp_path, capsys):
    path = tmp_path / "clash.py"
    path.write_text(SCRIPT.replace("warmup(steps: int = 5, rows: int = 8)", "warmup(steps: int = 5, format: int = 8)"))
    path.write_text(path.read_text().replace("('warmup', steps, rows)", "('warmup', steps, format)"))
    assert run("check", path, "--program", "warmup", "--warmup.format", "3", "--format", "json")[0] == 0
    assert ("warmup", 5, 3) in told_by(path)
    with pytest.raises(SystemExit, match="0"):
        run("check", path, "--program", "warmup", "--help")
    assert "--warmup.format INT (8)" in " ".join(capsys.readouterr().out.split())
    status, _, err = run("check", path, "--program", "warmup", "--format", "3")
    assert status == 2 and "argument --format: invalid choice: '3'" in err
    assert "fix  --format is an option of flowrl check: the parameter of the program is --warmup.format." in err
    assert "fix" not in run("check", path, "--program", "warmup", "--steps", "x")[2]


CLASHES = """
import flowrl as fl

flow = fl.Flow("t")
actor = flow.worker(fl.Actor, model="a/model")
rows = fl.data.rows([{"prompt": "1+2=", "answer": "3"}], batch=1, response="answer")


@flow.program
def t(steps=2, seed: int = 3, keep_last: int = 2, format: int = 1):
    for step, batch in flow.steps(rows, steps):
        flow.log(step, actor.update(batch, loss=fl.rl.sft()))
"""


def test_an_option_that_a_parameter_has_the_name_of_says_so(run, tmp_path):
    path = tmp_path / "t.py"
    path.write_text(CLASHES)
    for words in (["--seed", "7"], ["--seed=6", "--seed=7"]):
        status, _, err = run("check", path, *words)
        assert (status, err) == (0, "--seed is an option of flowrl check: the parameter of the program is --t.seed.\n")
    (tmp_path / "seed.yaml").write_text("seed: 7\n")
    assert "is --t.seed." in run("check", path, "--config", "seed.yaml")[2]
    for words in (["--t.seed", "7", "--seed", "1"], ["--t.seed", "7"], ["--steps", "3"]):
        assert run("check", path, *words)[::2] == (0, ""), words
    path.write_text(CLASHES + CLASHES[CLASHES.index("@flow") :].replace("def t", "def other"))
    both = ["--program", "t,other", "--seed", "7"]
    assert [line.split()[-1] for line in run("check", path, *both)[2].splitlines()] == ["--t.seed.", "--other.seed."]
    assert "is --other.seed." in run("check", path, *both, "--t.seed", "1")[2]


@pytest.mark.parametrize("word", ["--keep-last=3", "--keep_last=3", "--keep-last"])
def test_a_word_that_is_an_option_of_another_command_is_no_parameter(run, tmp_path, word):
    path = tmp_path / "t.py"
    path.write_text(CLASHES)
    status, _, err = run("check", path, word)
    assert status == 2 and f"'{word}' is no option here." in err
    assert "fix  --keep-last is an option of flowrl run: the parameter of the program is --t.keep-last." in err
    assert run("check", path, "--t.keep-last", "3")[::2] == (0, "")
    (tmp_path / "of_run.yaml").write_text("keep-last: 3\n")
    status, _, err = run("check", path, "--config", "of_run.yaml")
    assert (status, err.splitlines()) == (
        0,
        ["--keep-last is an option of flowrl run: the parameter of the program is --t.keep-last."],
    )
    (tmp_path / "of_check.yaml").write_text("format: json\n")
    status, _, err = run("run", path, "--config", "of_check.yaml")
    assert status == 2 and "of_check.yaml:1" in err
    assert "fix  --format is an option of flowrl check: the parameter of the program is --t.format." in err


def test_a_parameter_of_a_program_that_is_run_twice_is_said_once(run, script):
    assert run("check", script, "--program", "warmup,train,warmup", "--rows", "3")[0] == 0
    assert ("warmup", 5, 3) in told_by(script)


PARAMETERS = """
from typing import Literal, Optional

import flowrl as fl

flow = fl.Flow("kinds")
actor = flow.worker(fl.Actor, model="a/model")
rows = fl.data.rows([{"prompt": "1+2=", "answer": "3"}], batch=1, response="answer")


@flow.program(presets={"50%": {"n": 2}})
def kinds(
    steps: int = 1,
    share: str = "50% of it",
    n: Literal[1, 2] = 1,
    how: "Literal['%', 'b'] | None" = None,
    most: Optional[float] = None,
    mixed: Literal[1, "auto"] = "auto",
    levels: tuple[int, ...] | None = None,
    names: list[str] | None = None,
):
    with open("told", "a") as told:
        told.write(f"{(n, how, most, mixed, levels, names)}\\n")
    for step, batch in flow.steps(rows, steps):
        flow.log(step, actor.update(batch, loss=fl.rl.sft()))
"""


def test_percent_signs_of_a_user_are_shown_in_help(run, tmp_path, capsys):
    path = tmp_path / "100%s.py"
    path.write_text(PARAMETERS)
    with pytest.raises(SystemExit, match="0"):
        run("check", path, "--help")
    out = " ".join(capsys.readouterr().out.split())
    assert out.startswith("usage: flowrl check 100%s.py [options]")
    assert "(50% of it)" in out and "parameters: 50%" in out


@pytest.mark.parametrize(
    ("words", "place", "value"),
    [
        (["--n", "2"], 0, 2),
        (["--how", "b"], 1, "b"),
        (["--how", "none"], 1, None),
        (["--most", "2"], 2, 2.0),
        (["--mixed", "auto"], 3, "auto"),
    ],
)
def test_listed_values_have_their_own_type(run, tmp_path, words, place, value):
    path = tmp_path / "kinds.py"
    path.write_text(PARAMETERS)
    assert run("check", path, *words) == (0, "kinds: fine\n", "")
    given = told_by(path)[0][place]
    assert given == value and type(given) is type(value)


@pytest.mark.parametrize("word", ["--levels=3", "--names=a"])
def test_several_values_are_for_presets(run, tmp_path, word):
    path = tmp_path / "kinds.py"
    path.write_text(PARAMETERS)
    status, _, err = run("check", path, word)
    assert status == 2 and f"'{word}' is no option here." in err
    assert f"fix  No flag says what '{word[2:-2]}' may be: give it by a preset, or by flow.run." in err


@pytest.mark.parametrize(
    ("text", "status", "said"),
    [
        ("import nothing_like_this", 2, "broken.py cannot be loaded: ModuleNotFoundError: No module named"),
        (
            "from tasks import arithmetic",
            2,
            "broken.py cannot be loaded: ModuleNotFoundError: No module named 'tasks'.\n"
            "  at   broken.py:1   from tasks import arithmetic\n"
            "  fix  What ships with flowrl is in flowrl.algorithms: from flowrl.algorithms.tasks import ...",
        ),
        ("def f(:", 2, "broken.py cannot be loaded: SyntaxError"),
        (
            "x = 1 / 0",
            1,
            "broken.py failed while it was loaded: ZeroDivisionError: division by zero.\n  at   broken.py:1",
        ),
        ("x = 1", 2, "broken.py has 0 flows; a script has one."),
        ("import flowrl\nflow = flowrl.Flow('a')", 2, "broken.py has no program."),
        (
            "import flowrl\nm = flowrl.Model(config={})",
            1,
            "A model configuration needs 'model_type'.\n  at   broken.py:2",
        ),
    ],
)
def test_scripts_that_cannot_be_loaded(run, tmp_path, monkeypatch, text, status, said):
    (tmp_path / "broken.py").write_text(text)
    # Where another test imported flowrl.algorithms, its tasks can be imported by every script.
    monkeypatch.setattr(sys, "path", [path for path in sys.path if not (Path(path) / "tasks").is_dir()])
    for name in [name for name in sys.modules if name.partition(".")[0] == "tasks"]:
        monkeypatch.delitem(sys.modules, name)
    found, _, err = run("check", "broken.py")
    assert found == status and err.partition(": ")[2].startswith(said)


def test_a_flow_may_have_two_names(run, script):
    Path(script).write_text(Path(script).read_text() + "\nalias = flow\n")
    assert run("check", script)[0] == 0


def test_the_traceback_of_a_failing_script_begins_in_it(run, tmp_path):
    (tmp_path / "broken.py").write_text("def half(x):\n    return x / 0\n\n\nhalf(1)\n")
    status, _, err = run("check", "broken.py")
    assert status == 1 and "Traceback" in err and "broken.py" in err
    assert "cli.py" not in err and "importlib" not in err


def test_a_script_sees_the_modules_beside_it(run, script, tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "beside.py").write_text("STEPS = 7\n")
    path = tmp_path / "sub" / "uses.py"
    path.write_text("import beside\n" + SCRIPT.replace("steps: int = 5", "steps: int = beside.STEPS"))
    assert run("check", path)[0] == 0
    assert ("warmup", 7, 8) in told_by(path)


def test_a_script_named_like_a_library_does_not_take_its_place(run, tmp_path):
    path = tmp_path / "json.py"
    path.write_text(SCRIPT)
    assert run("check", path)[0] == 0
    assert sys.modules["json"] is json


PACKAGED = SCRIPT.replace("steps: int = 5", "steps: int = STEPS").replace(
    "import flowrl as fl", "import flowrl as fl\nfrom .settings import STEPS\nfrom . import settings", 1
)


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A driver in a package that imports from it: ``mine/deep/driver.py``. Other tests may have one of that name."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "mine"]:
        monkeypatch.delitem(sys.modules, name)
    for folder in (tmp_path / "mine", tmp_path / "mine" / "deep"):
        folder.mkdir()
        (folder / "__init__.py").write_text("")
    (tmp_path / "mine" / "deep" / "settings.py").write_text("STEPS = 11\n")
    path = tmp_path / "mine" / "deep" / "driver.py"
    path.write_text(PACKAGED)
    return path


def test_a_script_in_a_package_imports_from_it(run, package):
    assert run("check", package) == (0, "train: fine\n\nwarmup: fine\n", "")
    assert ("warmup", 11, 8) in told_by(package)
    assert "driver" not in sys.modules


def test_a_package_whose_name_something_else_has_is_refused(run, package, tmp_path):
    (tmp_path / "json").mkdir()
    path = (tmp_path / "mine").rename(tmp_path / "json" / "mine") / "deep" / "driver.py"
    (tmp_path / "json" / "__init__.py").write_text("")
    status, _, err = run("check", path)
    assert (status, err) == (
        2,
        "UsageError: json/mine/deep/driver.py is in a package 'json', and Python knows another 'json', "
        f"{json.__file__}.\n  fix  Give the folder json another name.\n",
    )


@pytest.mark.parametrize("is_package", [True, False])
def test_a_driver_is_run_as_a_module(package, tmp_path, is_package):
    if not is_package:  # of a folder without __init__.py, python -m makes a package all the same
        (package.parent / "__init__.py").unlink()
        (package.parents[1] / "__init__.py").unlink()
    words = [sys.executable, "-m", "mine.deep.driver", "--stepz", "3"]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 2 and "Did you mean --steps?" in done.stderr


def test_a_module_is_found_through_a_link_to_its_folder(package, tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "mine" / "..", target_is_directory=True)
    words = [sys.executable, "-m", "mine.deep.driver", "--stepz", "3"]
    done = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path / "link")
    assert done.returncode == 2 and "Did you mean --steps?" in done.stderr


def test_a_package_is_run_as_a_module(package, tmp_path):
    text = PACKAGED.replace("from .settings", "from .deep.settings").replace("from . ", "from .deep ")
    (tmp_path / "mine" / "__main__.py").write_text(text)
    done = subprocess.run([sys.executable, "-m", "mine", "--stepz", "3"], capture_output=True, text=True)
    assert done.returncode == 2 and "Did you mean --steps?" in done.stderr


def test_a_relative_import_without_a_package_says_what_to_do(run, package):
    (package.parent / "__init__.py").unlink()
    status, _, err = run("check", package)
    assert status == 2
    assert err.endswith(
        "  fix  Make mine/deep a package, with a file __init__.py in it, or run it as a module: "
        "python -m deep.driver.\n"
    )


def test_a_script_is_a_command_of_its_own(script):
    done = subprocess.run([sys.executable, script, "--stepz", "3"], capture_output=True, text=True)
    assert done.returncode == 2 and "Did you mean --steps?" in done.stderr
    done = subprocess.run([sys.executable, "-m", "flowrl", "check", script], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "train: fine\n\nwarmup: fine\n")


def test_the_installed_command_is_this_one():
    scripts = (Path(__file__).parents[2] / "pyproject.toml").read_text().partition("[project.scripts]")[2]
    assert 'flowrl = "flowrl.cli:main"' in scripts.partition("[tool")[0]


@pytest.mark.parametrize(
    ("said", "fix"),
    [
        ("--save", "Leave it out: so it is unless you write --no-save."),
        ("--no-saves", "Did you mean --no-save?"),
        ("--no-quiet", "Leave --quiet out."),
    ],
)
def test_the_opposite_of_a_switch_is_not_taken_for_it(run, script, said, fix):
    status, _, err = run("run", script, said)
    assert (status, err.splitlines()[-1]) == (2, f"  fix  {fix}")
