"""Rows chosen for learning from preferences, as ops of a program; the mathematics is in ``math/pairs.py``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..graph.ops.allowed import whole
from ..graph.ops.check_arguments import takes
from ..graph.ops.declare import op
from ..graph.ops.signature import CallShape
from .validate import refusal, refuse_lone_rows, warn_of_lone_rows

if TYPE_CHECKING:
    from torch import Tensor

    from ..batch import Batch


_NO_PAIR = "no prompt would be left"


def _of(call: CallShape) -> str:
    of = call.call.get("of")
    return f"{of if isinstance(of, str) else 'rewards'}: f32[]"


def _pairs_reads(call: CallShape) -> str:
    refuse_lone_rows("rl.pairs", call, _NO_PAIR)
    return _of(call) + (", response_mask" if "response_mask" in call.have else "")


def _by_prompt(batch: Batch) -> tuple[Tensor, Tensor]:
    """The prompt of each row, and all rows in the order of their keys: i64[rows] each."""
    import torch

    order = sorted(range(len(batch)), key=batch.keys.__getitem__)
    return batch.group_index()[0], torch.tensor(order, dtype=torch.int64)


@op(owner="rl", reads=_pairs_reads, adds="preferred: bool[]", rows="filter", cost="local", pieces=True)
def pairs(batch: Batch, *, of: str = "rewards") -> Batch:
    """Keep of each prompt the row with the largest ``of`` and the one with the smallest, for the losses on pairs.

    For online preferences (arXiv:2402.04792). Adds ``preferred`` bool[], true for the better one. Among equal rows
    the first key is taken. Prompts whose rows are all equal are left out, and so are those with one row. A row whose
    ``of`` is nan is never taken, nor one without a sampled token, where the batch has ``response_mask``: no loss could
    learn from it. Rows stay in their order.

    Args:
        batch: reads the field that ``of`` names, f32[], and ``response_mask`` where it is there.
        of: by which field rows are compared.

    >>> batch = fl.Batch.of([(0, 0), (0, 1), (0, 2), (1, 0)], rewards=[0.5, 1.0, 0.0, 1.0])
    >>> pairs = rl.pairs(batch)
    >>> pairs.keys, pairs.preferred.to_list()
    (((0, 1), (0, 2)), [True, False])
    """
    from ..batch import Column
    from .math.pairs import extremes

    warn_of_lone_rows("rl.pairs", batch, _NO_PAIR)
    numbers = batch[of].values.cpu().double()
    usable = numbers == numbers
    if "response_mask" in batch.fields:
        usable &= batch.response_mask.row_sum().values.cpu() > 0
    better, worse = extremes(numbers, *_by_prompt(batch), usable)
    kept = better | worse
    return batch.filter(kept).with_columns({"preferred": Column(better[kept])})


@op(owner="rl", reads=_of, rows="filter", cost="local", pieces=True)
@takes(k=whole(least=1, fix="Write k=1 for the best row of each prompt."))
def best_of(batch: Batch, *, k: int = 1, of: str = "rewards") -> Batch:
    """The ``k`` rows of each prompt with the largest ``of`` (RAFT, arXiv:2304.06767, with ``rl.sft`` on them).

    Among equal ones those with the first keys are kept. A prompt with fewer rows keeps them all. A row whose ``of`` is
    nan is never kept. Rows stay in their order.

    Args:
        batch: reads the field that ``of`` names, f32[].
        k: how many rows of each prompt; 1 or more.
        of: by which field rows are compared.

    >>> batch = fl.Batch.of([(0, 0), (0, 1), (1, 0), (1, 1)], rewards=[0.0, 1.0, 1.0, 1.0])
    >>> rl.best_of(batch).keys
    ((0, 1), (1, 0))
    """
    from .math.pairs import best

    return batch.filter(best(batch[of].values.cpu().double(), *_by_prompt(batch), int(k)))


@op(
    owner="rl",
    reads="tokens, response_mask",
    adds="tokens: i32[*token], response_mask: bool[*response]",
    rows="regroup",
    cost="local",
)
def mismatched(batch: Batch) -> Batch:
    """Each row's response behind the prompt of the next prompt, in the order of their keys; the last takes the first's.

    What the policy and the reference make of such rows estimates the KL between them, KTO's reference point
    (arXiv:2402.01306, section 4.1)::

        other = ref.logprobs(actor.logprobs(rl.mismatched(batch)))
        z = ((other.old_logprobs - other.ref_logprobs) * other.response_mask).row_sum().mean()

    The result has ``tokens`` and ``response_mask`` alone, and keys and rows as they were: a row's key is that of its
    response. Raises ProgramError where all rows are of one prompt.

    Args:
        batch: reads ``tokens`` and ``response_mask``; a prompt is what stands before the response, also where it is
            that of an agent.

    >>> batch = fl.Batch.of(
    ...     2,
    ...     tokens=fl.Column.of([[1, 8], [2, 9]], "token", "i32"),
    ...     response_mask=fl.Column.of([[True], [True]], "response"),
    ... )
    >>> rl.mismatched(batch).tokens.to_list()
    [[2, 8], [1, 9]]
    """
    from ..batch import Batch, Column
    from .math.pairs import packed_together, parted

    group, order = _by_prompt(batch)
    first: dict[int, int] = {}  # of each prompt, by key, its first row
    for row in order.tolist():
        first.setdefault(int(group[row]), row)
    if len(first) == 1:
        raise refusal(
            "rl.mismatched: all rows are of one prompt, so there is no other one.",
            "Give it the rows of two prompts or more.",
        )
    prompts = list(first)
    after = dict(zip(prompts, [*prompts[1:], *prompts[:1]], strict=True))
    whole, mask = batch.tokens, batch.response_mask
    before, response = parted(whole.values, whole.lengths, mask.lengths)
    prompt = Column.packed(before, whole.lengths - mask.lengths, "prompt").take(
        [first[after[g]] for g in group.tolist()]
    )
    tokens = packed_together(prompt.values, prompt.lengths, response, mask.lengths)
    column = Column.packed(tokens, prompt.lengths + mask.lengths, "token")
    return Batch(batch.keys, {"tokens": column, "response_mask": mask}, batch.call)
