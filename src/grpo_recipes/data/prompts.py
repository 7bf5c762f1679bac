"""From a row to the token ids the policy is asked with."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from grpo_recipes.data.dataset import Dataset
from grpo_recipes.environments.contract import Example
from grpo_recipes.errors import UserError
from grpo_recipes.recipe.schema import DataConfig

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_PLACEHOLDER = re.compile(r"\{(\w+)\}")


def render(example: Example, config: DataConfig, tokenizer: PreTrainedTokenizerBase) -> str:
    """The whole prompt as text: the template around the question, in the tokenizer's chat template or as it stands.

    Without a chat template the system prompt is a paragraph before the rest.

    Raises:
        UserError: the template names no field of the row, or a chat template is wanted where there is none.
    """
    prompt = _fill(config.prompt, example)
    if not config.apply_chat_template:
        return f"{config.system_prompt}\n\n{prompt}" if config.system_prompt else prompt
    if tokenizer.chat_template is None:
        raise UserError(
            "the tokenizer has no chat template",
            where="data.apply_chat_template",
            mend="set it to false, or use a tokenizer with one",
        )
    system = [{"role": "system", "content": config.system_prompt}] if config.system_prompt else []
    messages = [*system, {"role": "user", "content": prompt}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert isinstance(text, str)  # one conversation, not tokenized
    return text


def _fill(template: str, example: Example) -> str:
    """One pass over the template, so that braces in a question stay what they are; unknown names stay, too."""
    fields = {**example.metadata.get("entry", {}).get("metadata", {}), "question": example.question}
    text, named = "", 0
    position = 0
    for match in _PLACEHOLDER.finditer(template):
        if match[1] in fields:
            text += template[position : match.start()] + str(fields[match[1]])
            position, named = match.end(), named + 1
    if not named:
        mend = f"use {{question}}{''.join(f', {{{name}}}' for name in fields if name != 'question')}"
        raise UserError("the template names no field of the row", where="data.prompt", mend=mend)
    return text + template[position:]


def encode(example: Example, config: DataConfig, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Token ids of the prompt, with at most one beginning-of-sequence token.

    A chat template writes its special tokens itself. Raw text gets the beginning-of-sequence token if the tokenizer
    adds one by default and the text does not open with it; an end-of-sequence token is never added.

    Raises:
        UserError: as `render`; or the tokenizer has no token for part of the text.
    """
    ids = encode_text(render(example, config, tokenizer), tokenizer, "prompt")
    bos = tokenizer.bos_token_id
    if config.apply_chat_template or bos is None or ids[:1] == [bos]:
        return ids
    return [bos, *ids] if bos in tokenizer.encode("", add_special_tokens=True) else ids


def encode_text(text: str, tokenizer: PreTrainedTokenizerBase, what: str) -> list[int]:
    """Token ids of the text alone. Raises UserError, naming `what` it is, where the tokenizer has no token for it."""
    try:
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
    except Exception as error:  # tokenizers raises bare Exception for a character outside its vocabulary
        mend = "use a tokenizer that covers the dataset"
        raise UserError(f"cannot be tokenized: {error}", where=f"{what} {text[:60]!r}", mend=mend) from error
    return ids


def encode_dataset(
    dataset: Dataset, config: DataConfig, tokenizer: PreTrainedTokenizerBase, role: str
) -> tuple[Dataset, list[tuple[int, ...]]]:
    """Rows whose prompts have at most `max_input_seq_length` tokens, and those prompts' token ids, in order.

    Args:
        role: "train" or "validation", for messages.

    Raises:
        UserError: as `encode`; or every prompt is empty or too long.
    """
    ids = [tuple(encode(example, config, tokenizer)) for example in dataset]
    fits = [0 < len(prompt) <= config.max_input_seq_length for prompt in ids]
    if not any(fits):
        raise UserError(
            f"every prompt of data.{role} is longer than {config.max_input_seq_length} tokens; "
            f"the shortest has {min(map(len, ids))}",
            where="data.max_input_seq_length",
            mend="raise it, or use shorter questions",
        )
    kept = dataset.keep(lambda example: fits[example.index], "longer than max_input_seq_length")
    return kept, [prompt for prompt, fit in zip(ids, fits, strict=True) if fit]
