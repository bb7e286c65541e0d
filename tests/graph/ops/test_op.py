"""Ops: what a declaration says, and what a call on plain batches does and refuses."""

import pytest

import flowrl as fl
from flowrl.batch import Batch, Column
from flowrl.errors import FieldError, RowsError, WorkerError
from flowrl.graph.ops.function_spec import Spec
from flowrl.graph.ops.op import Op
from flowrl.graph.ops.update_metrics import Metrics


class Judge(fl.Worker):
    """Counts, scores and changes rows."""

    def __init__(self, weight=1.0, fields=()):
        self.weight, self.fields = weight, fields
        self.seen = []

    @fl.op(reads="length: f32[]", adds="rewards: f32[]", cost="local")
    def score(self, batch, *, scale=1.0):
        self.seen.append(batch.fields)
        return {"rewards": batch.length * (self.weight * scale)}

    @fl.op(reads="length", adds="copy: i64[]", rows="expand")
    def copies(self, batch, *, n):
        return {"copy": list(range(n)) * len(batch)}

    @fl.op(reads="length", rows="filter")
    def short(self, batch, *, most=2.0):
        return batch.filter(batch.length <= most)

    @fl.op(reads="length", adds="place: i64[]", rows="filter")
    def ranked(self, batch):
        kept = batch.filter(batch.length > 1.0)
        return kept.with_columns({"place": Column.of(list(range(len(kept))))})

    @fl.op(reads=None, adds="length: f32[]", rows="regroup")
    def longest(self, batch):
        return Batch.of([(0,)], length=[batch.length.max()])

    @fl.op(reads="length", updates="seen")
    def tally(self, batch) -> Metrics:
        return Metrics(total=batch.length.sum())

    @fl.op(reads="length", cost="local")
    def mean(self, batch) -> float:
        return batch.length.mean()

    @fl.op(reads={"batch": "length", "other": "rewards"}, adds="gap: f32[]")
    def compare(self, batch, *, other):
        return {"gap": batch.length - other.rewards}

    @fl.op(reads="length", adds="rewards: f32[]")
    def liar(self, batch):
        return {"reward": batch.length}

    @fl.op(reads="length", adds="rewards: f32[]")
    def forgetful(self, batch):
        return None

    @fl.op(reads="length", adds="rewards: f32[]")
    def sloppy(self, batch):
        return {"rewards": batch.length > 1.0}

    @fl.op(reads="length", adds="rewards: f32[]")
    def lossy(self, batch):
        return {"rewards": [0.5]}


@pytest.fixture
def batch():
    return Batch.of(3, length=[1.0, 2.0, 3.0], note=Column.of(["a", "b", "c"], dtype="any"))


def test_an_op_is_handed_what_it_reads_and_the_rest_flows_through(batch):
    judge = Judge(weight=2.0)
    scored = judge.score(batch, scale=0.5)
    assert judge.seen == [("length",)]
    assert set(scored.fields) == {"length", "note", "rewards"}
    assert scored.rewards.to_list() == [1.0, 2.0, 3.0]
    assert scored.keys == batch.keys
    assert "rewards" not in batch.fields


def test_added_fields_can_be_renamed(batch):
    scored = Judge().score(Judge().score(batch), into={"rewards": "costs"})
    assert {"rewards", "costs"} <= set(scored.fields)


def test_expand_appends_a_number_to_each_key(batch):
    copies = Judge().copies(batch, n=2)
    assert copies.keys == ((0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1))
    assert copies["copy"].to_list() == [0, 1, 0, 1, 0, 1]
    assert copies.note.to_list() == ["a", "a", "b", "b", "c", "c"]


def test_filter_keeps_the_other_fields_of_the_rows_that_stay(batch):
    assert Judge().short(batch).note.to_list() == ["a", "b"]
    ranked = Judge().ranked(batch)
    assert (ranked.keys, ranked.note.to_list(), ranked.place.to_list()) == (((1,), (2,)), ["b", "c"], [0, 1])


def test_regroup_returns_rows_of_its_own(batch):
    assert Judge().longest(batch).length.to_list() == [3.0]


def test_an_update_is_noted_by_its_worker(batch):
    judge = Judge()
    before = judge.stamp
    judge.score(batch)
    assert judge.stamp == before, "a pure op changes nothing"
    judge.tally(batch)
    assert judge.stamp > before, "the next checkpoint saves it anew"


def test_metrics_and_numbers_come_back_as_they_are(batch):
    assert Judge().tally(batch) == {"total": 6.0}
    assert Judge().tally(batch).total == 6.0
    assert Judge().mean(batch) == 2.0


