"""What a program's Python makes of a number waits for the number, and is made of that of the run, on every runtime."""

import pytest
from direct import run_direct
from flows import metrics, module_of

from flowrl.errors import RunError
from flowrl.placement.plan.plan import Plan


@pytest.fixture
def exits():
    return module_of("exits_flow")


def made(out, ways):
    """What was recorded, and what plain Python makes of the numbers that were recorded beside it."""
    lines = metrics(out)
    assert len(lines) == 3 and len({line["x"] for line in lines}) == 3
    recorded = [{name: line[name] for name in ways(1.0)} for line in lines]
    return recorded, [ways(line["x"]) for line in lines]


@pytest.mark.parametrize("runtime", ["eager", "local"])
def test_every_way_gives_what_plain_python_gives(exits, tmp_path, runtime):
    exits.flow.run(out=tmp_path / "run", runtime=runtime, quiet=True)
    recorded, wanted = made(tmp_path / "run", exits.ways)
    assert recorded == wanted


def test_on_ranks_too(exits, tmp_path):
    run_direct(exits.flow, Plan({"a": "cpu"}), tmp_path / "run", "exits")
    recorded, wanted = made(tmp_path / "run", exits.ways)
    assert recorded == wanted


def test_a_resumed_run_reads_them_again(exits, tmp_path, monkeypatch):
    real, count = exits.Counter.__dict__["update"].fn, 0

    def fn(self, batch, *, scale=1.0):
        nonlocal count
        count += 1
        if count == 3:
            raise RuntimeError("on purpose")
        return real(self, batch, scale=scale)

    fn.__annotations__ = real.__annotations__
    object.__setattr__(exits.Counter.__dict__["update"], "fn", fn)
    with pytest.raises(RunError, match="on purpose"):
        exits.flow.run(out=tmp_path / "run", quiet=True, checkpoint_every=1)
    exits.flow.run(out=tmp_path / "run", quiet=True, resume=True)
    recorded, wanted = made(tmp_path / "run", exits.ways)
    assert recorded == wanted
