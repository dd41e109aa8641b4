"""The trainer's log: metrics.jsonl, trained.jsonl as evidence, evaluations.jsonl, samples of whole groups, and what
dashboards read from the broker.

A step that is replayed after a crash appears again, and its last line is that of the surviving weights. A line
``resumed`` says that a trainer (``leader_term``) resumed from that step: it voids the lines of later steps before it,
and everything that an older term writes after it.
"""

import json
import time
from collections import deque
from collections.abc import Mapping
from functools import partial
from typing import Any

from broker.evaluations.results import DatasetResult
from broker.evaluations.store import MendedSamples
from consumers.trainer.context import TrainerContext
from consumers.trainer.data.groups import Batch
from consumers.trainer.metrics.throughput import compute_metrics, device_name, memory_metrics
from consumers.trainer.records.evaluation_log import EvaluationLog
from consumers.trainer.records.evaluation_samples import EvalSampleLog
from consumers.trainer.records.machine import write_environment
from consumers.trainer.records.samples import SampleLog, Terms
from consumers.trainer.records.trackers import Trackers
from consumers.trainer.step.learner import StepResult
from schemas.errors import BrokerDamaged
from schemas.messages import Trajectory
from schemas.run_folder import METRICS, TRAINED
from schemas.system.files import LineFile, disk_errors

LOOK_S = 30.0
"""Seconds between two searches for parts of evaluations that the broker has lost."""


