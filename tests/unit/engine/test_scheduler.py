"""Scheduling decisions, without a model: who is let in, what a step runs, who gives way."""

from functools import partial
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.engine.errors import QueueFull
from services.engine.page_range import PageRange
from services.engine.request import SampledToken, SubmitMode
from services.engine.sequence import EngineSequence
from services.engine.sequence_state import SequenceState
from tests.unit.engine.scheduling import Bench

LOCAL, HANDOFF, PREFILL_ONLY = SubmitMode.LOCAL, SubmitMode.HANDOFF, SubmitMode.PREFILL_ONLY


def test_prompts_run_in_chunks_and_decoding_goes_first() -> None:
    bench = Bench(max_batched_tokens=9)
    bench.add(4)
    assert bench.step() == [("1", 0, 4)]
    bench.add(12)
    assert bench.step() == [("1", 4, 5), ("2", 0, 8)]
    assert bench.step() == [("1", 5, 6), ("2", 8, 12)]
    assert bench.step() == [("1", 6, 7), ("2", 12, 13)]


def test_blocks_that_may_hold_nan_are_found_by_nobody() -> None:
    bench = Bench(num_blocks=4)
    prompt = range(500, 508)
    bad = bench.add(0, prompt=prompt)
    bench.step()
    bench.scheduler.distrust(bad)
    bad.release()
    bench.add(0, prompt=prompt, max_tokens=4)
    assert bench.step() == [("2", 0, 8)], "its prefix was taken from the cache"


def test_who_had_computed_its_context_before_it_was_preempted_fails_with_nobody() -> None:
    bench = Bench(num_blocks=8)
    prompt = range(500, 508)
    preempted = bench.add(0, prompt=prompt)
    bench.step()
    everything = bench.add(16, priority=1, max_tokens=17)
    while everything.state is not SequenceState.ENDED:
        bench.step()
    assert preempted.state is SequenceState.WAITING
    author, new = bench.add(0, prompt=prompt, priority=1), bench.add(0, prompt=prompt)
    bench.scheduler.admit()
    assert preempted.state is SequenceState.WAITING, "it waits for nobody"
    assert bench.scheduler.equals_of([author]) == [new]


def test_a_block_that_an_import_fills_only_in_part_is_cleared() -> None:
    bench = Bench(num_blocks=16)
    part, whole = bench.add(6, HANDOFF), bench.add(8, HANDOFF)
    bench.scheduler.admit()
    assert whole.state is SequenceState.RESERVED
    assert bench.cleared == [part.block_table[1]]


def test_order_is_priority_then_arrival() -> None:
    bench = Bench(max_num_seqs=1)
    bench.add(4, max_tokens=1)
    bench.add(4, max_tokens=1)
    bench.add(4, priority=1, max_tokens=1)
    assert [bench.step()[0][0] for _ in range(3)] == ["3", "1", "2"]


def test_nobody_waits_for_a_prefix_behind_those_of_lower_priority() -> None:
    bench = Bench(num_blocks=64, max_batched_tokens=8)
    prompt = range(500, 520)
    bench.add(0, prompt=prompt)
    assert bench.step() == [("1", 0, 8)]
    bench.add(80, priority=1)  # holds up the first, and whoever waits for it
    bench.add(0, prompt=prompt, priority=2)
    bench.add(0, prompt=prompt, priority=2)  # waits for the one before, which goes first
    assert bench.step() == [("3", 8, 16)]
    assert bench.step() == [("3", 16, 20), ("2", 0, 4)]
    assert bench.step()[:2] == [("3", 20, 21), ("4", 19, 20)]


def test_the_queue_is_bounded() -> None:
    bench = Bench(max_num_seqs=1, max_queue_len=2)
    bench.add(4)
    bench.scheduler.admit()
    bench.add(4)
    bench.add(4)
    with pytest.raises(QueueFull):
        bench.add(4)


def test_a_full_queue_takes_who_goes_before_those_in_it() -> None:
    bench = Bench(num_blocks=8, max_queue_len=1)
    bench.add(4, max_tokens=12)
    bench.scheduler.admit()
    bench.add(24)
    urgent = bench.add(4, priority=1)
    bench.scheduler.admit()
    assert urgent.state is SequenceState.RUNNING


