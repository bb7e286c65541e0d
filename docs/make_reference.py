"""Write docs/reference: every entry of the public API, by what users do: ``python docs/make_reference.py``.

The text of an entry is its docstring, which autodoc puts in as the pages are built. Beside it stands what the
declaration says: the fields that an op reads and adds with their shapes, and the values that arguments may have.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import flowrl as fl
from flowrl import rl
from flowrl.data.source import Options
from flowrl.errors import FlowError
from flowrl.graph.ops.check_arguments import rule_of
from flowrl.graph.ops.field_types import STANDARD
from flowrl.graph.ops.function_parameters import parameters_of
from flowrl.graph.ops.op import Op
from flowrl.workers.base import Worker

HERE = Path(__file__).parent / "reference"


@dataclass(frozen=True)
class Page:
    """A page: ``Page("data", "Draw rows", "Where ...", {"From a file": ("fl.data.jsonl",)})``."""

    name: str
    title: str
    text: str
    groups: Mapping[str, Sequence[str]]


PAGES = (
    Page(
        "programs",
        "Write a program",
        "What a driver is made of: a flow, its workers and programs, and the values that pass between them.",
        {
            "The flow": ("fl.Flow", "fl.load_script", "fl.render"),
            "Rows": ("fl.Batch", "fl.Column", "fl.Metrics"),
            "Ops of your own": ("fl.op", "fl.takes", "fl.open"),
            "What a run has recorded": ("fl.open_run", "fl.OpenedRun"),
            "Values that an argument may have": (
                "fl.allowed.number",
                "fl.allowed.whole",
                "fl.allowed.numbers",
                "fl.allowed.flag",
                "fl.allowed.text",
                "fl.allowed.one_of",
                "fl.allowed.instance",
                "fl.allowed.worker",
                "fl.allowed.Allowed",
            ),
        },
    ),
    Page(
        "workers",
        "Declare workers",
        "Each is declared with `flow.worker`, and its ops are called in programs.",
        {
            "Models": ("fl.Actor", "fl.Reference", "fl.Critic", "fl.RewardModel", "fl.Model", "fl.Lora"),
            "Rewards and environments": ("fl.FunctionReward", "fl.Env"),
            "Workers of your own": ("fl.Worker",),
        },
    ),
    Page(
        "environments",
        "Write an environment",
        "Environments of messages and tools. `fl.Env` is their base, for states and texts.",
        {
            "An environment": ("fl.environments.Environment", "fl.environments.State"),
            "An agent": ("fl.environments.AgentEnvironment", "fl.environments.Task"),
            "Of other packages": (
                "fl.environments.AviaryEnvironment",
                "fl.environments.GymnasiumEnvironment",
                "fl.environments.HarborEnvironment",
                "fl.environments.NeMoGymEnvironment",
                "fl.environments.OpenEnvEnvironment",
                "fl.environments.ReasoningGymEnvironment",
                "fl.environments.TasksetEnvironment",
                "fl.environments.TextArenaEnvironment",
                "fl.environments.VerifiersEnvironment",
            ),
            "What ends and grades it": (
                "fl.environments.stop",
                "fl.environments.reward",
                "fl.environments.metric",
                "fl.environments.group_reward",
            ),
            "By name": ("fl.environments.find_environment", "fl.environments.load_environment"),
        },
    ),
    Page(
        "verification",
        "Verify answers",
        "For rewards of environments and of `fl.FunctionReward`; [verification](../verification.md) has examples.",
        {
            "Compare": (
                "fl.environments.verify.exact",
                "fl.environments.verify.numeric",
                "fl.environments.verify.choice",
                "fl.environments.verify.symbolic",
                "fl.environments.verify.final_answer",
            ),
            "Run": (
                "fl.environments.verify.unit_tests",
                "fl.environments.verify.code_of",
                "fl.environments.verify.Limits",
                "fl.environments.verify.run_command",
                "fl.environments.verify.Ran",
            ),
            "Ask": ("fl.environments.verify.Judge", "fl.environments.verify.score_of_ten"),
            "What is said": (
                "fl.environments.verify.Verdict",
                "fl.environments.verify.VerdictCache",
                "fl.environments.verify.VerifierFailed",
            ),
        },
    ),
    Page(
        "data",
        "Draw rows",
        "Sources of prompts. Nothing is read when one is made.",
        {
            "Sources": ("fl.data.rows", "fl.data.jsonl", "fl.data.parquet", "fl.data.hf", "fl.data.generated"),
            "Several sources": ("fl.data.mix", "fl.data.stratified"),
            "What they take and give": ("fl.data.Options", "fl.data.Source", "fl.data.Mixture", "fl.data.Cursor"),
        },
    ),
    Page(
        "advantages",
        "From rewards to advantages",
        "Ops on scored rows. Each returns the batch with the fields that it adds.",
        {
            "Advantages": (
                "rl.advantages",
                "rl.group_advantages",
                "rl.gae",
                "rl.pass_at_k",
                "rl.gdpo",
                "rl.gigpo",
                "rl.turn_advantages",
                "rl.optimal_token_baseline",
                "rl.teacher_advantages",
            ),
            "Rewards": (
                "rl.kl_penalty",
                "rl.clipped_rewards",
                "rl.whitened_rewards",
                "rl.overlong_penalty",
                "rl.length_penalty",
                "rl.collect",
            ),
            "Weights of stale rows": ("rl.importance_weights",),
        },
    ),
    Page(
        "selection",
        "Choose rows and tokens",
        "Ops that keep some rows of a batch, or mark some of its tokens.",
        {
            "Rows": ("rl.best_of", "rl.first_groups", "rl.pairs", "rl.mismatched", "rl.branches"),
            "Tokens": ("rl.select_by_covariance", "rl.select_by_entropy", "rl.select_by_second_moment"),
        },
    ),
    Page(
        "losses",
        "Choose a loss",
        "Given to `update(batch, loss=...)`. A loss knows the fields that it reads, so `flowrl check` finds a missing "
        "one.",
        {
            "Of a policy": (
                "rl.policy_loss",
                "rl.ppo_clip",
                "rl.reinforce",
                "rl.gspo",
                "rl.cispo",
                "rl.sapo",
                "rl.gmpo",
                "rl.dppo",
                "rl.vespo",
                "rl.topr",
                "rl.quadratic",
                "rl.clip_cov",
                "rl.kl_cov",
                "rl.m2po",
                "rl.decoupled_ppo",
            ),
            "Gates": (
                "rl.gates.ppo",
                "rl.gates.cispo",
                "rl.gates.sapo",
                "rl.gates.gmpo",
                "rl.gates.dppo",
                "rl.gates.vespo",
                "rl.gates.surrogate",
                "rl.gates.reinforce",
                "rl.gates.quadratic",
                "rl.gates.topr",
                "rl.gates.clip_cov",
                "rl.gates.kl_cov",
                "rl.Gate",
            ),
            "Corrections for stale rows": (
                "rl.correct",
                "rl.reject",
                "rl.off_policy_mask",
                "rl.Correction",
                "rl.Rejection",
            ),
            "Of preferences": (
                "rl.preference_loss",
                "rl.dpo",
                "rl.ipo",
                "rl.simpo",
                "rl.cpo",
                "rl.orpo",
                "rl.kto",
                "rl.bradley_terry",
            ),
            "Of given rows, of a teacher, of a critic": ("rl.sft", "rl.divergence", "rl.full_kl", "rl.value_clip"),
            "Losses of your own": ("rl.loss", "rl.Loss", "rl.LossInputs", "rl.where"),
        },
    ),
    Page(
        "coefficients",
        "Control a coefficient",
        "Functions of numbers, which a program may call with values that it has not waited for.",
        {"From step to step": ("rl.adaptive_kl", "rl.adaptive_entropy", "rl.lagrange", "rl.clamp")},
    ),
    Page(
        "plans",
        "Place and forecast",
        "What a plan file says, as objects.",
        {
            "A plan": ("fl.Plan", "fl.Pool", "fl.Place", "fl.Pipeline", "fl.Mesh", "fl.Cluster"),
            "Costs": ("fl.GivenCosts",),
        },
    ),
    Page(
        "testing",
        "Test without a model",
        "An engine that samples from a table, in tests of agents and of what is built on "
        "[the contract of engines](../engines.md#the-contract).",
        {
            "The engine": (
                "fl.testing.FakeEngine",
                "fl.testing.SampleRequest",
                "fl.testing.Sampling",
                "fl.testing.SampledRow",
                "fl.testing.PrefixTokens",
            ),
            "Rows one by one": ("fl.testing.Stream", "fl.testing.StreamedCall"),
            "Time": ("fl.testing.VirtualClock", "fl.testing.RealClock"),
        },
    ),
    Page(
        "errors",
        "Handle errors",
        "All errors that are meant for users are `fl.FlowError`. [Mistakes](../mistakes.md) and "
        "[wrong programs](../wrong_programs.md) show what each looks like.",
        {
            "The base": ("fl.FlowError", "fl.errors.At"),
            "Kinds": tuple(f"fl.errors.{name}" for name in fl.errors.__all__ if name not in ("At", "FlowError")),
        },
    ),
)

HEAD = """\
# Reference

