"""Rollouts drawn in step and ahead of training: which, when, by which seeds and weights, and after a resume."""

import json
import time
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest

from grpo_recipes.data.sampler import SamplerState, epoch_order
from grpo_recipes.engine.drawn_rollouts import DrawnRollouts
from grpo_recipes.engine.inbox import Inbox
from grpo_recipes.engine.loop import state_from_json, state_to_json
from grpo_recipes.engine.parts import LoopState, Prompts
from grpo_recipes.engine.rollouts import answer_each, judge, to_store
from grpo_recipes.environments.contract import Example, StepResult
from grpo_recipes.errors import UserError
from grpo_recipes.generation.contract import GeneratorStalled, Sampling
from grpo_recipes.generation.seeds import sample_seed
from grpo_recipes.recipe.compose import resolve
from thread_generator import ThreadGenerator

pytestmark = pytest.mark.timeout(60)

GROUPS, SAMPLES, ROWS, SEED = 4, 2, 10, 7
BASE = (
    f"grpo.num_prompts_per_step={GROUPS}",
    f"grpo.num_generations_per_prompt={SAMPLES}",
    f"grpo.seed={SEED}",
    "policy.train_global_batch_size=8",
    "policy.generation.backend=vllm",
)
AHEAD = (*BASE, "grpo.async_grpo.enabled=true", "loss_fn.use_importance_sampling_correction=true")
ORDER = [row for epoch in range(20) for row in epoch_order(SEED, epoch, ROWS)]  # by group number
TRAIN = Prompts(
    [Example(n, str(n), "") for n in range(ROWS)],
    [(100 + n,) for n in range(ROWS)],  # a prompt is its row
)


class Trainer:
    """A source, and what a loop does with it. `slow`: {(group number, sample, attempt): tokens, or None for ever}."""

    def __init__(self, *overrides, slow=None, last_step=50, order=None, state=None):
        self.slow = slow or {}
        self.generator = ThreadGenerator(self.tokens)
        self.refits = []
        self.source = DrawnRollouts(
            resolve("tiny_arith", overrides).recipe,
            TRAIN,
            Inbox(self.generator),
            SimpleNamespace(batch_decode=lambda rows, **_: ["" for _ in rows]),
            (1,),
            last_step=last_step,
            refit=self.refit,
            check_stop=lambda phase: None,
            order=order,
        )
        self.state = state or LoopState(0, SamplerState(SEED), 0, 0)
        self.batches = []
        self.by_seed = {
            sample_seed(SEED, *divmod(group, GROUPS), sample + (attempt << 32)): (group, sample, attempt)
            for group in range(60 * GROUPS)
            for sample in range(SAMPLES)
            for attempt in range(3)
        }

    def tokens(self, request):
        length = self.slow.get(self.by_seed[request.seed], 3)
        return None if length is None else [5] * length

    def refit(self, version):
        self.refits.append((version, self.generator.paused))
        self.generator.version = version

    def step(self):
        batch = self.source.next(self.state)
        self.batches.append(batch)
        version = self.state.weight_version + 1
        self.source.refit(version)
        after = replace(
            self.state,
            step=self.state.step + 1,
            sampler=batch.sampler,
            pending=batch.pending,
            weight_version=version,
        )
        self.state = state_from_json(json.loads(json.dumps(state_to_json(after))))
        return batch

    def close(self):
        self.generator.close()


@pytest.fixture
def trainer(request):
    made = []

    def make(*overrides, **options):
        made.append(Trainer(*overrides, **options))
        return made[-1]

    yield make
    for one in made:
        one.close()


def test_in_step_each_batch_is_the_next_of_the_data(trainer):
    run = trainer(*BASE)
    for step in range(4):
        batch = run.step()
        numbers = tuple(range(4 * step, 4 * step + 4))
        assert (batch.groups, batch.pending, batch.metrics, batch.timing) == (numbers, (), {}, {})
        assert [r.prompt_ids[0] - 100 for r in batch.rollouts] == [ORDER[n] for n in numbers for _ in range(SAMPLES)]
        assert [r.seed for r in batch.rollouts] == [
            sample_seed(SEED, step, position, sample) for position in range(GROUPS) for sample in range(SAMPLES)
        ]
    assert run.refits == [(1, False), (2, False), (3, False), (4, False)]


def test_one_off_draws_a_step_ahead(trainer):
    run = trainer(*AHEAD, last_step=3)
    first = run.step()
    assert (first.groups, first.pending) == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert first.metrics["train/trajectory_age_max"] == 0
    second, third = run.step(), run.step()
    assert (second.groups, second.pending) == ((4, 5, 6, 7), (8, 9, 10, 11))
    assert second.metrics["train/trajectory_age_min"] == second.metrics["train/trajectory_age_max"] == 1
    assert (third.groups, third.pending) == ((8, 9, 10, 11), ())  # nothing is asked for beyond the last step
    assert len(run.generator.asked) == 3 * GROUPS * SAMPLES
    assert second.timing["rollout_wait"] >= 0 and second.seconds >= second.timing["rollout_wait"]


