"""flowrl export: a checkpoint becomes a Hugging Face folder whose logits are the actor's, or nothing at all."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from flowrl.backends.hf.engine import HFEngine
from flowrl.cli import main

DRIVER = """
import flowrl as fl
from flowrl import rl
from letters import SMALL

flow = fl.Flow("train")
actor = flow.worker(fl.Actor, SMALL, lr=1e-2, max_tokens=4{more})
{other}
reward = flow.worker(fl.FunctionReward, lambda response: float(len(response)))


@flow.program
def train(steps: int = 2):
    for step, batch in flow.steps(fl.data.rows([{{"prompt": "ab"}}, {{"prompt": "c"}}], batch=2), steps):
        batch = rl.advantages(reward.score(actor.generate(batch, n=4)))
        flow.log(step, actor.update(batch, loss=rl.ppo_clip()), reward=batch.rewards.mean())
        {also}
"""


def ran(folder: Path, *, more: str = "", other: str = "", also: str = "", words: str = "") -> Path:
    """A run of three steps."""
    folder.mkdir()
    (folder / "train.py").write_text(DRIVER.format(more=more, other=other, also=also))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("flowrl.cli.run.draw_apart", lambda *what: "")
        out = str(folder / "run")
        assert main(["run", str(folder / "train.py"), "--steps", "3", "--quiet", "--out", out, *words.split()]) == 0
    return folder / "run"


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    words = "--checkpoint-every 1 --keep-last 5 --keep-best reward"
    return ran(tmp_path_factory.mktemp("export") / "a", words=words)


def test_the_last_checkpoint_is_what_the_run_saved(run, tmp_path, capsys) -> None:
    assert main(["export", str(run), str(tmp_path / "out" / "mine")]) == 0
    said = capsys.readouterr().out.splitlines()
    last = sorted((run / "checkpoints").iterdir())[-1].name
    assert said[0] == f"{tmp_path}/out/mine: 'actor' as of checkpoint {last}, train step 2, fp32"
    assert re.fullmatch(r"transformers loads it; of 64 tokens no logit differs by more than [\d.e-]+", said[1])
    mine, saved = tmp_path / "out" / "mine", run / "model" / "actor"
    assert {p.name for p in mine.iterdir()} == {p.name for p in saved.iterdir()}
    wanted = load_file(saved / "model.safetensors")
    got = load_file(mine / "model.safetensors")
    assert set(got) == set(wanted) and all(torch.equal(got[name], wanted[name]) for name in wanted)
    assert [p.name for p in mine.parent.iterdir()] == ["mine"], "nothing lies beside it"


def test_another_checkpoint_and_other_bits(run, tmp_path) -> None:
    first = sorted(path.name for path in (run / "checkpoints").iterdir())[0]
    assert main(["export", str(run), str(tmp_path / "first"), "--checkpoint", first]) == 0
    assert main(["export", str(run), str(tmp_path / "bf16"), "--checkpoint", first, "--dtype", "bf16"]) == 0
    whole, short = (load_file(tmp_path / name / "model.safetensors") for name in ("first", "bf16"))
    assert all(torch.equal(short[name], whole[name].bfloat16()) for name in whole)
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "bf16", dtype="auto").dtype == torch.bfloat16
    last = load_file(run / "model" / "actor" / "model.safetensors")
    assert any(not torch.equal(whole[name], last[name]) for name in last), "weights of an earlier step"
    card = (tmp_path / "bf16" / "README.md").read_text()
    assert "pipeline_tag: text-generation" in card.split("---")[1]
    assert f"The weights of checkpoint `{first}` of run" in card and "| at step 0 of train | |" in card


def test_the_best_one(run, tmp_path) -> None:
    assert main(["export", str(run), str(tmp_path / "best"), "--checkpoint", "best"]) == 0
    got, wanted = (load_file(p / "model.safetensors") for p in (tmp_path / "best", run / "best" / "actor"))
    assert all(torch.equal(got[name], wanted[name]) for name in wanted)


def test_adapters_are_merged(tmp_path, capsys) -> None:
    run = ran(tmp_path / "a", more=", lora=fl.Lora(r=2)")
    assert main(["export", str(run), str(tmp_path / "mine")]) == 0
    assert "no logit differs" in capsys.readouterr().out
    got, wanted = (load_file(p / "model.safetensors") for p in (tmp_path / "mine", run / "model" / "actor"))
    assert all(torch.equal(got[name], wanted[name]) for name in wanted)
    assert (tmp_path / "mine" / "adapter" / "adapter_config.json").exists()


def test_a_folder_whose_logits_are_others_does_not_appear(run, tmp_path, capsys, monkeypatch) -> None:
    save = HFEngine.save

    def wrong(engine: HFEngine, folder: Path) -> None:
        save(engine, folder)
        weights = load_file(Path(folder) / "model.safetensors")
        weights["model.norm.weight"] = weights["model.norm.weight"] * 1.5
        save_file(weights, Path(folder) / "model.safetensors", metadata={"format": "pt"})

    monkeypatch.setattr(HFEngine, "save", wrong)
    assert main(["export", str(run), str(tmp_path / "mine")]) == 1
    assert "the logits of the saved model differ from those of the actor by" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_weights_that_are_not_saved_are_named(run, tmp_path, capsys, monkeypatch) -> None:
    save = HFEngine.save

    def partly(engine: HFEngine, folder: Path) -> None:
        save(engine, folder)
        weights = load_file(Path(folder) / "model.safetensors")
        weights.pop("model.norm.weight")
        save_file(weights, Path(folder) / "model.safetensors", metadata={"format": "pt"})

    monkeypatch.setattr(HFEngine, "save", partly)
    assert main(["export", str(run), str(tmp_path / "mine")]) == 1
    assert "does not find the weights that were saved: model.norm.weight" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--checkpoint", "77"], "has no checkpoint '77'"),
        (["--checkpoint", "newest"], "has no checkpoint 'newest'"),
        (["--worker", "critic"], "the run has no actor 'critic'"),
        (["--public"], "--public says who may see a model on the hub"),
    ],
)
def test_what_is_not_there_is_told_with_what_is(run, tmp_path, capsys, words, told) -> None:
    assert main(["export", str(run), str(tmp_path / "mine"), *words]) == 2
    assert told in capsys.readouterr().err and not (tmp_path / "mine").exists()


def test_a_file_of_another_kind_is_no_folder_for_a_model(run, tmp_path, capsys) -> None:
    assert main(["export", str(run), str(tmp_path / "good.csv")]) == 2
    assert "conversations go into FILE.jsonl or FILE.parquet" in capsys.readouterr().err
    assert not (tmp_path / "good.csv").exists()


def test_a_folder_that_holds_something_is_left_alone(run, tmp_path, capsys) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes").write_text("mine")
    assert main(["export", str(run), str(tmp_path / "mine")]) == 2
    assert "is not empty" in capsys.readouterr().err and (tmp_path / "mine" / "notes").read_text() == "mine"


def test_a_run_that_trains_two_actors_asks_which(tmp_path, capsys) -> None:
    second = "flow.log(step, second=second.update(batch, loss=rl.sft())['loss'])"
    run = ran(tmp_path / "a", other="second = flow.worker(fl.Actor, SMALL, lr=1e-2, max_tokens=4)", also=second)
    assert main(["export", str(run), str(tmp_path / "mine")]) == 2
    assert "the run trains several actors" in capsys.readouterr().err
    assert main(["export", str(run), str(tmp_path / "mine"), "--worker", "second"]) == 0


def test_a_damaged_checkpoint_is_not_exported(tmp_path, capsys) -> None:
    run = ran(tmp_path / "a")
    point = sorted((run / "checkpoints").iterdir())[-1]
    [weights] = point.glob("actor.*safetensors")
    weights.write_bytes(weights.read_bytes()[:-8])
    assert main(["export", str(run), str(tmp_path / "mine")]) == 2
    assert f"checkpoint {point.name} is damaged" in capsys.readouterr().err