def test_an_op_on_two_batches_reads_of_each_what_it_declares(batch):
    other = Judge(weight=3.0).score(batch)
    assert Judge().compare(batch, other=other).gap.to_list() == [-2.0, -4.0, -6.0]
    with pytest.raises(FieldError, match="reads 'rewards', which no op before it adds"):
        Judge().compare(batch, other=batch)


def test_what_each_kind_of_op_returns_is_read_off_its_declaration():
    returns = {n: Judge.__dict__[n].returns for n in ("score", "copies", "short", "longest", "tally", "mean")}
    assert returns == {
        "score": "batch",
        "copies": "batch",
        "short": "batch",
        "longest": "batch",
        "tally": "metrics",
        "mean": "scalar",
    }
    assert fl.Actor.__dict__["save"].returns == "none"


@pytest.mark.parametrize(
    ("op", "error", "what"),
    [
        ("liar", FieldError, r"declares that it adds 'rewards', but returned 'reward'"),
        ("forgetful", WorkerError, r"returned NoneType, not a dict of the fields it adds"),
        ("sloppy", FieldError, r"declares 'rewards: f32\[\]' but returned bool\[\]"),
        ("lossy", RowsError, r"returned 1 rows of 'rewards' for 3 rows"),
    ],
)
def test_an_op_that_breaks_its_word_is_told(batch, op, error, what):
    with pytest.raises(error, match=what):
        getattr(Judge(), op)(batch)


def test_a_missing_field_names_the_near_miss():
    with pytest.raises(FieldError) as error:
        Judge().score(Batch.of(1, lenght=[1.0]))
    assert "Judge.score reads 'length', which no op before it adds." in str(error.value)
    assert "Did you mean 'lenght'?" in str(error.value)


def test_a_field_is_not_written_twice(batch):
    once = Judge().score(batch)
    with pytest.raises(FieldError, match="adds 'rewards', which the batch already has"):
        Judge().score(once)


def test_arguments_are_those_of_the_function(batch):
    with pytest.raises(TypeError, match="unexpected keyword argument 'scal'"):
        Judge().score(batch, scal=2.0)


def test_the_declaration_can_depend_on_the_call():
    class Sized(fl.Worker):
        def __init__(self, reads):
            self.reads = reads

        @fl.op(reads=lambda shape: shape.init["reads"], adds=lambda shape: f"{shape.call['name']}: f32[]")
        def add(self, batch, *, name="x"):
            return {name: [0.0] * len(batch)}

    op: Op = Sized.__dict__["add"]
    signature = op.signature({"reads": "tokens"}, {"name": "y"}, frozenset())
    assert str(signature) == "(tokens: i32[*token]) -> (y: f32[])"


def test_what_a_loss_reads_counts_as_read_by_the_op():
    op: Op = fl.Actor.__dict__["update"]
    signature = op.signature({}, {"batch": None, "loss": Spec("mine", "weights: f32[]")}, frozenset())
    assert list(signature.reads["batch"]) == ["tokens", "response_mask", "weights"]


@pytest.mark.parametrize(
    ("declared", "what"),
    [
        ({"reads": "tokens: int32[]"}, "'int32' is no dtype"),
        ({"reads": {"batch": "tokens: i32[", "other": "x"}}, "no field type"),
        ({"adds": "mine"}, "adds 'mine' without a type"),
        ({"rows": "same_rows"}, "rows='same_rows' is none of same, expand, filter, apart, regroup"),
        ({"cost": "gpu"}, "cost='gpu' is none of"),
    ],
)
def test_a_wrong_declaration_is_refused_where_it_stands(declared, what):
    with pytest.raises(WorkerError) as error:

        class Wrong(fl.Worker):
            @fl.op(**declared)
            def act(self, batch): ...

    assert what in str(error.value)
    assert error.value.at.file == __file__


def test_a_function_outside_of_a_worker_is_an_op_too(batch):
    @fl.op(reads="length", adds="double: f32[]")
    def doubled(batch):
        """Twice the length."""
        return {"double": batch.length * 2.0}

    assert doubled(batch)["double"].to_list() == [2.0, 4.0, 6.0]
    assert doubled.__doc__ == "Twice the length."
    assert doubled.owner == "user"


def test_a_regrouping_op_keeps_to_its_declaration(batch):
    @fl.op(reads=None, adds="top: f32[]", rows="regroup")
    def top(batch):
        return Batch.of(1, top=[batch.length.max()], length=[3.0])

    with pytest.raises(FieldError, match="declares that it adds 'top', but returned 'length', 'top'"):
        top(batch)


