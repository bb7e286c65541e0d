"""Loading: names, folders, configurations, tokenizers, and the errors that say what to write instead."""

import pytest
import tiny as T
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, Qwen2ForCausalLM

from flowrl.backends import open_engine
from flowrl.backends.hf.load import load_unread, pick_device
from flowrl.backends.hf.net import Net
from flowrl.errors import ModelError, PlanError
from flowrl.workers.model_options import Build, Model, Sampling

QWEN = T.CONFIGS["qwen2"]


def opening(model, **build):
    return open_engine("hf", Build(model, **build))


def test_random_weights_come_from_the_models_seed_alone():
    torch.manual_seed(1)
    first = opening(Model(config=QWEN, seed=4)).digest()
    torch.manual_seed(2)
    before = torch.get_rng_state()
    assert opening(Model(config=QWEN, seed=4)).digest() == first
    assert opening(Model(config=QWEN, seed=5)).digest() != first
    assert torch.equal(torch.get_rng_state(), before)


def test_positions_keep_their_precision_in_a_narrow_model():
    """bf16 rounds rotary frequencies by up to 0.4 %: 40 positions at the ten thousandth."""
    wide, narrow = (opening(Model(config=QWEN), dtype=d).net.model.model.rotary_emb.inv_freq for d in ("fp32", "bf16"))
    assert narrow.dtype == torch.float32 and torch.equal(wide, narrow)


def test_a_saved_model_is_one_that_transformers_loads(tmp_path):
    opened = T.engine("llama")
    opened._tokenizer = T.build_tokenizer()
    opened.save(tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    ids = torch.tensor([[2, 3, 4, 5]])
    assert torch.allclose(model(ids).logits[0].double(), T.whole_logits(opened, [2, 3, 4, 5]), atol=1e-6)
    assert AutoTokenizer.from_pretrained(tmp_path / "model")("w3 w4")["input_ids"] == [3, 4]
    again = opening(Model(str(tmp_path / "model")))
    assert again.digest() == opened.digest()
    assert again.tokenizer.eos_token_id == T.EOS


def test_a_language_model_becomes_a_critic_with_a_small_head(tmp_path):
    lm = T.engine()
    lm.save(tmp_path / "lm")
    first = opening(Model(str(tmp_path / "lm")), head="scalar", seed=1)
    assert torch.equal(first.weights()["model.embed_tokens.weight"], lm.weights()["model.embed_tokens.weight"])
    assert 0 < float(first.weights()["score.weight"].std()) < 3 / 32
    assert opening(Model(str(tmp_path / "lm")), head="scalar", seed=1).digest() == first.digest()
    assert opening(Model(str(tmp_path / "lm")), head="scalar", seed=2).digest() != first.digest()
    first.save(tmp_path / "scorer")
    again = opening(Model(str(tmp_path / "scorer")), head="scalar", seed=2)
    assert first.fresh_head == () and again.fresh_head is None
    for folder, lacks in (("lm", True), ("scorer", False)):
        model, saved = load_unread(Build(Model(str(tmp_path / folder)), head="scalar"), torch.float32)
        assert saved is not None and (model.fresh_head is not None) == lacks


def test_a_saved_scorer_scores_as_transformers_does(tmp_path):
    opened = T.engine("llama", head="scalar")
    opened.save(tmp_path / "judge")
    column, batch = T.prompts()
    scores = opened.scores(batch.rename(prompt_ids="tokens"))
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "judge")
    for prompt, score in zip(T.PROMPTS, scores.to_list(), strict=True):
        with torch.no_grad():
            assert score == pytest.approx(float(model(torch.tensor([prompt])).logits[0, 0]), abs=1e-5)
    again = opening(Model(str(tmp_path / "judge")), head="scalar")  # no tokenizer lies there: it needs none
    assert again.scores(batch.rename(prompt_ids="tokens")).equal(scores)
    assert len(column) == 4


def test_a_configured_model_ends_where_its_tokenizer_does(tmp_path):
    config = {k: v for k, v in QWEN.items() if not k.endswith("token_id")}
    opened = opening(Model(config={**config, "model_type": "llama"}, tokenizer=T.build_tokenizer))
    assert opened.eos_ids == (T.EOS,) and opened.pad_id == 0
    opened.save(tmp_path / "m")
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "m").config.eos_token_id == T.EOS
    bare = opening(Model(config={**config, "eos_token_id": [7, 9]}))
    assert bare.eos_ids == (7, 9)
    with pytest.raises(ModelError, match="The model 'random qwen2' has no tokenizer"):
        _ = bare.tokenizer


