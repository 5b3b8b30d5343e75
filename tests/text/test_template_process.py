"""Templates that would block a server or fill its memory, in a process that can be killed."""

from __future__ import annotations

import gc
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import termios
import threading
import time
from fcntl import ioctl
from pathlib import Path
from typing import Any

import jinja2
import pytest

from genserve.errors import RepositoryError
from genserve.text import template_renderer
from genserve.text.chat_template import (
    MAX_OWN_CHARS,
    ChatRejected,
    ChatTemplate,
    TemplateExceeded,
    TemplateFailed,
    TemplateProcess,
)
from tests.support.representatives import with_extended

LOOP = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
DOUBLING = (
    "{% set ns = namespace(x=['ab']) %}{% for i in range(99) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}"
)
HANGS_ON_REQUEST = "{% if hang %}" + LOOP + "{% endif %}{{ text }}"


def process(source: str) -> TemplateProcess:
    return TemplateProcess(source, special_tokens={"eos_token": "</s>"})


def pid(template: TemplateProcess) -> int:
    assert template._child is not None
    return template._child._process.pid


def has_ended(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def test_the_process_maps_no_openssl() -> None:
    template = process("{{ text }}")
    template.compile()
    assert "libcrypto" not in Path(f"/proc/{pid(template)}/maps").read_text()
    template.close()


def test_the_program_starts_where_hashlib_needs_openssl() -> None:
    """As with Fedora's Python, which has no algorithms of its own."""
    packages = Path(jinja2.__file__).parents[1]
    program = (
        "import runpy, sys\n"
        "sys.modules |= dict.fromkeys(('_md5', '_sha1', '_sha2'))\n"
        f"sys.argv = ['', '9', '{2**30}', {str(packages)!r}]\n"
        f"runpy.run_path({template_renderer.__file__!r}, run_name='__main__')"
    )
    command = [sys.executable, "-I", "-S", "-c", program]
    ran = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=False)
    assert ran.returncode == 0, ran.stderr.decode()


def test_one_process_renders_several_chats() -> None:
    template = process("{{ text }}{{ eos_token }}")
    assert template.compile() == {"text"}
    first = pid(template)
    for text in ("a", "\ud800\u4e16\0"):
        assert template.render({"text": text}) == f"{text}</s>"
    assert pid(template) == first


@pytest.mark.parametrize(
    "source",
    [
        LOOP,
        pytest.param("{{ 10 ** (n ** n) }}", marks=pytest.mark.extended),
        "{{ '%1000000000d' | format(1) }}",
        pytest.param("{% for i in range(99999) %}{{ 'a' * 999 }}{% endfor %}", marks=pytest.mark.extended),
        *(
            pytest.param(source, marks=pytest.mark.extended)
            for source in (
                "{% macro f(n) %}{{ f(n + 1) ~ f(n + 1) if n < 40 }}{% endmacro %}{{ f(0) }}",
                DOUBLING + "{{ ns.x | tojson }}",
                "{{ 'a' * n ** 10 }}",
                "{{ 'a' | center(n ** 10) }}",
                DOUBLING.replace("['ab']", "'ab'").replace("[ns.x, ns.x]", "ns.x ~ ns.x") + "{{ ns.x }}",
            )
        ),
    ],
)
def test_a_template_that_exceeds_its_limits_is_stopped_and_the_next_chat_is_rendered(source: str) -> None:
    hostile = "{% if hostile %}" + source + "{% endif %}{{ text }}"
    template = TemplateProcess(hostile, special_tokens={}, max_cpu_s=0.5)
    with pytest.raises(TemplateExceeded, match=r"CPU time|memory|characters"):
        template.render({"hostile": True, "n": 10, "text": ""})
    assert template.render({"text": "fine"}) == "fine"


@pytest.mark.parametrize(
    "source",
    ["{{ 10 ** (10 ** 8) }}", "{{ " + "(" * 100_000, "{% if a %}" * 5000 + "{% endif %}" * 5000],
    ids=["power", "brackets", "blocks"],
)
@pytest.mark.usefixtures("endless_templates_end_soon")
def test_a_template_that_exceeds_its_limits_when_compiled_is_rejected(source: str) -> None:
    with pytest.raises(RepositoryError, match="chat template") as raised:
        ChatTemplate(source, special_tokens={}, name="chat_template.jinja")
    assert raised.value.message.startswith("chat_template.jinja: ")
    assert raised.value.remedy


def test_rendering_takes_no_memory_of_this_process() -> None:
    before = resource.getrusage(resource.RUSAGE_SELF)
    with pytest.raises(TemplateExceeded):
        process("{{ 'a' * 10 ** 9 }}").render({})
    after = resource.getrusage(resource.RUSAGE_SELF)
    assert after.ru_maxrss - before.ru_maxrss < 2**18, "kB"


def test_a_template_may_repeat_a_long_chat() -> None:
    long = "long " * MAX_OWN_CHARS
    assert process("{{ text }}{{ text }}").render({"text": long}) == long * 2


def test_messages_of_failures_are_short() -> None:
    with pytest.raises(ChatRejected) as rejected:
        process("{{ raise_exception('no' * 9999) }}").render({})
    with pytest.raises(TemplateFailed) as failed:
        process("{{ ('%(' ~ 'a' * 9999 ~ ')s') % {} }}").render({})
    assert len(str(rejected.value)) < 1000 > len(str(failed.value))


