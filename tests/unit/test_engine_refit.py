"""What the driver does in a refit: when it certifies, what it compares, and how it names what is wrong."""

from __future__ import annotations

import pytest

from grpo_recipes.engine.refit import EmbeddedRefit, EngineRefit, probe_sequences, shortened, trainer_checksums
from grpo_recipes.engine.worker import EmbeddedReport
from grpo_recipes.generation.sync.contract import RefitError

SUMS = {"a": "float32[2] 0000000000000001", "b": "float32[2] 0000000000000002"}


class Workers:
    """Ranks that hold `sums`; the first talks."""

    def __init__(self, *sums):
        self.sums, self.calls, self.world_size = sums, [], len(sums)

    def call(self, method, *arguments):
        self.calls.append(method)
        if method == "open_link":
            return [("address", *arguments), *[None] * (self.world_size - 1)]
        if method == "send_weights":
            return [16, *[0] * (self.world_size - 1)]
        if method == "sum_weights":
            return [repr(sums) for sums in self.sums]
        if method == "weight_sums":
            return list(self.sums)
        if method == "probe_logprobs":
            [sequences] = arguments
            return [[[-1.0] * (len(s) - 1) for s in sequences], *[[]] * (self.world_size - 1)]
        raise AssertionError(method)

    def scatter(self, method, arguments):
        assert method == "weight_sums" and [a for (a,) in arguments] == [True, *[False] * (self.world_size - 1)]
        return [self.sums[0], *[{}] * (self.world_size - 1)]


class Engine:
    receivers = 2

    def __init__(self, handed=SUMS, wrong=(), gap=0.0, fails=""):
        self.handed, self.wrong, self.gap, self.fails, self.taken = handed, list(wrong), gap, fails, []

    def start_take(self, address, version, certify):
        self.taken.append((address, version, certify))

    def finish_refit(self, version):
        if self.fails:
            raise RefitError(self.fails)
        report = {"tensors": 2, "handed": self.handed, "wrong": self.wrong, "unseen": ["b"]}
        return [report] * self.receivers

    def probe(self, sequences):
        self.read = len(sequences)
        return [[-1.0 + self.gap] * (len(s) - 1) for s in sequences]


def refit_of(workers, *engines, certify="first_two", precision="float32"):
    return EngineRefit(
        workers,
        lambda: engines,
        transport="broadcast",
        certify=certify,
        precision=precision,
        vocab_size=10,
        longest=5,
        host="host",
    )


@pytest.mark.parametrize(
    ("certify", "wanted"),
    [("first_two", [True, True, False]), ("every", [True] * 3), ("never", [False] * 3)],
)
def test_which_refits_are_certified(certify, wanted):
    engine = Engine()
    refit = refit_of(Workers(SUMS, SUMS), engine, certify=certify)
    assert [refit(version).certified for version in (1, 2, 3)] == wanted
    assert engine.taken == [(("address", "broadcast", 2, "host"), v, c) for v, c in zip((1, 2, 3), wanted, strict=True)]


def test_the_probe_is_whole_in_the_first_two_refits_and_a_sixteenth_later():
    engine = Engine()
    refit = refit_of(Workers(SUMS), engine, certify="every")
    read = []
    for version in (1, 2, 3):
        refit(version)
        read.append(engine.read)
    refit.catch_up(3, engine)
    assert [*read, engine.read] == [3, 3, 1, 3]


def test_all_engines_take_the_weights_of_one_sending():
    workers, engines = Workers(SUMS), (Engine(), Engine())
    stats = refit_of(workers, *engines, certify="never")(7)
    assert workers.calls == ["open_link", "send_weights"]
    assert all(e.taken == [(("address", "broadcast", 4, "host"), 7, False)] for e in engines)
    assert (stats.bytes, stats.tensors, stats.certified) == (16, 2, False)


def test_an_engine_that_was_started_anew_is_brought_up_alone_and_certified():
    old, new = Engine(), Engine()
    refit = refit_of(Workers(SUMS), old, new)
    refit(1), refit(2)
    assert refit.catch_up(2, new).certified
    assert [t[2] for t in new.taken] == [True] * 3 and len(old.taken) == 2
    assert refit(3).certified and refit(4).certified and not refit(5).certified


