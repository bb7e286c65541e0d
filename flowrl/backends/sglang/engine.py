"""SGLang as an engine that generates: the weights lie here, in a file that its server reads, and it has its rows."""

from __future__ import annotations

import secrets
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from ...batch import Column
from ...errors import DataError, EngineLost, ModelError, RunError
from ...placement.backends import backend
from ...workers.engine import Published
from ...workers.model_options import Build, Sampled, Sampling
from ...workers.streaming import FailedCall, SampledRow, SampleRequest, gathered
from ..continuous import asleep, check_lengths
from ..hf import engine as reference
from ..hf.finite import check_finite, not_finite
from ..mirror import Mirrored, check_build, open_mirror
from ..probe import TOLERANCE, expected, probe_rows
from .answers import AskedRow
from .calls import Calls
from .proof import check_probe, check_sums, sums
from .serving import Serving
from .versions import check_here
from .weight_file import WeightFile


def open_engine(build: Build) -> SGLangEngine:
    """Start a server with the model of ``build``, or take that of ``url:``. Raises ModelError for what is not done."""
    options = {**{o.name: o.default for o in backend("sglang").options}, **build.options}
    check_build(build, "sglang", "SGLang")
    for what, fix in backend("sglang").unrun({}, options, reference.pick_device(build.device).type):
        raise ModelError(what, fix=fix)
    check_here(options, "cpu")
    return SGLangEngine(build, open_mirror(build, "sglang"), options)