class StepLog:
    """The log of one trainer: one line for each step in each file, flushed at once. A full disk makes it wait.

    tokens_per_s: of the last step, without the time in pauses. evaluations: all that are complete.
    """

    def __init__(self, context: TrainerContext) -> None:
        self._context = context
        self._broker = context.broker
        self._progress = context.progress
        self._config = context.config
        folder = context.config.folder
        self._metrics = LineFile(folder / METRICS)
        self._trained = LineFile(folder / TRAINED)
        self.evaluations = EvaluationLog(folder)
        self._traces = context.traces
        self._ranks = context.rank_group.ranks
        self._trackers = Trackers(context.config, self._ranks.accelerator, context.notify)
        self._eval_sample_log = EvalSampleLog(folder, context.broker.eval_samples.take)
        self._sample_log = SampleLog(folder, context.config.trainer.log_groups)
        write_environment(folder, context.config.base, self._ranks.world)
        self._last: dict[str, Any] = {}
        self._evaluated: deque[dict[str, Any]] = deque()
        """Metrics of the evaluations that no line has yet."""
        self._samples: list[tuple[Trajectory, float]] = []
        self._terms: Terms = {}
        self._next_look = 0.0
        self.tokens_per_s = 0.0

    def write_resumed(self) -> None:
        """Write at which step training resumes: earlier lines of that step and later ones no longer count."""
        resumed = {"resumed": self._progress.step, "leader_term": self._context.session.leader_term}
        self._append(self._trained, resumed)

    def trained(self, batch: Batch) -> None:
        """Log which samples are in the weights now; call it before anything that may find the broker lost."""
        samples = [
            [group.task_id, member.sample]
            for group in batch.record.groups
            for member in group.members
            if member.trajectory_id
        ]
        line = {"step": batch.record.step, "leader_term": self._context.session.leader_term}
        self._append(self._trained, line | {"samples": samples, "excluded": batch.excluded})

    def finished(self, batch: Batch, result: StepResult) -> None:
        """End the step's time, and write its metrics and samples to the run's folder, the trackers and the broker."""
        times = self._context.timer.lap()
        self.tokens_per_s = result.metrics["tokens"] / times["total"]
        figures = self._figures(batch, result) | {f"time/{name}_s": seconds for name, seconds in times.items()}
        self._append(self._metrics, figures | (self._evaluated.popleft() if self._evaluated else {}))
        self._last = figures
        worked = result.seconds.get("total", 0.0) + times.get("publish", 0.0)
        samples = [sample for group in batch.groups for sample in group.samples]
        step = self._progress.step
        moment = self._traces.trained(step, worked, samples)
        self._trackers.log(figures)
        self._samples, self._terms = samples, batch.terms
        self._sample_log.write(step, batch.record.version, batch.groups, result.advantages, batch.terms, moment)
        if self._config.eval is None and step % self._config.trainer.checkpoint.every == 0:
            self._log_completions()
        self._broker.metrics.append(figures)
        kept = self._broker.trajectory_store.keep(step, self._samples, batch.terms, moment)
        self._sample_log.keep_images(kept, batch.groups)
        self.write_evaluations()

    def write_evaluations(self) -> None:
        """Write complete evaluations, in metrics.jsonl with the next steps, and repair open ones that lost a part."""
        evaluation = self._config.eval
        if evaluation is None:
            return
        passes = {one.label: one.passes(evaluation.sampling_of(one).n) for one in evaluation.dataset}

        def figures(label: str, of: DatasetResult) -> dict[str, float]:
            return of.figures(passes.get(label, ()), self._config.has_accuracy)

        results = self._broker.evals.read_results()
        if not all(result.complete for result in results) and time.monotonic() >= self._next_look:
            self._next_look = time.monotonic() + LOOK_S
            self._tell_mended(self._broker.evals.mend())
        for result in results:
            if not (result.complete and result.n) or result.version in self.evaluations.lines:
                continue
            line = {
                "version": result.version,
                "n": result.n,
                "scored": result.scored,
                "failed": result.failed,
                "off_version": result.off_version,
                "mean": result.mean if result.scored else None,
                "accuracy": result.accuracy if self._config.has_accuracy else None,
                "length": result.length,
                "time": result.time,
                "wall_s": max(0.0, result.time - float(self._progress.started or 0)),
                "datasets": {label: of.to_json() | figures(label, of) for label, of in result.datasets.items()},
            }
            self._context.retry("evaluations", partial(self.evaluations.add, line))
            if result.failed:
                text = (
                    f"{result.failed} of {result.n} samples of the evaluation of version {result.version} failed and"
                    " are left out of its means; dead letters and events say why"
                )
                self._context.notify("evaluation", "warning", text)
            known = {"reward": line["mean"], "length": line["length"], "version": line["version"]}
            for label, of in result.datasets.items():
                known |= {f"{label}/{name}": value for name, value in figures(label, of).items()}
            evaluated = {f"eval/{name}": value for name, value in known.items() if value is not None}
            self._evaluated.append(evaluated)
            self._trackers.log_evaluation(self._progress.step, evaluated)
            self._log_completions()
        self._eval_sample_log.write(self.evaluations.lines)

    def check_evaluation(self, version: int) -> None:
        """Repair the evaluation of this version at once; BrokerDamaged if so much of it is lost that it would not end.

        That is the number of its samples, or tasks with samples left: both are written when the evaluation is opened,
        and a search finds every task that exists throughout.
        """
        before = self._broker.evals.samples_left(version)
        mended = self._broker.evals.mend()
        after, found = self._broker.evals.samples_left(version), mended.get(version, MendedSamples()).left
        uncounted = after is None and (before is not None or found > 0)
        unfindable = before is not None and after is not None and found < after
        if uncounted or unfindable:
            raise BrokerDamaged(f"the broker has lost a part of the evaluation of version {version}")
        self._tell_mended(mended)

    def _tell_mended(self, found: Mapping[int, MendedSamples]) -> None:
        for version, (again, failed, _) in found.items():
            if not again and not failed:
                continue
            text = (
                f"the broker has lost a part of the evaluation of version {version}: {again} samples are queued again,"
                f" {failed} count as failed"
            )
            self._context.notify("evaluation", "warning", text)

    def _log_completions(self) -> None:
        """Send trackers some samples of the last batch, from the worst to the best."""
        samples = sorted(self._samples, key=lambda pair: pair[1])
        count = min(self._config.trainer.log_completions, len(samples))
        if count:
            rows = [samples[round(i * (len(samples) - 1) / max(1, count - 1))] for i in range(count)]
            self._trackers.log_completions(self._progress.step, rows, self._terms)

    def flush(self) -> None:
        """Give trackers and traces a moment to send what was logged; for a trainer that ends with an error."""
        self._traces.flush()
        self._trackers.flush()

    def close(self) -> None:
        """Close all files. Write the last step's line again with each evaluation that no line has."""
        for evaluated in self._evaluated if self._last else ():
            # Without times, which would be counted twice.
            figures = {name: value for name, value in self._last.items() if not name.startswith("time/")}
            self._append(self._metrics, figures | evaluated)
        self._trackers.close()
        self._traces.close()
        self._metrics.close()
        self._trained.close()
        self._sample_log.close()

    def _append(self, file: LineFile, line: dict[str, Any]) -> None:
        def write() -> None:
            with disk_errors(f"cannot write {file.path}"):
                file.append(json.dumps(line))

        self._context.retry("log", write)

    def _figures(self, batch: Batch, result: StepResult) -> dict[str, Any]:
        figures: dict[str, Any] = {
            "step": self._progress.step,
            "version": self._progress.version,
            "wall_s": time.time() - float(self._progress.started or 0),
            "trajectories": sum(len(group.samples) for group in batch.groups),
            "staleness/histogram": {str(age): tokens for age, tokens in result.staleness.items()},
            "samples/excluded": batch.excluded,
            "perf/tokens_per_s": self.tokens_per_s,
            **batch.figures,
        }
        metrics = dict(result.metrics)
        flops = metrics.pop("forward_flops", 0.0)
        figures |= compute_metrics(flops, result.seconds, self._ranks.world, device_name())
        figures |= memory_metrics()
        for name, value in metrics.items():
            section, _, rest = name.partition("_")
            known = section in ("reward", "staleness")
            figures[f"{section}/{rest}" if known else f"train/{name}"] = value
        return figures
