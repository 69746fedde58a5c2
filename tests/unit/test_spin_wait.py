"""How long one looks for what one waits for before one sleeps."""

from millstream.services.process.waits import Spin


def test_only_who_just_had_work_looks_for_more():
    spin = Spin(0.001)
    assert spin.seconds == 0  # it has seen no work yet
    spin.record_wait(0.0005, 1)
    assert spin.seconds == 0.001
    spin.record_wait(0.5, 1)
    assert spin.seconds == 0


def test_behind_a_full_batch_nobody_looks():
    spin = Spin(0.001)
    spin.record_wait(0.0005, 30)
    assert spin.seconds == 0


def test_never_when_told_so():
    spin = Spin(0)
    spin.record_wait(0.0001, 1)
    assert spin.seconds == 0
