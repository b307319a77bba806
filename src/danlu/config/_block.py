"""What all blocks share: frozen, no unknown keys, `auto`, units, capabilities still to come."""

import typing
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    ValidationInfo,
    WithJsonSchema,
    field_validator,
)

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
    "PositiveNumber",
    "Seconds",
    "Seed",
    "Text",
    "planned",
]

Auto = Literal["auto"]
"""The planner turns this into a number."""

NOT_YET, NOT_YET_VALUES = "x-not-yet", "x-not-yet-values"
T = TypeVar("T")


class Block(BaseModel):
    """A block of the config: read-only, and a key it does not know is an error.

    Numbers are finite, and `true` is not one of them.
    """

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
        arbitrary_types_allowed=True,
        allow_inf_nan=False,
    )

    @field_validator("*", mode="before")
    @classmethod
    def _true_is_no_number(cls, value: object, info: ValidationInfo) -> object:
        """Python takes `True` for 1; who writes `true` for a number has mixed up two keys."""
        found = next((v for v in _items(value) if isinstance(v, bool)), None)
        kinds = _kinds(cls.model_fields[info.field_name or ""].annotation)
        if found is not None and bool not in kinds and kinds & {int, float}:
            raise ValueError(f"{str(found).lower()} is not a number; write it in digits")
        return value


def planned(default: T, *, values: tuple[Any, ...] = ()) -> T:
    """A key that is designed but not built: any other value than its default is refused, aloud.

    Args:
        default: the value that means "not used".
        values: when given, only these values are refused; the others work.
    """
    extra: dict[str, Any] = {NOT_YET_VALUES: list(values)} if values else {NOT_YET: True}
    return Field(default, json_schema_extra=extra)


def _items(value: object) -> tuple[object, ...]:
    return tuple(value) if isinstance(value, list | tuple) else (value,)


def _kinds(annotation: Any) -> set[Any]:
    """All types that an annotation such as `float | Literal["auto"]` is made of."""
    inner = typing.get_args(annotation)
    if typing.get_origin(annotation) is Literal:
        return {type(value) for value in inner}
    return {annotation}.union(*map(_kinds, inner)) if inner else {annotation}


def _unit(schema_pattern: str, kind: str) -> WithJsonSchema:
    return WithJsonSchema(
        {"anyOf": [{"type": kind}, {"type": "string", "pattern": schema_pattern}]}
    )


Bytes = Annotated[int, BeforeValidator(parse_bytes), _unit(r"^[\d.]+ ?([KMGTP]i?)?B?$", "integer")]
Seconds = Annotated[float, BeforeValidator(parse_duration), _unit(r"^[\d.]+ ?[a-z]+", "number")]
Count = Annotated[
    int,
    BeforeValidator(parse_count),
    Field(le=10**12),
    _unit(r"^[\d.e+_]+ ?[kKMBGT]?$", "integer"),
]
"""At most a million million: more is a slip, and would be counted to, or held in memory."""
Positive = Annotated[Count, Field(ge=1)]
PositiveNumber = Annotated[float, Field(gt=0)]
Seed = Annotated[int, Field(ge=0, le=2**62)]
"""Bounded so that a step can be added to it and every generator still takes it."""
Text = Annotated[str, Field(min_length=1)]
Limit = Annotated[
    Bound,
    BeforeValidator(parse_bound),
    PlainSerializer(str, return_type=str),
    WithJsonSchema({"type": "string", "pattern": r"^(<|<=|>|>=) ?[\d.]+$"}),
]
