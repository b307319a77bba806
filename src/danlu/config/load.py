"""From a YAML or JSON file and `key=value` words to a checked, frozen `RunConfig`.

Whatever is wrong is said in one line: the key, what is wrong with its value, and how to mend it.
"""

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from danlu.base.errors import ConfigError, NotAvailableError, closest
from danlu.config._block import NOT_YET, NOT_YET_VALUES
from danlu.config._yaml import parse, read_file
from danlu.config.run import RunConfig

__all__ = ["expand_path", "load", "require_available", "split_words"]


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
    _check_text(tree, (), set())
    try:
        return RunConfig.model_validate(tree)
    except ValidationError as error:
        raise _explain(error) from None


def split_words(words: Sequence[str]) -> tuple[str | None, list[str]]:
    """The config file among the words of a command, or None, and the overrides.

    Raises:
        ConfigError: two files, or a key without a value.
    """
    files = [word for word in words if "=" not in word]
    for word in files:
        if word.split(".")[0] in RunConfig.model_fields and not os.path.exists(word):
            raise ConfigError(word, "this key has no value.", f"Write {word}=VALUE.")
    if len(files) > 1:
        raise ConfigError(files[1], "this is a second config file.", "Overrides are key=value.")
    return files[0] if files else None, [word for word in words if "=" in word]


def expand_path(text: str, key: str) -> Path:
    """A path with `~` and `$VARIABLES` replaced; a `$` that names nothing is a character.

    Raises:
        ConfigError: a variable that is not set, a user that does not exist, or a zero byte.
    """
    for match in re.finditer(r"\$(?:(\w+)|\{([^}]+)\})", text, re.ASCII):
        name = match[1] or match[2]
        if name not in os.environ:
            raise ConfigError(key, f"{text!r} needs ${name}, which is not set.", f"export {name}=…")
    if "\0" in text:
        raise ConfigError(key, f"{text!r} holds a zero byte.", "Name another path.")
    try:
        return Path(os.path.expandvars(text)).expanduser()
    except RuntimeError:
        raise ConfigError(
            key, f"the home folder in {text!r} is not known.", "Write the whole path."
        ) from None


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


def _check_text(node: Any, path: tuple[str | int, ...], seen: set[int]) -> None:
    """Refuses text that no UTF-8 file can hold: the run's own config is written as one.

    Raises:
        ConfigError: half a surrogate pair, from bytes that were not UTF-8 or an escape.
    """
    if isinstance(node, str):
        try:
            node.encode()
        except UnicodeEncodeError:
            raise ConfigError(
                _dotted(path) or "the config", f"{node!a} is not valid text.", "Write it as UTF-8."
            ) from None
    if not isinstance(node, dict | list | tuple) or id(node) in seen:
        return
    seen.add(id(node))
    for key, value in node.items() if isinstance(node, dict) else enumerate(node):
        _check_text(key, path, seen)
        _check_text(value, (*path, key if isinstance(key, int) else str(key)), seen)


def _override(tree: dict[str, Any], word: str) -> None:
    key, equals, text = word.partition("=")
    if not equals or not key.strip():
        raise ConfigError(word, "this is not key=value.", "Write for example train.steps=1000.")
    if "[]" in key:
        fix = f"Write {key.replace('[]', '[0]')}=… for the first one."
        raise ConfigError(key, "it does not say which entry of the list.", fix)
    *path, last = parts = key.replace("[", ".").replace("]", "").split(".")
    if "" in parts:
        raise ConfigError(key, "this is not a key.", "Write for example train.steps=1000.")
    value = parse(text, key)
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
    if not (part.isdecimal() and len(part) < 10 and int(part) < len(node)):
        raise ConfigError(key, f"there is no entry {part!r}.", f"The list has {len(node)} entries.")
    return int(part)


_WANTED = {
    "int_type": "a whole number", "int_parsing": "a whole number",
    "int_from_float": "a whole number", "int_parsing_size": "a smaller number",
    "finite_number": "a finite number", "string_too_short": "at least one character",
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
    value = same[0]["input"]
    if problems[0]["type"] == "invalid_key":
        where = _dotted(first[:-1]) or "the config"
        return ConfigError(where, f"the key {_shown(value)} is not text.", "Take it out.")
    if value is None:
        wanted = [w.replace("None is", "an empty value is") for w in wanted]
    own = [w for w in wanted if w.endswith((".", "?"))]
    if own:  # a sentence of our own says more than a list of types
        others = [w for w in wanted if w not in own]
        text = ", or ".join([own[0].rstrip("."), *others]) + "." if others else own[0]
        return ConfigError(_dotted(first), text)
    return ConfigError(
        _dotted(first), f"{_shown(value)} is not possible.", f"Write {' or '.join(wanted)}."
    )


def _shown(value: object) -> str:
    """A value as a user would write it, in less than 60 characters."""
    if value is None or isinstance(value, bool):
        return "an empty value" if value is None else str(value).lower()
    try:
        shown = repr(value)
    except ValueError:  # Python writes no whole number of more than 4300 digits
        return "a number of thousands of digits"
    return shown if len(shown) < 60 else shown[:57] + "…"


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
        return f"{bounds[kind]} {next(iter(context.values())):,}"
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
