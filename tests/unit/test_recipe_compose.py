"""Files, defaults and overrides to one resolved recipe, with the origin of each value."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from grpo_recipes.errors import UserError
from grpo_recipes.recipe.catalogue import catalogue, find
from grpo_recipes.recipe.compose import load_resolved, resolve
from grpo_recipes.recipe.diff import diff
from grpo_recipes.recipe.yaml_files import dump, parse

BASE = """
description: a base
stack: "2026.11"
policy:
  model_name: some/model
  train_global_batch_size: 4
  max_total_sequence_length: 64
  max_grad_norm: 2
  megatron_cfg: {optimizer: {lr: 1e-3, adam_beta1: 0.8}}
  generation: {max_new_tokens: 8}
data:
  train: {dataset_name: reasoning_gym, task: chain_sum, size: 100}
  validation: {dataset_name: reasoning_gym, task: chain_sum, size: 10, seed: 1000}
  max_input_seq_length: 32
  env_name: reasoning_gym
"""
V1 = """
defaults: [../_base/base.yaml]
description: the first
grpo: {num_prompts_per_step: 2, num_generations_per_prompt: 4, max_num_steps: 3, max_val_samples: 10}
policy: {megatron_cfg: {optimizer: {lr: 2e-4}}}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for path, text in {
        "_base/base.yaml": BASE,
        "sums/v1.yaml": V1,
        "sums/v2.yaml": V1.replace("the first", "the second"),
        "sums/v10.yaml": V1.replace("the first", "the tenth"),
    }.items():
        file = tmp_path / "recipes" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return tmp_path / "recipes"


def test_layers_merge_in_order_and_every_leaf_has_an_origin(folder: Path) -> None:
    got = resolve("sums@v1", ["grpo.seed=7", "policy.megatron_cfg.optimizer.lr=0.5"], folder)
    assert got.recipe.policy.megatron_cfg.optimizer == {"lr": 0.5, "adam_beta1": 0.8}
    assert got.recipe.description == "the first"
    assert got.recipe.grpo is not None
    assert got.recipe.grpo.seed == 7
    assert got.origins["policy.megatron_cfg.optimizer.lr"] == "override"
    assert got.origins["policy.megatron_cfg.optimizer.adam_beta1"] == "base _base/base.yaml"
    assert got.origins["description"] == "recipe sums/v1.yaml"
    assert got.origins["loss_fn.ratio_clip_min"] == "schema default"
    assert got.origins.keys() == got.leaves().keys()
    assert got.values["policy"]["max_grad_norm"] == 2.0
    assert "loss_fn" not in got.values


def test_newest_version_is_the_largest_number(folder: Path) -> None:
    assert resolve("sums", folder=folder).recipe.description == "the tenth"
    assert [file.version for file in catalogue(folder)["sums"]] == ["v1", "v2", "v10"]
    assert "_base" not in catalogue(folder)


def test_a_file_anywhere_is_a_recipe(folder: Path, tmp_path: Path) -> None:
    mine = tmp_path / "mine.yaml"
    mine.write_text("defaults: [recipes/sums/v1.yaml]\ngrpo: {seed: 5}\n")
    got = resolve(str(mine), folder=folder)
    assert (got.name, got.version, got.root) == ("mine", "unversioned", tmp_path.resolve())
    assert got.origins["grpo.seed"] == f"recipe {mine.resolve()}"
    assert got.origins["grpo.max_num_steps"] == "base sums/v1.yaml"


@pytest.mark.parametrize(
    ("reference", "expected"),
    [
        ("sum", "no recipe is called 'sum'\n  -> did you mean sums?"),
        ("zzz", "choose one of sums"),
        ("sums@v3", "sums has no version 'v3'\n  -> choose one of v1, v2, v10"),
        ("sums@", "sums has no version ''"),
        ("no/such.yaml", "no/such.yaml: no such recipe file"),
    ],
)
def test_unknown_recipes_name_the_nearest(folder: Path, reference: str, expected: str) -> None:
    with pytest.raises(UserError) as error:
        find(reference, folder)
    assert expected in str(error.value)


