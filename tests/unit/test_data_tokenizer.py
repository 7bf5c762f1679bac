import json
from pathlib import Path

import pytest
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from grpo_recipes.data.char_tokenizer import build_char_tokenizer
from grpo_recipes.data.dataset import Rows
from grpo_recipes.data.prompts import encode, encode_dataset, render
from grpo_recipes.data.tokenizer import chat_template_digest, load_tokenizer, tokenizer_digest
from grpo_recipes.environments.contract import Example
from grpo_recipes.errors import UserError
from grpo_recipes.recipe.schema import DataConfig, DatasetConfig

ALPHABET = "0123456789+-= "
LLAMA_LIKE_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
BOS, EOS = 0, 1


def llama_like(chat_template: str | None = LLAMA_LIKE_TEMPLATE) -> PreTrainedTokenizerFast:
    """Characters as tokens; <bos> and <eos> are added around raw text by default, as some tokenizers do."""
    vocabulary = ["<bos>", "<eos>", *map(chr, range(32, 127))]
    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate(vocabulary)}))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.add_special_tokens(["<bos>", "<eos>"])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A <eos>", special_tokens=[("<bos>", BOS), ("<eos>", EOS)]
    )
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<bos>", eos_token="<eos>")
    wrapped.chat_template = chat_template
    return wrapped


def data(chat: bool = False, prompt: str = "{question}", system: str | None = None, longest: int = 100) -> DataConfig:
    rows = DatasetConfig(dataset_name="file", path="unused.jsonl")
    return DataConfig(
        train=rows,
        validation=rows,
        prompt=prompt,
        system_prompt=system,
        apply_chat_template=chat,
        max_input_seq_length=longest,
        env_name="math",
    )


def ask(question: str, **metadata: object) -> Example:
    return Example(0, question, "", {"entry": {"metadata": metadata}} if metadata else {})


# The character tokenizer


def test_char_tokenizer_round_trip(tmp_path: Path) -> None:
    build_char_tokenizer(ALPHABET, tmp_path)
    for tokenizer in (load_tokenizer(tmp_path), AutoTokenizer.from_pretrained(tmp_path)):
        ids = [*tokenizer.encode("23+45=68"), tokenizer.eos_token_id]
        assert ids == [4, 5, 12, 6, 7, 14, 8, 10, 1]
        assert tokenizer.decode(ids) == "23+45=68<eos>"
        assert tokenizer.decode(ids, skip_special_tokens=True) == "23+45=68"
        assert tokenizer.decode(tokenizer.encode(" 1 + 2  = ")) == " 1 + 2  = "
        assert (tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.bos_token_id) == (0, 1, None)
        assert len(tokenizer) == 2 + len(ALPHABET)


