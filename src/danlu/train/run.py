"""One run: its folder, its plan, its text, its parts, and what happens between steps."""

import contextlib
import gc
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from danlu.base.errors import CheckpointError, ConfigError, DanluError, UserError
from danlu.base.events import JsonLines
from danlu.base.facts import StepReport
from danlu.base.files import explain_disk_full, write_json
from danlu.base.units import format_bytes, format_count, format_rate
from danlu.checkpoint.disk import CheckpointStore, read_facts
from danlu.checkpoint.state import CheckpointFacts
from danlu.config.load import expand_path, require_available
from danlu.config.run import RunConfig
from danlu.data.corpus import Corpus
from danlu.data.loader import Loader, training_order
from danlu.data.prepare import prepare
from danlu.hardware.cluster import local_cluster
from danlu.hardware.comm import Comm, join_ranks, launched_nodes
from danlu.hardware.device import device_kind, probe
from danlu.models.generate import Sampling, generate
from danlu.models.transformer import Transformer
from danlu.monitor.live import Display, open_display
from danlu.monitor.meter import Meter
from danlu.monitor.recorder import Recorder
from danlu.monitor.report import write_report
from danlu.monitor.sinks._base import SINKS
from danlu.monitor.summary import RunSummary, summarise
from danlu.optim.schedules._base import SCHEDULES
from danlu.planner.plan import Plan
from danlu.train.adapt import Adapter
from danlu.train.balance import Balancer, dealable
from danlu.train.build import Learner, build, build_loader, document_end
from danlu.train.control import StopRequest
from danlu.train.evaluate import evaluate
from danlu.train.folder import RunFolder
from danlu.train.inference import load_model
from danlu.train.loop import Ended, train_steps
from danlu.train.planning import plan_run

__all__ = ["Run", "open_run"]

_SAMPLED_PARAMETERS = 2e9
"""A larger model is not read back by one rank only to write a sample."""


