"""From a config to its Plan: description, cluster and planner put together. No torch."""

from dataclasses import replace
from pathlib import Path

from danlu.base.errors import ConfigError, UserError
from danlu.base.facts import ClusterFacts, ModelShape
from danlu.base.files import atomic_write
from danlu.config.data import TokenizerConfig
from danlu.config.load import require_available
from danlu.config.run import RunConfig
from danlu.hardware.cluster import cpu_on_paper, local_cluster, parse_cluster
from danlu.models.describe import describe
from danlu.planner.cost import setting_of, step_cost
from danlu.planner.plan import Plan
from danlu.planner.search import make_plan, pin
from danlu.planner.timeline import timeline_html

__all__ = ["layout_is_open", "plan_run", "shape_of", "write_timeline"]

_RAW_BYTES_AND_END = 257


def shape_of(config: RunConfig) -> ModelShape:
    """The model in numbers; reads a configured tokenizer file, trains none.

    Raises:
        ConfigError: numbers that do not go together.
        DataError: a tokenizer file that is missing or broken.
    """
    return config.model.shape(_tokenizer_size(config.data_pipeline.tokenizer))


def _tokenizer_size(config: TokenizerConfig) -> int:
    if config.type == "bytes":
        return _RAW_BYTES_AND_END
    if config.type == "bpe":
        return config.vocab_size
    from danlu.data.tokenizer import configured_tokenizer  # heavy: only where a file must be read

    return configured_tokenizer(config).size


def plan_run(
    config: RunConfig,
    cluster: str | Path | ClusterFacts | None = None,
    *,
    world: int | None = None,
    before: Plan | None = None,
) -> Plan:
    """The plan of a run.

    Args:
        config: what the user wants.
        cluster: `16x8xh100`, facts, or None for this machine.
        world: ranks that a launcher has already started.
        before: the plan of the run that is resumed; what decides learning is kept from it.

    Raises:
        ConfigError: a key that is not available, numbers that do not go together, or a model that
            does not fit.
    """
    require_available(config)
    if cluster is None:
        cluster = local_cluster()
        if config.train.device == "cpu" and cluster.device.kind != "cpu":
            device = cpu_on_paper()
            cluster = replace(cluster, devices_per_node=1, device=device)
    elif not isinstance(cluster, ClusterFacts):
        cluster = parse_cluster(str(cluster))
    if before is not None:
        config = pin(config, before)
    shape = shape_of(config)
    return make_plan(config, shape, describe(shape), cluster, world=world)


def layout_is_open(config: RunConfig) -> bool:
    """Whether the planner chooses among layouts, other than the number of copies."""
    pipeline = config.pipeline_parallel
    return "auto" in (
        config.tensor_parallel.degree,
        pipeline.stages,
        config.zero_optimization.stage,
        pipeline.schedule if pipeline.stages != 1 else None,
    )


def write_timeline(plan: Plan, path: Path) -> None:
    """Draws a plan's pipeline schedule as a page that opens in a browser.

    Raises:
        ConfigError: a plan without a pipeline.
        UserError: the file cannot be written.
    """
    layout = plan.layout
    if layout.pipeline == 1:
        raise ConfigError(
            "--timeline", "the plan has no pipeline to draw.", "Set pipeline_parallel.stages."
        )
    setting = setting_of(
        plan.cluster,
        layout,
        width=plan.model.hidden_size,
        number_format=plan.format,
        backend=plan.backend,
        compiled=plan.compile,
    )
    cost = step_cost(
        describe(plan.model),
        layout,
        setting,
        micro_tokens=plan.micro_batch * plan.model.sequence_length,
        micro_batches=plan.accumulation,
    )
    assert cost.timeline is not None, "a pipeline has a timeline"
    notes = (
        f"{plan.accumulation} micro-batches of {plan.micro_batch} sequences, simulated",
        f"layers of each stage: {', '.join(str(n) for n in layout.stages)}",
    )
    try:
        with atomic_write(path) as file:
            file.write(timeline_html(cost.timeline, layout.text(), notes))
    except OSError as error:
        raise UserError(
            "--timeline", f"{path} cannot be written ({error.strerror}).", "Name another file."
        ) from None