def test_char_tokenizer_knows_newlines_and_any_character(tmp_path: Path) -> None:
    build_char_tokenizer("a\n\té漢<", tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.encode("漢\n<é\ta<eos>") == [6, 3, 7, 5, 4, 2, 1]
    assert tokenizer.decode([6, 3, 7, 5, 4, 2]) == "漢\n<é\ta"


def test_char_tokenizer_can_ignore_spaces(tmp_path: Path) -> None:
    build_char_tokenizer("12+=", tmp_path, ignore_spaces=True)
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.encode("1 + 2=", add_special_tokens=False) == [2, 4, 3, 5]
    assert tokenizer.decode([2, 4, 3, 5]) == "1+2="


def test_char_tokenizer_refuses_what_it_does_not_know(tmp_path: Path) -> None:
    build_char_tokenizer(ALPHABET, tmp_path)
    with pytest.raises(UserError, match=r"prompt '2x3': cannot be tokenized: .*\n  -> use a tokenizer that covers"):
        encode(ask("2x3"), data(), load_tokenizer(tmp_path))


def test_char_tokenizer_files_repeat(tmp_path: Path) -> None:
    build_char_tokenizer(ALPHABET, tmp_path / "a")
    build_char_tokenizer(ALPHABET, tmp_path / "b")
    names = ["tokenizer.json", "tokenizer_config.json"]
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == names
    assert [(tmp_path / "a" / n).read_bytes() for n in names] == [(tmp_path / "b" / n).read_bytes() for n in names]


@pytest.mark.parametrize(("alphabet", "message"), [("", "alphabet is empty"), ("abca", "the alphabet repeats 'a'")])
def test_char_tokenizer_bad_alphabet(tmp_path: Path, alphabet: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        build_char_tokenizer(alphabet, tmp_path)


# Loading


def test_missing_folder(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"nowhere: no such folder\n  -> set policy.tokenizer.name"):
        load_tokenizer(tmp_path / "nowhere")


def test_folder_without_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no readable tokenizer: .*\n  -> the folder needs tokenizer.json"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("keep", [0, 100])
def test_damaged_tokenizer(tmp_path: Path, keep: int) -> None:
    build_char_tokenizer(ALPHABET, tmp_path)
    path = tmp_path / "tokenizer.json"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(UserError, match=r"no readable tokenizer: "):
        load_tokenizer(tmp_path)


def test_damaged_tokenizer_config(tmp_path: Path) -> None:
    build_char_tokenizer(ALPHABET, tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(UserError, match=r"tokenizer_config.json: not a JSON object: "):
        load_tokenizer(tmp_path)


def test_own_code_is_run_only_if_trusted(tmp_path: Path) -> None:
    build_char_tokenizer(ALPHABET, tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    config["auto_map"] = {"AutoTokenizer": ["planted.Planted", "planted.Planted"]}
    config["tokenizer_class"] = "Planted"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    code = "from transformers import PreTrainedTokenizerFast\nfrom pathlib import Path\n"
    code += f"Path({str(tmp_path / 'ran')!r}).touch()\nclass Planted(PreTrainedTokenizerFast): pass\n"
    (tmp_path / "planted.py").write_text(code)
    with pytest.raises(UserError, match=r"wants code from its folder run\n  -> .* policy.trust_remote_code=true"):
        load_tokenizer(tmp_path)
    assert not (tmp_path / "ran").exists()
    assert type(load_tokenizer(tmp_path, trust_remote_code=True)).__name__ == "Planted"
    assert (tmp_path / "ran").exists()


def test_tokenizer_without_end_of_sequence(tmp_path: Path) -> None:
    tokenizer = llama_like()
    tokenizer.eos_token = None
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"no end-of-sequence token\n  -> set eos_token"):
        load_tokenizer(tmp_path)


def test_digests(tmp_path: Path) -> None:
    build_char_tokenizer(ALPHABET, tmp_path / "a")
    build_char_tokenizer(ALPHABET[::-1], tmp_path / "b")
    first, second = load_tokenizer(tmp_path / "a"), load_tokenizer(tmp_path / "b")
    digest = tokenizer_digest(first)
    first(["1", "23"], padding=True, truncation=True, max_length=4)  # leaves its settings in the tokenizer
    assert tokenizer_digest(first) == digest == tokenizer_digest(load_tokenizer(tmp_path / "a"))
    assert tokenizer_digest(second) != digest
    assert chat_template_digest(first) is None
    assert chat_template_digest(llama_like("a")) == "ac8d8342bbb2362d13f0a559a3621bb407011368895164b628a54f7fc33fc43c"
    assert chat_template_digest(llama_like("b")) != chat_template_digest(llama_like("a"))


# Prompts


@pytest.mark.parametrize(
    ("template", "question", "text"),
    [
        ("{question}", "1 + 1", "1 + 1"),
        ("Solve {question} in \\boxed{}.", "{x}", "Solve {x} in \\boxed{}."),
        ("{question}!", "{question} {0} {", "{question} {0} {!"),
        ("{question} {question} {other}", "a", "a a {other}"),
        ("{{question}}", "a", "{a}"),
    ],
)
def test_braces_are_data(template: str, question: str, text: str) -> None:
    assert render(ask(question), data(prompt=template), llama_like()) == text


def test_template_may_name_fields_of_the_entry() -> None:
    example = ask("What is 23 + 45?", expression="23 + 45", terms=2)
    assert render(example, data(prompt="{terms}: {expression}="), llama_like()) == "2: 23 + 45="


def test_template_that_names_nothing() -> None:
    with pytest.raises(
        UserError, match=r"data.prompt: the template names no field of the row\n  -> use {question}, {terms}"
    ):
        render(ask("1 + 1", terms=2), data(prompt="{qestion}"), llama_like())


def test_chat_template_and_system_prompt() -> None:
    text = render(ask("1 + 1"), data(chat=True, prompt="{question} = ?", system="Be brief."), llama_like())
    assert text == "<bos>[system]Be brief.<eos>[user]1 + 1 = ?<eos>[assistant]"
    assert render(ask("1 + 1"), data(system="Be brief."), llama_like()) == "Be brief.\n\n1 + 1"


def test_chat_template_missing() -> None:
    with pytest.raises(
        UserError, match=r"data.apply_chat_template: the tokenizer has no chat template\n  -> set it to false"
    ):
        render(ask("1 + 1"), data(chat=True), llama_like(None))


def test_one_bos_at_most() -> None:
    """Covers: BOS twice on Llama 3."""
    tokenizer = llama_like()
    chat = encode(ask("1"), data(chat=True), tokenizer)
    assert chat == tokenizer.apply_chat_template(
        [{"role": "user", "content": "1"}], add_generation_prompt=True, return_dict=False
    )
    assert chat[0] == BOS
    assert chat.count(BOS) == 1
    one = tokenizer.convert_tokens_to_ids("1")
    assert encode(ask("1"), data(), tokenizer) == [BOS, one]
    assert encode(ask("1"), data(prompt="<bos>{question}"), tokenizer) == [BOS, one]


def test_no_special_token_where_the_tokenizer_adds_none(tmp_path: Path) -> None:
    build_char_tokenizer(ALPHABET, tmp_path)
    assert encode(ask("1+1="), data(), load_tokenizer(tmp_path)) == [3, 12, 3, 14]


def test_prompts_that_are_too_long_are_left_out_and_counted() -> None:
    questions = ["12345", "123", "123456", "1234"]
    rows = Rows(tuple(Example(i, question, "") for i, question in enumerate(questions)), {"duplicate": 1})
    kept, ids = encode_dataset(rows, data(longest=5), llama_like(), "train")  # and <bos>
    assert [(row.index, row.question) for row in kept] == [(0, "123"), (1, "1234")]
    assert ids == [tuple(encode(row, data(), llama_like())) for row in kept]
    assert kept.excluded == {"duplicate": 1, "longer than max_input_seq_length": 2}


def test_no_prompt_fits() -> None:
    rows = Rows((Example(0, "12345", ""), Example(1, "123", "")))
    message = r"data.max_input_seq_length: every prompt of data.train is longer than 3 tokens; the shortest has 4\n  -> raise it"
    with pytest.raises(UserError, match=message):
        encode_dataset(rows, data(longest=3), llama_like(), "train")
