from collections.abc import Callable, Iterator
from typing import Any

import pytest
import reasoning_gym

from grpo_recipes.environments.contract import Example, StepResult
from grpo_recipes.environments.factory import make_environment
from grpo_recipes.environments.math import MathEnvironment
from grpo_recipes.environments.reasoning_gym import ReasoningGymEnvironment
from grpo_recipes.environments.reasoning_gym_grader import extract
from grpo_recipes.errors import UserError
from grpo_recipes.recipe.schema import DataConfig, EnvConfig, ReasoningGymEnvConfig


def example(task: str, entry: dict[str, Any] | None = None) -> Example:
    entry = entry or reasoning_gym.create_dataset(task, size=1, seed=1)[0]
    return Example(0, entry["question"], entry["answer"] or "", {"task": task, "task_args": {}, "entry": entry})


@pytest.fixture(scope="module")
def environment() -> Iterator[ReasoningGymEnvironment]:
    environment = ReasoningGymEnvironment(ReasoningGymEnvConfig(num_workers=2, timeout_s=5.0))
    yield environment
    environment.close()


@pytest.fixture
def judge(environment: ReasoningGymEnvironment) -> Callable[[Example, str], StepResult]:
    return lambda row, response: environment.step([row], [response])


Judge = Callable[[Example, str], StepResult]


@pytest.mark.parametrize(
    ("task", "response", "reward"),
    [
        ("chain_sum", "-4", 1.0),
        ("chain_sum", " -4\n", 1.0),
        ("chain_sum", "-5", 0.0),
        ("chain_sum", "", 0.0),
        ("countdown", "94*4 - 61 - 6", 1.0),
        ("countdown", "6 + 61", 0.05),
        ("countdown", "no idea", 0.01),  # the verifier's own number for a wrong answer is kept
    ],
)
def test_rewards_are_the_verifiers_own(judge: Judge, task: str, response: str, reward: float) -> None:
    result = judge(example(task), response)
    assert result == StepResult([reward], [None], [None], [{"score": reward}])
    verifier = reasoning_gym.create_dataset(task, size=1, seed=1)
    assert verifier.score_answer(response.strip(), example(task).metadata["entry"]) == reward


def test_verifier_that_raises_is_an_error_and_no_zero(judge: Judge) -> None:
    result = judge(example("prime_factorization"), "wrong")
    assert result.rewards == [None]
    assert result.errors == ["ValueError: invalid literal for int() with base 10: 'wrong'"]
    assert result.components == [{}]


def test_response_that_is_code_cannot_reach_or_hang_the_trainer(judge: Judge) -> None:
    """string_insertion's verifier evaluates the response as Python."""
    row = example("string_insertion")
    assert judge(row, "__import__('os')._exit(3)").errors == ["the grader's process ended (exit status 3)"]
    assert judge(row, "[9 ** 9 ** 9]").errors == ["no verdict within 5 s"]
    assert judge(row, row.answer).rewards == [1.0]


def test_task_without_reference_answer_gets_its_whole_entry(judge: Judge) -> None:
    row = example("graph_color")
    solution = row.metadata["entry"]["metadata"]["possible_answer"]
    coloring = "{" + ", ".join(f'"{node}": {color}' for node, color in solution.items()) + "}"
    assert judge(row, coloring).rewards == [1.0]


def test_many_episodes_keep_their_order(environment: ReasoningGymEnvironment) -> None:
    entries = list(reasoning_gym.create_dataset("chain_sum", size=100, seed=3))
    rows = [example("chain_sum", entry) for entry in entries]
    assert environment.reset(rows) == [entry["question"] for entry in entries]
    responses = [entry["answer"] if i % 3 else "no" for i, entry in enumerate(entries)]
    assert environment.step(rows, responses).rewards == [1.0 if i % 3 else 0.0 for i in range(100)]


@pytest.mark.parametrize(
    ("response", "pattern", "answer"),
    [
        ("  42 \n", None, "42"),
        ("I think <answer> 42\n</answer> or <answer>43</answer>", "<answer>(.*?)</answer>", "42"),
        ("<answer>4\n2</answer>", "<answer>(.*?)</answer>", "4\n2"),
        ("42", "<answer>(.*?)</answer>", None),
        ("no", "no|(yes)", None),
    ],
)
def test_answer_in_a_response(response: str, pattern: str | None, answer: str | None) -> None:
    assert extract(response, pattern) == answer


def test_answer_pattern_reaches_the_verifier() -> None:
    environment = ReasoningGymEnvironment(ReasoningGymEnvConfig(answer_pattern="<answer>(.*?)</answer>"))
    rewards = environment.step(
        [example("chain_sum")] * 3, ["-4", "so <answer>-4</answer>", "<answer>4</answer>"]
    ).rewards
    environment.close()
    assert rewards == [0.0, 1.0, 0.0]


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("(", "env.reasoning_gym.answer_pattern: not a regular expression: "),
        ("answer", "env.reasoning_gym.answer_pattern: the pattern has no group\n  -> put the answer in parentheses"),
    ],
)
def test_bad_answer_pattern(pattern: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        ReasoningGymEnvironment(ReasoningGymEnvConfig(answer_pattern=pattern))
    assert message in str(caught.value)


def data(env_name: str, validation: str = "reasoning_gym") -> DataConfig:
    return DataConfig.model_validate(
        {
            "train": {"dataset_name": "reasoning_gym", "task": "chain_sum", "size": 2},
            "validation": {"dataset_name": validation},
            "env_name": env_name,
            "max_input_seq_length": 10,
        }
    )


@pytest.mark.parametrize(("name", "kind"), [("math", MathEnvironment), ("reasoning_gym", ReasoningGymEnvironment)])
def test_factory(name: str, kind: type) -> None:
    environment = make_environment(EnvConfig(), data(name))
    environment.close()
    assert type(environment) is kind


def test_reasoning_gym_cannot_judge_files() -> None:
    message = r"data.validation.dataset_name: the reasoning_gym environment cannot judge dataset_name file"
    with pytest.raises(UserError, match=message + r".*\n  -> set data.env_name to math"):
        make_environment(EnvConfig(), data("reasoning_gym", validation="file"))
