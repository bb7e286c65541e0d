"""Half of a surrogate pair in data is named with file and row, or carried unharmed: never a traceback of a codec."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import tiny as T

import flowrl as fl
from flowrl.errors import DataError, RewardError
from flowrl.workers.model_options import Model

HALF = "1 \ud800 2"
SAID = r"A text has half of a surrogate pair at character 2, which is no character: '1 \ud800 2'."


def jsonl(tmp_path, *rows):
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


def flow_of(source):
    flow = fl.Flow("halves")

    @flow.program
    def halves(steps: int = 1):
        for step, batch in flow.steps(source, steps):
            flow.log(step, length=batch.prompt_ids.lengths_column().mean())

    return flow


@pytest.mark.parametrize("kind", ["jsonl", "list", "response", "rejected"])
def test_a_text_that_is_encoded_is_named_with_its_place(tmp_path, kind):
    rows = [{"prompt": "1 2", "good": "3", "bad": "4"}] * 2
    rows[1] = {**rows[1], {"response": "good", "rejected": "bad"}.get(kind, "prompt"): HALF}
    learned = {"response": {"response": "good"}, "rejected": {"response": "good", "rejected": "bad"}}.get(kind, {})
    learned["tokenizer"] = T.build_tokenizer
    data = fl.data.rows(rows, batch=2, shuffle=False, tokenizer=T.build_tokenizer) if kind == "list" else None
    file = jsonl(tmp_path, *rows)
    source = data or fl.data.jsonl(file, batch=2, shuffle=False, **learned)
    with pytest.raises(DataError) as error:
        flow_of(source).run(out=tmp_path / "run", quiet=True)
    assert error.value.what == SAID and error.value.fix.startswith("Mend the data")
    at = error.value.at
    assert (at.file, at.line) == (("<the list of rows, row 1>", 0) if kind == "list" else (file, 2))
    error.value.report().encode()


def test_a_conversation_is_named_too(tmp_path):
    chat = [{"role": "user", "content": "1"}, {"role": "assistant", "content": HALF}]

    def tokenizer():
        made = T.build_tokenizer()
        made.chat_template = "{% for m in messages %}{{ m.role }} {{ m.content }} {% endfor %}"
        return made

    file = jsonl(tmp_path, {"messages": chat})
    source = fl.data.jsonl(file, batch=1, messages="messages", tokenizer=tokenizer)
    with pytest.raises(DataError, match="A conversation has half of a surrogate pair") as error:
        flow_of(source).run(out=tmp_path / "run", quiet=True)
    assert error.value.at.file == file and error.value.at.line == 1


def test_parquet_that_is_no_utf_8_is_named_with_file_and_row(tmp_path):
    pa = pytest.importorskip("pyarrow", reason="the extra [data] is not installed")
    parquet = pytest.importorskip("pyarrow.parquet")
    texts = pa.Array.from_buffers(
        pa.string(), 2, [None, pa.py_buffer(b"\0\0\0\0\3\0\0\0\6\0\0\0"), pa.py_buffer(b"1 2\xed\xa0\x80")]
    )
    file = tmp_path / "rows.parquet"
    parquet.write_table(pa.table({"prompt": texts}), file)
    with pytest.raises(DataError, match="A row holds a text that is no UTF-8") as error:
        flow_of(fl.data.parquet(str(file), batch=2, shuffle=False, tokenizer=T.build_tokenizer)).run(
            out=tmp_path / "run", quiet=True
        )
    assert error.value.at.file == str(file) and error.value.at.text == "row 1"


def measure(answer, prompt):
    return float(len(answer))


class Rows(fl.Worker):
    keeps = ("seen",)

    def __init__(self):
        self.seen = ""

    @fl.op(reads="answer, rewards", updates="seen")
    def note(self, batch) -> fl.Metrics:
        self.seen += "".join(batch.answer.to_list())
        return fl.Metrics(length=len(self.seen))


def carried(tmp_path):
    flow = fl.Flow("carried")
    reward = flow.worker(fl.FunctionReward, measure, tokenizer=T.build_tokenizer, name="reward")
    seen = flow.worker(Rows, name="seen")
    actor = flow.worker(
        fl.Actor, Model(config=T.CONFIGS["qwen2"], tokenizer=T.build_tokenizer), lr=None, max_tokens=3, name="actor"
    )
    file = jsonl(tmp_path, {"prompt": "1 2", "answer": HALF, "\udfff": 1}, {"prompt": "3", "answer": "\udcff\ud800"})

    @flow.program
    def carried(steps: int = 2):
        for step, batch in flow.steps(fl.data.jsonl(file, batch=2, shuffle=False), steps):
            batch = reward.score(actor.generate(batch))
            if batch.rewards.mean() > 0:
                flow.log(step, seen.note(batch), reward=batch.rewards.mean())

    return flow


@pytest.mark.parametrize("runtime", ["eager", "local"])
def test_columns_that_nothing_encodes_are_carried(tmp_path, runtime):
    """Through the journal, records, a checkpoint and a resume."""
    out = tmp_path / "run"
    how = {"runtime": runtime, "quiet": True, "trajectories_every": 1, "checkpoint_every": 1}
    carried(tmp_path).run(out=out, **how)
    done = carried(tmp_path).run(out=out, resume=True, steps=3, **how)
    assert dict(done.last)["carried"]["length"] == 3 * len(HALF + "\udcff\ud800")
    lines = [json.loads(line) for line in (out / "trajectories.jsonl").read_text().splitlines()]
    assert {line["answer"] for line in lines} == {HALF, "\udcff\ud800"}


def test_what_user_code_says_of_it_is_shown_on_any_terminal(tmp_path):
    file = jsonl(tmp_path, {"prompt": "1", "a\ud800": 1})
    script = tmp_path / "driver.py"
    script.write_text(
        f"import flowrl as fl\nflow = fl.Flow('f')\nactor = flow.worker(fl.Actor, model='a', lr=None)\n"
        f"@flow.program\ndef f(steps: int = 1):\n    for step, batch in flow.steps(fl.data.jsonl({file!r}, batch=1), steps):\n"
        f"        flow.log(step, x=actor.generate(batch).answer.mean())\n"
    )
    done = subprocess.run([sys.executable, "-m", "flowrl", "check", str(script)], capture_output=True, check=False)
    assert done.returncode == 1 and b"Traceback" not in done.stderr + done.stdout
    assert rb"a\ud800" in done.stdout + done.stderr


class Echo(fl.Env):
    def reset(self, row, seed):
        return None, HALF

    def step(self, state, action):
        return None, "", 0.0, True


def test_an_observation_is_named_with_its_row(tmp_path):
    flow = fl.Flow("echo")
    actor = flow.worker(
        fl.Actor, Model(config=T.CONFIGS["qwen2"], tokenizer=T.build_tokenizer), lr=None, max_tokens=3, name="actor"
    )
    env = flow.worker(Echo, name="env")

    @flow.program
    def echo(steps: int = 1):
        for step, batch in flow.steps(fl.data.rows([{"prompt": "1 2"}], batch=1), steps):
            flow.log(step, reward=env.rollout(batch, policy=actor).rewards.mean())

    with pytest.raises(RewardError, match="row 0.*half of a surrogate pair at character 2"):
        flow.run(out=tmp_path / "run", quiet=True)
