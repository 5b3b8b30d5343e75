import os
import threading

from genserve.wakeup import Wakeup


def test_a_ring_ends_one_wait_whether_it_comes_before_or_after() -> None:
    bell, answer = Wakeup(), Wakeup()
    bell.ring()
    bell.ring()
    assert bell.wait()
    assert bell.wait(0)
    assert not bell.wait(0)

    def echo() -> None:
        bell.wait()
        answer.ring()

    thread = threading.Thread(target=echo)
    thread.start()
    bell.ring()
    assert answer.wait(10)
    thread.join()


def test_a_bell_that_is_dropped_leaves_no_files_open() -> None:
    bell = Wakeup()
    hears, rings = os.dup(bell._hears), os.dup(bell._rings)
    del bell
    os.close(rings)
    assert os.read(hears, 1) == b""  # nobody can write to it any more
    os.close(hears)
