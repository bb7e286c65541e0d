"""Every row that comes in is trained on, dropped by the program for a reason, or live; and what loses one is told."""

from __future__ import annotations

import json
import random
import re

import pytest
from direct import run_direct
from flows import module_of
from hypothesis import given, settings
from hypothesis import strategies as st

from flowrl.batch import Batch
from flowrl.errors import ResumeError, RunError
from flowrl.placement.plan.plan import Pipeline, Place, Plan, Pool
from flowrl.runtime.driver.monitoring.length_bias import GroupLengths, length_bias
from flowrl.runtime.driver.monitoring.row_ledger import NO_UPDATE, RowLedger

BY_FILTER = r"batch.filter, ledger_flow.py:\d+"
SAYS = [[2, 4, False], [0, 99, True], [0, 6, False], [1, 0, True]]


def ledger_of(run):
    return json.loads((run / "run.json").read_text())["ledger"]["ledger"]


def lines_of(run):
    return [json.loads(line) for line in (run / "ledger.jsonl").read_text().splitlines()]


def closes(totals):
    return totals["admitted"] == totals["trained"] + sum(totals["dropped"].values()) + totals["live"]


def test_rows_of_prompts_under_way_are_live():
    """Of two chunks one is done: its rows are in no value of the program until the other one is."""
    ledger = RowLedger("grpo")
    ledger.draw([(0,), (1,)], admit=True)
    ledger.sample([(0, 0), (0, 1)], [3, 4])
    ledger.settle([[(0,), (1,)]], under_way={0, 1})
    assert ledger.rows.live() == 3 and not ledger.rows.dropped
    ledger.sample([(1, 0), (1, 1)], [5, 6])
    ledger.train([(0, 0), (0, 1), (1, 0), (1, 1)])
    ledger.settle([])
    assert ledger.rows.trained == 4 and not ledger.rows.dropped


@settings(max_examples=16, deadline=None)
@given(
    says=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 10), st.booleans()).map(list), min_size=1, max_size=4),
    steps=st.integers(1, 5),
    staleness=st.integers(0, 2),
)
def test_the_ledger_of_any_program_is_what_was_sampled_and_trained(tmp_path_factory, says, steps, staleness):
    says[0][2] = False  # the trace looks at two rounds: one of them has the update
    out = tmp_path_factory.mktemp("run") / "run"
    plan = Plan({"a": "cpu", "b": "cpu"}, {"sampler": Place("b")}, pipeline=Pipeline(staleness=staleness))
    flows = module_of("ledger_flow")
    flows.flow.run("ledger", out=out, plan=plan, quiet=True, steps=steps, says=json.dumps(says))
    sampled, trained = set(flows.SAMPLED), set(flows.TRAINED)
    rows, prompts = ledger_of(out)["rows"], ledger_of(out)["prompts"]
    assert rows["admitted"] == len(sampled)
    assert rows["trained"] == len(trained)
    assert sum(rows["dropped"].values()) == len(sampled - trained)
    assert prompts["admitted"] == len({key[0] for key in sampled})
    assert prompts["trained"] == len({key[0] for key in trained})
    assert rows["live"] == prompts["live"] == 0
    assert all(closes(line["rows"]) and closes(line["prompts"]) for line in lines_of(out))
    assert all(why == NO_UPDATE or re.fullmatch(BY_FILTER, why) for why in rows["dropped"])


def test_a_resumed_run_has_the_ledger_of_one_that_was_left_alone(tmp_path):
    says = json.dumps(SAYS)
    module_of("ledger_flow").flow.run("ledger", out=tmp_path / "whole", quiet=True, steps=9, says=says)
    for steps in (2, 5, 9):
        module_of("ledger_flow").flow.run(
            "ledger", out=tmp_path / "parts", quiet=True, steps=steps, says=says, resume=steps > 2, checkpoint_every=2
        )
    assert ledger_of(tmp_path / "parts") == ledger_of(tmp_path / "whole")
    assert lines_of(tmp_path / "parts")[-1]["rows"]["admitted"] == lines_of(tmp_path / "whole")[-1]["rows"]["admitted"]


def test_on_ranks_it_is_the_same(tmp_path):
    says = {"ledger": {"steps": 6, "says": json.dumps(SAYS)}}
    flow = module_of("ledger_flow").flow
    flow.run("ledger", out=tmp_path / "local", quiet=True, parameters=says)
    plan = Plan({"a": "cpu", "b": Pool("b", processes=3)}, {"judge": Place("b")})
    run_direct(flow, plan, tmp_path / "ranks", "ledger", parameters=says)
    assert ledger_of(tmp_path / "ranks") == ledger_of(tmp_path / "local")


