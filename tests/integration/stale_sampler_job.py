"""A job whose sampler says that it has new weights and keeps its old ones: `python stale_sampler_job.py RUN VERSION`.

From VERSION on. What a refit does that is lost on its way.
"""

import sys
from pathlib import Path

from grpo_recipes import job
from grpo_recipes.engine.refit import EmbeddedRefit, RefitStats

refit = EmbeddedRefit.__call__


def lost_refit(self, version):
    if version < int(sys.argv[2]):
        return refit(self, version)
    self._workers.call("resume", version)
    return RefitStats(0, 0.0, 0, certified=False)


if __name__ == "__main__":  # its workers import this module, too
    EmbeddedRefit.__call__ = lost_refit
    sys.exit(job.main(Path(sys.argv[1])))
