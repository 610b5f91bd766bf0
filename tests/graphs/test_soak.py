"""Ten thousand graphs, one after the other: nothing may be left of any of them."""

import os
from contextlib import closing

import numpy as np
import pytest

from tests.helpers.graph_rig import DRIFT_NBYTES, SUMMED, Rig, bound, floats

pytestmark = [pytest.mark.gpu, pytest.mark.fake, pytest.mark.slow]

NUM_WARM = 50


def num_captures(rig: Rig) -> int:
    """Return how many graphs to make; the double is slower, and forgets nothing by itself."""
    return int(os.environ.get("NXRT_SOAK_CAPTURES", "1000" if rig.fake else "10000"))


@pytest.mark.timeout(600)
def test_ten_thousand_captures_leave_nothing_behind(rig: Rig) -> None:
    with rig.session(SUMMED) as session:
        with bound(session, 64) as largest:
            session.run(largest)
            session.step(largest)
        figures, free_nbytes = None, 0
        for number in range(num_captures(rig) + NUM_WARM):
            count = number % 64 + 1
            expected = np.cumsum(3 * floats(count, number), dtype=np.float32)
            with (
                bound(session, count, number) as binding,
                closing(session.capture(binding)) as graph,
            ):
                graph.replay()
                graph.replay()
                assert np.array_equal(binding.read("y"), expected)
            if number >= NUM_WARM and number % 64 == NUM_WARM % 64:
                session.synchronize()
                figures = figures or rig.figures()
                free_nbytes = free_nbytes or rig.free_nbytes()
                assert rig.figures() == figures
        assert free_nbytes - rig.free_nbytes() <= DRIFT_NBYTES
        assert rig.device.releases.num_pending == 0
