"""One typed error for pydantic's first complaint, naming the key and where it was written.

It knows models and errors, and nothing of what the models mean.
"""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar, get_args

from pydantic import BaseModel
from pydantic import ValidationError as PydanticError

from nxrt.errors import InvalidInputError

ModelT = TypeVar("ModelT", bound=BaseModel)

Path = tuple[int | str, ...]


def _says_nothing(_path: Path) -> str:
    return ""


def validated(
    model: type[ModelT],
    values: Mapping[str, Any],
    error: type[InvalidInputError],
    where: str,
    origin: Callable[[Path], str] = _says_nothing,
) -> ModelT:
    """Build a pydantic model; its first complaint becomes one typed error that names the key.

    Args:
        model: the model class.
        values: its fields.
        error: the class to raise.
        where: what the values are, put before the key in the message.
        origin: says of a key, as a path, where its value was written.
    """
    try:
        return model.model_validate(values)
    except PydanticError as problem:
        first = problem.errors(include_url=False)[0]
        path = tuple(part for part in first["loc"] if part != "[key]")
        accepted = first["msg"].removeprefix("Value error, accepted: ")
        if first["type"] == "extra_forbidden":
            accepted = f"no such key; known: {', '.join(_fields_at(model, path[:-1]))}"
        if first["type"] == "missing":
            accepted = "a value: the key is required"
        found = "nothing" if first["type"] == "missing" else repr(first["input"])
        key = ".".join([where, *map(str, path)])
        raise error(key, found=found, accepted=accepted, remedy=origin(path)) from problem


def _fields_at(model: type[BaseModel], path: Path) -> list[str]:
    """Return the keys of the table that `path` leads to from a model."""
    table = model
    for key in path:
        # A key that is no field is one of a mapping, whose model has been entered already.
        if key in table.model_fields:
            table = _model_in(table.model_fields[str(key)].annotation) or table
    return list(table.model_fields)


def _model_in(annotation: object) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    found = map(_model_in, get_args(annotation))
    return next((model for model in found if model is not None), None)