@pytest.mark.parametrize(
    "text",
    [
        "{question}",
        "two words",
        'it\'s "quoted" $(rm -rf /tmp/x); `id` & | > < # not a comment',
        "line one\nline two\n",
        "key: value",
        "5",
        "true",
        " leading and trailing ",
        "[a, b",
        "ä €",
        r"\d+\s${"[:-2],
        "a=b=c",
        "???!",
    ],
)
def test_text_overrides_arrive_as_they_are(folder: Path, tmp_path: Path, text: str) -> None:
    got = resolve("sums", [f"data.system_prompt={text}"], folder)
    assert got.recipe.data.system_prompt == text
    file = tmp_path / "recipe.yaml"
    file.write_text(got.to_yaml(), encoding="utf-8")
    assert load_resolved(file).recipe.data.system_prompt == text


def test_quoted_and_null_text_is_yaml(folder: Path) -> None:
    got = resolve(
        "sums", [r'data.system_prompt="a\tb"', "data.prompt='{question} '", "policy.tokenizer.name=null"], folder
    )
    assert got.recipe.data.system_prompt == "a\tb"
    assert got.recipe.data.prompt == "{question} "
    assert got.recipe.policy.tokenizer.name is None


def test_other_overrides_are_yaml(folder: Path) -> None:
    got = resolve(
        "sums",
        [
            "policy.generation.stop_token_ids=[1, 2]",
            "policy.generation.temperature=7e-1",
            "data.train.task_args={min_terms: 3}",
            "data.train.task_args.name=a b",
            "policy.megatron_cfg.optimizer.adam_eps=1e-9",
        ],
        folder,
    )
    assert got.recipe.policy.generation.stop_token_ids == (1, 2)
    assert got.recipe.policy.generation.temperature == 0.7
    assert got.recipe.data.train.task_args == {"min_terms": 3, "name": "a b"}
    assert got.recipe.policy.megatron_cfg.optimizer["adam_eps"] == 1e-9


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("grpo.seed", "'grpo.seed': is not an override of the form key=value"),
        ("=3", "is not an override"),
        ("grpo..seed=3", "is not an override"),
        ("grpo.seed=[1", "grpo.seed, line 2, column 1: not valid YAML"),
        ("data.prompt=${oc.env:HOME}", "data.prompt: interpolation is not available"),
        ("data.train.task_args={a: ['${x}']}", "data.train.task_args.a: interpolation is not available"),
        ("grpo.seed=???", "??? stands for a missing value"),
        ("grpo.seed=!!binary aGk=", "a recipe cannot hold a bytes"),
        ("data.prompt=\udcff{question}", "data.prompt: is not valid UTF-8"),
        ("data.train=[]", "data.train: is given a list and a mapping"),
        ("grpo=[1]", "grpo: is given a list and a mapping"),
        ("data.train.task_args=&a [*a]", "line 1, column 1: not valid YAML: found unconstructable recursive node"),
        (f"grpo.seed={'9' * 5000}", "grpo.seed, line 1, column 1: not valid YAML: a number of 5000 digits"),
    ],
)
def test_bad_overrides(folder: Path, override: str, expected: str) -> None:
    with pytest.raises(UserError) as error:
        resolve("sums", [override], folder)
    assert expected in str(error.value)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "defaults: [../_base/bsae.yaml]\n",
            "defaults name ../_base/bsae.yaml, which does not exist\n  -> did you mean base.yaml?",
        ),
        ("defaults: ../_base/base.yaml\n", "defaults must be a list"),
        ("defaults: [v3.yaml]\n", "defaults come back to v3.yaml"),
        ("grpo: {seed: 1}\ngrpo: {seed: 2}\n", "line 2, column 1: not valid YAML: the key 'grpo' occurs twice"),
        ("grpo.seed: 1\n", "the key 'grpo.seed' must be text without a dot"),
        ("1: 2\n", "the key 1 must be text"),
        ("a: [\n", "not valid YAML"),
        ("- a\n", "holds no mapping"),
        ("", "holds no mapping"),
        ("description: ${x}\n", "interpolation is not available"),
    ],
)
def test_bad_files(folder: Path, text: str, expected: str) -> None:
    (folder / "sums" / "v3.yaml").write_text(text)
    with pytest.raises(UserError) as error:
        resolve("sums@v3", folder=folder)
    assert expected in str(error.value)
    assert "v3.yaml" in str(error.value)


