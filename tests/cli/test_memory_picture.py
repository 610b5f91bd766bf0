"""The picture's geometry: areas as high as the bytes, nothing outside, no text over another."""

import random
import re
from collections.abc import Iterator
from itertools import combinations, pairwise
from xml.etree import ElementTree as ET

import pytest

from nxrt.cli.memory_chart import PLOT_HEIGHT, PLOT_WIDTH, PLOT_X, thinned, tick_step
from nxrt.cli.memory_picture import MOST_ROWS, as_html, as_svg
from nxrt.cli.memory_timeline import Moment
from nxrt.cli.recording import Recording
from nxrt.cli.svg import ROLE_COLORS, ink_on, mixed
from nxrt.cli.time_scale import MIN_PHASE_WIDTH, TimeScale, length_text, time_text
from nxrt.memory.events import Event
from nxrt.memory.snapshot import TierUsage
from nxrt.memory.tier import HOST

SVG = "{http://www.w3.org/2000/svg}"
MIB = 2**20


def event(time_s: float, what: str, nbytes: int, used: int, **labels: str) -> Event:
    named = {"role": "kv_cache", "holder": "cache", "request": ""} | labels
    return Event(time_s, what, "process", "host", **named, nbytes=nbytes, used=used)


def simple(limit: int | None = 400, watermark: int | None = None) -> Recording:
    """Return 100 bytes of a cache from 2 s, 200 more of a graph from 6 s, nothing from 8 s."""
    events = (
        event(2, "reserve", 100, 100),
        event(6, "reserve", 200, 300, role="graph"),
        event(8, "release", 200, 100, role="graph"),
        event(8, "release", 100, 0),
    )
    usage = TierUsage(HOST, limit, 0, 300, 0, (), watermark=watermark)
    return Recording("job", 10, [("setup", 0), ("eager", 5)], events, (usage,), 10.0)