def test_a_full_queue_takes_nobody_behind_one_that_does_not_fit() -> None:
    bench = Bench(num_blocks=8, max_queue_len=1)
    bench.add(4, max_tokens=12)
    bench.scheduler.admit()
    bench.add(24)
    with pytest.raises(QueueFull):
        bench.add(4, max_tokens=1)


def test_a_queue_of_length_zero_still_lets_in_what_fits() -> None:
    bench = Bench(max_num_seqs=1, max_queue_len=0)
    bench.add(4)
    bench.scheduler.admit()
    with pytest.raises(QueueFull):
        bench.add(4)


def test_reservations_take_at_most_half_the_pool() -> None:
    bench = Bench(num_blocks=8)
    sequences = [bench.add(4, HANDOFF) for _ in range(3)]  # two blocks each: context and one more
    bench.scheduler.admit()
    states = [sequence.state for sequence in sequences]
    assert states == [SequenceState.RESERVED, SequenceState.RESERVED, SequenceState.WAITING]


def test_the_half_is_not_exceeded_by_one_block() -> None:
    bench = Bench(num_blocks=8)
    sequences = [bench.add(4, HANDOFF, max_tokens=1) for _ in range(6)]
    bench.scheduler.admit()
    assert [sequence.awaits_kv for sequence in sequences] == [True] * 4 + [False] * 2


def test_a_reservation_above_half_the_pool_is_the_only_one_and_holds_up_nobody_who_computes_here() -> None:
    bench = Bench(num_blocks=64)
    bench.add(4, max_tokens=100)
    small = bench.add(4, HANDOFF, max_tokens=1)
    bench.step()
    large, later = bench.add(140, HANDOFF, max_tokens=1), bench.add(4, HANDOFF, max_tokens=1)
    bench.step()
    assert (large.state, later.state) == (SequenceState.WAITING, SequenceState.WAITING)
    small.release()
    here = [bench.add(4, max_tokens=1) for _ in range(3)]
    for _ in range(4):
        bench.step()
    assert (large.state, later.state) == (SequenceState.RESERVED, SequenceState.WAITING)
    assert {sequence.state for sequence in here} == {SequenceState.ENDED}
    large.compute_locally()
    bench.step()
    assert later.state is SequenceState.RESERVED


@pytest.mark.parametrize(
    ("num_tokens", "meanwhile"), [(164, SequenceState.RESERVED), (165, SequenceState.WAITING)]
)
def test_a_reservation_above_half_the_pool_leaves_those_that_run_what_they_can_come_to_need(
    num_tokens: int, meanwhile: SequenceState
) -> None:
    """Its pages may never come. That new ones keep coming does not keep it out."""
    bench = Bench(num_blocks=64, max_queue_len=100)
    running = bench.add(30, max_tokens=60)  # 23 blocks in the end
    bench.step()
    large = bench.add(num_tokens, HANDOFF, max_tokens=1)
    while running.state is not SequenceState.ENDED:
        bench.add(4, max_tokens=1)
        assert "1" in [request_id for request_id, _, _ in bench.step()], "it gave way"
        assert large.state is meanwhile
    bench.step()
    assert large.state is SequenceState.RESERVED


def test_who_outgrows_what_reservations_leave_waits_for_them_and_goes_on() -> None:
    bench = Bench(num_blocks=8)
    reserved = bench.add(14, HANDOFF, max_tokens=1)
    growing = bench.add(4, max_tokens=24)
    while not growing.was_preempted:
        assert bench.step() or growing.was_preempted, "no progress"
    assert bench.step() == [], "it took blocks that are waiting for pages"
    reserved.release()
    assert bench.step() == [("2", 16, 17)], "what it had computed was in the cache"


def test_who_gave_way_to_a_reservation_goes_before_it_once_it_has_joined() -> None:
    bench = Bench(num_blocks=8)
    first, later = bench.add(4, max_tokens=24), bench.add(12, HANDOFF, max_tokens=12)
    while not first.was_preempted:
        assert bench.step() or first.was_preempted, "no progress"
    assert bench.step() == []
    _deliver(later)
    assert bench.step() == [("1", 16, 17)], "it waits for the reply that came after it"
    while first.state is not SequenceState.ENDED:
        assert bench.step(), "no progress"
    assert bench.step()[0][0] == "2"


