"""YAML and JSON as they come from a file or a command line, before any key is looked at."""

from pathlib import Path
from typing import Any

import yaml

from danlu.base.errors import ConfigError, closest

__all__ = ["parse", "read_file"]


class _Loader(yaml.SafeLoader):
    """YAML in which a key written twice is an error, not a silent loss."""


def _mapping(loader: _Loader, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:  # noqa: FBT001
    seen: set[Any] = set()
    for key_node, _ in node.value:
        if key_node.tag == "tag:yaml.org,2002:merge":  # <<: its keys yield to those written here
            continue
        key = loader.construct_object(key_node, deep=True)
        if isinstance(key, list | dict | set):
            raise _refusal("a key cannot be a list or a block", key_node)
        if (type(key), key) in seen:
            raise _refusal(f"{key!r} is written twice", key_node)
        seen.add((type(key), key))
    return yaml.SafeLoader.construct_mapping(loader, node, deep=True)


def _refusal(problem: str, node: yaml.Node) -> yaml.constructor.ConstructorError:
    return yaml.constructor.ConstructorError(None, None, problem, node.start_mark)


_Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)


def parse(text: str, where: str) -> Any:
    """The value that a text is in YAML.

    Raises:
        ConfigError: text that is not YAML, or a value that YAML's own rules cannot read.
    """
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        raise ConfigError(where, *_yaml_problem(error)) from None
    except RecursionError:
        raise ConfigError(where, "it is nested too deeply.", "Mend the brackets.") from None
    except ValueError as error:  # a date like 2024-13-45
        reason = f"a value cannot be read ({error})."
    except (LookupError, TypeError, AttributeError):  # PyYAML's way to refuse `!!bool soon`
        reason = "a value is not what its !!tag says."
    raise ConfigError(where, reason, "Put text into quotes.")


def read_file(path: Path) -> dict[str, Any]:
    """The raw tree of a YAML or JSON file.

    Raises:
        ConfigError: missing or unreadable file, or text that is not a mapping of keys.
    """
    try:
        if not path.is_file():
            raise ConfigError(str(path), "there is no such file.", _files_near(path))
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ConfigError(str(path), "the file is not UTF-8 text.", "Save it as UTF-8.") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(str(path), f"it cannot be read ({reason}).", "Check the path.") from None
    tree = parse(text, str(path))
    if tree is None:
        raise ConfigError(
            str(path), "the file is empty.", "Write for example: train: {steps: 1000}"
        )
    if not isinstance(tree, dict):
        raise ConfigError(
            str(path), "the file holds no keys.", "Write for example: train: {steps: 1000}"
        )
    return tree


def _files_near(path: Path) -> str:
    """A hint at the config files beside a path where there is none."""
    folder = path.parent if path.parent.is_dir() else Path()
    near = [p.name for p in folder.iterdir() if p.suffix in (".yaml", ".yml", ".json")]
    return closest(path.name, near) if near else "Check the path."


def _yaml_problem(error: yaml.YAMLError) -> tuple[str, str]:
    mark = getattr(error, "problem_mark", None)
    where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
    return f"{where}{getattr(error, 'problem', None) or error}.", "Mend the YAML there."