def test_new_weights_wait_for_what_is_being_drawn(trainer):
    run = trainer(*AHEAD, slow={(4, 0, 0): 150})
    run.step()
    batch = run.step()
    assert {version for r in batch.rollouts for version in r.completion.weight_versions.tolist()} == {0}
    assert run.refits[0] == (1, False)


def test_partial_rollouts_go_on_with_new_weights(trainer):
    run = trainer(*AHEAD, "grpo.async_grpo.in_flight_weight_updates=true", slow={(4, 0, 0): 150})
    run.step()
    assert run.refits[0] == (1, True)  # paused meanwhile
    versions = run.step().rollouts[0].completion.weight_versions.tolist()
    assert len(versions) == 150 and sorted(set(versions)) == [0, 1] and versions == sorted(versions)


READY_FIRST = (
    *AHEAD,
    "grpo.async_grpo.max_trajectory_age_steps=4",
    "grpo.async_grpo.consumption=ready_first",
    "grpo.async_grpo.in_flight_weight_updates=true",
)
SLOW = {(1, 0, 0): 120, (6, 1, 0): 200}


def test_ready_first_passes_over_a_straggler_within_the_age(trainer):
    run = trainer(*READY_FIRST, slow={(1, 0, 0): 400})
    batches = [run.step() for _ in range(6)]
    taken = [batch.groups for batch in batches]
    [step] = [n for n, groups in enumerate(taken) if 1 in groups]
    assert step == 2  # two steps later than in the order of the data: it may not be passed over longer
    assert max(batch.metrics["train/trajectory_age_max"] for batch in batches) <= 4
    assert all(count == 1 for count in Counter(n for groups in taken for n in groups).values())


def test_in_order_waits_for_a_straggler(trainer):
    run = trainer(*AHEAD, "grpo.async_grpo.max_trajectory_age_steps=3", slow=SLOW)
    assert [run.step().groups for _ in range(4)] == [tuple(range(4 * n, 4 * n + 4)) for n in range(4)]


def test_a_recorded_order_is_taken_again_whatever_is_ready_first(trainer):
    first = trainer(*READY_FIRST, slow=SLOW)
    order = {n: first.step().groups for n in range(5)}
    assert set(order[0]) != {0, 1, 2, 3}
    others = {(0, 0, 0): 150, (2, 0, 0): 90, (9, 1, 0): 120}
    free, bound = trainer(*READY_FIRST, slow=others), trainer(*READY_FIRST, slow=others, order=order)
    assert {n: free.step().groups for n in range(5)} != order
    assert {n: bound.step().groups for n in range(5)} == order
    with pytest.raises(UserError, match="step 6 are not on record"):
        bound.step()


