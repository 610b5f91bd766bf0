"""Geometries: the known ones are right, and every fault of a file names its key."""

from pathlib import Path

import pytest

from nxrt.errors import InvalidInputError
from nxrt.planning.geometry import (
    FOLDER,
    LatentGeometry,
    StateGroupGeometry,
    known_models,
    load_geometry,
)

LATENT = (FOLDER / "glm-5.2.toml").read_text(encoding="utf-8")
INDEXER = Path(__file__).with_name("glm_decode_geometry.toml").read_text(encoding="utf-8")
GROUPS = (FOLDER / "deepseek-v4-flash.toml").read_text(encoding="utf-8")


def write(folder: Path, text: str) -> str:
    path = folder / "model.toml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def latent(name: str) -> LatentGeometry:
    geometry = load_geometry(name)
    assert isinstance(geometry, LatentGeometry)
    return geometry


def groups(name: str) -> StateGroupGeometry:
    geometry = load_geometry(name)
    assert isinstance(geometry, StateGroupGeometry)
    return geometry


def test_four_models_are_known_and_load() -> None:
    names = ["deepseek-v3.2", "deepseek-v4-flash", "deepseek-v4-pro", "glm-5.2"]
    assert known_models() == names
    assert [load_geometry(name).name.lower() for name in names] == names


def test_names_are_taken_in_any_case() -> None:
    assert load_geometry("GLM-5.2") == load_geometry("glm-5.2")


def test_glm_has_an_indexer_where_its_rule_says() -> None:
    glm = latent("glm-5.2")
    expected = [layer for layer in range(78) if layer < 3 or (layer - 2) % 4 == 0]
    assert glm.indexer.layers == expected
    assert glm.num_indexers == 21
    assert (glm.latent.token_nbytes, glm.indexer.token_nbytes) == (1152, 256)


def test_v32_has_an_indexer_in_every_layer_with_one_scale_for_each_key() -> None:
    v32 = latent("deepseek-v3.2")
    assert v32.num_indexers == 61
    assert v32.indexer.token_nbytes == 128 + 4
    assert v32.max_context == 163_840


@pytest.mark.parametrize(
    ("name", "counts", "first"),
    [
        ("deepseek-v4-flash", (2, 21, 20), [0, 0, 4, 128]),
        ("deepseek-v4-pro", (0, 30, 31), [128, 128, 4, 128]),
    ],
)
def test_v4_ratios_alternate(name: str, counts: tuple[int, ...], first: list[int]) -> None:
    ratios = groups(name).state_groups.ratios
    assert tuple(ratios.count(ratio) for ratio in (0, 4, 128)) == counts
    assert (ratios[:4], ratios[-1]) == (first, 4)
    assert ratios[2:] == [4, 128] * (len(ratios) // 2 - 1) + [4]


def test_a_file_is_read_as_a_known_model_is(tmp_path: Path) -> None:
    assert load_geometry(write(tmp_path, LATENT)) == load_geometry("glm-5.2")


def test_an_unknown_model_lists_the_known_ones() -> None:
    with pytest.raises(InvalidInputError) as refusal:
        load_geometry("glm-9")
    assert refusal.value.subject == "model"
    assert refusal.value.found == "'glm-9'"
    for name in known_models():
        assert name in refusal.value.accepted


@pytest.mark.parametrize("name", ["", "../glm-5.2", "glm-5.2\x00", "nowhere/glm-5.2"])
def test_only_names_of_the_list_are_names(name: str) -> None:
    with pytest.raises(InvalidInputError, match="model: got"):
        load_geometry(name)


BAD_FILES = {
    "no TOML": ("[latent", "model.toml"),
    "no cache": (LATENT.replace("cache =", "# cache ="), "model.toml.cache"),
    "unknown cache": (LATENT.replace('"latent"', '"paged"'), "model.toml.cache"),
    "cache no text": (LATENT.replace('"latent"', "[1]"), "model.toml.cache"),
    "no name": (LATENT.replace("name =", "# name ="), "model.toml.name"),
    "steering name": (LATENT.replace('"GLM-5.2"', '"\\u001b[2J"'), "model.toml.name"),
    "no table": (LATENT.replace("[attention]", "[attentions]"), "model.toml.attention"),
    "unknown key": (LATENT.replace("rope_width", "ropes = 3\nrope_width"), "latent.ropes"),
    "unknown table": (LATENT + "\n[extra]\na = 1\n", "model.toml.extra"),
    "layers 0": (LATENT.replace("num_layers = 78", "num_layers = 0"), "model.toml.num_layers"),
    "fraction": (LATENT.replace("top_k = 2048", "top_k = 2048.5"), "indexer.top_k"),
    "truth": (LATENT.replace("top_k = 2048", "top_k = true"), "indexer.top_k"),
    "huge": (LATENT.replace("= 1_048_576", f"= {2**70}"), "model.toml.max_context"),
    "unknown dtype": (LATENT.replace('dtype = "bf16"', 'dtype = "int3"', 1), "latent.dtype"),
    "layer past the last": (LATENT.replace("70, 74]", "70, 78]"), "model.toml.indexer"),
    "layer twice": (LATENT.replace("[0, 1,", "[0, 0,"), "indexer.layers"),
    "layer below 0": (LATENT.replace("[0, 1,", "[-1, 1,"), "indexer.layers.0"),
    "unknown ratio": (GROUPS.replace("0, 0, 4,", "0, 0, 8,"), "state_groups.ratios.2"),
    "ratio missing": (GROUPS.replace("0, 0, 4,", "0, 4,"), "model.toml.state_groups"),
    "window 0": (GROUPS.replace("window = 128", "window = 0"), "state_groups.window"),
    "context past a group": (
        GROUPS.replace("= 1_048_576", "= 1_048_577"),
        "model.toml.max_context",
    ),
    "a dtype of no kernel": (INDEXER.replace("bf16", "fp8"), "model.toml.dtype"),
    "an indexer's layers": (INDEXER.replace("top_k", "layers = [0]\ntop_k"), "indexer.layers"),
    "a latent's key": (GROUPS + 'key_dtype = "bf16"\n', "indexer.key_dtype"),
}


@pytest.mark.parametrize("fault", BAD_FILES)
def test_a_bad_file_is_one_error_that_names_the_key(tmp_path: Path, fault: str) -> None:
    text, subject = BAD_FILES[fault]
    assert text not in (LATENT, GROUPS, INDEXER)
    with pytest.raises(InvalidInputError) as refusal:
        load_geometry(write(tmp_path, text))
    assert refusal.value.subject.endswith(subject)
    assert refusal.value.accepted


def test_a_file_that_is_not_there_or_not_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match=r"gone\.toml: got No such file"):
        load_geometry(str(tmp_path / "gone.toml"))
    (tmp_path / "model.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(InvalidInputError, match="accepted: TOML"):
        load_geometry(str(tmp_path / "model.toml"))
