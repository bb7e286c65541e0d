"""Answers questions of reasoning-gym by a policy, and scores the same answers by the package; prints both as JSON."""

from __future__ import annotations

import json
import random

import reasoning_gym
from adapter_play import page_trained, played

from flowrl.environments import ReasoningGymEnvironment
from flowrl.errors import WorkerError

ANSWERS = [f"<answer>{i}</answer>" for i in range(-9, 19)]


def both(dataset, words, **options):
    """What a policy is given for its answers, and what the data set gives for them in a program without flowrl."""
    found = played(ReasoningGymEnvironment(dataset, size=8, seed=4, **options), words, tasks=8, n=6)
    raw = reasoning_gym.create_dataset(dataset, size=8, seed=4, **options)
    for place, row in enumerate(found["rows"]):
        entry = raw[place // 6]
        assert row["task"]["entry"] and len(row["texts"]) == 1
        row["theirs"] = raw.score_answer(reasoning_gym.utils.extract_answer(row["texts"][0]), entry)
    return found


def scored_alike():
    """The data sets in which some answer is scored otherwise than by the package on its own entry; and how many are tried."""
    bad, tried = [], 0
    for name in sorted(set(reasoning_gym.factory.DATASETS) - {"composite"}):
        env = ReasoningGymEnvironment(name, size=3, seed=1)
        entries = list(env._made)
        env._made = entries_of(env._made, entries)
        rows = list(env.rows())
        given = [entry["answer"] or "" for entry in entries] + ["", "0", "[]"]
        for row, entry in zip(rows, entries, strict=True):
            for answer in given:
                theirs = outcome(lambda: env._made.score_answer(answer=answer.strip(), entry=entry))  # noqa: B023
                ours = outcome(lambda: env.score(f"So <answer>{answer}</answer>", row["entry"]))  # noqa: B023
                bad += [name] * (ours != theirs)
            tried += 1
    return {"bad": bad, "tried": tried}


def outcome(score):
    """A score, or the exception of one: some data sets raise for an answer that is malformed."""
    try:
        return score()
    except Exception as error:
        return repr(error)


class entries_of:
    """A data set whose entries are made once, as some are made anew with each look."""

    def __init__(self, made, entries):
        self.made, self.entries, self.score_answer = made, entries, made.score_answer

    def __iter__(self):
        return iter(self.entries)


def refused(dataset, **options):
    try:
        list(ReasoningGymEnvironment(dataset, **options).rows())
    except WorkerError as error:
        return f"{error} {error.fix}"


if __name__ == "__main__":
    random.seed(1)
    small = {"min_terms": 2, "max_terms": 2, "max_digits": 1}
    found = {"chain_sum": both("chain_sum", ANSWERS, **small)}
    letters = [f"<answer>{word}" for word in ("A is", "True", "No")] + ["</answer>", "Yes", "<answer>Yes</answer>"]
    found["isomorphic_strings"] = both("isomorphic_strings", [*letters, "<answer>True</answer>"], max_string_length=3)
    found |= {"alike": scored_alike(), "page": page_trained("Tasks of reasoning-gym", ANSWERS)}
    found["refused"] = [refused("chain_sun"), refused("chain_sum", max_trems=3), refused("chain_sum", size=0)]
    print(f"\n{json.dumps(found)}")  # some data sets print too