@pytest.mark.parametrize(
    ("engine", "words"),
    [
        (Engine(handed={"a": SUMS["a"]}), "b is missing"),
        (Engine(handed=SUMS | {"a": SUMS["b"]}), "a differs"),
        (Engine(handed=SUMS | {"c": SUMS["a"]}), "c is not of the trainer"),
        (Engine(wrong=["b"]), "b is not, in the model that draws"),
        (Engine(gap=2e-4), "logprobs of the probe differ"),
        (Engine(gap=float("nan")), "logprobs of the probe differ"),
    ],
)
def test_what_does_not_agree_ends_the_refit(engine, words):
    with pytest.raises(RefitError, match=words):
        refit_of(Workers(SUMS), Engine(), engine)(1)


def test_the_largest_gap_of_the_probe_is_reported():
    stats = refit_of(Workers(SUMS), Engine(), Engine(gap=5e-6))(1)
    assert stats.largest_gap == pytest.approx(5e-6, abs=2e-7) and stats.unseen == ("b",)


def test_ranks_of_the_trainer_that_hold_different_copies_are_found():
    """Covers: replicas that have drifted apart are gathered from one of them only."""
    with pytest.raises(RefitError, match=r"different weights: b differs .*rank 1"):
        trainer_checksums(Workers(SUMS, SUMS | {"b": SUMS["a"]}))


def test_the_reason_of_an_engine_goes_with_the_trainers_error():
    class Failing(Workers):
        def call(self, method, *arguments):
            if method == "send_weights":
                raise RefitError("0 of 2 connected")
            return super().call(method, *arguments)

    with pytest.raises(RefitError, match="0 of 2") as raised:
        refit_of(Failing(SUMS), Engine(fails="cannot pause"))(1)
    assert raised.value.__notes__ == ["engine 0: cannot pause"]


def test_the_probe_has_every_token_and_another_order_each_time():
    found = probe_sequences(10, 5, seed=1)
    assert [len(s) for s in found] == [4, 4, 2] and sorted(t for s in found for t in s) == list(range(10))
    assert probe_sequences(10, 5, seed=2) != found == probe_sequences(10, 5, seed=1)
    assert [len(s) for s in probe_sequences(9, 5, seed=1)] == [4, 4, 2]  # the last token has one before it


def test_an_error_names_a_few_tensors():
    assert shortened(["a", "b"]) == "a; b"
    assert shortened(list("abcdefg")) == "a; b; c; d; e; and 2 more"


class Embedded(Workers):
    def __init__(self, *reports):
        super().__init__(*[SUMS] * len(reports))
        self.reports = reports

    def call(self, method, *arguments):
        if method == "refit":
            self.calls.append(arguments)
            return list(self.reports)
        return super().call(method, *arguments)


def test_copies_in_the_trainers_processes_are_certified_as_they_were_handed_weights_and_as_they_hold_them():
    good = EmbeddedReport(16, 2, SUMS, SUMS)
    workers = Embedded(good, good)
    refit = EmbeddedRefit(workers, "first_two")
    assert [refit(version).certified for version in (1, 2, 3)] == [True, True, False]
    assert [c for c in workers.calls if isinstance(c, tuple)] == [(1, True), (2, True), (3, False)]
    for bad, words in (
        (EmbeddedReport(16, 2, {}, SUMS), "handed to the sampler of rank 1: a is missing"),
        (EmbeddedReport(16, 2, SUMS, SUMS | {"b": SUMS["a"]}), "held by the sampler of rank 1: b differs"),
    ):
        with pytest.raises(RefitError, match=words):
            EmbeddedRefit(Embedded(good, bad), "first_two")(1)


def test_a_sampler_that_shares_the_trainers_parameters_takes_nothing():
    workers = Embedded(EmbeddedReport(0, 0))
    stats = EmbeddedRefit(workers, "every")(1)
    assert (stats.bytes, stats.tensors, stats.certified) == (0, 0, False) and "sum_weights" not in workers.calls
