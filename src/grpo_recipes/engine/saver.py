"""The saves of a run: in the foreground, or in the background while the next steps run."""

from __future__ import annotations

from typing import Any, NamedTuple

from grpo_recipes.engine.checkpoint import CheckpointStore
from grpo_recipes.engine.policy_group import PolicyGroup


class Begun(NamedTuple):
    """A checkpoint whose ranks are still writing."""

    step: int
    state: dict[str, Any]
    metric: float | None


class Saver:
    """One save at a time: the next waits for the one before.

    Args:
        background: a save costs the step the copy to host memory; each rank writes in a thread, and the checkpoint is
            sealed here once all of them are done, at the next `poll`, `save` or `finish`. The same call raises what
            went wrong in the background.
    """

    def __init__(self, store: CheckpointStore, policy: PolicyGroup, *, background: bool) -> None:
        self.store, self.policy, self.background = store, policy, background
        self._begun: Begun | None = None

    def save(self, step: int, state: dict[str, Any], metric: float | None) -> None:
        """Raises UserError where the disk is full or refuses, for this save or for the one before."""
        self.finish()
        if not self.background:
            self.store.save(step, state, metric, self.policy.save)
            return
        with self.store.writing(step):
            self.policy.start_save(self.store.open(step))
        self._begun = Begun(step, state, metric)

    def poll(self) -> None:
        """Seal the checkpoint if every rank has written; never waits."""
        self._settle(wait=False)

    def finish(self) -> None:
        """Wait until nothing is being written."""
        self._settle(wait=True)

    def _settle(self, *, wait: bool) -> None:
        if self._begun is None:
            return
        with self.store.writing(self._begun.step):
            digests = self.policy.finish_save(wait=wait)
        if digests is not None:
            begun, self._begun = self._begun, None
            self.store.seal(begun.step, begun.state, begun.metric, digests)
