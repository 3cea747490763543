"""A soak of some seconds: python -m tests.server.soak runs it for longer."""

from tests.server.soak import soak, table


def test_clients_that_come_and_go_change_no_answer(folder):
    found = soak(folder, 12, 12)
    totals = found[0]
    assert not totals.wrong and set(totals.seconds) == {
        "whole", "streamed", "stopped", "several", "sampled", "left", "bad",
    }  # fmt: skip
    assert len(totals.poisoned) == 1 and found[-1]["error"] == 1
    assert table(*found).row_count == 7
