"""A model's geometry: the numbers its memory follows from, read from a data file.

Geometries are data; what they cost is in `planner`. Weights are not described.
"""

import tomllib
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator

from nxrt.errors import InvalidInputError
from nxrt.memory.budget import validated
from nxrt.memory.state_bytes import MAX_POSITIONS

FOLDER = Path(__file__).with_name("geometries")
ELEMENT_NBYTES = {"f32": 4, "bf16": 2, "f16": 2, "fp8": 1}
SCALE_NBYTES = 4
"""A scale is a float32."""

MAX_COUNT = 2**31 - 1
_Count = Annotated[int, Field(ge=1, le=MAX_COUNT)]
_Element = Literal["f32", "bf16", "f16", "fp8"]
# A name is printed and drawn: nothing that could steer a terminal.
_Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9 ._-]{0,63}$")]


class _Table(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Attention(_Table):
    """Describe the attention heads; no size follows from them, since all share one cache."""

    num_heads: _Count
    head_dim: _Count


class LatentCache(_Table):
    """Describe what each layer caches of a token: one latent and one rotary key."""

    latent_width: _Count
    rope_width: Annotated[int, Field(ge=0, le=MAX_COUNT)]
    dtype: _Element

    @property
    def token_nbytes(self) -> int:
        """Return the bytes of one token in one layer."""
        return (self.latent_width + self.rope_width) * ELEMENT_NBYTES[self.dtype]


class Indexer(_Table):
    """Describe the token indexer: its heads, and how many positions it selects."""

    num_heads: _Count
    head_dim: _Count
    top_k: _Count


class LatentIndexer(Indexer):
    """Describe an indexer with a cache of its own: one key for each token.

    `layers` are those that have one, ascending; every layer where it is left out.
    """

    key_dtype: _Element
    key_scales: Annotated[int, Field(ge=0, le=MAX_COUNT)] = 0
    layers: list[Annotated[int, Field(ge=0)]] | None = None

    @field_validator("layers")
    @classmethod
    def _ascending(cls, layers: list[int] | None) -> list[int] | None:
        if layers is not None and layers != sorted(set(layers)):
            raise ValueError("accepted: layers in ascending order, each once")
        return layers

    @property
    def token_nbytes(self) -> int:
        """Return the bytes of one token's key in one layer that has an indexer."""
        return self.head_dim * ELEMENT_NBYTES[self.key_dtype] + self.key_scales * SCALE_NBYTES


class StateGroups(_Table):
    """Describe compressed state: each layer's ratio, 0 for the dense window alone."""

    window: Annotated[int, Field(ge=1, le=MAX_POSITIONS)]
    ratios: list[Literal[0, 4, 128]]


class _Model(_Table):
    name: _Name
    num_layers: _Count
    max_context: _Count
    attention: Attention


class LatentGeometry(_Model):
    """Describe a model that caches every token."""

    cache: Literal["latent"]
    latent: LatentCache
    indexer: LatentIndexer

    @field_validator("indexer")
    @classmethod
    def _layers_exist(cls, indexer: LatentIndexer, info: ValidationInfo) -> LatentIndexer:
        num_layers = info.data.get("num_layers", MAX_COUNT)
        if indexer.layers and indexer.layers[-1] >= num_layers:
            raise ValueError(f"accepted: layers below num_layers, {num_layers}")
        return indexer

    @property
    def num_indexers(self) -> int:
        """Return how many layers have an indexer."""
        return self.num_layers if self.indexer.layers is None else len(self.indexer.layers)


class StateGroupGeometry(_Model):
    """Describe a model that compresses tokens into records."""

    cache: Literal["state_groups"]
    max_context: Annotated[int, Field(ge=1, le=MAX_POSITIONS)]
    state_groups: StateGroups
    indexer: Indexer

    @field_validator("state_groups")
    @classmethod
    def _every_layer_has_a_ratio(cls, groups: StateGroups, info: ValidationInfo) -> StateGroups:
        num_layers, num_ratios = info.data.get("num_layers"), len(groups.ratios)
        if num_layers not in (None, num_ratios):
            raise ValueError(f"accepted: as many ratios as num_layers, {num_layers}")
        return groups


class IndexerGeometry(_Table):
    """Describe one token indexer by itself, as a job runs it: its keys are all that is cached."""

    name: _Name
    cache: Literal["indexer"]
    max_context: _Count
    dtype: Literal["f32", "bf16", "f16"]
    indexer: Indexer


Geometry = LatentGeometry | StateGroupGeometry | IndexerGeometry

_BY_CACHE: dict[object, type[LatentGeometry | StateGroupGeometry | IndexerGeometry]] = {
    "latent": LatentGeometry,
    "state_groups": StateGroupGeometry,
    "indexer": IndexerGeometry,
}


def known_models() -> list[str]:
    """Return the names of the geometries that nxrt brings along."""
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


def load_geometry(name_or_path: str) -> Geometry:
    """Read and check a geometry.

    Args:
        name_or_path: a known model's name in any case, or the path of a .toml file.

    Raises:
        InvalidInputError: there is no such model or file, or a key of it is not accepted; the
            subject is the key.
    """
    if name_or_path.endswith(".toml"):
        path = Path(name_or_path)
    elif name_or_path.lower() in known_models():
        path = FOLDER / f"{name_or_path.lower()}.toml"
    else:
        accepted = f"{', '.join(known_models())}, or the path of a .toml file"
        raise InvalidInputError("model", found=repr(name_or_path), accepted=accepted)
    values = read_toml(path)
    cache = values.get("cache")
    model = _BY_CACHE.get(cache) if isinstance(cache, str) else None
    if model is None:
        found = "nothing" if cache is None else repr(cache)
        accepted = " or ".join(f'"{name}"' for name in _BY_CACHE)
        raise InvalidInputError(f"{path.name}.cache", found=found, accepted=accepted)
    return validated(model, values, InvalidInputError, path.name)


def read_toml(path: Path) -> dict[str, object]:
    """Return a file's tables. Raises InvalidInputError where it cannot be read or is not TOML."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        found = error.strerror or str(error)
        raise InvalidInputError(str(path), found=found, accepted="a readable file") from error
    except (ValueError, RecursionError) as error:
        raise InvalidInputError(str(path), found=str(error), accepted="TOML") from error
