"""Tables: mini-batches and weights of rows that several ranks have are those of one process."""

import pytest
import torch

from flowrl import rl
from flowrl.backends.team import Team
from flowrl.backends.update_rows import Table
from flowrl.batch import Batch, CallInfo, Column
from flowrl.errors import ProgramError, RowsError
from flowrl.rl.math.losses import row_weights, token_weights

CALL = CallInfo(seed=3, program="p", step=2, op="actor.update")


def rows(count=11, seed=0, silent=()):
    """Rows of uneven lengths, two to a prompt; some tokens, and all of row 4, are not trained."""
    chance = torch.Generator().manual_seed(seed)
    masks, advantages = [], []
    for i in range(count):
        length = int(torch.randint(1, 9, (), generator=chance))
        masks.append([i != 4 and (i + j) % 4 != 3 for j in range(length)])
        advantages.append([0.0 if i in silent else 1.0] * length)
    return Batch.of(
        [(i // 2, i % 2) for i in range(count)],
        response_mask=Column.of(masks, dim="response", dtype="bool"),
        advantages=Column.of(advantages, dim="response", dtype="f32"),
    ).with_call(CALL)


class Heard(Team):
    """A rank that is told what the others said."""

    def __init__(self, place, said):
        self.data, self.place, self.said = len(said), place, said

    def gather(self, item):
        return self.said


class Says(Team):
    def gather(self, item):
        self.item = item
        return [item]


def tables(parts, loss):
    """The table that each rank makes."""
    said = []
    for part in parts:
        team = Says()
        try:
            Table.of(team, part, loss)
        finally:
            said.append(team.item)
    return [Table.of(Heard(place, said), part, loss) for place, part in enumerate(parts)]


SPLITS = [
    [[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10]],
    [[10, 3, 8], [], [0, 1, 2, 9, 4, 5, 6, 7]],
    [[7, 6, 5, 4, 3, 2, 1, 0], [8, 9, 10]],
]


@pytest.mark.parametrize("split", SPLITS, ids=["1", "3", "2"])
@pytest.mark.parametrize("how", [{}, {"rows": 3}, {"tokens": 12}, {"rows": 3, "together": True}], ids=str)
def test_every_rank_knows_the_mini_batches_of_one_process(split, how):
    whole = rows()
    alone = Table.of(Team(), whole, rl.ppo_clip())
    for epoch in range(2):
        wanted = [[whole.keys[i] for i in part] for part in alone.mini_batches(epoch=epoch, **how)]
        found = tables([whole.take(part) for part in split], rl.ppo_clip())
        for table in found:
            parts = table.mini_batches(epoch=epoch, **how)
            assert [[table.keys[i] for i in part] for part in parts] == wanted
        for number, part in enumerate(alone.mini_batches(epoch=epoch, **how)):
            taken = [t.local(t.mini_batches(epoch=epoch, **how)[number]) for t in found]
            assert sum(map(len, taken)) == len(part)
            for mine, local in zip(split, taken, strict=True):
                keys = [whole.keys[mine[i]] for i in local.tolist()]
                assert keys == [k for k in wanted[number] if k in keys], "in the order of the mini-batch"


def test_rows_know_whose_they_are():
    whole = rows()
    for place, table in enumerate(tables([whole.take(part) for part in SPLITS[1]], rl.sft())):
        assert table.keys == whole.keys and table.call == CALL
        assert [table.keys[i] for i in table.mine] == [whole.keys[i] for i in SPLITS[1][place]]
        assert table.place.tolist() == [2, 2, 2, 0, 2, 2, 2, 2, 0, 2, 0]
        assert table.lengths.tolist() == whole.response_mask.lengths.tolist()
        assert table.local(torch.arange(11)).sort().values.tolist() == list(range(len(SPLITS[1][place])))


@pytest.mark.parametrize("aggregate", ["token-mean", "token-sum", "seq-mean-token-mean", "seq-mean-token-sum"])
def test_weights_are_those_of_tokens_in_one_process(aggregate):
    whole, chosen = rows(), torch.tensor([9, 0, 4, 3, 5])
    mask = whole.response_mask
    row = torch.repeat_interleave(torch.arange(11), mask.lengths)
    inside = torch.zeros(11, dtype=torch.bool).index_fill(0, chosen, True)
    wanted = token_weights(mask.values & inside[row], row, 11, aggregate)
    for table in tables([whole.take(part) for part in SPLITS[2]], rl.ppo_clip(aggregate=aggregate)):
        assert torch.equal(table.weights(chosen)[row] * mask.values, wanted)


def test_weights_of_rows():
    whole, chosen = rows(), torch.tensor([9, 8, 4, 5])
    for table in tables([whole.take(part) for part in SPLITS[2]], rl.dpo()):
        counted = torch.zeros(11, dtype=torch.bool).index_fill(0, torch.tensor([5, 8, 9]), True)
        assert torch.equal(table.weights(chosen), row_weights(counted, "row-mean"))


def test_rows_without_a_gradient_are_not_trained():
    table = Table.of(Team(), rows(silent=(2, 7)), rl.ppo_clip())
    assert table.trained(torch.tensor([7, 5, 4, 3, 2, 1])).tolist() == [5, 1]
    assert Table.of(Team(), rows(silent=(2, 7)), rl.sft()).trained(torch.tensor([7, 4])).tolist() == [7]


def test_shares_are_in_the_order_of_keys():
    table = Table.of(Team(), rows().take([3, 1, 0, 2, 5, 4, 7, 6, 10, 9, 8]), rl.sft())
    assert torch.cat([table.local(table.share(i, 3)) for i in range(3)]).tolist() == [2, 1, 3, 0, 5, 4, 7, 6, 10, 9, 8]


@pytest.mark.parametrize(
    ("limit", "sizes"),
    [(3, [3, 3, 3, 2]), (4, [4, 4, 3]), (5, [4, 4, 3]), (8, [6, 5]), (10, [6, 5]), (11, [11]), (1, [1] * 11)],
)
def test_mini_batches_are_as_equal_as_their_limit_allows(limit, sizes):
    table = Table.of(Team(), rows(), rl.ppo_clip())
    parts = table.mini_batches(rows=limit)
    assert [len(part) for part in parts] == sizes
    drawn = [i for part in table.mini_batches(rows=1) for i in part.tolist()]
    assert [i for part in parts for i in part.tolist()] == drawn  # in the same order


def test_prompts_that_stay_together_are_spread_over_mini_batches():
    keys = [(prompt, sample) for prompt in range(9) for sample in range(8)]
    mask = Column.of([[True]] * 72, dim="response", dtype="bool")
    table = Table.of(Team(), Batch.of(keys, response_mask=mask).with_call(CALL), rl.sft())
    assert [len(part) for part in table.mini_batches(rows=36, together=True)] == [24, 24, 24]  # not 32, 32 and 8


def test_no_rows_of_a_loss_by_prompt_have_no_weights():
    assert (
        Table.of(Team(), rows().take([]), rl.ppo_clip(aggregate="prompt-mean")).weights(torch.arange(0)).tolist() == []
    )


def test_no_rows_at_all():
    for table in tables([rows().take([]), rows().take([])], rl.sft()):
        assert table.mini_batches(rows=2) == table.mini_batches() == [] and len(table.weights(torch.arange(0))) == 0


def test_rows_are_on_one_rank_and_compared_ones_together():
    whole = rows()
    with pytest.raises(RowsError, match=r"\(1, 1\) is given to two rows"):
        tables([whole.take([0, 1, 3]), whole.take([3])], rl.sft())
    with pytest.raises(
        ProgramError, match="dpo compares rows of one prompt, and those of prompt 1 are on ranks 0 and 1"
    ):
        tables([whole.take([0, 1, 2]), whole.take([3])], rl.dpo())


@pytest.mark.parametrize("split", SPLITS, ids=["1", "3", "2"])
def test_a_mean_over_prompts_knows_the_rows_of_all_ranks(split):
    whole, loss = rows(), rl.ppo_clip(aggregate="prompt-mean")
    alone = Table.of(Team(), whole, loss)
    for part in alone.mini_batches(rows=5):
        prompts = [alone.keys[i][0] for i in part]
        others = [key[0] for i, key in enumerate(alone.keys) if i not in part.tolist()]
        assert not set(prompts) & set(others)  # a prompt is in one mini-batch
        counts = {prompt: sum(int(alone.counts[i]) for i in part if alone.keys[i][0] == prompt) for prompt in prompts}
        wanted = [0.0] * len(alone)
        for i in part.tolist():
            if alone.counts[i]:
                wanted[i] = 1 / counts[alone.keys[i][0]] / sum(n > 0 for n in counts.values())
        for table in tables([whole.take(rows_of) for rows_of in split], loss):
            assert table.weights(part).tolist() == pytest.approx(wanted)
