"""Read YAML as the JSON it stands for: what is written is what is sent. Must not guess types as YAML 1.1 does.

`NO`, `12:30`, `1_000` and `01234` are texts here, `2500.10` is the number with that very literal, a key is a text and stands once.
"""

import re

import yaml

from app.domain.json_text import Json, parse

_NUMBER_TAG = "!number"
_SCALARS = (
    ("tag:yaml.org,2002:null", r"null|~|", ["n", "~", ""]),
    ("tag:yaml.org,2002:bool", r"true|false", ["t", "f"]),
    (_NUMBER_TAG, r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?", list("-0123456789")),
)


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader with the scalars of JSON and no others."""

    yaml_implicit_resolvers = {}  # noqa: RUF012 - the library's own way; what PyYAML guesses is left out


def _construct_number(loader: _Loader, node: yaml.ScalarNode) -> Json:
    return parse(str(loader.construct_scalar(node)).encode())


def _construct_object(loader: _Loader, node: yaml.MappingNode) -> dict[str, Json]:
    members: dict[str, Json] = {}
    for key_node, value_node in node.value:
        key = loader.construct_object(key_node, deep=True)
        if not isinstance(key, str):
            raise yaml.constructor.ConstructorError(None, None, "expected a text as key: put it in quotes", key_node.start_mark)
        if key in members:
            raise yaml.constructor.ConstructorError(None, None, f"the key {key!r} stands here a second time", key_node.start_mark)
        members[key] = loader.construct_object(value_node, deep=True)
    return members


for _tag, _pattern, _firsts in _SCALARS:
    _Loader.add_implicit_resolver(_tag, re.compile(rf"^(?:{_pattern})$", re.ASCII), _firsts)
_Loader.add_constructor(_NUMBER_TAG, _construct_number)
_Loader.add_constructor("tag:yaml.org,2002:map", _construct_object)


def read(text: str) -> object:
    """Return what a YAML text says, numbers as `json_text` holds them.

    Raises:
        yaml.YAMLError: it is not YAML, a key is no text, or stands twice.
    """
    loaded: object = yaml.load(text, Loader=_Loader)  # noqa: S506 - a safe loader
    return loaded