def test_nobody_gives_way_to_one_that_it_does_not_help() -> None:
    bench = Bench(num_blocks=12)
    first = bench.add(4, max_tokens=30)
    large, small = bench.add(20, HANDOFF, max_tokens=1), bench.add(1, HANDOFF, max_tokens=4)
    while not first.was_preempted:
        assert bench.step() or first.was_preempted, "no progress"
    _deliver(small)
    while small.state is not SequenceState.ENDED:
        assert [request_id for request_id, _, _ in bench.step()] == ["3"]
    large.release()
    assert bench.step()[0][0] == "1"


def test_a_new_one_of_higher_priority_takes_nobodys_blocks() -> None:
    bench = Bench(num_blocks=4)
    running = bench.add(8, max_tokens=5)
    bench.step()
    bench.add(8, priority=1, max_tokens=1)
    assert bench.step() == [("1", 8, 9)]
    assert not running.was_preempted


def test_who_lacks_only_a_place_in_the_batch_waits_for_one() -> None:
    bench = Bench(num_blocks=8, max_num_seqs=2)
    first, reserved = bench.add(4, max_tokens=24), bench.add(14, HANDOFF, max_tokens=1)
    while not first.was_preempted:
        assert bench.step() or first.was_preempted, "no progress"
    urgent = [bench.add(1, priority=1, max_tokens=4) for _ in range(2)]
    bench.step()
    reserved.release()
    assert [request_id for request_id, _, _ in bench.step()] == ["3", "4"]
    while urgent[0].state is not SequenceState.ENDED:
        bench.step()
    assert "1" in [request_id for request_id, _, _ in bench.step()]


def test_who_came_back_is_still_the_first_to_give_way() -> None:
    bench = Bench(num_blocks=8)
    first, second = bench.add(4, max_tokens=16), bench.add(4, max_tokens=16)
    reserved = bench.add(14, HANDOFF, max_tokens=1)
    while not second.was_preempted:
        assert bench.step(), "no progress"
    reserved.release()
    while second.state is not SequenceState.ENDED:
        assert bench.step(), "no progress"
    assert not first.was_preempted


def test_a_full_queue_of_those_that_wait_for_reservations_takes_who_fits() -> None:
    bench = Bench(num_blocks=16, max_queue_len=1)
    bench.add(20, HANDOFF)
    bench.scheduler.admit()
    bench.add(12, HANDOFF)
    here = bench.add(3)
    bench.scheduler.admit()
    assert here.state is SequenceState.RUNNING
    with pytest.raises(QueueFull):
        bench.add(3, HANDOFF)
    with pytest.raises(QueueFull):
        bench.add(40)


def test_who_waits_to_reserve_blocks_holds_up_nobody_who_computes_here() -> None:
    bench = Bench(num_blocks=16)
    first, second, third = bench.add(20, HANDOFF), bench.add(12, HANDOFF), bench.add(3, HANDOFF)
    bench.add(3)
    assert bench.step() == [("4", 0, 3)]
    assert (second.state, third.state) == (SequenceState.WAITING, SequenceState.WAITING)
    first.release()
    bench.scheduler.admit()
    assert (second.state, third.state) == (SequenceState.RESERVED, SequenceState.RESERVED)


def test_several_tokens_of_one_step_get_room_before_they_are_computed() -> None:
    """As if they had been guessed: the last block is full, and two tokens are to come into the next."""
    bench = Bench(num_blocks=4)
    sequence = bench.add(4, max_tokens=12)
    bench.step()
    sequence.take_tokens([SampledToken(70)] * 5)
    assert bench.step() == [("1", 4, 10)]
    assert len(sequence.block_table) == 3


def test_the_last_one_gives_way_and_comes_back_first() -> None:
    bench = Bench(num_blocks=5)
    first, second = bench.add(7, max_tokens=12), bench.add(3, max_tokens=9)
    seen: list[list[str]] = []
    while bench.scheduler.num_running or bench.scheduler.num_waiting:
        seen.append([request_id for request_id, _, _ in bench.step()])
        assert seen[-1], "no progress"
        if second.state is SequenceState.WAITING and bench.num_arrived == 2:
            bench.add(3, max_tokens=1)
    assert second.was_preempted
    assert not first.was_preempted
    steps_of_second = [i for i, ids in enumerate(seen) if "2" in ids]
    assert ["1"] in seen[steps_of_second[0] : steps_of_second[-1]], "nobody gave way"
    order = [ids[-1] for ids in seen]
    assert order.index("3") > max(i for i, ids in enumerate(seen) if "1" in ids)
    assert second.num_once_computed_tokens > 0
    assert bench.scheduler.blocks.num_used == 0


