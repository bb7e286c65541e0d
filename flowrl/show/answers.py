"""What the page asks for, by name: each answer is plain data, cut to what a screen needs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ..errors import FlowError
from ..runtime.driver.monitoring.wait_story import wait_story
from . import curves, lanes, row_labels, search_rows, summaries
from .follow_runs import FollowedRun, Follower
from .forecasts import compare_forecast
from .measured_graph import Drawings
from .read_lines import read_line
from .read_question import BadQuestionError, Words, filter_of, number_of, text_of, whole_of
from .row_texts import WIDE_LINE, Decodes, field_of, preview, tokenizer_of, tokens_of, whole_row

CURVES = 40  # in one answer


class Answers:
    """Answers the questions of a page about the runs that a thread follows."""

    def __init__(self, follower: Follower) -> None:
        self.follower = follower
        self.drawings = Drawings()
        self._tokenizers: dict[str, Decodes] = {}

    def runs(self, words: Words) -> dict[str, Any]:
        """All runs, each in short."""
        return {"runs": [self._in_short(run) for run in self.follower.runs.values()]}

    def about(self, words: Words) -> dict[str, Any]:
        """What run.json says, and what a live run waits for."""
        run = self._run(words)
        record, note = run.record()
        try:
            waits = wait_story(run.found.folder).to_json()
        except (FlowError, OSError, ValueError, KeyError, TypeError):
            waits = None
        return {"folder": str(run.found.folder), "note": note, "record": summaries.about(record), "waits": waits}

    def forecast(self, words: Words) -> dict[str, Any]:
        """What the plan foretold of each program that a run has it of, beside what happened."""
        run = self._run(words)
        said = run.record()[0].get("forecasts")
        with run.store.reading() as connection:
            return {
                "programs": [
                    {
                        "program": _string(program),
                        "source": _string(forecast.get("source")),
                        "notes": [_string(note) for note in forecast.get("notes") or ()],
                        "lines": compare_forecast(connection, program, forecast),
                    }
                    for program, forecast in (said.items() if isinstance(said, dict) else ())
                    if isinstance(forecast, dict)
                ]
            }

    def names(self, words: Words) -> dict[str, Any]:
        """The programs of a run and the names of their metrics."""
        with self._run(words).store.reading() as connection:
            return {"programs": curves.metric_names(connection)}

    def curves(self, words: Words) -> dict[str, Any]:
        """Curves of a program of a run by name."""
        program, names = text_of(words, "program"), list(words.get("name", ()))[:CURVES]
        points = min(whole_of(words, "points") or curves.POINTS, 5000)
        with self._run(words).store.reading() as connection:
            return {"curves": curves.curves(connection, program, names, points=points)}

    def rows(self, words: Words) -> dict[str, Any]:
        """A page of rows with the beginnings of their texts."""
        run = self._run(words)
        self.follower.first = run.found.id
        with run.store.reading() as connection:
            labels = row_labels.labels_of(connection, text_of(words, "program"))
            found = search_rows.search_rows(connection, filter_of(words, labels))
            found["programs"] = search_rows.programs_with_rows(connection)
        found["labels"] = {name: list(values.items()) for name, values in labels.items()}
        for row in found["rows"]:
            row |= self._preview(run, row)
        return found

    def prompts(self, words: Words) -> dict[str, Any]:
        """A page of prompts with the rewards of their rows, those of which a row fits the filter.

        ``silent=1``: those whose rows were all rewarded alike.
        """
        run, program = self._run(words), text_of(words, "program")
        silent, page = text_of(words, "silent") == "1", whole_of(words, "page") or 0
        with run.store.reading() as connection:
            asked = filter_of(words, row_labels.labels_of(connection, program))
            if asked.order not in search_rows.PROMPT_ORDERS:
                has = ", ".join(search_rows.PROMPT_ORDERS)
                raise BadQuestionError(f"Prompts have no order '{asked.order}'; there are {has}.")
            found = search_rows.search_prompts(connection, asked, silent=silent, page=max(0, page))
            for prompt in found["prompts"]:
                rows = search_rows.rows_of_prompt(connection, program, prompt["step"], prompt["prompt"], most=1)
                prompt["text"] = self._preview(run, rows[0]).get("prompt_text", "") if rows else ""
        return found

    def row(self, words: Words) -> dict[str, Any]:
        """A row with its texts and its first tokens, and the other rows of its prompt."""
        run = self._run(words)
        place, row = self._row(run, words)
        texts = self._tokenizer(run)
        with run.store.reading() as connection:
            others = search_rows.rows_of_prompt(connection, place["program"], place["step"], place["prompt"])
        return {**place, **whole_row(row, texts), "strip": tokens_of(row, texts, 0), "others": others}

    def group(self, words: Words) -> dict[str, Any]:
        """All rows of a prompt in a step, with their conversations."""
        run = self._run(words)
        step = whole_of(words, "step")
        with run.store.reading() as connection:
            rows = search_rows.rows_of_prompt(
                connection, text_of(words, "program"), step or 0, text_of(words, "prompt")
            )
        texts = self._tokenizer(run)
        for row in rows:
            read = read_line(run.found.folder / "trajectories.jsonl", row["at"], row["size"])
            row["conversation"] = whole_row(read, texts)["conversation"] if read is not None else []
        return {"rows": rows}

    def tokens(self, words: Words) -> dict[str, Any]:
        """A page of a row's tokens."""
        run = self._run(words)
        return tokens_of(self._row(run, words)[1], self._tokenizer(run), whole_of(words, "from") or 0)

    def field(self, words: Words) -> str:
        """A field of a row, all of it."""
        return field_of(self._row(self._run(words), words)[1], text_of(words, "field"))

    def lanes(self, words: Words) -> dict[str, Any]:
        """What ran when in each pool and on each rank, and the memory meanwhile: of all the time, a part, or a step."""
        begin, end, step = number_of(words, "from"), number_of(words, "to"), whole_of(words, "step")
        with self._run(words).store.reading() as connection:
            if step is not None:
                times = lanes.step_times(connection, text_of(words, "program"), step)
                if times is None:
                    raise BadQuestionError(f"no call of step {step} is recorded", 404)
                begin, end = times
            found = lanes.lanes(connection, begin, end)
            found |= {"memory": lanes.memory(connection, found["from"], found["to"])}
            if begin is None or step is not None:
                found |= {"busiest": lanes.busiest(connection), "waits": lanes.pool_waits(connection)}
                found |= {"programs": lanes.programs_with_calls(connection)}
            return found

    def chain(self, words: Words) -> dict[str, Any]:
        """A call, and those that let each other begin before it."""
        with self._run(words).store.reading() as connection:
            return {"chain": lanes.chain(connection, whole_of(words, "at") or 0)}

    def graph(self, words: Words) -> dict[str, Any]:
        """The graph of a program with what was measured; its ``picture`` is None while the first one is drawn."""
        run, program = self._run(words), text_of(words, "program")
        graphs = run.record()[0].get("graphs")
        programs = list(graphs) if isinstance(graphs, dict) else []
        drawn = self.drawings.newest(run.found.folder, program)
        with run.store.reading() as connection:
            lags = summaries.lags(connection, program)
        return {"picture": None, **(drawn or {}), "programs": programs, "lags": lags}

    def ledger(self, words: Words) -> dict[str, Any]:
        """What became of the rows of a program."""
        with self._run(words).store.reading() as connection:
            return summaries.ledger(connection, text_of(words, "program"))

    def events(self, words: Words) -> dict[str, Any]:
        """A page of events."""
        with self._run(words).store.reading() as connection:
            return summaries.events(connection, text_of(words, "kind"), whole_of(words, "before"))

    def event(self, words: Words) -> str:
        """An event, all of its text."""
        run = self._run(words)
        at, size = whole_of(words, "at"), whole_of(words, "size")
        line = read_line(run.found.folder / "events.jsonl", at or 0, size or 0)
        if line is None:
            raise BadQuestionError("there is no such event", 404)
        return field_of(line, "text")

    def _in_short(self, run: FollowedRun) -> dict[str, Any]:
        record, note = run.record()
        with run.store.reading() as connection:
            found = summaries.counts(connection)
        progress = run.progress()
        return {
            "id": run.found.id,
            "label": run.found.label,
            "status": _string(record.get("status")),
            "script": _string(record.get("script")),
            "program": _main_program(record),
            "started": record.get("started") if isinstance(record.get("started"), (int, float)) else None,
            "note": note or run.problem,
            **found,
            "indexed": progress["share"],
            "rows_about": max(found["rows"], round(found["rows"] / progress["rows"])) if progress["rows"] else None,
            "revision": str(progress["revision"]),
            "skipped": progress["skipped"],
        }

    def _run(self, words: Words) -> FollowedRun:
        run = self.follower.runs.get(text_of(words, "run"))
        if run is None:
            raise BadQuestionError("there is no such run", 404)
        return run

    def _row(self, run: FollowedRun, words: Words) -> tuple[dict[str, Any], dict[str, Any]]:
        """Where a row is, and the row. Raises BadQuestionError where it is gone, as after a resume."""
        with run.store.reading() as connection:
            place = search_rows.row_at(connection, whole_of(words, "n") or 0)
        row = place and read_line(run.found.folder / "trajectories.jsonl", place["at"], place["size"])
        if place is None or not row:
            raise BadQuestionError("there is no such row any more", 404)
        return place, row

    def _preview(self, run: FollowedRun, row: Mapping[str, Any]) -> dict[str, str]:
        if row["size"] > WIDE_LINE:
            return {"response": f"(a row of {row['size'] / 1e6:.1f} MB: open it to read its beginning)"}
        read = read_line(run.found.folder / "trajectories.jsonl", row["at"], row["size"])
        return preview(read) if read is not None else {}

    def _tokenizer(self, run: FollowedRun) -> Decodes | None:
        """The tokenizer of a run, once it has saved one."""
        if run.found.id not in self._tokenizers:
            found = tokenizer_of(run.found.folder)
            if found is None:
                return None
            self._tokenizers[run.found.id] = found
        return self._tokenizers[run.found.id]


#: What can be asked for.
QUESTIONS: Mapping[str, Callable[[Answers, Words], Any]] = {
    "runs": Answers.runs,
    "about": Answers.about,
    "forecast": Answers.forecast,
    "names": Answers.names,
    "curves": Answers.curves,
    "rows": Answers.rows,
    "prompts": Answers.prompts,
    "row": Answers.row,
    "group": Answers.group,
    "tokens": Answers.tokens,
    "field": Answers.field,
    "lanes": Answers.lanes,
    "chain": Answers.chain,
    "graph": Answers.graph,
    "ledger": Answers.ledger,
    "events": Answers.events,
    "event": Answers.event,
}


def _main_program(record: Mapping[str, Any]) -> str:
    """The program with most calls, whose views are opened first; empty where the record has no graph."""
    graphs = record.get("graphs")
    known = {n: g for n, g in graphs.items() if isinstance(g, dict)} if isinstance(graphs, dict) else {}
    sizes = {name: len(graph.get("nodes") or ()) for name, graph in known.items()}
    return max(sizes, key=lambda name: sizes[name], default="")


def _string(value: Any) -> str:
    return value[:500] if isinstance(value, str) else ""