@pytest.mark.parametrize(
    ("config", "what", "fix"),
    [
        ({"model_type": "qwen22"}, "transformers knows no model_type 'qwen22'", 'Write "model_type": "qwen2".'),
        (
            {**QWEN, "hidden_sizes": 3},
            "The configuration of qwen2 has no 'hidden_sizes'",
            "Did you mean 'hidden_size'?",
        ),
        ({**QWEN, "num_attention_heads": 3}, "A first forward pass of Qwen2ForCausalLM fails", "its sizes"),
    ],
)
def test_wrong_configurations(config, what, fix):
    with pytest.raises(ModelError, match=what) as error:
        opening(Model(config=config))
    assert fix in error.value.fix


def test_wrong_folders(tmp_path, monkeypatch):
    T.engine().save(tmp_path / "runs" / "model" / "actor")
    with pytest.raises(ModelError, match="There is no folder") as error:
        opening(Model(str(tmp_path / "runs" / "modle" / "actor")))
    assert error.value.fix == f"Did you mean the folder {tmp_path / 'runs' / 'model'}?"
    with pytest.raises(ModelError, match="holds no config") as error:
        opening(Model(str(tmp_path / "runs" / "model")))
    assert error.value.have == "actor"
    assert error.value.fix == f"Write {tmp_path / 'runs' / 'model' / 'actor'}."
    (tmp_path / "runs" / "model" / "actor" / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="cannot be loaded"):
        opening(Model(str(tmp_path / "runs" / "model" / "actor")))


def test_a_name_that_the_hub_does_not_give(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    (tmp_path / "judge").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError, match="The model 'jugde' is not in the cache, and HF_HUB_OFFLINE is set") as error:
        opening(Model("jugde", tokenizer=T.build_tokenizer))
    assert "\n" not in error.value.what
    assert error.value.fix == "Did you mean the folder judge?"


def test_a_tokenizer_must_fit():
    with pytest.raises(ModelError, match="The tokenizer has 50 tokens; the model embeds 40"):
        opening(Model(config=QWEN, tokenizer=lambda: T.build_tokenizer(50)))


def test_a_model_that_changes_its_logits_is_refused():
    class Doubled(Qwen2ForCausalLM):
        def forward(self, *args, **kwargs):
            found = super().forward(*args, **kwargs)
            found.logits = 2 * found.logits
            return found

    model = Doubled(T.engine().net.config).eval()
    with pytest.raises(ModelError, match="The logits of Doubled differ by"):
        Net(model, "lm", torch.device("cpu"), torch.float32)


def test_devices_and_dtypes(monkeypatch):
    with pytest.raises(ModelError, match="'gpu0' is no device"):
        opening(Model(config=QWEN), device="gpu0")
    if not torch.cuda.is_available():
        with pytest.raises(ModelError, match="finds no CUDA"):
            opening(Model(config=QWEN), device="cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert str(pick_device("cuda:1")) == "cuda:1"
    with pytest.raises(ModelError, match=r"'cuda:3' was asked for, but torch finds 2 here, from cuda:0 to cuda:1\."):
        pick_device("cuda:3")
    monkeypatch.undo()
    with pytest.raises(ModelError, match="dtype='fp23' is none of") as error:
        opening(Model(config=QWEN), dtype="fp23")
    assert error.value.fix == "Write dtype='fp32'."


def test_an_unknown_engine():
    with pytest.raises(PlanError, match="There is no engine 'hff'") as error:
        open_engine("hff", Build(Model(config=QWEN)))
    assert error.value.fix == "Write hf."


@pytest.mark.parametrize("kind", ["gemma2", "cohere", "granite", "phi"])
def test_heads_with_a_cap_a_scale_or_a_bias(kind):
    opened = T.engine(kind)
    hidden = opened.net.hidden(torch.tensor([[2, 3, 4, 5]]))[0]
    assert torch.allclose(opened.net.head.logits(hidden).double(), T.whole_logits(opened, [2, 3, 4, 5]), atol=1e-5)


def test_weights_may_be_copied_between_engines_of_one_model():
    first, second = T.engine("llama"), opening(Model(config=T.CONFIGS["llama"], seed=9))
    second.copy_weights_from(first)
    assert second.digest() == first.digest()
    with pytest.raises(ModelError, match="do not fit"):
        second.copy_weights_from(T.engine("gpt2"))


def test_a_value_is_that_of_the_state_before_its_token():
    opened = T.engine("llama", head="scalar")
    batch = T.rollouts(T.engine("llama"), n=2)
    values = opened.values(batch)
    assert values.type == "f32[*response]"
    for i, (ids, found) in enumerate(zip(batch.tokens.to_list(), values.to_list(), strict=True)):
        first = len(T.PROMPTS[i // 2])
        with torch.no_grad():
            every = opened.net.values(opened.net.hidden(torch.tensor([ids])))[0]
        assert found == pytest.approx(every[first - 1 : -1].tolist(), abs=1e-5)


def test_an_op_of_the_other_head_says_so():
    from flowrl.errors import ProgramError

    with pytest.raises(ProgramError, match="has the head 'scalar'; generate needs 'lm'"):
        column, batch = T.prompts()
        T.engine(head="scalar").generate(column, 1, batch.row_seeds(), Sampling())
