"""A model that is no folder and that the hub does not give is told with its cause, after one question to the hub."""

import pytest
from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError

from flowrl.backends.hf.load import load_tokenizer
from flowrl.backends.hf.on_hub import check_on_hub
from flowrl.errors import ModelError
from flowrl.workers.model_options import Model


@pytest.fixture
def asked(monkeypatch, tmp_path):
    """What the hub is asked, which answers with ``asked.answer``; nothing is cached."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    monkeypatch.chdir(tmp_path)

    class Asked(list):
        answer = None

    found = Asked()

    def model_info(self, name, **how):
        found.append(name)
        if found.answer is not None:
            raise found.answer

    monkeypatch.setattr(HfApi, "model_info", model_info)
    return found


def of_hub(kind: type[HfHubHTTPError]) -> Exception:
    """An answer of the hub; its constructor wants one of the HTTP library, which differs between versions."""
    return kind.__new__(kind)


@pytest.mark.parametrize("said", [Model("foo/bar"), Model(config={"model_type": "qwen2"}, tokenizer="foo/bar")])
def test_a_hub_that_cannot_be_reached(asked, said):
    asked.answer = ConnectionError("Name or service not known")
    with pytest.raises(ModelError) as error:
        load_tokenizer(said)
    what = "model" if said.name else "tokenizer"
    assert error.value.what == f"The {what} 'foo/bar' is not in the cache, and the hub cannot be reached."
    assert "--model WORKER=NAME" in error.value.fix and "that folder" not in error.value.fix
    assert asked == ["foo/bar"], "it is asked once"


def test_a_name_that_the_hub_does_not_know(asked):
    asked.answer = of_hub(RepositoryNotFoundError)
    with pytest.raises(ModelError, match="the hub has none of that name"):
        check_on_hub("foo/bar", ["config.json"])


def test_what_else_the_hub_says_is_left_to_transformers(asked):
    asked.answer = of_hub(HfHubHTTPError)
    check_on_hub("foo/bar", ["config.json"])
    asked.answer = None
    check_on_hub("foo/bar", ["config.json"])
    assert len(asked) == 2


def test_a_size_for_plans_has_no_weights(asked):
    with pytest.raises(
        ModelError, match=r"'Qwen3-8b' is a size for check, plan and simulate: it has no weights\."
    ) as error:
        load_tokenizer(Model("Qwen3-8b"))
    assert "--model WORKER=Qwen/Qwen3-8B" in error.value.fix and not asked


def test_a_cached_model_is_not_asked_for(asked, tmp_path):
    folder = tmp_path / "cache" / "hub" / "models--foo--bar" / "snapshots" / "1"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    check_on_hub("foo/bar", ["config.json"])
    assert not asked
