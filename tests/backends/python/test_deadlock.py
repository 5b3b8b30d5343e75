from __future__ import annotations

from genserve.backends.python.deadlock import deadlocked, waits_for_itself
from genserve.inference import Backlog, Executor, Inference, InferenceRequest


def executor(name="e"):
    return Executor(name=name)


def inference(*executors, parts=(), backlog=None):
    asked = InferenceRequest(model_name="m", inputs={})
    made = Inference(request=asked, on_response=lambda response, final: None, parts=list(parts))
    made.backlog = backlog
    made.blocked_by = lambda: executors
    return made


def executing(instance, what):
    instance.executing = (what,)
    what.blocked_by = lambda: (instance,)
    what.started_ns = 1


def waits(instance, *calls):
    instance.waiting_for.update(calls)


def test_an_inference_that_waits_for_a_free_instance_is_not_deadlocked():
    assert not deadlocked(inference(executor()))


def test_an_inference_that_needs_no_instance_is_not_deadlocked():
    assert not deadlocked(inference())


def test_an_inference_behind_a_busy_instance_is_not_deadlocked():
    busy = executor()
    executing(busy, inference())
    assert not deadlocked(inference(busy))


def test_a_call_to_the_same_instance_is_deadlocked():
    one = executor()
    executing(one, inference())
    call = inference(one)
    waits(one, call)
    assert deadlocked(call)


def test_a_call_to_the_same_model_with_a_second_instance_is_not_deadlocked():
    one, two = executor(), executor()
    executing(one, inference())
    call = inference(one, two)
    waits(one, call)
    assert not deadlocked(call)


def test_in_a_cycle_only_the_call_without_an_instance_is_deadlocked():
    a, b = executor("a"), executor("b")
    executing(a, inference())
    to_b, back = inference(), inference(a)
    executing(b, to_b)
    waits(a, to_b)
    waits(b, back)
    assert deadlocked(back)
    assert not deadlocked(to_b)


def test_instances_that_all_wait_for_one_of_them_are_deadlocked():
    pool = [executor(str(number)) for number in range(2)]
    calls = [inference(*pool) for _ in pool]
    for one, call in zip(pool, calls, strict=True):
        executing(one, inference())
        waits(one, call)
    assert all(map(deadlocked, calls))


def test_an_instance_that_waits_for_another_that_works_is_not_deadlocked():
    a, b = executor("a"), executor("b")
    executing(a, inference())
    to_b = inference()
    executing(b, to_b)
    waits(a, to_b)
    assert not deadlocked(inference(a))


def test_a_wait_for_an_ended_inference_blocks_nothing():
    one = executor()
    executing(one, inference())
    call = inference(one)
    waits(one, call)
    call.send(None, final=True)
    assert not deadlocked(inference(one))


def test_one_deadlocked_call_among_others_holds_the_instance():
    one, free = executor("one"), executor("free")
    executing(one, inference())
    fine, back = inference(free), inference(one)
    waits(one, fine, back)
    assert not deadlocked(fine)
    assert deadlocked(back)


def test_an_inference_is_deadlocked_with_its_part():
    one = executor()
    executing(one, inference())
    step = inference(one)
    ensemble = inference(parts=[step])
    waits(one, ensemble)
    assert deadlocked(ensemble)


def test_an_inference_whose_part_runs_is_not_deadlocked():
    one, two = executor("one"), executor("two")
    executing(one, inference())
    step = inference()
    executing(two, step)
    ensemble = inference(parts=[step, inference(two)])
    waits(one, ensemble)
    assert not deadlocked(ensemble)


def test_a_call_to_an_instance_that_needs_the_callers_resource_is_deadlocked():
    caller, target = executor("caller"), executor("target")
    executing(caller, inference())
    call = inference(target)
    waits(caller, call)
    target.blocked_by = lambda: [caller]
    assert deadlocked(call)
    slow = executor("slow")
    executing(slow, inference())
    target.blocked_by = lambda: [caller, slow]  # who may leave enough of it
    assert not deadlocked(call)


def in_line(*others):
    """Return a request that is submitted once one of these has ended."""
    waiting = inference()
    waiting.blocked_by = lambda: others
    return waiting


def answering(instance, *waiting):
    """Return an inference that an instance executes, with a backlog of responses."""
    made = inference(backlog=Backlog())
    executing(instance, made)
    for other in waiting:
        made.backlog.add(other)
    return made


def test_a_step_that_calls_its_own_full_ensemble_is_deadlocked():
    one = executor()
    ahead = inference()
    executing(one, ahead)
    call = inference(parts=[in_line(ahead)])
    waits(one, call)
    assert deadlocked(call)


def test_a_full_ensemble_with_a_running_request_is_not_deadlocked():
    one, two = executor(), executor()
    ahead, other = inference(), inference()
    executing(one, ahead)
    executing(two, other)
    call = inference(parts=[in_line(ahead, other)])
    waits(one, call)
    assert not deadlocked(call)


def test_a_response_waits_for_itself_if_a_later_step_calls_its_model():
    producer, consumer = executor(), executor()
    taken = inference()
    executing(consumer, taken)
    answered = answering(producer, in_line(taken))
    assert not waits_for_itself(answered)
    call = inference(producer)
    waits(consumer, call)
    assert waits_for_itself(answered)
    assert not deadlocked(call)       # it is the producer that goes on
    call.blocked_by = lambda: (producer, executor())
    assert not waits_for_itself(answered)


def test_a_response_without_a_backlog_does_not_wait_for_itself():
    assert not waits_for_itself(answering(executor()))
    assert not waits_for_itself(inference(executor()))
