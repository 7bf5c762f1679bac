import hashlib
from typing import Any

import pytest

from grpo_recipes.data.dataset import load_dataset, load_datasets
from grpo_recipes.errors import UserError
from grpo_recipes.recipe.schema import DataConfig, DatasetConfig

TWO_DIGITS = {"min_terms": 2, "max_terms": 2, "min_digits": 2, "max_digits": 2}


def chain_sum(**changes: Any) -> DatasetConfig:
    values = {"dataset_name": "reasoning_gym", "task": "chain_sum", "task_args": TWO_DIGITS, "size": 50, "seed": 1}
    return DatasetConfig.model_validate({**values, **changes})


def pair(train: DatasetConfig, validation: DatasetConfig) -> DataConfig:
    return DataConfig(train=train, validation=validation, max_input_seq_length=100, env_name="reasoning_gym")


def test_rows_are_a_function_of_task_arguments_and_seed() -> None:
    rows = load_dataset(chain_sum(), "train")
    assert len(rows) == 50
    assert [row.index for row in rows] == list(range(50))
    assert rows[0].question == "State the final answer to the following arithmetic problem: 42 - 25 ="
    assert rows[0].answer == "17"
    assert rows[0].metadata["task"] == "chain_sum"
    assert rows[0].metadata["entry"]["metadata"]["expression"] == "42 - 25"
    assert list(load_dataset(chain_sum(), "train")) == list(rows)
    assert load_dataset(chain_sum(), "train").digest() == rows.digest()


@pytest.mark.parametrize("changes", [{"seed": 2}, {"size": 49}, {"task_args": {**TWO_DIGITS, "max_digits": 3}}])
def test_digest_changes_with_the_rows(changes: dict[str, Any]) -> None:
    assert load_dataset(chain_sum(**changes), "train").digest() != load_dataset(chain_sum(), "train").digest()


def test_entries_that_json_does_not_know_have_a_digest() -> None:
    """gsm_symbolic keeps fractions.Fraction in its metadata."""
    rows = load_dataset(chain_sum(task="gsm_symbolic", task_args={}, size=100), "train")
    again = load_dataset(chain_sum(task="gsm_symbolic", task_args={}, size=100), "train")
    assert any("Fraction(" in repr(row.metadata) for row in rows)
    assert rows.digest() == again.digest()


def test_digest_is_that_of_canonical_json() -> None:
    task_args = {"min_terms": 1, "max_terms": 1, "min_digits": 1, "max_digits": 1}
    text = (
        '["State the final answer to the following arithmetic problem: 4 =","4",{"entry":{"answer":"4","metadata":'
        '{"difficulty":{"num_digits":[1,1],"num_terms":[1,1]},"expression":"4","num_digits":1,"num_terms":1,'
        '"source_dataset":"chain_sum","source_index":0},"question":"State the final answer to the following arithmetic '
        'problem: 4 ="},"task":"chain_sum","task_args":{"max_digits":1,"max_terms":1,"min_digits":1,"min_terms":1}}]\n'
    )
    rows = load_dataset(chain_sum(size=1, task_args=task_args), "train")
    assert rows.digest() == hashlib.sha256(text.encode()).hexdigest()


def test_training_shares_no_question_with_validation_and_validation_repeats_none() -> None:
    # 16200 problems exist, so that 3000 and 8000 draws collide often.
    train, validation = load_datasets(pair(chain_sum(size=8000, seed=1), chain_sum(size=3000, seed=100_000)))
    asked = [row.question for row in validation]
    trained = [row.question for row in train]
    assert not set(asked) & set(trained)
    assert len(set(asked)) == len(asked)
    assert [row.index for row in train] == list(range(len(train)))
    assert [row.index for row in validation] == list(range(len(validation)))
    all_train = [row.question for row in load_dataset(chain_sum(size=8000, seed=1), "train")]
    assert trained == [question for question in all_train if question not in set(asked)]
    assert train.excluded == {"in the validation set": 8000 - len(train)}
    assert validation.excluded == {"duplicate": 3000 - len(validation)}
    assert 1000 < 8000 - len(train) < 1700  # 8000 x (1 - exp(-3000/16200)) = 1353
    assert 150 < 3000 - len(validation) < 350  # 3000 - 16200 x (1 - exp(-3000/16200)) = 261


def test_neighbouring_seeds_hold_the_same_problems() -> None:
    """reasoning-gym seeds row i with seed + i; a careless choice of seeds may not leak."""
    with pytest.raises(UserError, match="every training question is also in the validation set"):
        load_datasets(pair(chain_sum(size=20, seed=2), chain_sum(size=50, seed=1)))


def test_validation_keeps_the_first_row_of_each_question() -> None:
    one_digit = {"min_terms": 1, "max_terms": 1, "min_digits": 1, "max_digits": 1}
    everything = load_dataset(chain_sum(size=40, seed=5, task_args=one_digit), "validation")
    _, validation = load_datasets(pair(chain_sum(), chain_sum(size=40, seed=5, task_args=one_digit)))
    assert [row.question for row in validation] == list(dict.fromkeys(row.question for row in everything))


def test_question_pattern_keeps_what_it_matches() -> None:
    rows = load_dataset(chain_sum(size=200, question_pattern=r"\+"), "train")
    assert 70 < len(rows) < 130
    assert all("+" in row.question for row in rows)
    assert rows.excluded == {"off question_pattern": 200 - len(rows)}
    assert [row.index for row in rows] == list(range(len(rows)))


def test_task_without_reference_answers_keeps_its_entry() -> None:
    rows = load_dataset(chain_sum(task="graph_color", task_args={}, size=2), "train")
    assert rows[0].answer == ""
    assert rows[0].metadata["entry"]["answer"] is None
    assert rows[0].metadata["entry"]["metadata"]["possible_answer"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"task": "chain_sun"}, "data.train.task: reasoning-gym has no task 'chain_sun'\n  -> use chain_sum"),
        ({"task": None}, "data.train.task: a reasoning_gym dataset needs it"),
        ({"size": None}, "data.train.size: a reasoning_gym dataset needs it"),
        (
            {"task_args": {"min_digit": 2}},
            "data.train.task_args.min_digit: chain_sum has no argument 'min_digit'\n  -> use min_digits",
        ),
        (
            {"task_args": {"seed": 2}},
            "data.train.task_args.seed: chain_sum has no argument 'seed'\n  -> use data.train.seed",
        ),
        (
            {"task_args": {"min_terms": 5, "max_terms": 2}},
            "data.train.task_args: chain_sum refuses its arguments: max_terms must be >= min_terms",
        ),
        ({"task_args": {"min_terms": "two"}}, "data.train.task_args: chain_sum refuses its arguments: "),
        ({"question_pattern": "("}, "data.train.question_pattern: not a regular expression: "),
        ({"question_pattern": "x{9}"}, "data.train.question_pattern: no question matches 'x{9}'"),
    ],
)
def test_bad_input(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as caught:
        load_dataset(chain_sum(**changes), "train")
    assert message in str(caught.value)