def busy(num_events: int = 3000) -> Recording:
    """Return many roles, holders, requests, refusals and phases."""
    rng, used = random.Random(5), 0
    held: list[tuple[int, dict[str, str]]] = []
    events: list[Event] = []
    for n in range(num_events):
        role = rng.choice(list(ROLE_COLORS))
        holder = f"<{role}> {n % 9} \x1b[2J" + "x" * 70
        labels = {"role": role, "holder": holder, "request": f"r{n % 30}"}
        nbytes = rng.randrange(1, 40) * MIB
        if n % 11 == 0:
            events.append(event(n / 1e3, "refuse", nbytes, used, **labels))
        elif len(held) > 12:
            nbytes, labels = held.pop(rng.randrange(len(held)))
            used -= nbytes
            events.append(event(n / 1e3, "release", nbytes, used, **labels))
        else:
            held.append((nbytes, labels))
            used += nbytes
            events.append(event(n / 1e3, "reserve", nbytes, used, **labels))
    peak = max(e.used for e in events)
    usage = TierUsage(HOST, peak, 0, peak, 0, (), watermark=peak * 99 // 100)
    names = ("setup", "eager", "capture", "replay", "close")
    phases = list(zip(names, (0, 0.5, 0.5001, 0.6, 2.99), strict=True))
    return Recording("busy.toml", 10, phases, tuple(events), (usage,), 3.0, "a failure " * 30)


def shapes(recording: Recording, tag: str) -> list[ET.Element]:
    return list(ET.fromstring(as_svg(recording)).iter(f"{SVG}{tag}"))


def texts(recording: Recording) -> list[str]:
    return [element.text or "" for element in shapes(recording, "text")]


def points(path: ET.Element) -> list[tuple[float, float]]:
    pairs = re.findall(r"([-\d.]+),([-\d.]+)", path.get("d", ""))
    return [(float(x), float(y)) for x, y in pairs]


def area(recording: Recording, role: str) -> list[tuple[float, float]]:
    color = mixed(ROLE_COLORS[role])
    return points(next(p for p in shapes(recording, "path") if p.get("fill") == color))


def test_areas_step_at_the_events_and_are_as_high_as_the_bytes() -> None:
    recording = simple()
    cache, graph = area(recording, "kv_cache"), area(recording, "graph")

    def x(time_s: float) -> float:
        return PLOT_X + PLOT_WIDTH * time_s / 10

    assert {round(px, 1) for px, _ in cache} == {round(x(t), 1) for t in (2, 6, 8)}
    assert {round(px, 1) for px, _ in graph} == {round(x(t), 1) for t in (6, 8)}
    height = max(y for _, y in cache) - min(y for _, y in cache)
    assert height / PLOT_HEIGHT == pytest.approx(100 / (400 * 1.06), abs=2e-3)
    assert max(y for _, y in graph) == pytest.approx(min(y for _, y in cache))
    assert max(y for _, y in graph) - min(y for _, y in graph) == pytest.approx(2 * height, abs=0.2)


def test_the_limit_and_the_watermark_are_lines_at_their_height() -> None:
    dashed = [e for e in shapes(simple(400, 320), "line") if e.get("stroke-width") == "1.6"]
    top, low = (float(element.get("y1", "")) for element in dashed)
    floor = max(y for _, y in area(simple(400, 320), "kv_cache"))
    assert (floor - top) / (floor - low) == pytest.approx(400 / 320, abs=0.01)
    assert {"limit", "400 B", "watermark", "320 B"} <= set(texts(simple(400, 320)))


def test_a_limit_far_above_is_written_and_not_drawn() -> None:
    far = simple(10_000)
    assert [e for e in shapes(far, "line") if e.get("stroke-width") == "1.6"] == []
    assert "9.77 KiB ↑" in texts(far)
    assert any("no limit" in text for text in texts(simple(None)))


def test_the_peak_is_marked_with_its_size_and_moment() -> None:
    recording = simple()
    assert "peak 300 B at 6.00 s" in texts(recording)
    mark = next(e for e in shapes(recording, "circle") if e.get("r") == "4")
    x, y = float(mark.get("cx", "")), float(mark.get("cy", ""))
    assert x == pytest.approx(PLOT_X + PLOT_WIDTH * 0.6, abs=0.1)
    assert y == pytest.approx(min(py for _, py in area(recording, "graph")), abs=0.1)


def test_a_role_of_a_byte_beside_gibibytes_is_still_drawn() -> None:
    events = (
        event(1, "reserve", 2**33, 2**33),
        event(2, "reserve", 1, 2**33 + 1, role="staging"),
    )
    recording = Recording("job", 10, [("eager", 0)], events, (), 10.0)
    path = next(
        p for p in shapes(recording, "path") if p.get("fill") == mixed(ROLE_COLORS["staging"])
    )
    assert path.get("stroke") == path.get("fill")
    assert float(path.get("stroke-width", "0")) >= 1
    assert max(x for x, _ in points(path)) - min(x for x, _ in points(path)) > PLOT_WIDTH / 2


def boxes(recording: Recording) -> Iterator[tuple[str, float, float, float, float]]:
    for element in shapes(recording, "text"):
        if element.get("aria-hidden"):  # the ground below a text that lies over areas
            continue
        text, size = element.text or "", float(element.get("font-size", ""))
        width = len(text) * size * 0.58
        shift = {"start": 0.0, "middle": 0.5, "end": 1.0}[element.get("text-anchor", "start")]
        x, y = float(element.get("x", "")) - width * shift, float(element.get("y", ""))
        yield text, x, x + width, y - size * 0.8, y + size * 0.2


@pytest.mark.parametrize("recording", [simple(400, 390), busy()], ids=["simple", "busy"])
def test_no_text_lies_over_another_or_outside(recording: Recording) -> None:
    root = ET.fromstring(as_svg(recording))
    width, height = float(root.get("width", "")), float(root.get("height", ""))
    found = list(boxes(recording))
    for text, left, right, top, bottom in found:
        assert left >= 0, text
        assert right <= width, text
        assert top >= 0, text
        assert bottom <= height, text
    for (one, l1, r1, t1, b1), (two, l2, r2, t2, b2) in combinations(found, 2):
        assert r1 <= l2 or r2 <= l1 or b1 <= t2 or b2 <= t1, (one, two)


def test_many_rows_are_cut_in_the_picture_and_whole_in_the_page() -> None:
    recording = busy()
    drawn = texts(recording)
    assert sum(text.startswith("r") and text[1:].isdigit() for text in drawn) == MOST_ROWS
    assert "and 20 more" in drawn
    root = ET.fromstring(as_html(recording).removeprefix("<!DOCTYPE html>"))
    cells = [cell.text or "" for cell in root.iter("td")]
    assert {f"r{n}" for n in range(30)} <= set(cells)


def test_a_long_history_is_a_picture_of_reasonable_size() -> None:
    assert len(as_svg(busy(20_000))) < 600_000


def test_what_falls_into_one_pixel_keeps_its_widest_and_its_last_state() -> None:
    scale = TimeScale.of([("run", 0.0)], 1.0, x=0.0, width=10.0)
    times = [0.1 + n / 1e5 for n in range(100)]
    moments = [Moment(time_s, 0, {}) for time_s in times]
    above = [7] * 50 + [99] + [3] * 49
    steps = thinned(moments, [0] * 100, above, scale)
    assert [high for _, _, high in steps] == [99, 3]


@pytest.mark.parametrize("light", [True, False])
def test_every_plain_colour_has_another_for_the_dark(light: bool) -> None:
    text = as_svg(busy())
    used = set(re.findall(r'fill="(#[0-9a-f]{6})"', text.split("</style>")[1]))
    plain = used - {mixed(color) for color in ROLE_COLORS.values()}
    dark = dict(re.findall(r'\[fill="(#[0-9a-f]{6})"\]\{fill:(#[0-9a-f]{6})\}', text))
    assert plain <= dark.keys()
    values = dark.keys() if light else dark.values()
    assert len(set(values)) == len(dark)


def test_the_ink_on_a_colour_can_be_read() -> None:
    assert [ink_on(color)[1] for color in ("#0072b2", "#56b4e9", "#ffffff", "#101010")] == [
        "f", "1", "1", "f",
    ]  # fmt: skip


def test_a_recording_without_events_says_so() -> None:
    assert "Nothing was reserved." in texts(Recording("job", 10, [("setup", 1.0)], ended_s=1.0))


def test_a_full_history_says_that_events_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nxrt.cli.memory_picture.MAX_EVENTS", 4)
    assert any(text.startswith("Only the last 4 events") for text in texts(simple()))


@pytest.mark.parametrize("peak", [4, 5, 1000, 1024, 3 * MIB, 2**40, 7 * 2**30])
def test_byte_ticks_are_round_and_few(peak: int) -> None:
    step = tick_step(peak * 1.22)
    assert step & (step - 1) == 0
    assert 3 <= peak * 1.22 // step <= 6


PHASES = [("setup", 10.0), ("eager", 10.001), ("capture", 12.0), ("replay", 12.0001)]


def test_short_phases_have_room_and_time_goes_on() -> None:
    scale = TimeScale.of(PHASES, 13.0, x=100.0, width=700.0)
    assert [span.width >= MIN_PHASE_WIDTH - 1e-6 for span in scale.spans] == [True] * 4
    assert sum(span.width for span in scale.spans) == pytest.approx(700)
    assert not scale.is_even
    times = [10 + n / 1e4 for n in range(30_001)]
    places = [scale.position(time_s) for time_s in times]
    assert places == sorted(places)
    assert [scale.position(0), scale.position(99)] == pytest.approx([100, 800])


def test_one_phase_is_linear() -> None:
    scale = TimeScale.of([("run", 5.0)], 7.0, x=0.0, width=100.0)
    assert scale.is_even
    assert scale.position(5.5) == pytest.approx(25)


@pytest.mark.parametrize("length", [1e-5, 3e-3, 0.7, 42.0, 5000.0])
def test_time_ticks_are_round_and_apart(length: float) -> None:
    phases = [("a", 0.0), ("b", length * 0.001), ("c", length * 0.5)]
    ticks = list(TimeScale.of(phases, length, x=0.0, width=700.0).ticks())
    assert len(ticks) >= 5
    for (x1, one), (x2, two) in pairwise(ticks):
        assert x2 - x1 >= 6.4 * (len(one) + len(two)) / 2
    last = re.sub(r"[^\d]", "", ticks[-1][1]).strip("0")
    assert len(last) <= 3


def test_a_phase_of_no_length_is_drawn() -> None:
    scale = TimeScale.of([("a", 1.0), ("b", 1.0)], 1.0, x=0.0, width=100.0)
    assert [span.width for span in scale.spans] == [50, 50]
    assert list(scale.ticks()) == []


def test_times_are_written_as_exactly_as_they_are_known() -> None:
    assert [time_text(1.5, 0.5), time_text(0.25, 0.05), time_text(12, 2)] == [
        "1.5 s", "250 ms", "12 s",
    ]  # fmt: skip
    assert time_text(1.0005, 0.0005) == "1,000.5 ms"
    assert [length_text(n) for n in (0, 0.00123, 0.5, 6.0, 75.0)] == [
        "0 ms", "1.23 ms", "500 ms", "6.00 s", "75.0 s",
    ]  # fmt: skip