class Run:
    """A run that is ready to train. Made by `open_run` (or `danlu.build`).

    Attributes:
        folder: everything it leaves behind.
        config: what the user wants.
        plan: every number.
        corpus: the prepared text.
        comm: all ranks.
    """

    def __init__(
        self,
        folder: RunFolder,
        config: RunConfig,
        plan: Plan,
        corpus: Corpus,
        comm: Comm,
        display: Display,
    ) -> None:
        self.folder, self.config, self.plan = folder, config, plan
        self.corpus, self.comm = corpus, comm
        self._display = display
        self._peaks_left = 3
        self._scratch = folder.path / "offload"
        self._adapter = Adapter(
            config, plan, comm, scratch=self._scratch,
            phase=self._phase, note=self._note, event=self._event,
        )  # fmt: skip
        self._events = JsonLines(folder.events, comm.rank)
        self._store = CheckpointStore(
            folder.checkpoints, comm, keep=config.checkpoint.keep, warn=self._warn
        )

    def train(self) -> str:
        """Trains to the plan's last step; goes on from the newest whole checkpoint.

        Returns `done`, `interrupted` (Ctrl-C; a checkpoint was written) or `nan`. Afterwards the
        ranks have parted and the folder is free.

        Raises:
            CheckpointError: a checkpoint that does not fit, or a full disk at the end.
        """
        try:
            with self._display, StopRequest() as stop:
                return self._train_from_newest(stop)
        finally:
            self._events.close()
            self.folder.release()
            self.comm.close()

    def _train_from_newest(self, stop: StopRequest) -> str:
        try:
            learner, first, position = self._build()
        except UserError:
            self.folder.discard()
            raise
        if self.comm.largest(float(stop.wanted)):
            self.folder.discard()
            self._display.stop("interrupted")
            return "interrupted"
        if first >= self.plan.steps:
            self._note(f"All {self.plan.steps} steps are done; set train.steps to go further.")
            return "done"
        self._announce(first)
        if self.corpus.left_out:
            self._note(self.corpus.left_out)
        with Recorder(self.folder.path, self._sinks(), events=self._events) as recorder:
            ended, loader = self._train(learner, position, stop, recorder, first)
            while ended.reason == "replan":
                first, position = ended.step, loader.state()["position"]
                with stop.saving():
                    saved = self._try_to_save(learner, loader, first)
                loader.close()
                if saved:
                    del learner
                    gc.collect()  # wrapped models are cyclic
                    self._adapter.cut_again()
                    self._take_plan()
                    learner, first, position = self._load(replanned=True)
                ended, loader = self._train(learner, position, stop, recorder, first)
        if ended.reason != "nan":
            with stop.saving():
                self._save(learner, loader, ended.step)
            self._sample_from_checkpoint(ended.step)
        loader.close()
        self._close(ended)
        return ended.reason

    def report(self) -> RunSummary:
        """What the run has reached so far, from its files."""
        return summarise(self.folder.path)

    def _build(self) -> tuple[Learner, int, int]:
        """What learns, the steps it has done, and the samples it has read."""
        self._adapter.before_first_step()
        self._take_plan()
        self._phase("building the model and its kernels")
        return self._load()

    def _take_plan(self) -> None:
        """The adapter's plan becomes the run's, with the device's peak as it is known by now."""
        self.plan = replace(self._adapter.plan, cluster=self.plan.cluster)
        if self.comm.first:
            self._write_plan()

    def _write_plan(self) -> None:
        try:
            self.plan.save(self.folder.plan)
        except OSError as error:  # the run goes on: what it does not find there is planned again
            self._warn(f"{self.folder.plan} cannot be written ({error.strerror}).")

    def _load(self, *, replanned: bool = False) -> tuple[Learner, int, int]:
        """Builds the plan's parts and gives them the newest checkpoint."""
        learner = self._build_learner(self._scratch)
        newest = self._store.newest()
        if newest is None and self.comm.share(any(self._store.all())):
            raise CheckpointError(
                str(self.folder.checkpoints),
                "no checkpoint of this run is whole.",
                "Use folder=… for a new run, or delete this folder to start again from step 0.",
            )
        if newest is None:
            if self.config.checkpoint.start_from is not None:
                self._start_from(learner, self.config.checkpoint.start_from)
            return learner, 0, 0
        facts = read_facts(newest)
        self._check_fit(newest, facts)
        self._store.load(newest, learner.model, learner.optimizer)
        if not replanned:
            self._event("resume", step=facts.step, checkpoint=newest.name, world=self.comm.world)
            self._note(f"Goes on after step {facts.step} ({newest.name}).")
        return learner, facts.step, facts.data["position"]

    def _build_learner(self, scratch: Path) -> Learner:
        """The parts; a mistake that one rank meets ends all of them."""
        problem: UserError | None = None
        try:
            learner = build(self.config, self.plan, self.comm, scratch=scratch, note=self._note)
        except UserError as error:
            problem = error
        if self.comm.largest(float(problem is not None)):
            raise problem or CheckpointError(
                str(self.folder.logs), "another rank met a mistake.", "It is in that rank's log."
            )
        return learner

    def _start_from(self, learner: Learner, text: str) -> None:
        path = expand_path(text, "checkpoint.start_from")
        if (path / "checkpoints").is_dir():
            others = CheckpointStore(path / "checkpoints", self.comm, keep=1, warn=self._warn)
            path = others.newest() or path
        self._check_model(path, read_facts(path))
        self._store.load(path, learner.model, None)
        self._note(f"Starts with the weights of {path}.")

    def _check_fit(self, path: Path, facts: CheckpointFacts) -> None:
        self._check_model(path, facts)
        if facts.corpus != self.corpus.fingerprint:
            raise CheckpointError(
                str(path),
                "the text has changed since this checkpoint was written.",
                "Use folder=… for a new run (checkpoint.start_from keeps the weights).",
            )

    def _check_model(self, path: Path, facts: CheckpointFacts) -> None:
        for name, mine in asdict(self.plan.model).items():
            if facts.model.get(name) != mine:
                raise CheckpointError(
                    str(path),
                    f"it holds another model ({name}: {facts.model.get(name)} there, {mine} here).",
                    "Use folder=… for a new run, or the model of the checkpoint.",
                )

    def _train(
        self,
        learner: Learner,
        position: int,
        stop: StopRequest,
        recorder: Recorder,
        first: int,
    ) -> tuple[Ended, Loader]:
        """Trains on from step `first` and the sample at `position`."""
        plan = self.plan
        loader = build_loader(self.config, plan, self.corpus, learner.ranks, position=position)
        self._adapter.watch(learner)
        meter = Meter(
            self.comm,
            learner.device,
            flops_per_token=plan.flops_per_token,
            peak_flops=plan.peak_flops,
        )

        def on_report(report: StepReport) -> None:
            if self.comm.first:
                report = self._within_peak(report, meter)
                recorder.step(report)
                self._display.step(report)

        def after_step(step: int) -> bool:
            last = step == plan.steps
            with meter.paused():
                if last or step % plan.evaluate_every == 0:
                    self._evaluate(learner, step, recorder, last=last)
                if not last and step % plan.checkpoint_every == 0:
                    with stop.saving():
                        self._try_to_save(learner, loader, step)
            return self._adapter.after_step() and not last

        balancer = None
        if self.config.data_parallel.balance and dealable(plan.layout, plan.accumulation):
            balancer = Balancer(learner.ranks, loader, self._note)
        every, often = self.config.monitor.log_every, 1 if learner.device.kind == "cpu" else 10
        ended = train_steps(
            learner,
            loader,
            meter,
            stop,
            first=first,
            check_every=often,
            report_every=often if every == "auto" else every,
            on_report=on_report,
            after_step=after_step,
            balancer=balancer,
        )
        return ended, loader

    def _within_peak(self, report: StepReport, meter: Meter) -> StepReport:
        """Nothing is faster than its peak: where a step was, the peak is measured again.

        A few times at most, and on CPUs only: a GPU's peak was its own, and its memory is taken.
        """
        known = self.plan.cluster.device
        if report.mfu is None or report.mfu <= 1 or known.kind != "cpu" or not self._peaks_left:
            return report
        self._peaks_left -= 1
        with meter.paused():
            found = probe(known.kind)
        if found.peak_flops[self.plan.format] > known.peak_flops[self.plan.format]:
            before = self.plan.peak_flops
            self.plan = replace(self.plan, cluster=replace(self.plan.cluster, device=found))
            self._write_plan()
            meter.peak_flops = self.plan.peak_flops
            self._note(
                f"A step was faster than the peak of {format_rate(before)} that was measured; now"
                f" {format_rate(meter.peak_flops)}."
            )
        return replace(report, mfu=meter.utilisation(report.tokens_per_second))

    def _evaluate(self, learner: Learner, step: int, recorder: Recorder, *, last: bool) -> None:
        evaluation = evaluate(
            learner,
            self.corpus,
            step,
            self.plan.evaluate_tokens,
            document_end=document_end(self.config, self.corpus),
        )
        if not self.comm.first:
            return
        if evaluation is not None:
            recorder.evaluation(evaluation)
            self._display.evaluation(evaluation)
        if not self.plan.layout.plain:  # no rank has the whole model
            return
        prompts = self.config.monitor.sample_prompts
        if prompts and not last:  # one a time: they cost training time
            prompts = (prompts[step // self.plan.evaluate_every % len(prompts)],)
        self._sample(learner.model, prompts, step)

    def _sample_from_checkpoint(self, step: int) -> None:
        """What the model writes, where ranks share it: the first one reads all of it back."""
        prompts = self.config.monitor.sample_prompts
        if self.plan.layout.plain or not self.comm.first or not prompts:
            return
        if self.plan.parameters > _SAMPLED_PARAMETERS:
            self._note("No sample is written: the model is large. Use danlu generate.")
            return
        loaded = load_model(self.folder.path, device=self.config.train.device, warn=self._warn)
        self._sample(loaded.model, prompts, step)

    def _sample(self, model: Transformer, prompts: tuple[str, ...], step: int) -> None:
        for prompt in prompts if self.config.monitor.sample_tokens else ():
            text = self._continue(model, prompt, step)
            self._event("sample", step=step, prompt=prompt, text=text)
            self._display.sample(prompt, text)

    def _continue(self, model: Transformer, prompt: str, step: int) -> str:
        tokenizer = self.corpus.tokenizer
        ids = [int(i) for i in tokenizer.encode_batch([prompt])[0]]
        tokens = self.config.monitor.sample_tokens
        sampling = Sampling(seed=self.config.train.seed + step)
        return tokenizer.decode(list(generate(model, ids, tokens, tokenizer.end, sampling)))

    def _save(self, learner: Learner, loader: Loader, step: int) -> None:
        began = time.perf_counter()
        facts = CheckpointFacts(
            step=step,
            data=loader.state(),
            model=asdict(self.plan.model),
            corpus=self.corpus.fingerprint,
            run=self.folder.identity_hash(),
        )
        path = self._store.save(learner.model, learner.optimizer, facts)
        seconds = round(time.perf_counter() - began, 3)
        self._event("checkpoint", step=step, path=path.name, seconds=seconds)

    def _try_to_save(self, learner: Learner, loader: Loader, step: int) -> bool:
        """A checkpoint on the way; one that cannot be written is a warning, not the run's end."""
        try:
            self._save(learner, loader, step)
        except CheckpointError as error:
            self._warn(str(error))
            return False
        return True

    def _close(self, ended: Ended) -> None:
        message = ""
        if ended.reason == "nan":
            message = (
                f"the loss or gradient of step {ended.step + 1} is not a finite number; training"
                " stopped before its update. Lower optimizer.learning_rate, or look at the data."
            )
            self._event("nan", step=ended.step + 1, reason=message)
            self._display.note(f"error: {message}")
        self._event("stop", step=ended.step, reason=ended.reason, message=message)
        if self.comm.first:
            try:
                write_report(self.folder.path)
            except UserError as error:  # the run is done and saved; the report can be made later
                self._warn(str(error))
            self._display.stop(ended.reason)
        self.comm.wait()

    def _announce(self, first: int) -> None:
        plan, device = self.plan, self.plan.cluster.device
        self._event("start", step=first, plan=plan.hash, world=self.comm.world, device=device.name)
        if not self.comm.first:
            return
        corpus, ranks = self.corpus.facts, plan.layout.ranks
        facts = {
            "model": f"{format_count(plan.parameters)} parameters, {plan.model.layers} layers of"
            f" {plan.model.hidden_size}, sequences of {plan.model.sequence_length}",
            "text": f"{format_count(corpus.train_tokens)} tokens of {corpus.documents} documents,"
            f" vocabulary {corpus.vocab_size}",
            "run": f"{plan.steps} steps of {format_count(plan.batch_tokens)} tokens, learning rate"
            f" {plan.learning_rate:g}",
            "device": f"{device.name}, {plan.threads} threads"
            f"{f' x {ranks} ranks ({plan.layout.text()})' if ranks > 1 else ''}, {plan.format} at"
            f" {format_rate(plan.peak_flops)}, {plan.backend} kernels",
            "expected": f"{format_count(plan.predicted.tokens_per_second)} tokens/s,"
            f" {format_bytes(plan.predicted.memory_bytes)} a rank",
            "folder": str(self.folder.path),
        }
        self._display.start(
            self.config.name or self.folder.path.name,
            facts,
            total_steps=plan.steps,
            start_step=first,
        )

    def _sinks(self) -> tuple[str, ...]:
        return self.config.monitor.sinks if self.comm.first else ()

    def _event(self, kind: str, **fields: Any) -> None:
        if self.comm.first:
            with contextlib.suppress(OSError):  # a full disk must not end the run from in here
                self._events.write(kind=kind, **fields)

    def _phase(self, text: str) -> None:
        self._display.phase(text, 0, None)

    def _note(self, text: str) -> None:
        self._event("note", text=text)
        if self.comm.first:
            self._display.note(text)

    def _warn(self, text: str) -> None:
        self._event("warning", text=text)
        if self.comm.first:
            self._display.note(f"warning: {text}")


def open_run(config: RunConfig, *, display: Display | None = None) -> Run:
    """Everything before the first step: folder, text, device, plan. Resumes what it finds.

    Under a launcher every rank calls it; the first one decides, the others are told.

    Raises:
        UserError: anything that the user can mend; the folder is left as it was.
    """
    require_available(config)
    device = device_kind(config.train.device)
    comm = join_ranks(device, timeout_seconds=config.launch.timeout)
    if display is None:
        console = Console(highlight=False, quiet=not comm.first)
        display = open_display(config.monitor.progress if comm.first else False, console)
    with display:
        decided = _on_first(comm, lambda: decide(config, display, world=comm.world))
    corpus = Corpus.open(decided.corpus)
    return Run(decided.folder, config, decided.plan, corpus, comm, display)


class Decided(NamedTuple):
    """What every rank must know before it builds anything."""

    folder: RunFolder
    plan: Plan
    corpus: Path


def _on_first(comm: Comm, work: Callable[[], Decided]) -> Decided:
    """The result of the first rank's `work` on every rank, or its error."""
    outcome: Decided | DanluError | None = None
    kept: RunFolder | None = None
    if comm.first:
        try:
            outcome = work()
            kept = outcome.folder
        except DanluError as error:
            outcome = error
    outcome = comm.share(outcome)
    if isinstance(outcome, DanluError):
        raise outcome
    assert outcome is not None
    return outcome if kept is None else outcome._replace(folder=kept)


def decide(config: RunConfig, display: Display, *, world: int | None) -> Decided:
    """One process's work for all ranks: claims the folder, prepares the text, makes the plan.

    Args:
        config: what the user wants.
        display: shows how far the preparation is.
        world: ranks that are there, or are about to be started.

    Raises:
        UserError: anything that the user can mend; the folder is left as it was.
    """
    folder = RunFolder.of(config)
    known = folder.check(config)
    _check_names(config)
    before = Plan.load(folder.plan) if known and folder.plan.exists() else None
    display.phase("measuring the device", 0, None)
    probe(config.train.device)
    cluster = local_cluster(launched_nodes())
    plan = plan_run(config, cluster, world=world, before=before)
    if config.data_parallel.balance and not dealable(plan.layout, plan.accumulation):
        raise ConfigError(
            "data_parallel.balance",
            f"{plan.layout.text()} with {plan.accumulation} micro-batches a copy cannot be dealt.",
            "Leave it out, or use two copies or more, train.micro_batch for two micro-batches or"
            " more, no pipeline, and no ZeRO.",
        )
    corpus = prepare(
        config.data_pipeline,
        watch=lambda s: display.phase(f"preparing text: {s.phase}", s.done, s.total),
    )
    training_order(
        corpus.stream("train"),
        sequence_length=plan.model.sequence_length,
        seed=config.train.seed,
    )
    with explain_disk_full(folder.path, "Make room, or use folder=… on another disk."):
        try:
            folder.claim(config)
            plan.save(folder.plan)
            corpus.tokenizer.save(folder.tokenizer)
            facts = {"folder": str(corpus.folder), "fingerprint": corpus.fingerprint}
            write_json(folder.data, facts)
        except OSError:
            folder.discard()
            raise
    return Decided(folder, plan, corpus.folder)


def _check_names(config: RunConfig) -> None:
    """Parts that are chosen by name exist; found out before any work is done."""
    SCHEDULES.find(config.schedule.type)
    for sink in config.monitor.sinks:
        SINKS.find(sink)
