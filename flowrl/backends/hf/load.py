"""A transformers model and its tokenizer from a hub name, a local folder, or a configuration with random weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch

from ...errors import ModelError, near
from ...workers.model_folder import folder_fix, model_folder
from ...workers.model_options import Build, Model, dtypes
from ...workers.tokens.tokenizer import find_tokenizer, refuse_code
from .on_hub import check_on_hub
from .saved import Saved, leave_unread

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}

ADAPTER_BIN = "adapter_model.bin"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")


def pick_device(said: str) -> torch.device:
    """``auto`` is the CUDA device where there is one, else the CPU."""
    if said == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(said)
    except RuntimeError:
        raise ModelError(f"'{said}' is no device.", fix="Write auto, cpu, cuda or cuda:1.") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ModelError(
            f"The device '{said}' was asked for, but torch finds no CUDA here.", fix="Write device='auto'."
        )
    if device.type == "cuda" and (device.index or 0) >= (there := torch.cuda.device_count()):
        what = f"The device '{said}' was asked for, but torch finds {there} here, from cuda:0 to cuda:{there - 1}."
        raise ModelError(what, fix="Write device='auto', or one of these.")
    return device


def pick_dtypes(build: Build, device: torch.device) -> tuple[torch.dtype, torch.dtype]:
    """The dtype of the weights and that of the computation. Trained weights are never narrower than float32."""
    if build.dtype not in (*DTYPES, "auto"):
        raise ModelError(
            f"dtype='{build.dtype}' is none of auto, fp32, bf16.",
            fix=f"Write dtype='{near(build.dtype, DTYPES) or 'auto'}'.",
        )
    held, compute = dtypes(build.dtype, trained=build.trainable, cuda=device.type == "cuda")
    return DTYPES[held], DTYPES[compute]


def load_model(build: Build, device: torch.device, dtype: torch.dtype) -> Any:
    """The transformers model, in ``dtype`` on ``device``, in evaluation mode (no dropout, in training neither).

    Random weights come from the model's seed alone, whatever the state of torch's generators, which stay as they are.
    A scalar head that the checkpoint does not hold gets normal weights of std 1 / hidden size from ``build.seed``. The
    attribute ``fresh_head`` of such a model are the names of weights in the files that it has no place for, else None.
    """
    return _made(build, dtype).to(device=device).eval()


def load_unread(build: Build, dtype: torch.dtype) -> tuple[Any, Saved | None]:
    """The model as of :func:`load_model` on the CPU, its weights on the meta device, and where they are to be read.

    Buffers and a fresh scalar head are there. None, and a model with all its weights, where it has no files, or such as
    :func:`~flowrl.backends.hf.saved.match` does not know.
    """
    found: list[Saved] = []
    with _leaving_unread(found, "score.weight" if build.head == "scalar" else ""):
        model = _made(build, dtype)
    return model.eval(), (found[0] if found else None)


def _made(build: Build, dtype: torch.dtype) -> Any:
    with quiet(), torch.random.fork_rng(devices=[]):  # made on the CPU, so that every device has the same weights
        torch.manual_seed(build.model.seed)
        if build.model.config is not None:
            model, fresh = _from_config(build.model.config, build.head, dtype), True
        else:
            model, fresh, unread = _from_name(build.model, build.head, dtype)
            model.fresh_head = unread if fresh else None
    if build.head == "scalar" and fresh:
        generator = torch.Generator().manual_seed(build.seed)
        weight = model.score.weight
        with torch.no_grad():
            weight.copy_(torch.randn(weight.shape, generator=generator) / weight.shape[1])
    for parameter in model.parameters():  # buffers stay as they are: rounded rotary frequencies move far positions
        parameter.data = parameter.data.to(dtype)
    model.config.use_cache = False  # asked for where it is wanted
    return model


@contextmanager
def _leaving_unread(found: list[Saved], fresh: str) -> Iterator[None]:
    """Inside, transformers makes a saved model as ever, save that no weight is read that can be read by boxes later.

    It opens the files, ties weights and makes buffers itself; the one step that reads weights is left out. ``found``
    gets where they are, and stays empty where the model was read.
    """
    from transformers import PreTrainedModel

    name = "_load_pretrained_model"
    ever = getattr(PreTrainedModel, name, None)
    if ever is None:
        yield
        return

    def load(model: Any, state: Any, files: Any, how: Any, *more: Any, **named: Any) -> Any:
        plain = state is None and getattr(how, "hf_quantizer", None) is None
        saved = leave_unread(model, files or (), how.weight_mapping or (), fresh) if plain else None
        if saved is None:
            return ever(model, state, files, how, *more, **named)
        noted = model._weight_conversions
        told = ever(model, {}, None, how, *more, **named)
        model._weight_conversions = noted
        told[0].missing_keys -= set(saved.pieces) - set(model.all_tied_weights_keys)
        found.append(saved)
        return told

    setattr(PreTrainedModel, name, staticmethod(load))
    try:
        yield
    finally:
        setattr(PreTrainedModel, name, staticmethod(ever))


@contextmanager
def quiet() -> Iterator[None]:
    """No progress bars of transformers, and none of its warnings about what is checked here."""
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


def _auto(head: str) -> Any:
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    return AutoModelForCausalLM if head == "lm" else AutoModelForSequenceClassification


def _from_config(said: Mapping[str, Any], head: str, dtype: torch.dtype) -> Any:
    from transformers import AutoConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    options = dict(said)
    kind = options.pop("model_type")
    if kind not in CONFIG_MAPPING:
        meant = near(kind, CONFIG_MAPPING.keys())
        raise ModelError(
            f"transformers knows no model_type '{kind}'.",
            fix=f'Write "model_type": "{meant}".' if meant else "Name one of its model types, such as qwen2.",
        )
    plain = CONFIG_MAPPING[kind]()
    known = {k for k in (*dir(plain), *getattr(plain, "attribute_map", {})) if not k.startswith("_")}
    for key in sorted(set(options) - known):
        # A model may read keys that its configuration does not list; one that is nearly a listed key is a slip.
        meant = get_close_matches(key, known, n=1, cutoff=0.85)
        if meant:
            raise ModelError(f"The configuration of {kind} has no '{key}'.", fix=f"Did you mean '{meant[0]}'?")
    try:
        config = AutoConfig.for_model(kind, **options, **({"num_labels": 1} if head == "scalar" else {}))
        return _auto(head).from_config(config, dtype=dtype)
    except (ValueError, TypeError, KeyError) as error:
        raise ModelError(
            f"A random {kind} with head '{head}' cannot be made: {_first_line(error)}",
            fix="Change the configuration.",
        ) from error


def _from_name(model: Model, head: str, dtype: torch.dtype) -> tuple[Any, bool, tuple[str, ...]]:
    """The model, whether its scalar head is fresh, and the names of weights in the files that it has no place for."""
    name = model_folder(str(model.name))
    if not Path(name).is_dir():
        check_on_hub(name, ("config.json",), revision=model.revision)
    options: dict[str, Any] = {"num_labels": 1} if head == "scalar" else {}
    if not model.pickled_weights:
        _refuse_pickles(Path(name))
    try:
        loaded, info = _auto(head).from_pretrained(
            name,
            revision=model.revision or "main",
            dtype=dtype,
            output_loading_info=True,
            trust_remote_code=model.trust_remote_code,
            use_safetensors=None if model.pickled_weights else True,
            weights_only=True,
            **options,
        )
    except Exception as error:
        refuse_code(error, f"The model '{model.name}'")
        what = f"The model '{model.name}' cannot be loaded: {_first_line(error)}"
        raise ModelError(what, fix=folder_fix(name)) from error
    missing = sorted(info["missing_keys"])
    lost = [k for k in missing if not (head == "scalar" and k.startswith("score"))]
    if lost:
        raise ModelError(
            f"'{model.name}' lacks {len(lost)} weights of {type(loaded).__name__}, such as '{lost[0]}'.",
            fix="Name a folder that holds a whole model of this kind.",
        )
    for weight in loaded.parameters():
        if not weight.untyped_storage().resizable():  # the file's own memory, which nobody could give back
            weight.data = weight.data.clone()
    return loaded, bool(missing), tuple(sorted(info["unexpected_keys"]))


def _refuse_pickles(folder: Path) -> None:
    """Raise ModelError for a folder whose weights, or whose adapters, are pickles."""
    for whole, pickled in (("model*.safetensors*", "pytorch_model*.bin*"), ("adapter_model.safetensors", ADAPTER_BIN)):
        found = sorted(folder.glob(pickled)) if folder.is_dir() else []
        if found and not any(folder.glob(whole)):
            raise ModelError(
                f"The weights of '{folder}' are a pickle, {found[0].name}, which is not read.",
                fix="Save them as safetensors, or write model=fl.Model('FOLDER', pickled_weights=True).",
            )


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]


def load_tokenizer(model: Model) -> Any:
    """The tokenizer that the model names, or that lies beside it; None where there is none beside it."""
    said = model.tokenizer if model.tokenizer is not None else model.name
    if said is None:
        return None
    if callable(said):
        return said()
    name = model_folder(said) if model.tokenizer is None else said
    folder = Path(name).expanduser()
    if folder.is_dir() and not any((folder / file).is_file() for file in TOKENIZER_FILES):
        if model.tokenizer is None:
            return None  # transformers would make an empty one for some models
        raise ModelError(f"The folder '{said}' holds no tokenizer.", fix="Name a folder with a tokenizer.json.")
    if not folder.is_dir():
        what = "model" if model.tokenizer is None else "tokenizer"
        check_on_hub(name, ("config.json", *TOKENIZER_FILES), revision=model.revision, what=what)
    try:
        return find_tokenizer(name, model.revision, trust_remote_code=model.trust_remote_code)
    except ModelError:
        raise
    except Exception as error:
        raise ModelError(
            f"The tokenizer of '{said}' cannot be loaded: {_first_line(error)}",
            fix=f"{'Save a tokenizer in that folder' if folder.is_dir() else 'Name another model'}, or give "
            "Model(..., tokenizer=...).",
        ) from error
