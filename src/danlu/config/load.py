"""From a YAML or JSON file and `key=value` words to a checked, frozen `RunConfig`.

Whatever is wrong is said in one line: the key, what is wrong with its value, and how to mend it.
"""

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from danlu.base.errors import ConfigError, NotAvailableError, closest
from danlu.config._block import NOT_YET, NOT_YET_VALUES
from danlu.config.run import RunConfig

__all__ = ["expand_path", "load", "require_available"]


def load(source: str | Path | Mapping[str, Any] | None = None, *overrides: str) -> RunConfig:
    """Reads a config.

    Args:
        source: a YAML or JSON file, a mapping, or None for all defaults.
        overrides: words like `train.steps=100`; they win over the file. Values are read as YAML.

    Raises:
        ConfigError: a file or key that does not exist, a value of the wrong type, or one that
            cannot be.
    """
    if source is None:
        tree: dict[str, Any] = {}
    elif isinstance(source, Mapping):
        tree = dict(source)
    else:
        tree = read_file(Path(source))
        tree.setdefault("name", Path(source).stem)
    for word in overrides:
        _override(tree, word)
    try:
        return RunConfig.model_validate(tree)
    except ValidationError as error:
        raise _explain(error) from None


def expand_path(text: str, key: str) -> Path:
    """A path with `~` and `$VARIABLES` replaced.

    Raises:
        ConfigError: a variable that is not set.
    """
    expanded = os.path.expandvars(text)
    if "$" in expanded:
        name = expanded.split("$", 1)[1].split("/")[0].strip("{}")
        raise ConfigError(key, f"{text!r} needs ${name}, which is not set.", f"export {name}=…")
    return Path(expanded).expanduser()


def require_available(config: RunConfig) -> None:
    """Refuses keys whose capability this version does not have.

    Raises:
        NotAvailableError: for the first such key that is set to more than its default.
    """
    for key, value, default, choices in _not_yet(config, ""):
        allowed = f"Use {' or '.join(map(str, choices))}." if choices else ""
        if not choices:
            shown = "null" if default is None else default
            allowed = f"Leave it out (it is then {shown!s})."
        raise NotAvailableError(key, f"{value!s} is not available yet in this version.", allowed)


def _not_yet(block: BaseModel, prefix: str) -> Iterable[tuple[str, Any, Any, list[Any]]]:
    for name, field in type(block).model_fields.items():
        value, key = getattr(block, name), f"{prefix}{name}"
        extra = field.json_schema_extra if isinstance(field.json_schema_extra, dict) else {}
        refused = extra.get(NOT_YET_VALUES)
        if isinstance(refused, list):
            if value in refused:
                choices = [c for c in _literals(field.annotation) if c not in refused]
                yield key, value, field.default, choices
        elif extra.get(NOT_YET) and value != field.default:
            yield key, value, field.default, []
        elif isinstance(value, BaseModel):
            yield from _not_yet(value, f"{key}.")
        elif isinstance(value, tuple):
            for index, item in enumerate(value):
                if isinstance(item, BaseModel):
                    yield from _not_yet(item, f"{key}[{index}].")


def _literals(annotation: Any) -> list[Any]:
    return [a for a in getattr(annotation, "__args__", ()) if isinstance(a, str | int)]


class _Loader(yaml.SafeLoader):
    """YAML in which a key written twice is an error, not a silent loss."""


def _mapping(loader: _Loader, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:  # noqa: FBT001
    seen: set[Any] = set()
    for key_node, _ in node.value:
        key = loader.construct_object(key_node, deep=True)
        if key in seen:
            raise yaml.constructor.ConstructorError(
                None, None, f"{key!r} is written twice", key_node.start_mark
            )
        seen.add(key)
    return yaml.SafeLoader.construct_mapping(loader, node, deep=True)


_Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)


def read_file(path: Path) -> dict[str, Any]:
    """The raw tree of a YAML or JSON file.

    Raises:
        ConfigError: missing or unreadable file, or text that is not a mapping of keys.
    """
    if not path.is_file():
        folder = path.parent if path.parent.is_dir() else Path()
        near = [p.name for p in folder.iterdir() if p.suffix in (".yaml", ".yml", ".json")]
        hint = closest(path.name, near) if near else "Check the path."
        raise ConfigError(str(path), "there is no such file.", hint)
    try:
        tree = yaml.load(path.read_text(encoding="utf-8"), Loader=_Loader)
    except UnicodeDecodeError:
        raise ConfigError(str(path), "the file is not UTF-8 text.", "Save it as UTF-8.") from None
    except yaml.YAMLError as error:
        raise ConfigError(str(path), *_yaml_problem(error)) from None
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise ConfigError(
            str(path), "the file holds no keys.", "Write for example: train: {steps: 1000}"
        )
    return tree


