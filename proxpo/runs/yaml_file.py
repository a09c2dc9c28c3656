"""YAML files: configs, plans, studies and methods, all read and written by the same rules.

1e-6 is a number (YAML 1.1 takes it for text), a key given twice is refused, and so is a file that
is large, deeply nested or multiplied by aliases.
"""

import re
from pathlib import Path
from typing import Any

import yaml

from proxpo.errors import ProxpoError

LARGEST = 1 << 20  # bytes
MOST_VALUES, DEEPEST, HUGE = 200_000, 50, 1 << 64  # aliases followed; HUGE: of an integer


def read_yaml(path: Path) -> dict[str, Any]:
    """The settings in a YAML file, by name; one line on what is wrong with it otherwise."""
    try:
        if path.stat().st_size > LARGEST:
            raise ProxpoError(f"{path}: larger than 1 MiB, expected a short YAML file")
        tree = yaml.load(path.read_text(encoding="utf-8"), _Loader)
    except OSError as error:
        raise ProxpoError(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ProxpoError(f"{path}: not UTF-8 text") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or "not valid YAML"
        raise ProxpoError(f"{path}{line}: {' '.join(problem.split())}") from None
    except RecursionError:
        raise ProxpoError(f"{path}: blocks are nested too deep") from None
    except (ValueError, TypeError, OverflowError) as error:  # a date or number that cannot be
        reason = " ".join(str(error).split())
        raise ProxpoError(f"{path}: a value cannot be read: {reason}") from None
    if tree is None:
        return {}
    if not isinstance(tree, dict) or any(not isinstance(key, str) for key in tree):
        raise ProxpoError(f"{path}: expected settings as 'name: value' lines")
    _check_size(tree, path)
    return tree


def dump_yaml(tree: Any) -> str:
    """The text of a YAML file; `read_yaml` of it gives an equal tree."""
    return yaml.dump(tree, Dumper=_Dumper, sort_keys=False, allow_unicode=True)


def _check_size(tree: Any, path: Path) -> None:
    waiting: list[tuple[Any, int]] = [(tree, 0)]
    for _ in range(MOST_VALUES):
        if not waiting:
            return
        value, depth = waiting.pop()
        if depth > DEEPEST or (isinstance(value, int) and not -HUGE < value < HUGE):
            raise ProxpoError(f"{path}: nested too deeply or with a number of too many digits")
        if isinstance(value, (dict, list, set, tuple)):
            inner = value.values() if isinstance(value, dict) else value
            waiting += [(item, depth + 1) for item in inner]
    raise ProxpoError(f"{path}: more than {MOST_VALUES:,} values")


class _Loader(yaml.SafeLoader):
    """Refuses a key that is given twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        keys: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                problem = "expected a name before the colon"
                raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
            if key.value in keys:
                problem = f"'{key.value}' is given twice"
                raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
            keys.add(key.value)
        return super().construct_mapping(node, deep=deep)


class _Dumper(yaml.SafeDumper):
    """Quotes text that would be read as a number; repeats a value instead of pointing to it."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


for _kind in (_Loader, _Dumper):
    _kind.add_implicit_resolver(
        "tag:yaml.org,2002:float",
        re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)[eE][-+]?\d+$"),
        list("-+.0123456789"),
    )


__all__ = ["dump_yaml", "read_yaml"]