def test_yaml_scalars_are_those_of_1_2() -> None:
    text = "[1e-4, 1.0, .5, -3, 0x1f, 0o17, 010, yes, on, true, null, ~, 2026-11-30, '1', 1_000, 12:30]"
    want = [1e-4, 1.0, 0.5, -3, 31, 15, 10, "yes", "on", True, None, None, "2026-11-30", "1", "1_000", "12:30"]
    assert parse(text, "x") == want
    assert [type(value) for value in parse(text, "x")] == [type(value) for value in want]


@pytest.mark.parametrize(
    "value", ["1e5", "yes", "null", "", "0x10", "a: b", "- a", "x\n y \n", "'", "2026-11-30", "1.", " a"]
)
def test_dumped_text_stays_text(value: str) -> None:
    assert parse(dump({"key": value}), "x") == {"key": value}


def test_a_resolved_recipe_is_rebuilt_exactly(folder: Path, tmp_path: Path) -> None:
    overrides = ["data.prompt=a $(b); {question}\n'c'", "policy.generation.stop_token_ids=[3]", "logger.wandb=true"]
    got = resolve("sums@v2", overrides, folder)
    file = tmp_path / "recipe.yaml"
    file.write_text(got.to_yaml(), encoding="utf-8")
    assert load_resolved(file) == got


def test_a_shipped_recipe_is_rebuilt_wherever_the_recipes_lie(tmp_path: Path) -> None:
    got = resolve("tiny_arith@v1", ["grpo.seed=3"])
    file = tmp_path / "recipe.yaml"
    file.write_text(got.to_yaml(), encoding="utf-8")
    assert str(got.root) not in file.read_text(encoding="utf-8")
    assert load_resolved(file) == got


def test_an_edited_resolved_recipe_is_refused(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text(resolve("sums", ["grpo.seed=3"], folder).to_yaml().replace("seed: 3", "seed: 4"))
    with pytest.raises(UserError, match="was changed after it was written"):
        load_resolved(file)
    file.write_text("a: 1\n")
    with pytest.raises(UserError, match="is not a resolved recipe: lacks format"):
        load_resolved(file)


def test_diff_names_the_leaves_that_differ(folder: Path) -> None:
    left = resolve("sums@v1", [], folder)
    right = resolve("sums@v2", ["policy.megatron_cfg.optimizer.adam_eps=1e-9", "loss_fn.ratio_clip_max=0.3"], folder)
    assert [(d.path, d.left, d.right) for d in diff(left, right)] == [
        ("description", "the first", "the second"),
        ("loss_fn.ratio_clip_max", 0.2, 0.3),
        ("policy.megatron_cfg.optimizer.adam_eps", "(absent)", 1e-9),
    ]
    assert diff(left, left) == []


def test_recipes_are_found_in_an_installed_package(tmp_path: Path) -> None:
    """As a wheel lays them: inside the package, no checkout around it."""
    import os
    import subprocess
    import sys

    import grpo_recipes

    package, checkout = Path(grpo_recipes.__file__).parent, Path(__file__).parents[2]
    site = tmp_path / "site" / "grpo_recipes"
    site.mkdir(parents=True)
    for name in ("__init__.py", "errors.py"):
        shutil.copy(package / name, site / name)
    shutil.copytree(package / "recipe", site / "recipe")
    shutil.copytree(checkout / "recipes", site / "_recipes")
    code = "from grpo_recipes.recipe.compose import resolve; print(resolve('tiny_arith').digest)"
    out = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(site.parent)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert out.stdout.strip() == resolve("tiny_arith").digest
