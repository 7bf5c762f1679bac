"""Where metrics may go besides metrics.jsonl: TensorBoard, Weights & Biases, MLflow, Trackio. All optional."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from grpo_recipes.errors import UserError
from grpo_recipes.runs.folder import RunFolder


class Sink(Protocol):
    def log(self, step: int, values: Mapping[str, float]) -> None:
        """One row. Steps may come again after a resume."""

    def close(self) -> None:
        """Flush and end."""


class TensorBoardSink:
    """Event files in <run>/tensorboard, by the tensorboard package itself, without torch."""

    def __init__(self, folder: RunFolder, project: str, config: Mapping[str, Any]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event, self._summary = Event, Summary
        self._writer = EventFileWriter(str(folder.path / "tensorboard"))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        entries = [self._summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        event = self._event(wall_time=time.time(), step=step, summary=self._summary(value=entries))
        self._writer.add_event(event)

    def close(self) -> None:
        self._writer.close()


class WandbSink:
    def __init__(self, folder: RunFolder, project: str, config: Mapping[str, Any]) -> None:
        import wandb

        self._run = wandb.init(
            project=project, name=folder.name, id=folder.name, dir=str(folder.path), config=dict(config), resume="allow"
        )
        # W&B's own step may not go back, ours does when a run resumes from an earlier checkpoint.
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({**values, "step": step})

    def close(self) -> None:
        self._run.finish()


class MlflowSink:
    """To MLFLOW_TRACKING_URI where that is set, else wherever MLflow keeps its runs by default."""

    def __init__(self, folder: RunFolder, project: str, config: Mapping[str, Any]) -> None:
        import mlflow

        self._mlflow = mlflow
        mlflow.set_experiment(project)
        mlflow.start_run(run_name=folder.name)
        mlflow.log_dict(dict(config), "recipe.json")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._mlflow.log_metrics(dict(values), step=step)

    def close(self) -> None:
        self._mlflow.end_run()


class TrackioSink:
    def __init__(self, folder: RunFolder, project: str, config: Mapping[str, Any]) -> None:
        import trackio

        self._trackio = trackio
        trackio.init(project=project, name=folder.name, config=dict(config), resume="allow")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._trackio.log(dict(values), step=step)

    def close(self) -> None:
        self._trackio.finish()


SINKS: dict[str, Callable[[RunFolder, str, Mapping[str, Any]], Sink]] = {
    "tensorboard": TensorBoardSink,
    "wandb": WandbSink,
    "mlflow": MlflowSink,
    "trackio": TrackioSink,
}


def check_sinks(names: list[str]) -> None:
    """Raises UserError for a sink whose package is not installed; imports nothing."""
    for name in names:
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None:  # without origin it is a mere folder of that name, e.g. ./wandb
            raise UserError(
                f"the package {name} is not installed",
                where=f"logger.{name}",
                mend=f"pip install grpo-recipes[sinks], or logger.{name}=false",
            )


def open_sinks(folder: RunFolder, names: list[str], project: str, config: Mapping[str, Any]) -> list[Sink]:
    """The named sinks (keys of SINKS), ready. config: the resolved recipe, nested plain data."""
    check_sinks(names)
    return [SINKS[name](folder, project, config) for name in names]
