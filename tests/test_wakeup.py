import os
import threading

from genserve.wakeup import Wakeup


def test_a_notification_ends_one_wait_whether_it_comes_before_or_after() -> None:
    wakeup, answer = Wakeup(), Wakeup()
    wakeup.notify()
    wakeup.notify()
    assert wakeup.wait()
    assert wakeup.wait(0)
    assert not wakeup.wait(0)

    def echo() -> None:
        wakeup.wait()
        answer.notify()

    thread = threading.Thread(target=echo)
    thread.start()
    wakeup.notify()
    assert answer.wait(10)
    thread.join()


def test_a_deleted_wakeup_leaves_no_file_open() -> None:
    wakeup = Wakeup()
    read_end, write_end = os.dup(wakeup._read_end), os.dup(wakeup._write_end)
    del wakeup
    os.close(write_end)
    assert os.read(read_end, 1) == b""  # no write end is open any more
    os.close(read_end)
