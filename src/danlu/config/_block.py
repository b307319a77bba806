"""What all blocks share: frozen, no unknown keys, `auto`, units, capabilities still to come."""

from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer, WithJsonSchema

from danlu.base.units import Bound, parse_bound, parse_bytes, parse_count, parse_duration

__all__ = [
    "NOT_YET",
    "NOT_YET_VALUES",
    "Auto",
    "Block",
    "Bytes",
    "Count",
    "Limit",
    "Positive",
    "Seconds",
    "planned",
]

Auto = Literal["auto"]
"""The planner turns this into a number."""

NOT_YET, NOT_YET_VALUES = "x-not-yet", "x-not-yet-values"
T = TypeVar("T")


class Block(BaseModel):
    """A block of the config: read-only, and a key it does not know is an error."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, arbitrary_types_allowed=True
    )


def planned(default: T, *, values: tuple[Any, ...] = ()) -> T:
    """A key that is designed but not built: any other value than its default is refused, aloud.

    Args:
        default: the value that means "not used".
        values: when given, only these values are refused; the others work.
    """
    extra: dict[str, Any] = {NOT_YET_VALUES: list(values)} if values else {NOT_YET: True}
    return Field(default, json_schema_extra=extra)


def _unit(schema_pattern: str, kind: str) -> WithJsonSchema:
    return WithJsonSchema(
        {"anyOf": [{"type": kind}, {"type": "string", "pattern": schema_pattern}]}
    )


Bytes = Annotated[int, BeforeValidator(parse_bytes), _unit(r"^[\d.]+ ?([KMGTP]i?)?B?$", "integer")]
Seconds = Annotated[float, BeforeValidator(parse_duration), _unit(r"^[\d.]+ ?[a-z]+", "number")]
Count = Annotated[int, BeforeValidator(parse_count), _unit(r"^[\d.e+_]+ ?[kKMBGT]?$", "integer")]
Positive = Annotated[Count, Field(ge=1)]
Limit = Annotated[
    Bound,
    BeforeValidator(parse_bound),
    PlainSerializer(str, return_type=str),
    WithJsonSchema({"type": "string", "pattern": r"^(<|<=|>|>=) ?[\d.]+$"}),
]