def test_pages_on_their_way_out_are_never_preempted() -> None:
    bench = Bench(num_blocks=6)
    waiting_for_send = bench.add(8, PREFILL_ONLY)
    bench.step()
    other = bench.add(8, max_tokens=9)
    for _ in range(12):
        bench.step()
    assert waiting_for_send.state is SequenceState.ENDED
    assert len(waiting_for_send.block_table) == 2
    assert other.state is SequenceState.ENDED


def test_an_equal_prompt_shares_full_blocks_and_copies_the_last() -> None:
    bench = Bench(num_blocks=12)
    prompt = tuple(range(10, 20))  # two full blocks of 4, and 2 tokens
    first = bench.add(10, prompt=prompt)
    assert bench.step() == [("1", 0, 8)]
    assert bench.step() == [("1", 8, 10)]
    second = bench.add(10, prompt=prompt)
    assert bench.step() == [("1", 10, 11), ("2", 9, 10)]
    assert second.num_cached_tokens == 9
    assert second.block_table[:2] == first.block_table[:2]
    assert bench.copied == [(first.block_table[2], second.block_table[2], 1)]
    assert first.block_table[2] != second.block_table[2]


def test_choices_of_one_prompt_wait_for_the_first_and_hold_up_nobody_else() -> None:
    bench = Bench(num_blocks=20, max_batched_tokens=8)
    prompt = tuple(range(10, 22))
    choices = [bench.add(12, prompt=prompt) for _ in range(3)]
    other = bench.add(3)
    assert bench.step() == [("1", 0, 8)]
    assert other.state is SequenceState.RUNNING
    assert [choice.state for choice in choices[1:]] == [SequenceState.WAITING] * 2
    assert bench.step() == [("1", 8, 12), ("4", 0, 3)]
    assert bench.step() == [("1", 12, 13), ("2", 11, 12), ("3", 11, 12), ("4", 3, 4)]


def test_who_waits_for_a_prefix_goes_on_when_its_author_leaves() -> None:
    bench = Bench(num_blocks=20)
    prompt = tuple(range(10, 22))
    first, second = (bench.add(12, prompt=prompt) for _ in range(2))
    bench.step()
    first.release()
    assert bench.step() == [("2", 8, 12)], "what had been computed is used, the rest is computed"
    assert second.num_cached_tokens == 8


def test_an_author_that_was_preempted_holds_nobody_up() -> None:
    bench = Bench(num_blocks=7)
    first = bench.add(8, max_tokens=21, priority=1)
    author = bench.add(9, prompt=tuple(range(500, 509)), max_tokens=8)
    while not author.was_preempted:
        assert bench.step(), "no progress"
    follower = bench.add(9, prompt=tuple(range(500, 509)), max_tokens=2)
    for _ in range(60):
        bench.step()
    assert {s.state for s in (first, author, follower)} == {SequenceState.ENDED}
    assert bench.scheduler.blocks.num_used == 0


def test_a_short_queue_takes_the_choices_of_one_prompt() -> None:
    bench = Bench(num_blocks=20, max_queue_len=0, max_num_seqs=3)
    prompt = tuple(range(10, 22))
    for _ in range(3):
        bench.add(12, prompt=prompt)
        bench.scheduler.admit()
    with pytest.raises(QueueFull):
        bench.add(12, prompt=prompt)


def test_a_sequence_that_gives_up_importing_uses_what_is_cached() -> None:
    bench = Bench(num_blocks=20)
    prompt = tuple(range(10, 19))
    bench.add(9, prompt=prompt, max_tokens=1)
    bench.step()
    bench.step()
    importing = bench.add(9, HANDOFF, prompt=prompt)
    bench.scheduler.admit()
    assert (importing.num_computed_tokens, importing.num_held_tokens) == (0, 8)
    importing.compute_locally()
    assert bench.step() == [("2", 8, 9)]
    importing.release()
    assert bench.scheduler.blocks.num_used == 0


