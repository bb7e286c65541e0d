"""``flowrl export``: the weights of a run's checkpoint as a Hugging Face folder, or its conversations as a file."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from ..errors import UsageError
from .arguments.options import read_words, refuse_unused
from .export_conversations import SUFFIXES, export_conversations
from .export_model import DTYPES, export_model
from .help import new_parser
from .push_to_hub import open_hub

_OF_MODELS = ("--push-to-hub", "--public", "--worker", "--checkpoint", "--dtype")
_OTHER_FILES = (".json", ".csv", ".tsv", ".txt", ".arrow")  # in which conversations are not written


def export_command(words: Sequence[str]) -> int:
    """Write the folder, and push it where that is asked for; or write the file. Returns the exit status."""
    options = read_options(words)
    if options.folder.suffix in SUFFIXES:
        kept, all_of_them = export_conversations(options.run, options.folder, options.least)
        print(f"{options.folder}: {kept} of {all_of_them} conversations")
        return 0
    hub = open_hub(options.push_to_hub) if options.push_to_hub else None  # whoever cannot push is told at once
    exported = export_model(
        options.run, options.folder, worker=options.worker, checkpoint=options.checkpoint, dtype=options.dtype
    )
    print(f"{options.folder}: '{exported.worker}' as of {exported.place}, {exported.dtype}")
    print(f"transformers loads it; of {exported.tokens} tokens no logit differs by more than {exported.difference:.1g}")
    if hub is not None:
        print(f"pushed: {hub.push(options.folder, private=not options.public)}")
    return 0


def read_options(words: Sequence[str]) -> argparse.Namespace:
    """The options of this command. Raises UsageError."""
    if not words:
        raise UsageError("flowrl export needs the folder of a run.", fix="Write flowrl export RUN FOLDER.")
    parser = new_parser("export", "RUN FOLDER")
    parser.add_argument("run", type=Path, metavar="RUN", help="the folder of the run; its script is loaded, not run")
    parser.add_argument(
        "folder",
        type=Path,
        metavar="FOLDER",
        help="where the model goes: a new folder, or an empty one; FILE.jsonl or FILE.parquet: conversations go there",
    )
    parser.add_argument(
        "--least",
        action="append",
        default=[],
        type=_named_number,
        metavar="NAME=NUMBER",
        help="with a file: keep conversations with so much reward, or of another number; again for another one",
    )
    parser.add_argument("--worker", metavar="NAME", help="the actor; default: the one that is trained")
    parser.add_argument(
        "--checkpoint", default="last", metavar="WHICH", help="last, best (see --keep-best), or its number (last)"
    )
    parser.add_argument("--dtype", choices=DTYPES, help="round the weights to it; default: as they are trained")
    parser.add_argument("--push-to-hub", metavar="USER/NAME", help="then push it to the Hugging Face hub, as private")
    parser.add_argument("--public", action="store_true", help="with --push-to-hub: everybody may see it")
    options = read_words(parser, words, "flowrl export --help")
    options.least = dict(options.least)
    if options.least and options.folder.suffix not in SUFFIXES:
        raise UsageError(
            "--least chooses conversations, and this is a model.", fix="Write flowrl export RUN FILE.jsonl."
        )
    if options.folder.suffix in SUFFIXES:
        what = f"is for a model, and {options.folder} holds conversations."
        refuse_unused(words, _OF_MODELS, what, "Leave it out, or name a folder.")
    if options.folder.suffix in _OTHER_FILES:
        raise UsageError(
            f"{options.folder} would be a folder with a model.",
            fix="Name a folder; conversations go into FILE.jsonl or FILE.parquet.",
        )
    if options.public and not options.push_to_hub:
        raise UsageError("--public says who may see a model on the hub, and none is pushed.", fix="Add --push-to-hub.")
    return options


def _named_number(text: str) -> tuple[str, float]:
    name, _, number = text.partition("=")
    if not name or not number:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=NUMBER")
    return name, float(number)
