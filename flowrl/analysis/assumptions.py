"""What the times of a simulation rest on: what is assumed, measured or said, and what no runtime does yet."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from ..placement.cost.calibrated_costs import Calibrated, placed
from ..placement.cost.continuous_batch import Turns
from ..placement.cost.roofline import Roofline
from ..schedule.simulation import steady_error
from .call_seconds import plays_episodes
from .row_lengths import Tokens

if TYPE_CHECKING:
    from .study import Study

_SURE = 0.003  # by what part a steady step may be off before it is said


def assumptions_of(study: Study, commits: Mapping[int, float]) -> tuple[str, ...]:
    """Return what the times of a study rest on, with how sure they are: ``commits``, the time of each simulated one."""
    refused = (f"no runtime does this yet, and flowrl run refuses it: {error.what}" for error in study.unsupported())
    of_calls = (*_of_lengths(study), *_of_episodes(study), *_of_places(study), *_of_activations(study))
    return (*refused, *of_calls, *_of_costs(study), *_of_steps(study, commits))


def _of_lengths(study: Study) -> Iterator[str]:
    if isinstance(study.costs, Calibrated) and study.tokens == Tokens():
        yield f"tokens of a row: those of each call of {study.costs.run}"
    else:
        yield from study.lengths.said({n: made for n, made in study.calls.items() if n in study.works and made.rows})


def _of_episodes(study: Study) -> Iterator[str]:
    """What is taken of environments, by the calls of which it is alike."""
    alike: dict[str, list[str]] = {}
    for node, made in study.calls.items() if isinstance(study.cost_model, Roofline) else ():
        if plays_episodes(made):
            alike.setdefault(_turns_in_words(study, study.episode_turns(made)), []).append(node)
    for said, nodes in alike.items():
        yield f"{', '.join(nodes)}: {said}"


def _turns_in_words(study: Study, turns: Turns | None) -> str:
    if turns is None:
        return "episodes of one turn, whose environment takes no time (assumed; see --episode-turns)"
    basis = "said" if study.tokens.turns is not None else f"measured: {study.tokens.turns_source}"
    if turns.count == 1:
        return f"episodes of one turn ({basis})"
    return f"{turns.count} turns in an episode, and {turns.seconds:g} s of its environment between two ({basis})"


def _of_places(study: Study) -> Iterator[str]:
    """Calls whose seconds were measured elsewhere than where the plan has them."""
    for work in study.works.values():
        was = study.costs.places.get(work.title) if isinstance(study.costs, Calibrated) else None
        now = placed(work.backend, work.mesh)
        if was is not None and work.role.model is not None and was != now:
            yield f"{work.node}: its seconds were measured on {was}, and are taken for {now}"


def _of_activations(study: Study) -> Iterator[str]:
    """Workers whose memory and time are those of a driver that asks for recomputation, and does not."""
    for work in study.works.values():
        if work.kind == "train" and work.role.assumes_recomputation(work.backend):
            yield (
                f"{work.node}: activations are taken to be recomputed in the backward pass (assumed for "
                f"{work.backend}); {work.role.name} does so with gradient_checkpointing=True"
            )


def _of_costs(study: Study) -> Iterator[str]:
    costs = study.cost_model
    if not isinstance(costs, Roofline):
        return
    if any(work.kind == "external" for work in study.works.values()):
        yield f"a row of a reward or environment: {1000 * costs.efficiency.row_s:g} ms on a process (assumed)"
    if costs.error is None:
        yield "the roofline is not calibrated: compare plans, do not promise seconds"
    else:
        of = f"the calls of {costs.efficiency.name} were {costs.error:.0%} off it"
        yield f"the parts of a peak are fitted to a run: half of {of} or less"


def _of_steps(study: Study, commits: Mapping[int, float]) -> Iterator[str]:
    """How sure a steady step is where rows are drawn: more steps in flight may seem slower by that."""
    lengths = [work.load.lengths for work in study.works.values()]
    error, steps = steady_error(commits, study.execution.scheme.setup.staleness)
    if error > _SURE and any(each is not None and each.varies for each in lengths):
        yield (
            f"a steady step is an average of {steps} steps whose rows are drawn, right to {error:.1%} (a standard "
            "error): compare bounds of staleness with more steps, or by the seconds of all of them"
        )