def test_a_sequence_that_gives_up_importing_uses_what_came_into_the_cache_meanwhile() -> None:
    bench = Bench(num_blocks=20)
    prompt = tuple(range(10, 19))
    importing = bench.add(9, HANDOFF, prompt=prompt)
    bench.scheduler.admit()
    bench.add(9, prompt=prompt, max_tokens=1)
    bench.step()
    bench.step()
    importing.compute_locally()
    assert bench.step() == [("1", 8, 9)]


def test_a_tail_that_is_copied_to_its_own_block_is_not_cleared() -> None:
    """The cached block is evicted for the very sequence that is to continue it."""
    bench = Bench(num_blocks=2)
    prompt = tuple(range(10, 16))
    bench.add(6, prompt=prompt, max_tokens=1)
    bench.step()
    importing = bench.add(6, HANDOFF, prompt=prompt, max_tokens=1)
    bench.scheduler.admit()
    assert importing.num_held_tokens == 5
    assert bench.copied == [(importing.block_table[1], importing.block_table[1], 1)]
    assert bench.cleared == []


def test_what_was_held_stays_held_when_its_blocks_are_distrusted() -> None:
    bench = Bench(num_blocks=20)
    prompt = tuple(range(10, 19))
    author = bench.add(9, prompt=prompt, max_tokens=9)
    bench.step()
    bench.step()
    importing = bench.add(9, HANDOFF, prompt=prompt)
    bench.scheduler.admit()
    bench.scheduler.distrust(author)
    importing.compute_locally()
    assert ("2", 8, 9) in bench.step(), "it would write into blocks that others read"


SIZES = st.tuples(
    st.integers(1, 14),
    st.integers(1, 14),
    st.sampled_from([LOCAL, HANDOFF, PREFILL_ONLY]),
    st.sampled_from([0, 0, 1]),
)


@settings(deadline=None, max_examples=80)
@given(st.lists(SIZES, min_size=1, max_size=8), st.booleans(), st.randoms(use_true_random=False))
def test_whatever_comes_and_goes_everybody_ends_and_no_block_is_lost(
    sizes: list[tuple[int, int, SubmitMode, int]],
    are_alike: bool,  # noqa: FBT001 - drawn by hypothesis
    choose: SimpleNamespace,
) -> None:
    bench = Bench(num_blocks=8)
    live = []
    for num_tokens, max_tokens, mode, priority in sizes:
        prompt = tuple(range(10, 10 + num_tokens)) if are_alike else ()
        live.append(bench.add(num_tokens, mode, priority, max_tokens, prompt))
    for _ in range(400):
        bench.step()
        _check_blocks(bench, live)
        for sequence in live:
            if sequence.state is SequenceState.RESERVED and choose.random() < 0.5:
                choose.choice([sequence.compute_locally, sequence.kv.reset, partial(_deliver, sequence)])()
            elif sequence.state is SequenceState.ENDED or choose.random() < 0.02:
                sequence.release()
        if all(sequence.state is SequenceState.RELEASED for sequence in live):
            break
    assert all(sequence.state is SequenceState.RELEASED for sequence in live), "somebody starves"
    assert bench.scheduler.blocks.num_used == 0


def _deliver(sequence: EngineSequence) -> None:
    """What a prefill worker would send."""
    start, end = sequence.num_held_tokens, sequence.request.num_context_tokens
    sequence.kv.reset()
    sequence.kv.import_page(PageRange(0, 1, start, end), memoryview(bytes(8 * (end - start))))
    sequence.accept_first_token(SampledToken(70))
    sequence.join()


def _check_blocks(bench: Bench, live: list[EngineSequence]) -> None:
    """Every held block is counted; one that a sequence has yet to write to is its own."""
    held = [block for sequence in live for block in sequence.block_table]
    assert len(set(held)) == bench.scheduler.blocks.num_used
    reserved = [len(sequence.block_table) for sequence in live if sequence.state is SequenceState.RESERVED]
    assert len(reserved) <= 1 or sum(reserved) <= bench.scheduler.blocks.num_blocks // 2
    for sequence in live:
        num_kept = sequence.num_held_tokens if sequence.awaits_kv else sequence.num_computed_tokens
        for block in sequence.block_table[num_kept // 4 :]:
            assert held.count(block) == 1, "two sequences may write to one block"
        for block in sequence.block_table:
            assert bench.scheduler.blocks.num_holders(block) == held.count(block)
