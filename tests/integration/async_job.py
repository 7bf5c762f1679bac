"""killed_job.py with a generator that draws while the trainer trains: random digits, some after a long while."""

import runpy
import sys
from contextlib import contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from grpo_recipes.engine import setup
from thread_generator import ThreadGenerator

DIGITS = range(3, 13)


@contextmanager
def open_generator(recipe, workers, model_folder, *, on_gpu):
    def tokens(request):
        drawn = [DIGITS[request.seed // 10**place % 10] for place in range(1 + request.seed % 3)]
        return [*drawn, request.sampling.stop_token_ids[0]]

    generator = ThreadGenerator(tokens, tick_s=0.002, wait=lambda request: 200 if request.seed % 37 == 0 else 0)

    def refit(version):
        with generator.lock:
            generator.version = version

    yield generator, refit
    generator.close()


setup.open_generator = open_generator
setup.check_generator = lambda *_, **__: None
runpy.run_path(str(Path(__file__).with_name("killed_job.py")), run_name="__main__")
