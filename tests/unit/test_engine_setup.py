from types import SimpleNamespace

import pytest

from grpo_recipes.data.dataset import Rows
from grpo_recipes.engine.parts import Prompts
from grpo_recipes.engine.setup import check_answers
from grpo_recipes.environments.contract import Example
from grpo_recipes.errors import UserError

DIGITS = {str(digit): digit for digit in range(10)}
TOKENIZER = SimpleNamespace(encode=lambda text, add_special_tokens: [DIGITS[c] for c in text])


def prompts(*answers):
    rows = Rows(tuple(Example(index, "a question", answer) for index, answer in enumerate(answers)))
    return Prompts(rows, [(1, 2)] * len(answers))


def test_an_answer_that_just_fits():
    check_answers(prompts("1", "345"), TOKENIZER, 6)


def test_an_answer_too_long_is_found_before_the_first_step():
    with pytest.raises(UserError, match=r"max_total_sequence_length: 6 tokens cannot hold the 7 .*'a question'"):
        check_answers(prompts("1", "3456"), TOKENIZER, 6)


def test_an_answer_without_tokens_is_found_before_the_first_step():
    with pytest.raises(UserError, match="answer '3x': cannot be tokenized"):
        check_answers(prompts("3x"), TOKENIZER, 6)
