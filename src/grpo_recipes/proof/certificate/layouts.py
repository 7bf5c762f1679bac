"""Parallel layouts as a certificate names them: `tp2.pp2.sp`."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from grpo_recipes.errors import UserError
from grpo_recipes.recipe.architecture import number_of_experts
from grpo_recipes.recipe.megatron import given_fields
from grpo_recipes.recipe.schema import MegatronConfig

NOTATION = "tpN ppN vppN cpN epN etpN dpN sp, joined by dots, such as tp2.pp2.sp; one for a single process"
_TOKEN = re.compile(r"(tp|pp|vpp|cp|ep|etp|dp)([1-9]\d*)")


@dataclass(frozen=True)
class Layout:
    """Sizes of the parallel groups. Experts are spread over the ranks that data, context and tensor parallelism give."""

    tp: int = 1
    pp: int = 1
    vpp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = 1
    dp: int = 1
    sp: bool = False

    @property
    def processes(self) -> int:
        return self.tp * self.pp * self.cp * self.dp

    def __str__(self) -> str:
        sizes = [
            f"{name}{size}"
            for name in ("tp", "pp", "vpp", "cp", "ep", "etp", "dp")
            if (size := getattr(self, name)) > 1
        ]
        return ".".join([*sizes, *(["sp"] if self.sp else [])]) or "one"

    def megatron_cfg(self) -> dict[str, Any]:
        """The keys of policy.megatron_cfg."""
        values: dict[str, Any] = {
            "tensor_model_parallel_size": self.tp,
            "pipeline_model_parallel_size": self.pp,
            "context_parallel_size": self.cp,
            "expert_model_parallel_size": self.ep,
            "expert_tensor_parallel_size": self.etp,
            "sequence_parallel": self.sp,
        }
        return values | ({"virtual_pipeline_model_parallel_size": self.vpp} if self.vpp > 1 else {})


def parse(text: str) -> Layout:
    """Tokens in any order, joined by ".", "·" or "+". Where dp is left out it is the least that holds the experts.

    Raises:
        UserError: not a layout, or one whose sizes cannot go together in any model.
    """
    sizes: dict[str, int] = {}
    sp = False
    for token in re.split(r"[.·+]", text.strip().lower()):
        found = _TOKEN.fullmatch(token)
        if token == "sp" and not sp:
            sp = True
        elif found and found[1] not in sizes:
            sizes[found[1]] = int(found[2])
        elif text.strip().lower() != "one":
            why = "twice" if found or token == "sp" else "unknown"
            raise UserError(f"{token!r} in {text!r} is {why}", where="--layout", mend=f"write {NOTATION}")
    if "dp" not in sizes:
        sizes["dp"] = _least_dp(sizes)
    layout = Layout(**sizes, sp=sp)
    problem = next(_problems(layout), None)
    if problem:
        raise UserError(f"{text}: {problem}", where="--layout", mend=f"write {NOTATION}")
    return layout


def _least_dp(sizes: Mapping[str, int]) -> int:
    experts = sizes.get("ep", 1) * sizes.get("etp", 1)
    return experts // math.gcd(experts, sizes.get("tp", 1) * sizes.get("cp", 1))


def _problems(layout: Layout) -> Iterator[str]:
    if layout.sp and layout.tp == 1:
        yield "sequence parallelism (sp) needs tensor parallelism (tp2)"
    if layout.vpp > 1 and layout.pp == 1:
        yield "virtual pipeline stages (vpp) need a pipeline (pp2)"
    if layout.tp * layout.cp * layout.dp % (layout.ep * layout.etp):
        yield f"experts over ep x etp = {layout.ep * layout.etp} ranks do not fit tp x cp x dp = {layout.tp * layout.cp * layout.dp}"


def unfit(layout: Layout, config: Mapping[str, Any]) -> str | None:
    """Why a model of this config.json cannot take the layout, None if it can. The number of layers is not looked at."""
    heads, groups = config["num_attention_heads"], config["num_key_value_heads"]
    if heads % layout.tp:
        return f"tp{layout.tp} does not divide {heads} query heads"
    if groups % layout.tp and layout.tp % groups:  # fewer of them than ranks are copied, if that comes out even
        return f"tp{layout.tp} does not divide {groups} key-value heads"
    experts = number_of_experts(config)
    if not experts and (layout.ep > 1 or layout.etp > 1):
        return "the model has no experts to spread"
    if experts and experts % layout.ep:
        return f"ep{layout.ep} does not divide {experts} experts"
    if experts and layout.tp > 1 and not layout.sp:
        return "Megatron-Core trains experts under tensor parallelism only with sequence parallelism (sp)"
    return None


def recipes_own(megatron: MegatronConfig, replicated: bool) -> Layout:
    """The recipe's layout with every size above 1 reduced to 2."""

    def two(size: int) -> int:
        return min(size, 2)

    tp, cp = two(megatron.tensor_model_parallel_size), two(megatron.context_parallel_size)
    ep, etp = two(megatron.expert_model_parallel_size), two(megatron.expert_tensor_parallel_size)
    pp = two(megatron.pipeline_model_parallel_size)
    vpp = two(given_fields(megatron).get("virtual_pipeline_model_parallel_size") or 1)
    dp = max(2 if replicated else 1, _least_dp({"tp": tp, "cp": cp, "ep": ep, "etp": etp}))
    return Layout(tp, pp, vpp if pp > 1 else 1, cp, ep, etp, dp, megatron.sequence_parallel and tp > 1)


def fitting(config: Mapping[str, Any], processes: int, own: Layout | None = None) -> list[Layout]:
    """What is certified without further words: each dimension alone, and the recipe's own combination if it fits."""
    asked = ["tp2", "tp2.sp", "pp2", "pp2.vpp2", "dp2", "cp2", "ep2", "tp2.ep2.sp"]
    layouts = [parse(text) for text in asked]
    if own is not None and own not in layouts and own.processes > 1:
        layouts.append(own)
    return [layout for layout in layouts if layout.processes <= processes and unfit(layout, config) is None]


MATRIX = (
    "tp2",
    "tp2.sp",
    "pp2",
    "pp2.vpp2",
    "dp2",
    "cp2",
    "cp4",
    "ep2",
    "tp2.pp2.sp",
    "tp2.cp2",
    "pp2.cp2",
    "dp2.cp2",
    "tp2.ep2.sp",
    "tp2.ep2.dp2.sp",
)  # for at most four processes


def matrix(config: Mapping[str, Any]) -> list[Layout]:
    """All of MATRIX that the model can take; a model with experts takes tensor parallelism with sp only."""
    found: list[Layout] = []
    for text in MATRIX:
        layout = parse(text)
        if number_of_experts(config) and layout.tp > 1 and not layout.sp:
            layout = parse(f"{text}.sp")
        if layout not in found and unfit(layout, config) is None:
            found.append(layout)
    return found


def layers_for(layouts: Sequence[Layout]) -> int:
    """The least number of layers, at least four, that every pipeline divides."""
    stages = math.lcm(1, *(layout.pp * layout.vpp for layout in layouts))
    return stages * -(-4 // stages)