def test_a_process_that_has_died_is_replaced() -> None:
    template = process(HANGS_ON_REQUEST)
    template.compile()
    os.kill(pid(template), signal.SIGKILL)
    os.waitid(os.P_PID, pid(template), os.WEXITED | os.WNOWAIT)
    assert template.render({"text": "fine"}) == "fine"


def test_signals_to_the_process_group_do_not_end_it() -> None:
    template = process(HANGS_ON_REQUEST)
    template.compile()
    first = pid(template)
    for group_signal in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        os.kill(first, group_signal)
    assert template.render({"text": "fine"}) == "fine"
    assert pid(template) == first


def test_it_ends_when_it_is_closed_and_the_next_chat_starts_another() -> None:
    template = process(HANGS_ON_REQUEST)
    template.compile()
    first = pid(template)
    template.close()
    template.close()
    assert has_ended(first)
    assert template.render({"text": "fine"}) == "fine"
    assert pid(template) != first


def test_it_ends_with_its_owner() -> None:
    template = process(HANGS_ON_REQUEST)
    template.compile()
    first = pid(template)
    del template
    gc.collect()
    assert has_ended(first)


def test_many_threads_may_render() -> None:
    template = process(HANGS_ON_REQUEST)
    wrong: list[Any] = []

    def ask(number: int) -> None:
        wrong.extend(
            text for text in (str(n * number) for n in range(50)) if template.render({"text": text}) != text
        )

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


# A script without a `__main__` guard, as users write them.
OWNER = """
import sys, threading
from genserve.text.chat_template import TemplateProcess
template = TemplateProcess({source!r}, special_tokens={{}})
template.compile()
print(template._child._process.pid, flush=True)
if {hang}:
    threading.Thread(target=template.render, args=({{"hang": True}},), daemon=True).start()
sys.stdin.read()
"""


@pytest.mark.parametrize("hang", with_extended((False, True), always=(True,)))
@pytest.mark.parametrize("killed", [False, True])
def test_it_does_not_outlive_the_process_that_started_it(tmp_path: Path, hang: bool, killed: bool) -> None:
    script = tmp_path / "script.py"
    script.write_text(OWNER.format(source=HANGS_ON_REQUEST, hang=hang))
    with subprocess.Popen([sys.executable, script], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as owner:
        assert owner.stdout is not None
        child = os.pidfd_open(int(owner.stdout.readline()))
        if killed:
            owner.kill()
    select.select([child], [], [])  # returns when it has ended
    os.close(child)


def wait_for_question(template: TemplateProcess) -> None:
    """Wait until a chat is in the socket of a stopped process."""
    while template._child is None or not any(ioctl(template._child._socket, termios.TIOCOUTQ, bytes(4))):
        time.sleep(0.01)


def test_ctrl_c_in_the_middle_of_a_chat_leaves_no_answer_for_the_next() -> None:
    template = process(HANGS_ON_REQUEST)
    template.compile()
    os.kill(pid(template), signal.SIGSTOP)

    def press() -> None:
        wait_for_question(template)
        os.kill(os.getpid(), signal.SIGINT)

    presser = threading.Thread(target=press)
    presser.start()
    with pytest.raises(KeyboardInterrupt):
        template.render({"text": "old"})
    presser.join()
    assert template.render({"text": "new"}) == "new"


def test_closing_it_does_not_interrupt_another_threads_chat() -> None:
    template = process(HANGS_ON_REQUEST)
    template.compile()
    first = pid(template)
    rendered: list[str] = []
    chat = threading.Thread(target=lambda: rendered.append(template.render({"text": "other"})))
    os.kill(first, signal.SIGSTOP)
    chat.start()
    wait_for_question(template)
    template.close()
    template.close()
    os.kill(first, signal.SIGCONT)
    chat.join()
    assert rendered == ["other"]
    assert has_ended(first)
    assert template.render({"text": "fine"}) == "fine"


def test_many_threads_may_close_it_while_others_render() -> None:
    template = process(HANGS_ON_REQUEST)
    rendered: list[str] = []

    def ask() -> None:
        for _ in range(3):
            rendered.append(template.render({"text": "fine"}))
            template.close()

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert rendered == ["fine"] * 12


@pytest.mark.parametrize(
    "answer",
    [
        b"no JSON",
        b"5",
        b"[" * 99999,
        None,
        *(pytest.param(answer, marks=pytest.mark.extended) for answer in (b"", b"\xff", b"[]", b'["done"]')),
    ],
)
def test_an_invalid_answer_of_the_process_is_not_blamed_on_the_chat(answer: bytes | None) -> None:
    template = process(HANGS_ON_REQUEST)
    template.compile()
    assert template._child is not None
    theirs, template._child._socket, other_end = template._child._socket, *socket.socketpair()
    with theirs, other_end:
        other_end.sendall(b"\xff" * 8 if answer is None else len(answer).to_bytes(8) + answer)
        with pytest.raises(TemplateExceeded, match="invalid answer"):
            template.render({"text": ""})
    assert template.render({"text": "fine"}) == "fine"


def test_its_environment_has_no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_API_KEY", "secret")
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    template = process(HANGS_ON_REQUEST)
    template.compile()
    environment = Path(f"/proc/{pid(template)}/environ").read_bytes()
    assert b"secret" not in environment
    assert b"TZ=Asia/Tokyo" in environment  # for `strftime_now`
