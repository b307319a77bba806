"""The command line.

Commands import what they need when they run, so that `--help`, `plan`, `report` and `schema` answer
at once. No option mirrors a config key: overrides are words like `train.steps=1000`.
"""

import json
import math
import os
import shlex
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from danlu.base.errors import ConfigError, DanluError, UserError
from danlu.base.output import guard_output

if TYPE_CHECKING:
    from danlu.config.run import RunConfig

__all__ = ["main"]

app = typer.Typer(
    name="danlu",
    help=(
        "Train transformer language models, from a laptop to a cluster, on one config file.\n\n"
        "[bold]danlu train run.yaml train.steps=1000[/]  trains; the same command resumes.\n\n"
        "A config of three lines is a whole run:\n\n"
        "  model: {preset: tiny}\n\n"
        "  data_pipeline: {sources: [{type: files, path: books/}]}\n\n"
        "  train: {steps: 1000}\n\n"
        "Every key: docs/config.md, or [bold]danlu schema[/] for your editor."
    ),
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    add_completion=False,
)

Words = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[CONFIG] [KEY=VALUE]...",
        help="A YAML or JSON file, and keys that win over it, e.g. train.steps=1000.",
        show_default=False,
    ),
]
RunPath = Annotated[Path, typer.Argument(metavar="RUN", help="A run's folder, e.g. runs/small.")]


def _load(words: list[str] | None) -> "RunConfig":
    from danlu.config.load import load, split_words

    file, overrides = split_words(words or [])
    return load(file, *overrides)


@app.command()
def train(words: Words = None) -> None:
    """Train a model, or go on with a run that was stopped.

    Prepares the text, plans, builds kernels, trains with live progress, and ends with a report.
    Ctrl-C writes a checkpoint first; the same command then goes on. Under torchrun it joins the
    other ranks; data_parallel.degree=2 starts two ranks itself. Exit codes: 0 done, 130 stopped
    before its last step, 1 the loss is not finite, 2 something to mend.
    """
    config = _load(words)
    from danlu.hardware.comm import first_rank, launched_world
    from danlu.train.folder import RunFolder
    from danlu.train.launch import train as train_config

    reason = train_config(config)
    if first_rank():
        folder = RunFolder.of(config)
        from danlu.monitor.summary import summarise

        if folder.path.exists():  # one that was stopped before its first step leaves nothing
            typer.echo("\n" + summarise(folder.path).summary())
            typer.echo(f"\nReport: {folder.report}")
        if reason == "done":
            try_it = ["danlu", "generate", str(folder.path), "--prompt", "def "]
            typer.echo(f"Try it: {shlex.join(try_it)}")
        if reason == "interrupted" and not launched_world():
            typer.echo(f"Go on: {shlex.join(['danlu', 'train', *(words or [])])}")
    raise typer.Exit({"nan": 1, "interrupted": _INTERRUPTED}.get(reason, 0))


@app.command()
def plan(
    words: Words = None,
    cluster: Annotated[
        str | None,
        typer.Option(help="Machines to plan for, e.g. 16x8xh100; this machine when left out."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="The plan as JSON.")] = False,
    timeline: Annotated[
        Path | None,
        typer.Option(dir_okay=False, help="Draw the pipeline's schedule into this HTML file."),
    ] = None,
    validate: Annotated[
        bool,
        typer.Option(
            "--validate",
            help="Train the layout in small on this machine; compare with one process.",
        ),
    ] = False,
    ranks: Annotated[int, typer.Option(min=2, help="Most processes of --validate.")] = 8,
) -> None:
    """Show what a run would be: every number, why, and what it should cost.

    Works on a laptop for a cluster that one does not have.
    """
    from danlu.train.planning import plan_run, write_timeline

    made = plan_run(_load(words), cluster)
    if as_json:
        typer.echo(json.dumps({"hash": made.hash, **made.to_dict()}, indent=1))
    else:
        typer.echo(made.explain())
    if timeline is not None:
        write_timeline(made, timeline)
        typer.echo(f"\nTimeline: {timeline}", err=as_json)
    if validate:
        from danlu.train.validate import validate as run_small

        found = run_small(made, most_ranks=ranks)
        typer.echo(f"\n{found.text()}", err=as_json)
        raise typer.Exit(0 if found.passed else 1)


@app.command()
def prepare(words: Words = None) -> None:
    """Turn text into token shards, in parallel; a second call finds them done.

    `danlu train` does it by itself; this is for preparing ahead, or once for many runs.
    """
    config = _load(words)
    from danlu.config.load import require_available

    require_available(config)
    from danlu.base.units import format_bytes, format_count
    from danlu.data.prepare import prepare as prepare_corpus
    from danlu.monitor.live import open_display

    with open_display(config.monitor.progress) as display:
        corpus = prepare_corpus(
            config.data_pipeline,
            watch=lambda s: display.phase(f"preparing text: {s.phase}", s.done, s.total),
        )
    facts = corpus.facts
    size = format_bytes(facts.train_bytes + facts.validation_bytes)
    typer.echo(
        f"{facts.documents} documents, {size} of text: {format_count(facts.train_tokens)} tokens to"
        f" train on, {format_count(facts.validation_tokens)} held out; vocabulary"
        f" {facts.vocab_size}."
    )
    typer.echo(f"Token shards: {corpus.folder}")
    if corpus.left_out:
        typer.echo(corpus.left_out)


