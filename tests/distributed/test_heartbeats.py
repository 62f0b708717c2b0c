"""Which processes count as hanging."""

from tokencredit.distributed.heartbeats import LEFT, Beats


def test_a_process_without_a_new_beat_for_the_timeout_is_silent():
    beats = Beats([1, 2], timeout=10.0, now=0.0)
    for now in (4.0, 8.0, 12.0):
        beats.receive({1: b"1 5", 2: f"{now:.0f} 5".encode()}, now)
    assert beats.hanging(5, 14.0) == ([], [])
    assert beats.hanging(5, 14.1) == ([1], [])


def test_a_process_that_never_began_is_silent_too():
    assert Beats([1], timeout=10.0, now=0.0).hanging(0, 10.1) == ([1], [])


def test_a_process_is_late_once_this_one_has_waited_for_it_in_a_collective_operation():
    beats = Beats([1], timeout=10.0, now=0.0)
    for now in range(40):
        beats.receive({1: f"{now} 5".encode()}, float(now))
        # It has been at its fifth operation for long, as in a slow reward, but this process waits only since 20.
        assert beats.hanging(5 if now < 20 else 6, float(now)) == ([], [1] if now > 30 else [])


def test_a_process_that_comes_to_the_operation_or_to_another_is_not_late():
    beats = Beats([1], timeout=10.0, now=0.0)
    for now in range(60):
        begun = 5 + now // 9  # slow, but it gets on
        beats.receive({1: f"{now} {begun}".encode()}, float(now))
        assert beats.hanging(100, float(now)) == ([], [])
    for now in range(60, 100):
        beats.receive({1: f"{now} 100".encode()}, float(now))
        assert beats.hanging(100, float(now)) == ([], [])


def test_a_process_that_has_left_is_not_waited_for():
    beats = Beats([1], timeout=10.0, now=0.0)
    beats.receive({1: LEFT}, 1.0)
    assert beats.hanging(9, 100.0) == ([], [])


def test_a_process_that_was_stopped_itself_does_not_blame_the_others():
    beats = Beats([1], timeout=10.0, now=0.0)
    beats.receive({1: b"1 1"}, 1.0)
    beats.hanging(2, 1.0)
    beats.reset(100.0)
    assert beats.hanging(2, 100.0) == ([], [])
    assert beats.hanging(2, 110.1) == ([1], [1])