def _yaml_problem(error: yaml.YAMLError) -> tuple[str, str]:
    mark = getattr(error, "problem_mark", None)
    where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
    return f"{where}{getattr(error, 'problem', None) or error}.", "Mend the YAML there."


def _override(tree: dict[str, Any], word: str) -> None:
    key, equals, text = word.partition("=")
    if not equals or not key:
        raise ConfigError(word, "this is not key=value.", "Write for example train.steps=1000.")
    try:
        value = yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        raise ConfigError(key, *_yaml_problem(error)) from None
    *path, last = key.replace("[", ".").replace("]", "").split(".")
    node: Any = tree
    for depth, part in enumerate(path):
        node = _child(node, part, ".".join(path[: depth + 1]))
    if isinstance(node, list):
        node[_index(node, last, key)] = value
    else:
        node[last] = value


def _child(node: Any, part: str, key: str) -> Any:
    if isinstance(node, list):
        return node[_index(node, part, key)]
    child = node.setdefault(part, {})
    if child is None:
        child = node[part] = {}
    if not isinstance(child, dict | list):
        raise ConfigError(key, f"{child!r} has no keys below it.", "Check the spelling of the key.")
    return child


def _index(node: Sequence[Any], part: str, key: str) -> int:
    if not part.isdigit() or int(part) >= len(node):
        raise ConfigError(key, f"there is no entry {part!r}.", f"The list has {len(node)} entries.")
    return int(part)


_WANTED = {
    "int_type": "a whole number", "int_parsing": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number", "float_parsing": "a number", "bool_type": "true or false",
    "bool_parsing": "true or false", "string_type": "text", "tuple_type": "a list",
    "dict_type": "a block of keys", "model_type": "a block of keys",
    "model_attributes_type": "a block of keys", "none_required": "null",
}  # fmt: skip


def _explain(error: ValidationError) -> ConfigError:
    """The first problem of a validation, as one line; all branches of a union are one problem."""
    problems = error.errors()
    unknown = [p for p in problems if p["type"] == "extra_forbidden"]
    if unknown:
        return _unknown_key(unknown[0])
    first = _location(problems[0])
    same = [p for p in problems if _location(p) == first]
    wanted = list(dict.fromkeys(_wanted(p) for p in same))
    own = [w for w in wanted if w.endswith((".", "?"))]
    value = same[0]["input"]
    if own:  # a sentence of our own says more than a list of types
        others = [w for w in wanted if w not in own]
        text = ", or ".join([own[0].rstrip("."), *others]) + "." if others else own[0]
        return ConfigError(_dotted(first), text)
    shown = repr(value) if len(repr(value)) < 60 else repr(value)[:57] + "…"
    return ConfigError(_dotted(first), f"{shown} is not possible.", f"Write {' or '.join(wanted)}.")


def _wanted(problem: Any) -> str:
    kind, context = problem["type"], problem.get("ctx", {})
    if kind == "literal_error":
        return str(context["expected"]).replace("'", "")
    if kind == "value_error":
        text = str(context["error"])
        return text if text.endswith((".", "?")) else f"{text}."
    bounds = {
        "greater_than": "more than",
        "greater_than_equal": "at least",
        "less_than": "less than",
    }
    bounds["less_than_equal"] = "at most"
    if kind in bounds:
        return f"{bounds[kind]} {next(iter(context.values()))}"
    if kind == "too_short":
        return f"at least {context['min_length']} entry"
    return _WANTED.get(kind, str(problem["msg"]).lower())


def _location(problem: Any) -> tuple[str | int, ...]:
    """The key of a problem, without the branch of a union that pydantic adds behind it."""
    node: Any = RunConfig
    path: list[str | int] = []
    for part in problem["loc"]:
        if isinstance(part, int):
            path.append(part)
            continue
        fields = node.model_fields if isinstance(node, type) and issubclass(node, BaseModel) else {}
        if part not in fields and problem["type"] != "extra_forbidden":
            break
        path.append(part)
        if part in fields:
            node = _block_of(fields[part].annotation)
    return tuple(path)


def _block_of(annotation: Any) -> Any:
    """The block class inside an annotation such as `tuple[SourceConfig, ...]`."""
    for argument in (annotation, *getattr(annotation, "__args__", ())):
        if isinstance(argument, type) and issubclass(argument, BaseModel):
            return argument
    return None


def _unknown_key(problem: Any) -> ConfigError:
    node: Any = RunConfig
    for part in problem["loc"][:-1]:
        if isinstance(part, str) and part in node.model_fields:
            node = _block_of(node.model_fields[part].annotation) or node
    key = _dotted(problem["loc"])
    return ConfigError(
        key, "there is no such key.", closest(str(problem["loc"][-1]), node.model_fields)
    )


def _dotted(path: Sequence[str | int]) -> str:
    text = "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in path)
    return text.removeprefix(".")