@app.command()
def doctor(
    measure: Annotated[bool, typer.Option(help="Measure the rates again.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
) -> None:
    """Say what this machine has, how fast it is, and what danlu will use."""
    from danlu.train.doctor import examine

    found = examine(fresh=measure)
    typer.echo(json.dumps(found.to_dict(), indent=1) if as_json else found.text())


@app.command()
def report(run: RunPath) -> None:
    """Write a run's report.html from its files, and print the summary."""
    from danlu.monitor.report import write_report
    from danlu.monitor.summary import summarise

    path = write_report(run)
    typer.echo(summarise(run).summary())
    typer.echo(f"\nReport: {path}")


@app.command()
def watch(
    run: RunPath,
    once: Annotated[bool, typer.Option(help="Show the state once and end.")] = False,
) -> None:
    """Follow a run from another terminal."""
    from danlu.monitor.watch import watch as follow

    follow(run, once=once)


@app.command()
def generate(
    run: RunPath,
    prompt: Annotated[str, typer.Option(help="Text to continue.")] = "",
    tokens: Annotated[int, typer.Option(min=1, help="Most tokens to write.")] = 200,
    temperature: Annotated[float, typer.Option(min=0, help="0 takes the likeliest.")] = 0.8,
    top_k: Annotated[int, typer.Option(min=0, help="Only the k likeliest; 0 means all.")] = 50,
    top_p: Annotated[float, typer.Option(min=0, max=1, help="Only the likeliest share.")] = 0.95,
    seed: Annotated[int, typer.Option(min=0, max=2**62, help="Of the draw.")] = 0,
    device: Annotated[str, typer.Option(help="cpu, cuda or auto.")] = "auto",
) -> None:
    """Continue a text with a trained model, token by token."""
    if not math.isfinite(temperature) or math.isnan(top_p):
        raise ConfigError("--temperature, --top-p", "these are finite numbers.", "Write 0.8.")
    try:
        prompt.encode()
    except UnicodeEncodeError:
        raise ConfigError("--prompt", "this is not valid text.", "Write it as UTF-8.") from None
    from danlu.models.generate import Sampling
    from danlu.train.inference import continue_text, load_model

    loaded = load_model(
        run, device=device, warn=lambda text: typer.echo(f"warning: {text}", err=True)
    )
    typer.echo(prompt, nl=False)
    for piece in continue_text(loaded, prompt, tokens, Sampling(temperature, top_k, top_p, seed)):
        typer.echo(piece, nl=False)
        sys.stdout.flush()
    typer.echo()


@app.command()
def schema() -> None:
    """Print the config's JSON schema; editors complete and check YAML with it."""
    from danlu.config.describe import schema as config_schema

    typer.echo(json.dumps(config_schema(), indent=1))


class _Terminated(KeyboardInterrupt):
    """SIGTERM: what a scheduler does where a person presses Ctrl-C."""


_INTERRUPTED, _TERMINATED = 130, 143
_UsageError = cast(type[Exception], typer.BadParameter.__mro__[1])  # typer has no public name
_WORKING = (["train"], ["prepare"])
"""Commands that leave something behind, whether or not somebody reads what they print."""


def main() -> None:
    """Runs the command line; what the user can mend is one line and exit code 2."""
    arguments = sys.argv[1:] or ["--help"]
    working = arguments[:1] in _WORKING
    guard_output(outlive_reader=working)
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _terminate)
    try:
        code = _run(arguments)
    except DanluError as error:
        if not isinstance(error, UserError) or not error.common or _first_on_machine():
            typer.echo(f"error: {error}", err=True)
        code = error.exit_code
    except KeyboardInterrupt as stop:
        if _first_on_machine():
            kept = "; what is done is kept, the same command goes on" if working else ""
            typer.echo(f"interrupted{kept}", err=True)
        code = _TERMINATED if isinstance(stop, _Terminated) else _INTERRUPTED
    sys.exit(code)


def _run(arguments: Sequence[str]) -> int:
    """One command, without typer's own handling of errors and signals; returns the exit code.

    Raises:
        UserError: anything that the user can mend.
    """
    command = typer.main.get_command(app)
    try:
        with command.make_context("danlu", list(arguments)) as context:
            command.invoke(context)
    except typer.Exit as end:
        return end.exit_code
    except _UsageError as error:
        raise _explain(error) from None
    return 0


def _explain(error: Any) -> UserError:
    """A wrong option, argument or command as one of our own errors."""
    command = error.ctx.command_path if error.ctx else "danlu"
    text = error.format_message()
    end = "" if text.endswith((".", "?")) else "."
    return UserError(command, f"{text}{end}", f"See {command} --help.")


def _terminate(number: int, frame: object) -> None:
    raise _Terminated


def _first_on_machine() -> bool:
    """Whether this process is the one that talks: the only one, or a launcher's first one here."""
    return "0" in (os.environ.get("RANK", "0"), os.environ.get("LOCAL_RANK"))


if __name__ == "__main__":
    main()
