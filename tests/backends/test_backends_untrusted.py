"""Folders of others carry no code and no pickles into a run, unless the driver says so in words."""

import builtins
import json
import os
import shutil

import pytest
import tiny as T
import torch
from safetensors.torch import load_file

from flowrl.backends import open_engine, open_tokenizer
from flowrl.data.hub_store import Hf
from flowrl.errors import DataError, ModelError
from flowrl.placement.model.zoo import find_shape
from flowrl.workers.model_options import Build, Lora, Model, Optim
from flowrl.workers.tokens.tokenizer import find_tokenizer

CODE = """
from pathlib import Path
Path({mark!r}).touch()
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
class Words(PreTrainedTokenizerFast):
    "Of its own: transformers marks the class."
class Config(Qwen2Config):
    model_type = "theirs"
class Net(Qwen2ForCausalLM):
    config_class = Config
"""
MAP = {
    "AutoConfig": "theirs.Config",
    "AutoModelForCausalLM": "theirs.Net",
    "AutoModelForSequenceClassification": "theirs.Net",
    "AutoTokenizer": ["theirs.Words", "theirs.Words"],
}


@pytest.fixture(autouse=True)
def yes(monkeypatch):
    """Whoever asks is answered yes, as by ``yes | flowrl run``."""
    monkeypatch.setattr(builtins, "input", lambda *_: "y")


@pytest.fixture
def theirs(tmp_path):
    """A saved model with Python files of its own, which leave a mark when they are run."""
    folder = tmp_path / "theirs"
    opened = T.engine()
    opened._tokenizer = T.build_tokenizer()
    opened.save(folder)
    change(folder / "config.json", model_type="theirs", auto_map=MAP)
    change(folder / "tokenizer_config.json", tokenizer_class="Words", auto_map=MAP)
    (folder / "theirs.py").write_text(CODE.format(mark=str(tmp_path / "mark")))
    return folder


def change(file, **said):
    file.write_text(json.dumps({**json.loads(file.read_text()), **said}))


REFUSED = {
    "model": lambda folder: open_engine("hf", Build(Model(folder))),
    "scorer": lambda folder: open_engine("hf", Build(Model(folder), head="scalar")),
    "tokenizer": lambda folder: open_tokenizer(Model(folder)),
    "tokenizer of another model": lambda folder: open_tokenizer(Model(config=T.CONFIGS["qwen2"], tokenizer=folder)),
    "tokenizer of a worker": find_tokenizer,
}


@pytest.mark.parametrize("what", REFUSED)
def test_code_beside_a_model_is_not_run(theirs, tmp_path, what):
    with pytest.raises(ModelError) as caught:
        REFUSED[what](str(theirs))
    first, *_, last = str(caught.value).splitlines()
    assert str(theirs) in first and "Python files of its own" in first
    assert "trust_remote_code=True" in last
    assert not (tmp_path / "mark").exists()


def test_a_kind_of_model_that_is_known_is_loaded_without_the_code_beside_it(theirs, tmp_path):
    change(theirs / "config.json", model_type="qwen2")
    opened = open_engine("hf", Build(Model(str(theirs), tokenizer=T.build_tokenizer)))
    assert opened.digest() == T.engine().digest()
    assert not (tmp_path / "mark").exists()


def test_the_shape_of_a_model_is_read_without_its_code(theirs, tmp_path):
    change(theirs / "config.json", model_type="qwen2")
    find_shape(str(theirs))
    assert not (tmp_path / "mark").exists()


def test_code_is_run_where_the_driver_says_so(theirs, tmp_path):
    opened = open_engine("hf", Build(Model(str(theirs), trust_remote_code=True)))
    assert opened.digest() == T.engine().digest() and (tmp_path / "mark").exists()


@pytest.mark.parametrize("word", ["trust_remote_code", "pickled_weights"])
@pytest.mark.parametrize("said", ["no", "False", 1, None])
def test_only_true_is_a_permission(word, said):
    with pytest.raises(ModelError, match=f"{word}=.* is not True or False"):
        Model("folder", **{word: said})


class Opens:
    """What a pickle can do when it is read."""

    def __init__(self, file):
        self.file = file

    def __reduce__(self):
        return os.mkdir, (self.file,)


@pytest.fixture
def pickled(tmp_path):
    """A saved model whose weights are a pickle; reading it carelessly leaves a mark."""
    folder = tmp_path / "pickled"
    T.engine().save(folder)
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(weights, folder / "pytorch_model.bin")
    return folder


@pytest.mark.parametrize("head", ["lm", "scalar"])
def test_pickled_weights_are_not_read(pickled, head):
    with pytest.raises(ModelError) as caught:
        open_engine("hf", Build(Model(str(pickled)), head=head))
    first, *_, last = str(caught.value).splitlines()
    assert str(pickled) in first and "pytorch_model.bin" in first and "pickled_weights=True" in last


def test_pickled_weights_are_read_where_the_driver_says_so_and_run_nothing_even_then(pickled, tmp_path):
    model = Model(str(pickled), pickled_weights=True)
    assert open_engine("hf", Build(model)).digest() == T.engine().digest()
    torch.save({"model.norm.weight": Opens(str(tmp_path / "mark"))}, pickled / "pytorch_model.bin")
    with pytest.raises(ModelError, match="cannot be loaded"):
        open_engine("hf", Build(model))
    assert not (tmp_path / "mark").exists()


def test_a_pickle_beside_safetensors_is_left_alone(pickled, tmp_path):
    T.engine().save(pickled)
    torch.save({"model.norm.weight": Opens(str(tmp_path / "mark"))}, pickled / "pytorch_model.bin")
    assert open_engine("hf", Build(Model(str(pickled)))).digest() == T.engine().digest()
    assert not (tmp_path / "mark").exists()


@pytest.mark.parametrize("where", ["adapters", "model"])
def test_pickled_adapters_are_not_read(tmp_path, where):
    pytest.importorskip("peft", reason="the extra [lora] is not installed")
    opened = open_engine("hf", Build(Model(config=T.CONFIGS["qwen2"]), lora=Lora(r=2), optim=Optim()))
    opened.save(tmp_path / "tuned")
    adapter, mark = tmp_path / "tuned" / "adapter", tmp_path / "mark"
    (adapter / "adapter_model.safetensors").unlink()
    torch.save({"base_model.model.x": Opens(str(mark))}, adapter / "adapter_model.bin")
    with pytest.raises(ModelError) as caught:
        if where == "adapters":
            Lora(path=adapter)
        else:  # transformers itself loads adapters that lie beside a model
            for file in adapter.iterdir():
                shutil.copy(file, tmp_path / "tuned")
            open_engine("hf", Build(Model(str(tmp_path / "tuned"))))
    assert "adapter_model" in str(caught.value) and not mark.exists()


def test_a_script_beside_data_is_not_run(tmp_path):
    pytest.importorskip("datasets", reason="the extra [data] is not installed")
    folder, mark = tmp_path / "rows", tmp_path / "mark"
    folder.mkdir()
    (folder / "rows.py").write_text(CODE.format(mark=str(mark)))
    with pytest.raises(DataError, match="cannot be loaded"):
        Hf(str(folder), None, "train").open()
    (folder / "train.jsonl").write_text('{"prompt": "a"}\n')
    with pytest.raises(DataError, match="cannot be loaded"):
        Hf(str(folder), None, "train").open()
    assert not mark.exists()