class SGLangEngine(Mirrored):
    """A server of SGLang: ``open_engine(Build(Model("Qwen/Qwen3-0.6B"), options={"python": "/venv/bin/python"}))``.

    A copy of the model with the weights as they were last published is in this process, where they are moved, compared
    and saved as those of the reference engine; the server reads them as a file. A token depends on its row's seed and
    its place alone: rows are those of the reference engine, save rounding. Rows run on the server by themselves: a step
    waits a moment for those that have ended.

    Asleep there is no server, or one that has given its memory back. It comes back with the next publish, or before the
    next token.
    """

    #: What a publish may do while rows run.
    publish_modes = ("drain", "interrupt", "continue")

    def __init__(self, build: Build, mirror: Any, options: Mapping[str, Any]) -> None:
        super().__init__(build, mirror, options)
        self._name = secrets.token_hex(4)  # of the labels of its weights
        self._submitted = 0
        self._paused = self._server_paused = False
        self._version = 0
        self._held: list[list[AskedRow]] = []  # calls that are not sent: they came in a pause, or rest from a sleep
        self._found: list[SampledRow | FailedCall] = []  # of streamed calls, not told yet
        self._unproven: Callable[[], None] | None = None
        self._sums: Mapping[str, str] = {}
        self._file = WeightFile({s.name: s.tensor for s in mirror.shards()})
        for name, weight in mirror.net.model.named_parameters():
            weight.data = self._file.views[name]
        self._emptied = False  # there is no server with weights since it slept
        self._vocab = mirror.net.config.vocab_size
        self._probe = probe_rows(self._vocab, self.positions)
        self._folder = tempfile.TemporaryDirectory(prefix="flowrl-sglang-")
        self._write_folder(Path(self._folder.name))
        opened = {
            "folder": self._folder.name,
            "dtype": self._dtype,
            "positions": self.positions,
            "kv_tokens": self._kv_tokens(),
            "rows": options["rows"],
            "prefix_cache": options["prefix_cache"],
        }
        self.server = Serving(options, opened, type(mirror.net.model).__name__)
        try:
            self.calls = Calls(self.server.start(), self.server.ended, self._vocab, ours=not self.server.url)
            self.calls.not_finite = lambda what: not_finite(what, self.mirror.parameters)
            self.server.look(self.calls.client)
        except BaseException:
            self.close()
            raise

    def _write_folder(self, folder: Path) -> None:
        """Write what a server finds of the model: its configuration, and where the weights are."""
        config = self.mirror.net.model.config
        config.architectures = [type(self.mirror.net.model).__name__]
        config.eos_token_id = sorted(self.mirror.eos_ids) or None  # those that end a row here
        config.save_pretrained(folder)
        (folder / "model.safetensors").symlink_to(self._file.path)

    def _kv_bytes(self) -> int:
        """How many bytes the keys and values of a token take."""
        config = self.mirror.net.config
        head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return 2 * config.num_hidden_layers * config.num_key_value_heads * head * self.mirror.net.compute.itemsize

    def _kv_tokens(self) -> int:
        """How many tokens' keys and values ``kv_cache`` takes, and at most those of all rows."""
        most = self.options["rows"] * (self.positions or 1 << 20)
        return min(int(self.options["kv_cache"] * (1 << 30)) // self._kv_bytes(), most)

    def close(self) -> None:
        """End its server, where it has started one."""
        if hasattr(self, "calls"):
            self.calls.close()
        self.server.close()
        self._folder.cleanup()

    # -- rows ---------------------------------------------------------------------------------------------------------

    def generate(
        self, prompts: Column, n: int, seeds: Tensor, sampling: Sampling, starts: Tensor | None = None
    ) -> Sampled:
        """``n`` responses to each prompt; see :func:`flowrl.backends.hf.generation.generate.generate`."""
        if self._paused:
            raise RunError("The engine is paused.", fix="Call resume() first.")
        if self.offloaded is not None:
            raise asleep()
        call, rows = self.submit(SampleRequest(prompts, n, seeds, sampling, starts)), []
        while len(rows) < len(seeds):
            for found in self.calls.take():
                if found.call != call:
                    self._found.append(found)
                elif isinstance(found, FailedCall):
                    raise found.error
                else:
                    rows.append(found)
        made = gathered(rows, sampling)
        check_finite("log-probabilities of sampled tokens", made.rollout_logprobs.values, self.mirror.parameters)
        return made

    # -- rows one by one; see flowrl.workers.streaming.Streams --------------------------------------------------------

    def submit(self, request: SampleRequest) -> int:
        """Send a call, or hold it in a pause; return its number. The server takes tokens that are kept as prompt."""
        sampling = request.sampling
        if self.offloaded is not None:
            raise asleep()
        if sampling.support:
            raise RunError("SGLang does not record which tokens could be drawn.", fix="Leave support=True out.")
        most, before = check_lengths(self.positions, request.prompts.lengths), request.kept_rows()
        stops = frozenset({*self.mirror.eos_ids, *sampling.stop})
        texts = [tuple(row.tolist()) for row in request.prompts]
        for number, text in enumerate(texts):
            if wrong := [token for token in text if not 0 <= token < self._vocab]:
                what = f"The prompt of row {number} has the token {wrong[0]}; the model has {self._vocab}."
                raise DataError(what, fix="Use the model's own tokenizer.")  # a server dies of it
        if not self.publishes or self._emptied:
            self._bring_back()
        self._submitted += 1
        call, rows = self._submitted, []
        for row, (seed, start) in enumerate(zip(request.seeds.tolist(), request.row_starts, strict=True)):
            text, had = texts[row // request.n], before.get(row)
            if had is not None and had.reason != "aborted":
                continue
            limit = sampling.max_tokens if most is None else min(sampling.max_tokens, most - len(text))
            ids = () if had is None else had.ids
            asked = (*text, *ids), seed, start + len(ids), limit - len(ids)
            rows.append(AskedRow(call, row, *asked, stops, sampling, kept=had))
        self.calls.rows.update({(call, row.row): row for row in rows})
        self._held.append(rows)
        self._send_held()
        return call

    def _send_held(self) -> None:
        """Send the calls that wait, unless they have to go on waiting."""
        if not self._paused and self.offloaded is None and not self._emptied:
            held, self._held = self._held, []
            for rows in held:
                self.calls.begin(rows)

    def tokens_since(self, known: Mapping[int, Mapping[int, int]]) -> list[SampledRow]:
        """Return what rows have got, as far as the server has told of it and the weights are known."""
        return self.calls.tokens_since(known)

    def step(self) -> list[SampledRow | FailedCall]:
        """Return what has ended, after a moment at most."""
        if not self._paused and self.offloaded is None and self.calls.rows and not self._found:
            if self._emptied:
                self._bring_back()
            self._found += self.calls.take()
        found, self._found = self._found, []
        return found

    def running(self) -> list[tuple[int, int]]:
        """Return ``(call, row)`` of the rows that have not left."""
        told = [(each.call, each.row) for each in self._found if isinstance(each, SampledRow)]
        return sorted([*self.calls.rows, *told])

    def abort(self, call: int, rows: Iterable[int] | None = None) -> list[SampledRow]:
        """End rows of a call, or all of them; return them with the tokens that they have.

        In a pause these are the tokens that the server has told of by then. A row that ends by itself meanwhile comes
        with the next step, or here where all rows of the call are ended.
        """
        numbers = [row for c, row in self.calls.rows if c == call] if rows is None else dict.fromkeys(rows)
        wanted = [self.calls.rows[call, row] for row in numbers if (call, row) in self.calls.rows]
        unsent = [row for held in self._held for row in held if row in wanted]
        self._held = [[row for row in held if row not in unsent] for held in self._held]
        ended = [self.calls.give_up(row, sent=False) for row in unsent]
        wanted = [row for row in wanted if row not in unsent]
        if self._paused:
            ended += [self.calls.give_up(row, sent=True) for row in wanted]
            wanted = []
        keys = {(row.call, row.row) for row in wanted}
        for each in self.calls.abort(wanted):
            if isinstance(each, SampledRow) and each.reason == "aborted" and (each.call, each.row) in keys:
                ended.append(each)
            else:
                self._found.append(each)
        if rows is None:  # nobody is told of the call any more
            mine = [each for each in self._found if each.call == call]
            self._found = [each for each in self._found if each.call != call]
            ended += [each for each in mine if isinstance(each, SampledRow)]
        return sorted(ended, key=lambda row: row.row)

    def pause(self) -> None:
        """Make no tokens until :meth:`resume`, so that weights may be written."""
        if not self._paused and any(row.label for row in self.calls.rows.values()):
            self.calls.ask("/pause_generation", {"mode": "in_place"})
            self._server_paused = True
        self._paused = True

    def resume(self, version: int | None = None, *, keep_cache: bool = False) -> None:
        """Go on, under the weights of ``version``: with keys and values computed again, or kept with ``keep_cache``."""
        if version is not None:
            self._version = version
            if self.calls.labels:
                self.calls.labels[self._label] = version
        if self._server_paused and version is not None and not keep_cache:
            self.calls.ask("/pause_generation", {"mode": "retract"})
            self.calls.ask("/flush_cache", {})
        self._paused = False
        self._go_on()
        self._send_held()

    def _go_on(self) -> None:
        """Have a server that is paused go on, and prove what was published in the pause."""
        if self._server_paused:
            self.calls.ask("/continue_generation", {"torch_empty_cache": False})
            self._server_paused = False
        prove, self._unproven = self._unproven, None
        if prove is not None:
            prove()

    # -- memory -------------------------------------------------------------------------------------------------------

    def sleep(self) -> int:
        """Leave memory to others: the weights here, and what the server holds of them, of keys and of values.

        A server that gives its memory back does that, and one that was started here and does not is ended. Rows that
        run keep the tokens that they have, and go on from these. Returns the bytes; 0 where it sleeps already. Raises
        RunError for a server of ``url:`` that keeps its memory.
        """
        if self.offloaded is not None:
            return 0
        if self.server.url and not self.server.gives_memory_back:
            raise RunError(
                f"The server of SGLang at {self.server.url} keeps its memory, which somebody else needs.",
                fix="Start it with --enable-memory-saver, or place it in a pool of its own.",
            )
        freed = 0
        if not self._emptied:
            self._rest()
            freed = self._file.size + self._kv_tokens() * self._kv_bytes()
            if self.server.gives_memory_back:
                self.calls.release_memory()
            else:
                self.server.close()
            self._emptied = True
        return freed + self._offload(self._file.views.values(), self._file.empty)

    def _rest(self) -> None:
        """Take all rows out of the server. Those that have not ended go on later from the tokens that they have."""
        held = {(row.call, row.row) for rows in self._held for row in rows}
        running = {key: row for key, row in self.calls.rows.items() if key not in held}
        resting: dict[int, list[AskedRow]] = {}
        for call in dict.fromkeys(call for call, _ in running):
            for row in self.abort(call, [number for of, number in running if of == call]):
                resting.setdefault(call, []).append(running[call, row.row].again(row))
        self._go_on()  # where it is paused it ends them now
        self._found += self.calls.settle()
        self.calls.rows.update({(row.call, row.row): row for rows in resting.values() for row in rows})
        self._held += resting.values()

    def _bring_back(self) -> None:
        """Have a server with the weights that lie here, and send it what waits."""
        self._load()
        self._send_held()

    # -- weights ------------------------------------------------------------------------------------------------------

    @property
    def _label(self) -> str:
        return f"{self._name}.{self.publishes}"

    def _publish(self) -> None:
        """Have the server take the weights that were written here. Raises RunError as :meth:`_load`."""
        if self.offloaded is not None:
            raise asleep()
        if self.calls.rows and not self._paused:
            raise RunError(
                f"The weights were written while {len(self.calls.rows)} rows were being sampled with them.",
                fix="Call pause() before they are written and resume(version) after.",
            )
        self._load()

    def _load(self) -> None:
        """Have the server take the weights as they are here. Raises RunError where it does not compute with them after.

        In a pause of the server it cannot compute: the probe then comes as it goes on, before any row is handed out.
        """
        if self._emptied:
            if self.server.gives_memory_back:
                self.calls.ask("/resume_memory_occupation", {})
            else:
                self.calls.client = self.server.start()
                self.server.look(self.calls.client)
            self._emptied, self._sums = False, {}
        for row in self.calls.rows.values():
            if row.label and row.sure is None:
                row.sure = len(row.ids)
        self.publishes += 1
        what = f"publish {self.publishes} of {self.build.model.title}"
        began = time.monotonic()
        said = {"model_path": self._folder.name, "load_format": "auto", "weight_version": self._label}
        try:
            self.calls.ask("/update_weights_from_disk", {**said, "flush_cache": not self._server_paused})
        except RunError as error:
            kind = EngineLost if isinstance(error, EngineLost) else RunError
            raise kind(f"{what} failed. {error.what}", fix=error.fix) from error
        self.calls.note_publish(self._label, self._version)
        loaded = time.monotonic()
        self._check_sums(what)
        summed = time.monotonic()
        full = (self.publishes - 1) % self.options["probe"] == 0
        probe = self._probe if full else self._probe[:1]

        def prove() -> None:
            start = time.monotonic()
            gap = self._check_probe(what, probe)
            proof = summed - loaded + time.monotonic() - start
            self.published = Published(self._file.size, load=loaded - began, proof=proof, gap=gap, rows=len(probe))

        if self._server_paused:
            self._unproven = prove
        else:
            prove()

    def _check_sums(self, what: str) -> None:
        """Hold the sums of the server's weights against those here. On a GPU they are others, and are not looked at."""
        if self.server.info.get("device") != "cpu":
            return
        (rank,) = self.calls.ask("/weights_checker", {"action": "checksum"})["ranks"]
        here = sums(self.mirror.plain_weights(), backend("sglang").layout.fused)
        check_sums(what, rank["checksums"], here, self._sums)
        self._sums = here

    def _check_probe(self, what: str, probe: list[list[int]]) -> float:
        wanted = expected(self.mirror, probe)
        said = {
            "input_ids": probe,
            "sampling_params": {"max_new_tokens": 1, "temperature": 1.0, "ignore_eos": True},
            "return_logprob": True,
            "logprob_start_len": 0,
            "extra_key": self._label,
        }
        answer = self.calls.ask("/generate", said)
        if not isinstance(answer, list) or len(answer) != len(probe):
            raise RunError(f"{what}: SGLang did not answer the {len(probe)} rows of the probe.")
        if other := [
            r["meta_info"]["weight_version"] for r in answer if r["meta_info"]["weight_version"] != self._label
        ]:
            raise RunError(f"{what}: SGLang answers with weights '{other[0]}', and was given '{self._label}'.")
        return check_probe(what, answer, wanted, TOLERANCE[self._dtype])
