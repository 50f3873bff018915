"""A value of JSON as a dataclass of strings, numbers and tuples, or an error that says where it is none."""

import dataclasses
import reprlib
import typing
from typing import Any, NoReturn

IN_WORDS = {str: "a string", int: "an integer", float: "a number", type(None): "null"}


def read(kind: Any, value: Any, name: str) -> Any:
    """The value as `kind`, which is a dataclass, a tuple of types, or a union of those of IN_WORDS.

    Raises:
      ValueError: it is none; the message names the part that is not.
    """
    if dataclasses.is_dataclass(kind):
        return _record(kind, value, name)
    of_parts = typing.get_args(kind)
    if typing.get_origin(kind) is tuple:
        any_number = of_parts[-1] is ...
        if not isinstance(value, list) or not (any_number or len(value) == len(of_parts)):
            _refuse(value, name, "a list" if any_number else f"a list of {len(of_parts)}")
        kinds = of_parts[:1] * len(value) if any_number else of_parts
        return tuple(read(part, value[place], f"{name}[{place}]") for place, part in enumerate(kinds))
    kinds = of_parts or (kind,)
    if type(value) not in kinds and not (type(value) is int and float in kinds):
        _refuse(value, name, " or ".join(IN_WORDS[part] for part in kinds))
    return value


def _record(kind: Any, value: Any, name: str) -> Any:
    kinds = {field.name: field.type for field in dataclasses.fields(kind)}
    if not isinstance(value, dict):
        _refuse(value, name, "an object")
    if missing := [field for field in kinds if field not in value]:
        raise ValueError(f"{name} has no {missing[0]}")
    if surplus := [field for field in value if field not in kinds]:
        raise ValueError(f"{name} has {reprlib.repr(surplus[0])}, which is no field of it")
    prefix = "" if name == "it" else f"{name}."
    return kind(**{field: read(of_field, value[field], prefix + field) for field, of_field in kinds.items()})


def _refuse(value: Any, name: str, expected: str) -> NoReturn:
    raise ValueError(f"{name} is {reprlib.repr(value)}, expected {expected}")