def test_an_op_is_written_as_its_name():
    from flowrl import rl
    from flowrl.workers.actor import Actor

    assert (repr(rl.advantages), repr(Actor.update)) == ("rl.advantages", "Actor.update")


# -- rows one by one -------------------------------------------------------------------------------------------------


def grading(yields):
    """A worker whose op yields what is given."""

    class Grader(fl.Worker):
        @fl.op(reads="x", adds="grade: f32[]", cost="external", pieces="row")
        def grade(self, batch):
            yield from yields

    return Grader()


def test_an_op_that_touches_the_world_may_yield_its_rows_in_any_order():
    rows = fl.Batch.of(3, x=[1.0, 2.0, 3.0])
    made = grading([(2, {"grade": 6.0}), (0, {"grade": 2.0}), (1, {"grade": 4.0})]).grade(rows)
    assert made.fields == ("x", "grade") and made.grade.to_list() == [2.0, 4.0, 6.0]
    assert grading([]).grade(rows.take([])).grade.to_list() == []


@pytest.mark.parametrize(
    ("yields", "said"),
    [
        ([(0, {"grade": 1.0})], "yielded 1 of 2 rows; row 1 is the first that is missing"),
        ([(0, {"grade": 1.0}), (0, {"grade": 1.0})], "row 0 was yielded twice"),
        ([(2, {"grade": 1.0})], "row 2 was not one of the 2 rows of its batch"),
        ([(-1, {"grade": 1.0})], "row -1 was not one of the 2 rows"),
        ([(0, {"rank": 1.0})], r"yielded \['rank'\] for row 0, and declares that it adds \['grade'\]"),
        ([{"grade": 1.0}], "yielded {'grade': 1.0}, no pair of a row and its fields"),
        ([("a", {"grade": 1.0})], "yielded ('a', {'grade': 1.0}), no pair of a row and its fields"),
    ],
)
def test_rows_that_are_yielded_wrongly(yields, said):
    with pytest.raises(WorkerError, match=said.replace("(", r"\(").replace(")", r"\)").replace("{", r"\{")):
        grading(yields).grade(fl.Batch.of(2, x=[1.0, 2.0]))


@pytest.mark.parametrize("how", [{"cost": "local"}, {"cost": "external"}, {"cost": "external", "pieces": True},
                                 {"cost": "external", "pieces": "row", "rows": "expand"}])  # fmt: skip
def test_only_answers_of_the_world_to_rows_of_their_own_are_yielded(how):
    with pytest.raises(WorkerError, match="yields, which is for rows that the world answers one by one"):

        @fl.op(reads="x", adds="grade: f32[]", **how)
        def grade(batch):
            yield 0, {"grade": 1.0}


@fl.op(reads="length", adds="weight: f32[]")
def weigh(batch):
    name = "no" + "te"
    return {"weight": [len(text) for text in batch[name].to_list()]}


@fl.op(reads={"batch": "length", "other": ""}, adds="weight: f32[]")
def weigh_beside(batch, other):
    return {"weight": getattr(other, "length")}  # noqa: B009


@fl.op(reads="length, note", adds="weight: f32[]")
def misspell(batch):
    return {"weight": getattr(batch, "lenght")}  # noqa: B009


@pytest.mark.parametrize(
    ("call", "name", "text", "have", "fix"),
    [
        (weigh, "note", "batch[name]", "length", 'Write reads="length, note".'),
        (
            lambda batch: weigh_beside(batch, batch),
            "length",
            "getattr(other",
            "",
            'Write reads={"batch": "length", "other": "length"}.',
        ),
        (misspell, "lenght", "getattr(batch", "length, note", "Did you mean 'length'?"),
    ],
)
def test_an_op_that_reads_what_it_does_not_declare_is_told_how_at_its_line(batch, call, name, text, have, fix):
    with pytest.raises(FieldError) as error:
        call(batch)
    assert f"reads '{name}', which its reads= does not name" in error.value.what
    assert error.value.at.file == __file__ and text in error.value.at.text
    assert (error.value.have, error.value.fix) == (have, fix)


def test_an_op_may_ask_whether_it_was_handed_a_field(batch):
    @fl.op(reads="length", adds="weight: f32[]")
    def careful(batch):
        return {"weight": batch.note if hasattr(batch, "note") else batch.length}

    assert careful(batch).weight.to_list() == [1.0, 2.0, 3.0]
