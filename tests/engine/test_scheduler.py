"""Which pages sequences share, where the bits of a prompt's KV depend on how it is cut into chunks."""

from __future__ import annotations

from longspec.cache import PagePool
from longspec.engine.scheduler import Scheduler, Seat
from longspec.engine.sequence import Sequence

PAGE, GRID = 4, 16
DOCUMENT = list(range(100))


def seat_of(scheduler: Scheduler, prompt: list[int], said: int = 0) -> Seat:
    """Admit a prompt, or go on after a pause with an answer of `said` tokens."""
    sequence = Sequence(prompt, 60)
    sequence.tokens = list(range(200, 200 + said))
    scheduler.waiting.append(sequence)
    (seat,) = scheduler.admit()
    return seat


def answer(scheduler: Scheduler, prompt: list[int], num_new: int) -> None:
    """Compute a prompt and end its answer after some tokens."""
    seat = seat_of(scheduler, prompt)
    scheduler.note_computed(seat, len(prompt) - seat.computed)
    scheduler.grow(seat, len(prompt) + num_new)
    seat.sequence.tokens = list(range(200, 200 + num_new))
    scheduler.release(seat)


def shared(grid: int, first: int, num_new: int, second: list[int]) -> int:
    """How many tokens of a second prompt are there, after the document's first tokens got an answer of
    `num_new` tokens."""
    scheduler = Scheduler(PagePool(100, PAGE), 4, grid)
    answer(scheduler, DOCUMENT[:first], num_new)
    seat = seat_of(scheduler, second)
    assert seat.num_chunked == (len(second) // GRID * GRID if grid else 0)
    return seat.computed


def test_without_a_grid_every_full_page_is_shared() -> None:
    assert shared(0, 40, 0, DOCUMENT[:60]) == 40
    said = list(range(200, 211))
    assert shared(0, 40, 12, [*DOCUMENT[:40], *said, 1, 2, 3]) == 48


def test_with_a_grid_pages_are_shared_only_by_texts_that_are_cut_alike() -> None:
    # 40 tokens are chunks of 16, 16 and a rest of 8; 60 tokens have a third chunk, so the rest is no use.
    assert shared(GRID, 40, 0, DOCUMENT[:60]) == 32
    assert shared(GRID, 40, 0, [*DOCUMENT[:40], 1, 2, 3]) == 40
    # A shorter prompt computes its last tokens in the other way.
    assert shared(GRID, 60, 0, DOCUMENT[:45]) == 32
    # The next turn of a conversation, within the same chunk and beyond it.
    said = list(range(200, 211))
    assert shared(GRID, 33, 8, [*DOCUMENT[:33], *said[:7], 1, 2, 3]) == 40
    assert shared(GRID, 33, 12, [*DOCUMENT[:33], *said, 1, 2, 3, 4, 5]) == 32
    # A short text and a long one with the same beginning.
    assert shared(GRID, 12, 11, [*DOCUMENT[:12], *said]) == 0
    assert shared(GRID, 12, 3, [*DOCUMENT[:12], 1]) == 12


def test_after_a_pause_an_answer_is_not_cut_into_chunks() -> None:
    scheduler = Scheduler(PagePool(100, PAGE), 4, GRID)
    answer(scheduler, DOCUMENT[:20], 30)
    resumed = seat_of(scheduler, DOCUMENT[:20], said=25)
    assert (resumed.num_chunked, resumed.computed, len(resumed.text)) == (16, 44, 45)


def test_of_a_chunk_all_pages_are_shared_or_none() -> None:
    scheduler = Scheduler(PagePool(16, PAGE), 4, GRID)
    answer(scheduler, DOCUMENT[:48], 0)
    other = seat_of(scheduler, [300] * 24)  # takes the last pages of the document
    held = scheduler.pool.num_held
    scheduler.release(other)
    seat = seat_of(scheduler, DOCUMENT[:49])
    assert held == 7
    assert seat.computed % GRID == 0
    assert 0 < seat.computed < 48