All that `import flowrl as fl` and `from flowrl import rl` give, by what it is for. A name that is not here may change
without notice.

A wrong argument of a function raises `ProgramError` at the caller's line, of a worker's constructor `WorkerError`,
before anything is loaded. A type is a dtype and dims, without that of the rows: `f32[*response]` is a number per
response token ([vocabulary](../vocabulary.md#fields)). Examples run as they stand, after the two imports.
"""

#: Public modules: their entries are those of ``__all__``.
MODULES = {
    "fl": fl,
    "fl.allowed": fl.allowed,
    "fl.data": fl.data,
    "fl.environments": fl.environments,
    "fl.environments.verify": fl.environments.verify,
    "fl.errors": fl.errors,
}
MODULES |= {"fl.testing": fl.testing, "rl": rl, "rl.gates": rl.gates}
#: Methods that users call, of classes that have others for the runtime.
METHODS = {
    "fl.Flow": ("worker", "program", "steps", "more", "take", "log", "check", "graph", "study", "use_model",
                "use_arguments", "run", "main"),
    "fl.Worker": ("open", "program_starts", "close", "check_declaration", "save_model"),
    "fl.Env": ("reset", "step", "anchor", "rollout", "outcomes"),
    "fl.Loss": ("compute",),
    "fl.testing.FakeEngine": ("tokenizer", "generate", "submit", "step", "running", "abort", "pause", "resume",
                              "stream"),
    "fl.environments.AviaryEnvironment": ("make",),
    "fl.environments.GymnasiumEnvironment": ("make", "make_vec", "show", "read"),
    "fl.environments.OpenEnvEnvironment": ("show", "read"),
    "fl.environments.ReasoningGymEnvironment": ("make", "read"),
    "fl.environments.TasksetEnvironment": ("make",),
    "fl.environments.TextArenaEnvironment": ("make", "opponent"),
    "fl.environments.VerifiersEnvironment": ("make",),
    "fl.environments.Environment": ("rows", "setup", "respond", "source", "source_of", "grade"),
    "fl.data.Source": ("schema", "cursor", "to_batch"),
    "fl.data.Mixture": ("schema", "cursor", "to_batch"),
    "fl.allowed.Allowed": ("accepts",),
}  # fmt: skip


def entries() -> dict[str, Any]:
    """Every public entry by its name: what the ``__all__`` of the public modules list, but for those modules."""
    found: dict[str, Any] = {}
    for prefix, module in MODULES.items():
        for name in module.__all__:
            listed = f"{prefix}.{name}" in MODULES or name in MODULES or (prefix, name) == ("fl.errors", "FlowError")
            if not listed:
                found[f"{prefix}.{name}"] = getattr(module, name)
    return found


def page(page: Page) -> str:
    """The text of a page."""
    known = entries()
    parts = [f"# {page.title}", page.text]
    for title, names in page.groups.items():
        parts.append(f"## {title}")
        parts += [f"```{{eval-rst}}\n{chr(10).join(_entry(name, known[name]))}\n```" for name in names]
    return "\n\n".join(parts) + "\n"


def index() -> str:
    """The page that lists the others."""
    toc = "\n".join(p.name for p in PAGES)
    return f"{HEAD}\n```{{toctree}}\n:maxdepth: 2\n\n{toc}\n```\n"


def methods(name: str, cls: type) -> list[str]:
    """The methods of a class that its entry shows."""
    if name in METHODS:
        return list(METHODS[name])
    own = [n for n in vars(cls) if not n.startswith("_") and _is_method(vars(cls)[n])]
    if issubclass(cls, Worker):
        return [n for n in own if isinstance(vars(cls)[n], Op)]
    return [n for n in own if inspect.getdoc(getattr(cls, n))]


def _is_method(value: Any) -> bool:
    return isinstance(value, (Op, classmethod, staticmethod, property)) or inspect.isfunction(value)


def _entry(name: str, entry: Any) -> Iterator[str]:
    """The directives of an entry and of its methods."""
    target = "flowrl." + name.removeprefix("fl.")
    if not inspect.isclass(entry):
        yield f".. autofunction:: {target}"
        yield from _indented(facts(entry))
        return
    yield f".. auto{'exception' if issubclass(entry, BaseException) else 'class'}:: {target}"
    yield from _indented(facts(entry))
    if entry is Options:
        yield from _indented(_options())
    for method in [] if issubclass(entry, BaseException) and entry is not FlowError else methods(name, entry):
        value = inspect.getattr_static(entry, method)  # also of a base
        yield ""
        yield f"   .. auto{'property' if isinstance(value, property) else 'method'}:: {target}.{method}"
        if isinstance(value, Op):
            yield from ("   " + line if line else "" for line in _indented(facts(value)))


def _indented(lines: Iterator[str]) -> Iterator[str]:
    for line in lines:
        yield ""
        yield f"   {line}"


def facts(entry: Any) -> Iterator[str]:
    """What the declaration of an entry says: fields with their types, and the values that arguments may have."""
    fn = entry.fn if isinstance(entry, Op) else entry.__init__ if inspect.isclass(entry) else entry
    if isinstance(entry, Op):
        reads, adds = _fields(entry.reads), _fields(entry.adds)
        if reads:
            yield f"*Reads* {reads}."
        if adds:
            yield f"*Adds* {adds}."
        if entry.rows != "same":
            yield f"*Rows*: {_ROWS[entry.rows]}."
        if entry.updates:
            yield f"*Changes* the worker's ``{entry.updates}``."
    rules = _rules(fn)
    if rules:
        error = "WorkerError" if inspect.isclass(entry) else "ProgramError"
        yield f"*Raises* ``{error}`` unless " + "; ".join(f"``{name}`` is {rule}" for name, rule in rules.items()) + "."


_ROWS = {
    "expand": "each row becomes some, whose keys append a number",
    "filter": "some of the rows stay",
    "apart": "the same rows, with the added fields alone",
    "regroup": "other rows",
}


def _rules(fn: Any) -> dict[str, str]:
    """By parameter, the values that it may have, of those that are declared and are not any text or flag."""
    if not hasattr(fn, "__takes__"):
        return {}
    named = (name for name in parameters_of(fn).named if name != "self")
    rules = {name: rule for name in named if (rule := rule_of(fn, name)) is not None}
    return {name: str(rule) for name, rule in rules.items() if rule.kind not in ("flag", "text")}


def _fields(declared: Any) -> str:
    """Declared fields with their types; nothing for those that depend on the call, which the text names."""
    if not isinstance(declared, str):
        return ""
    return ", ".join(f"``{field}``" for field in map(_typed, re.split(r",\s*(?![^\[]*\])", declared)) if field)


def _typed(field: str) -> str:
    name, _, kind = field.partition(":")
    kind = kind.strip() or str(STANDARD.get(name.strip(), ""))
    return f"{name.strip()}: {kind}" if kind else name.strip()


def _options() -> Iterator[str]:
    """The options with their comments in the source."""
    for line in inspect.getsource(Options).splitlines():
        if found := re.fullmatch(r"    (\w+): (.*?)  # (.*)", line):
            name, kind, said = found.groups()
            yield f"- ``{name}``: ``{kind}``. {said[0].upper()}{said[1:]}."


def texts() -> dict[str, str]:
    """Every page by the name of its file."""
    return {"index.md": index(), **{f"{p.name}.md": page(p) for p in PAGES}}


if __name__ == "__main__":
    HERE.mkdir(exist_ok=True)
    for name, text in texts().items():
        (HERE / name).write_text(text)
