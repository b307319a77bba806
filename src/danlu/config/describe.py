"""The config explained from its own models: a JSON schema for editors, and `docs/config.md`."""

import json
import types
import typing
from typing import Any, Literal

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from danlu.base.units import Bound
from danlu.config._block import NOT_YET, NOT_YET_VALUES
from danlu.config.run import RunConfig

__all__ = ["reference", "schema"]


def schema() -> dict[str, Any]:
    """The JSON schema of a run's config; editors complete and check YAML with it."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema"
    } | RunConfig.model_json_schema()


def reference() -> str:
    """The reference page: every block, key, type, default and meaning (Markdown)."""
    lines = ["# Every key of the config", "", _PREFACE, ""]
    lines += _block_lines(RunConfig, "")
    return "\n".join(lines).rstrip() + "\n"


_PREFACE = """\
Generated from the models in `src/danlu/config/` by `make docs`; do not edit. Every key has a
default. Sizes are written like `4GiB`, durations like `10min`, counts like `300k`, bounds like
`<0.05`. `auto` is turned into a number by the planner; `danlu plan run.yaml` shows which. Keys
marked *not yet* belong to the design but are refused by this version."""


def _block_lines(block: type[BaseModel], prefix: str) -> list[str]:
    title = prefix.removesuffix(".") or "Top level"
    text = " ".join((block.__doc__ or "").split())
    lines = [f"## `{title}`" if prefix else f"## {title}", "", text, ""]
    lines += ["| key | type | default | meaning |", "|---|---|---|---|"]
    below: list[str] = []
    for name, field in block.model_fields.items():
        inner = _inner_block(field.annotation)
        many = inner is not None and typing.get_origin(field.annotation) is tuple
        if inner is not None:
            below += _block_lines(inner, f"{prefix}{name}{'[]' if many else ''}.")
        default = "the keys below" if inner and not many else f"`{_shown(field)}`"
        meaning = (field.description or "").replace("|", "\\|")
        lines.append(f"| `{name}` | {_kind(field)} | {default} | {meaning}{_mark(field)} |")
    return [*lines, "", *below]


def _mark(field: FieldInfo) -> str:
    extra = field.json_schema_extra if isinstance(field.json_schema_extra, dict) else {}
    refused = extra.get(NOT_YET_VALUES)
    if isinstance(refused, list):
        return " *Not yet: " + ", ".join(f"`{v}`" for v in refused) + ".*"
    return " *Not yet.*" if extra.get(NOT_YET) else ""


def _shown(field: FieldInfo) -> str:
    default = field.get_default(call_default_factory=True)
    if isinstance(default, tuple):
        default = [
            d.model_dump(exclude_defaults=True) if isinstance(d, BaseModel) else d for d in default
        ]
    return json.dumps(default, default=str)


def _inner_block(annotation: Any) -> type[BaseModel] | None:
    for argument in (annotation, *typing.get_args(annotation)):
        if isinstance(argument, type) and issubclass(argument, BaseModel):
            return argument
    return None


def _kind(field: FieldInfo) -> str:
    return _type_words(field.annotation).replace("|", "\\|")


_WORDS = {
    int: "count",
    float: "number",
    str: "text",
    bool: "true/false",
    type(None): "null",
    Bound: "bound",
}


def _type_words(annotation: Any) -> str:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "block"
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return _type_words(arguments[0])
    if origin is Literal:
        return " \\| ".join(f"`{a}`" for a in arguments).replace("\\|", "|")
    if origin in (typing.Union, types.UnionType):
        return " | ".join(dict.fromkeys(_type_words(a) for a in arguments))
    if origin is tuple:
        return f"list of {_type_words(arguments[0])}"
    return _WORDS.get(annotation, "mapping")
