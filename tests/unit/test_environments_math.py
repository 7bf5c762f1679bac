"""Covers: math-verify in a thread: every score silently 0, or a hung worker leaks."""

import threading
from collections.abc import Iterator

import pytest

from grpo_recipes.environments.contract import Example
from grpo_recipes.environments.math import MathEnvironment
from grpo_recipes.recipe.schema import MathEnvConfig


@pytest.fixture(scope="module")
def environment() -> Iterator[MathEnvironment]:
    environment = MathEnvironment(MathEnvConfig(num_workers=2, timeout_s=4.0))
    yield environment
    environment.close()


def judge(environment: MathEnvironment, pairs: list[tuple[str, str]]) -> tuple[list[float | None], list[str | None]]:
    examples = [Example(i, f"question {i}", answer) for i, (answer, _) in enumerate(pairs)]
    result = environment.step(examples, [response for _, response in pairs])
    assert result.observations == [None] * len(pairs)
    assert result.components == [{} if reward is None else {"correct": reward} for reward in result.rewards]
    return result.rewards, result.errors


def test_two_hundred_responses(environment: MathEnvironment) -> None:
    right = [
        (f"\\frac{{{i}}}{{7}}", f"so it is $\\frac{{{3 * i}}}{{21}}$, that is \\boxed{{{i}/7}}") for i in range(1, 101)
    ]
    wrong = [(str(i), f"The answer is \\boxed{{{i + 1}}}.") for i in range(100)]
    rewards, errors = judge(environment, [pair for both in zip(right, wrong, strict=True) for pair in both])
    assert rewards == [1.0, 0.0] * 100
    assert errors == [None] * 200


@pytest.mark.parametrize(
    ("answer", "response", "reward"),
    [
        ("5", "\\boxed{5}", 1.0),
        ("5", "it is 5", 1.0),
        ("5", "\\boxed{4}", 0.0),
        ("5", "I do not know", 0.0),
        ("5", "", 0.0),
        ("5", "\\boxed{\\frac{}", 0.0),
        ("\\frac{1}{2}", "\\boxed{0.5}", 1.0),
        ("$\\frac12$", "\\boxed{\\frac{1}{2}}", 1.0),
        ("\\boxed{2\\sqrt{3}}", "$\\sqrt{12}$", 1.0),
        ("-4", "\\boxed{4}", 0.0),
        ("(1,2)", "\\boxed{(1,2)}", 1.0),
        ("x>3", "\\boxed{x>3}", 1.0),
        ("1,000", "\\boxed{1000}", 1.0),
    ],
)
def test_verdicts(environment: MathEnvironment, answer: str, response: str, reward: float) -> None:
    assert judge(environment, [(answer, response)]) == ([reward], [None])


@pytest.mark.parametrize("answer", ["", "\\frac{", "$$"])
def test_reference_answer_that_is_no_mathematics_is_an_error(environment: MathEnvironment, answer: str) -> None:
    message = f"ValueError: the reference answer {answer!r} cannot be parsed"
    assert judge(environment, [(answer, "\\boxed{5}")]) == ([None], [message])


def test_expression_that_never_ends_is_an_error_and_the_others_are_judged(environment: MathEnvironment) -> None:
    endless = ("5", "\\boxed{9^{9^{9^{9}}}}")
    rewards, errors = judge(environment, [("5", "\\boxed{5}"), endless, ("5", "\\boxed{6}"), ("5", "\\boxed{5}")])
    assert rewards == [1.0, None, 0.0, 1.0]
    assert errors[1] is not None
    assert errors[1] == "no verdict within 4 s" or "MemoryError" in errors[1]
    assert errors[::2] == [None, None]


def test_off_the_main_thread_scores_are_right(environment: MathEnvironment) -> None:
    found: list[tuple[list[float | None], list[str | None]]] = []
    pairs = [("5", "\\boxed{5}"), ("5", "\\boxed{6}")]
    thread = threading.Thread(target=lambda: found.append(judge(environment, pairs)))
    thread.start()
    thread.join()
    assert found == [([1.0, 0.0], [None, None])]


def test_episodes_open_with_the_question(environment: MathEnvironment) -> None:
    assert environment.reset([Example(0, "1 + 1 = ?", "2")]) == ["1 + 1 = ?"]
