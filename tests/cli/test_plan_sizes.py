"""What `nxrt plan` says of the four models at 1,048,576 tokens, against published figures.

A record takes 583 bytes, an index record 68; a carry has 8 slots, or 128.
"""

import json
from collections.abc import Callable
from typing import Any

import pytest

MILLION = 2**20
KIB, MIB, GIB = 2**10, 2**20, 2**30
Command = Callable[..., tuple[int, str, str]]


def report(command: Command, model: str, context: int = MILLION) -> dict[str, Any]:
    out = command("plan", "--model", model, "--context", context, "--json")[1]
    data: dict[str, Any] = json.loads(out)
    return data


def sizes(command: Command, model: str, context: int = MILLION) -> dict[tuple[str, str], int]:
    lines = report(command, model, context)["lines"]
    return {(line["holder"], line["what"].split(",")[0]): line["nbytes"] for line in lines}


@pytest.mark.parametrize(
    ("model", "num_layers", "num_fours", "num_many"),
    [("deepseek-v4-flash", 43, 21, 20), ("deepseek-v4-pro", 61, 30, 31)],
)
def test_a_layer_of_compressed_state_has_its_size_at_a_million(
    command: Command, model: str, num_layers: int, num_fours: int, num_many: int
) -> None:
    found = sizes(command, model)
    fours, many = f"{num_fours} layers of ratio 4", f"{num_many} layers of ratio 128"
    dense = f"all {num_layers} layers"
    assert found == {
        (fours, "compressed records"): num_fours * int(145.75 * MIB),
        (fours, "index records"): num_fours * 17 * MIB,
        (fours, "compression carries"): num_fours * 64 * KIB,
        (fours, "index carries"): num_fours * 16 * KIB,
        (many, "compressed records"): num_many * 4664 * KIB,
        (many, "compression carries"): num_many * 512 * KIB,
        (dense, "dense window"): num_layers * 128 * 583,
        ("captured graph", "one decode step"): 96 * KIB,
        ("staging", "slots for copies"): MIB,
    }


def test_a_stack_of_v4_flash_sums_to_what_is_published(command: Command) -> None:
    found = sizes(command, "deepseek-v4-flash")
    by_what = {
        what: sum(n for (_, name), n in found.items() if name.endswith(what))
        for what in ("records", "carries", "window")
    }
    assert round(by_what["records"] / GIB, 2) == 3.43
    assert round(by_what["carries"] / MIB, 1) == 11.6
    assert round(by_what["window"] / MIB, 1) == 3.1


def test_v4_pro_holds_about_five_gibibytes_of_records(command: Command) -> None:
    found = sizes(command, "deepseek-v4-pro")
    records = sum(nbytes for (_, what), nbytes in found.items() if what.endswith("records"))
    assert records == 30 * int(162.75 * MIB) + 31 * 4664 * KIB


def test_glm_at_a_million_holds_every_token_in_every_layer(command: Command) -> None:
    found = sizes(command, "glm-5.2")
    assert found["latent cache", "78 layers"] == 78 * MILLION * (512 + 64) * 2
    assert found["indexer keys", "21 layers"] == 21 * MILLION * 128 * 2
    # 8 B for the step's row, rounded up to 256, and what the blocks that share it meet by.
    assert found["DsaIndexSelect", "21 kernels"] == 21 * 256
    assert found["DsaIndexSelect control", "21 kernels"] == 21 * 53_392


def test_v32_ends_before_a_million_and_says_where(command: Command) -> None:
    code, _, err = command("plan", "--model", "deepseek-v3.2", "--context", MILLION)
    assert code == 2
    assert "163,840" in err
    found = sizes(command, "deepseek-v3.2", 163_840)
    assert found["latent cache", "61 layers"] == 61 * 163_840 * (512 + 64) * 2
    assert found["indexer keys", "61 layers"] == 61 * 163_840 * (128 + 4)