@pytest.mark.parametrize("overrides", [BASE, AHEAD, READY_FIRST], ids=["in step", "one-off", "ready first"])
def test_killed_and_resumed_at_any_step_every_prompt_is_trained_on_once(trainer, overrides):
    """Covers: asynchronous resume loses a third of the prompts or deadlocks."""
    steps = 7
    state, taken = None, []
    for _ in range(steps):  # each by a process of its own: all that was in flight is gone with the one before
        run = trainer(*overrides, slow=SLOW, last_step=steps, state=state)
        batch = run.step()
        run.close()
        state = run.state
        taken += batch.groups
        asked_for = set(taken) | set(batch.pending)
        assert asked_for == set(range(len(asked_for)))  # nothing is lost between
        rows = [r.example.index for r in batch.rollouts[::SAMPLES]]
        assert rows == [ORDER[number] for number in batch.groups]
        seeds = {(run.by_seed[r.seed][:2], r.seed) for r in batch.rollouts}
        assert seeds == {((n, s), sample_seed(SEED, n // GROUPS, n % GROUPS, s)) for n in batch.groups for s in (0, 1)}
    assert Counter(taken) == Counter(range(steps * GROUPS))
    assert state.pending == ()


DEADLINE = "grpo.rollout_deadline.seconds=0.3"


@pytest.mark.parametrize("overrides", [BASE, AHEAD], ids=["in step", "one-off"])
def test_a_straggler_is_left_out_and_does_not_wedge_the_step_nor_a_resumed_one(trainer, overrides):
    """Covers: one straggler holds its group and wedges the step, again after resume."""
    slow = {(2, 1, 0): None, (6, 0, 0): None}
    state = None
    for step, straggler in ((0, 5), (1, 4)):
        run = trainer(*overrides, DEADLINE, slow=slow, state=state)
        batch = run.step()
        reasons = [r.completion.finish_reason for r in batch.rollouts]
        assert [n for n, reason in enumerate(reasons) if reason == "abort"] == [straggler]
        assert len(batch.rollouts[straggler].completion.token_ids) == 0
        assert batch.groups == tuple(range(4 * step, 4 * step + 4))
        assert batch.metrics["train/rollouts_dropped"] == 1 and batch.metrics["train/rollouts_replaced"] == 0
        state = run.state


def test_a_straggler_is_replaced_by_a_sample_with_a_seed_of_its_own(trainer):
    slow = {(2, 1, 0): None, (3, 0, 0): None, (3, 0, 1): None}
    run = trainer(*BASE, DEADLINE, "grpo.rollout_deadline.max_replacements=1", slow=slow)
    batch = run.step()
    assert batch.rollouts[5].completion.finish_reason == "stop"
    assert batch.rollouts[5].seed == sample_seed(SEED, 0, 2, 1 + (1 << 32))
    assert batch.rollouts[6].completion.finish_reason == "abort"  # its replacement came no sooner
    assert batch.metrics["train/rollouts_replaced"] == 2 and batch.metrics["train/rollouts_dropped"] == 1
    assert run.step().metrics["train/rollouts_replaced"] == 0


def test_the_watchdog_names_what_is_missing(trainer):
    """Covers: a deadlock without a word. The generator knows of nothing outstanding, or says nothing."""
    run = trainer(*BASE, "grpo.rollout_watchdog_s=1.5", slow={(2, 1, 0): None})
    start = time.monotonic()
    with pytest.raises(GeneratorStalled, match=rf"missing: group 2 \(row {ORDER[2]}\): samples 1 \(requests 5\)"):
        run.step()
    assert 1.5 <= time.monotonic() - start < 5


def test_what_was_left_out_is_neither_judged_nor_an_error(trainer):
    batch = trainer(*BASE, DEADLINE, slow={(2, 1, 0): None}).step()
    judged = []

    def grade(examples, responses):
        judged.extend(example.index for example in examples)
        return StepResult([1.0] * len(examples), [None] * len(examples), [None] * len(examples), [{}] * len(examples))

    result = judge(SimpleNamespace(environment=SimpleNamespace(step=grade)), batch.rollouts)
    assert len(judged) == 7
    assert result.rewards == [1.0] * 5 + [None] + [1.0] * 2 and result.errors == [None] * 8
    stored = to_store(batch.groups, batch.rollouts, result, step=1, weight_version=0)
    assert stored.finish_reason.tolist() == [0, 0, 0, 0, 0, 2, 0, 0]
    assert stored.response_lengths.tolist() == [3, 3, 3, 3, 3, 0, 3, 3]
    assert stored.group.tolist() == [0, 0, 1, 1, 2, 2, 3, 3] and stored.sample.tolist() == [0, 1] * 4
    assert stored.example.tolist() == [ORDER[n] for n in (0, 0, 1, 1, 2, 2, 3, 3)]


def test_an_evaluation_shares_the_generator_with_rollouts_in_flight(trainer):
    run = trainer(*AHEAD)
    run.step()  # step 1's are in flight
    run.by_seed |= {sample_seed(SEED, 1 << 32, n, 0): (10**6, n, 0) for n in range(3)}
    parts = SimpleNamespace(
        inbox=run.source.inbox,
        recipe=resolve(
            "tiny_arith", (*AHEAD, "policy.generation.max_new_tokens=4", "grpo.rollout_watchdog_s=1")
        ).recipe,
        stop_token_ids=(1,),
        tokenizer=run.source.tokenizer,
        check_stop=lambda phase: None,
    )
    found = answer_each(parts, TRAIN, 3, temperature=0.0, step=1 << 32, seed=SEED)
    assert [r.example.index for r in found] == [0, 1, 2]
    assert run.generator.asked[-1].sampling == Sampling(0.0, 4, (1,))
    assert run.step().groups == (4, 5, 6, 7)
    run.slow[10**6, 1, 0] = None
    with pytest.raises(GeneratorStalled, match=r"missing in the evaluation: problems 1$"):
        answer_each(parts, TRAIN, 3, temperature=0.0, step=1 << 32, seed=SEED)


@pytest.mark.parametrize(
    ("overrides", "where"),
    [
        (("grpo.async_grpo.enabled=true", "loss_fn.use_importance_sampling_correction=true"), "async_grpo.enabled"),
        (("grpo.async_grpo.enabled=true", "policy.generation.backend=vllm"), "async_grpo.enabled"),
        ((*AHEAD, "grpo.async_grpo.consumption=ready_first"), "async_grpo.consumption"),
    ],
    ids=["embedded", "uncorrected", "no slack"],
)
def test_asynchrony_that_cannot_work_is_refused(overrides, where):
    with pytest.raises(UserError, match=where):
        resolve("tiny_arith", overrides)