def test_rows_that_a_checkpoint_has_lost_are_named(tmp_path):
    """The held rows of prompts are taken out of the checkpoint's live values, as a bug of flowrl would."""
    says, out = json.dumps([[0, 99, True], [0, 99, False]]), tmp_path / "run"
    from flowrl.runtime.storage.checkpoints import checkpoint_folder as checkpoint

    flow = module_of("ledger_flow").flow
    flow.run("ledger", out=out, quiet=True, steps=3, says=says, checkpoint_every=50)
    real = checkpoint.load_live

    def lossy(folder, manifest):
        values = real(folder, manifest)
        return {i: v.take(range(3, len(v))) if isinstance(v, Batch) and len(v) > 3 else v for i, v in values.items()}

    with pytest.MonkeyPatch.context() as patch, pytest.raises(ResumeError, match="lacks rows of prompt 6, which were"):
        patch.setattr(checkpoint, "load_live", lossy)
        flow.run("ledger", out=out, quiet=True, steps=4, says=says, resume=True)


def test_prompts_that_are_drawn_twice_and_rows_that_a_call_loses_are_named():
    ledger = RowLedger("grpo")
    ledger.draw([(0,), (1,)], admit=True)
    with pytest.raises(RunError, match="numbers to rows that others have: prompt 1"):
        ledger.draw([(1,), (2,)], admit=True)
    ledger.sample([(0, 0), (0, 1), (1, 0)], [3, 4, 5])
    ledger.compare("reward.score of step 0", [(0, 0), (0, 1), (1, 0)], [(0, 0), (1, 0)])
    with pytest.raises(RunError, match="reward.score of step 0 has no result for rows of prompt 0"):
        ledger.settle([[(0, 0), (0, 1), (1, 0)]])


def test_a_prompt_that_comes_with_several_rows_is_one_prompt():
    ledger = RowLedger("dpo")
    ledger.draw([(0, 0), (0, 1), (1, 0), (1, 1)], admit=True)
    assert (ledger.prompts.admitted, ledger.rows.admitted) == (2, 4)
    ledger.train([(0, 0), (0, 1), (1, 0)])
    ledger.settle([])
    assert (ledger.prompts.trained, ledger.rows.trained, ledger.rows.dropped) == (2, 3, {NO_UPDATE: 1})


def test_a_ledger_that_does_not_close_is_an_error_that_names_prompts():
    ledger = RowLedger("grpo")
    ledger.draw([(0,), (1,)], admit=True)
    ledger.rows.trained += 1
    with pytest.raises(
        RunError, match=r"ledger of rows does not close: 2 admitted, 1 trained, .* 2 live \(prompts 0, 1\)"
    ):
        ledger.check()


def test_pairs_stand_for_the_rows_of_their_prompt():
    ledger = RowLedger("dpo")
    ledger.draw([(0,), (1,)], admit=True)
    ledger.sample([(0, 0), (0, 1), (1, 0), (1, 1)], [])
    ledger.train([(0,)])
    ledger.settle([])
    assert (ledger.rows.trained, ledger.rows.dropped) == (2, {NO_UPDATE: 2})
    assert (ledger.prompts.trained, ledger.prompts.dropped) == (1, {NO_UPDATE: 1})


# -- lengths -----------------------------------------------------------------------------------------------------------


def groups(choose, seed=0, count=120, rows=4):
    drawn = random.Random(seed)
    found = []
    for number in range(count):
        shift = drawn.randrange(30)  # rows of a prompt are alike
        lengths = [1 + shift + drawn.randrange(10) for _ in range(rows)]
        found.append(GroupLengths(lengths, [choose(number, n) for n in lengths]))
    return found


def is_biased(some):
    found = length_bias(some)
    assert found is not None
    return found.is_biased


def test_a_choice_that_has_nothing_to_do_with_lengths_stays_within_the_bound():
    biased = [is_biased(groups(lambda number, n: number % 3 > 0, seed)) for seed in range(40)]
    assert sum(biased) <= 3, "of forty samples one is above a bound of 99 % in every second such test"


def test_a_choice_by_length_is_above_it():
    assert is_biased(groups(lambda number, n: n < 30))
    drawn = random.Random(3)
    assert is_biased(groups(lambda number, n: drawn.random() > n / 60))


def test_runs_report_it(tmp_path):
    for name, parameters in (("all", {}), ("short", {"longest": 6}), ("third", {"every": 3})):
        module_of("ledger_flow").flow.run(
            "lengths", out=tmp_path / name, quiet=True, parameters={"lengths": parameters}
        )
    said = {
        name: json.loads((tmp_path / name / "run.json").read_text())["ledger"]["lengths"]["lengths"]
        for name in ("all", "short", "third")
    }
    assert said["all"] == {"distance": 0.0, "bound": 0.0, "rows": 1024, "trained": 1024, "groups": 256}
    assert said["short"]["distance"] > 2 * said["short"]["bound"]
    assert 0 < said["third"]["distance"] <= said["third"]["bound"]
