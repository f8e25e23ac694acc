"""What the target is asked to write. The index of a sample decides it. It has one of three modes.

questions   the target asks itself: the chat template's user prefix, continued to the end of that turn, is
            a question, which it then answers
prompts     it answers given prompts, conversations, or several turns one after the other
documents   it continues pieces of given documents, without the chat template
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray

from longspec.data.options import MODES, SynthesisOptions
from longspec.data.records import JsonLines, read_document, read_prompt
from longspec.data.screen import is_looping, is_repetitive, loop_start, second_repetition, signature
from longspec.data.shards import Role
from longspec.decoding.choose import hash_bits, uniform
from longspec.decoding.methods import VANILLA
from longspec.decoding.sampling import Sampling
from longspec.engine.sequence import Sequence
from longspec.errors import UserError
from longspec.prompts import PromptEncoder, tokenizer_explained
from longspec.templates import render_chat, render_chats

# Streams of numbers that belong to a sample.
_MODE, _TEMPERATURE, _OFFSET, _TOPIC, _NOISE = range(5)
# Tokens: an answer with less room is not begun, and an answer cut to less is dropped.
_LEAST_ROOM = 32
# Shorter answers are often alike, so they are not compared.
_LEAST_COMPARED = 32
_QUESTION, _ANSWER = 0, 1
_MARK = "7f3a9c51"
# An answer is searched for loops and repetitions at this many tokens, and again after every further so many.
_LEAST_LOOKED = 48
_LOOK_EVERY = 16
# Repetitions are searched for less often, because that takes longer.
_LOOK_CLOSELY_EVERY = 64
# Where to cut a question that the target did not end itself.
_SENTENCE_END = re.compile(r"[.?!:。？！](?=[\s\"')\]]|$)|\n")
# Characters: a question is not cut to less.
_LEAST_QUESTION = 16
# Samples that are rendered and tokenised together.
AT_ONCE = 64
# Seeds are below this.
_SEEDS = 2**63
# Characters per token: likely in prose, and the most that is expected.
_LIKELY_CHARACTERS, _MOST_CHARACTERS = 4, 8


@dataclass
class Sample:
    """A text that is being written."""

    index: int
    mode: str
    temperature: float
    noise: int
    """Seed of its sequences' noise."""
    topic: str = ""
    messages: list[dict[str, str]] = field(default_factory=list)
    turns: list[str] = field(default_factory=list)
    """The user's later messages."""
    rendered: str = ""
    """The conversation as the chat template writes it."""
    tokens: list[int] = field(default_factory=list)
    roles: list[int] = field(default_factory=list)
    num_sequences: int = 0
    """How many sequences the target has written for this sample."""
    question: NDArray[np.uint64] | None = None
    """The signature of a new question, until it is compared."""
    answers: list[NDArray[np.uint64]] = field(default_factory=list)
    num_written: int = 0
    """Tokens that the target wrote for this sample."""
    num_lost: int = 0
    """Of these, the tokens that no question and no answer kept."""
    was_cut: bool = False
    question_was_cut: bool = False
    dropped: str | None = None
    """Why, if it was."""
    finished: bool = False

    def add(self, tokens: list[int], role: Role) -> None:
        self.tokens += tokens
        self.roles += [int(role)] * len(tokens)


class _LoopWatch:
    """Ends an answer that only repeats itself, because further tokens would be cut off anyway.

    It looks at fixed places of a text, so that the result does not depend on how many tokens come at a time.
    """

    def __init__(self) -> None:
        self._next = _LEAST_LOOKED

    def __call__(self, tokens: list[int]) -> int | None:
        while self._next <= len(tokens):
            end = self._next
            self._next += _LOOK_EVERY
            found = np.array(tokens[:end])
            if is_looping(found) or (end % _LOOK_CLOSELY_EVERY == 0 and is_repetitive(found)):
                return end
        return None


def repeats_from(tokens: NDArray[np.int64]) -> int | None:
    """Where a text does nothing but repeat itself, in a loop or in other repetitions; None if it does not.

    The first repetition of a loop is kept: the target did say it, and it is half of what is lost otherwise.
    """
    end = second_repetition(tokens)
    end = len(tokens) if end is None else end
    while end >= _LEAST_LOOKED and is_repetitive(tokens[:end]):
        end -= _LOOK_EVERY
    return end if end < len(tokens) else None


def first_sentences(text: str) -> str:
    """A text that breaks off, up to its last whole sentence or, without one, its last whole word."""
    ends = [found.end() for found in _SENTENCE_END.finditer(text)]
    if ends and len(text[: ends[-1]].strip()) >= _LEAST_QUESTION:
        return text[: ends[-1]]
    words = text.rstrip().rsplit(maxsplit=1)
    return words[0] if len(words) == 2 else text


# One object for each temperature, because checking its values takes longer than making a sequence.
_sampling = cache(Sampling)
FILES = {"prompts": read_prompt, "documents": read_document}


class Script:
    """Makes samples and their sequences, and adds what the target wrote to the samples."""

    def __init__(
        self,
        options: SynthesisOptions,
        encoder: PromptEncoder,
        prompts: JsonLines | None = None,
        documents: JsonLines | None = None,
        topics: tuple[str, ...] = (),
        eos_ids: frozenset[int] = frozenset(),
    ) -> None:
        self._options, self.tokenizer = options, encoder.tokenizer
        self._prompts, self._documents, self._topics = prompts, documents, topics
        self.turn_end: int | None = None
        """The token that ends a user's turn, if the template has one."""
        self._before = self._after = ""
        if options.shares.get("questions") or options.shares.get("prompts"):
            if not self.tokenizer.chat_template:
                raise UserError("the target has no chat template; --mode documents goes without one")
            rendered = self._render([{"role": "user", "content": _MARK}])
            self._before, found, self._after = rendered.partition(_MARK)
            if not found:
                raise UserError("the target's chat template hides the user's message; use --mode documents")
            first = self._encode(self._after)[:1]
            if first and first[0] in self.tokenizer.all_special_ids:
                self.turn_end = first[0]
        ends = {*eos_ids, self.tokenizer.eos_token_id, self.turn_end}
        self._eos_ids = frozenset(end for end in ends if end is not None)
        self._asking = {topic: self._encode(self._before + topic) for topic in topics or ("",)}

    def samples(self, first: int, count: int) -> list[Sample]:
        """Samples `first` to `first + count`, ready for their first sequence."""
        options, stop = self._options, first + count
        names = [name for name in MODES if options.shares.get(name)]
        shares = np.cumsum([options.shares[name] for name in names])
        kinds = np.searchsorted(shares, self._draws(0, stop, _MODE) * shares[-1], side="right")
        temperatures, offsets, topics = (
            self._draws(first, stop, stream) for stream in (_TEMPERATURE, _OFFSET, _TOPIC)
        )
        noise = hash_bits(
            torch.tensor(options.seed), torch.arange(first, stop), torch.tensor(_NOISE)
        ).tolist()
        # The rank of a sample among those of its mode: files are read in order, again and again.
        one_hot = kinds[:, None] == np.arange(len(names))
        ranks = (np.cumsum(one_hot, 0) - 1)[one_hot][first:]
        found = []
        for index in range(first, stop):
            kind, at = kinds[index], index - first
            temperature = options.temperatures[int(temperatures[at] * len(options.temperatures))]
            sample = Sample(index, names[kind], temperature, int(noise[at]))
            rank = int(ranks[at])
            if sample.mode == "documents":
                self._give_document(sample, rank, offsets[at])
            elif sample.mode == "prompts":
                assert self._prompts is not None
                sample.messages, sample.turns = read_prompt(self._prompts[rank % len(self._prompts)])
            elif self._topics:
                sample.topic = self._topics[int(topics[at] * len(self._topics))]
            found.append(sample)
        self._give_messages([sample for sample in found if sample.mode == "prompts"])
        return found

    def sequence(self, sample: Sample) -> Sequence:
        """The next sequence of a sample that is neither finished nor dropped."""
        options = self._options
        if sample.mode == "questions" and not sample.messages:
            prompt = self._asking[sample.topic]
            room, temperature = options.max_question_tokens, options.question_temperature
        else:
            prompt, room, temperature = sample.tokens, options.max_new_tokens, sample.temperature
        limit = min(room, options.seq_length - len(prompt))
        seed = (sample.noise ^ sample.num_sequences) % _SEEDS
        return Sequence(
            list(prompt), limit, _sampling(temperature), seed, self._eos_ids, VANILLA, keep_until=_LoopWatch()
        )

    def take(self, written: Iterable[tuple[Sample, list[int], bool]]) -> None:
        """Add to samples what the target wrote: sample, tokens, and whether the last token ends the text."""
        asked = []
        for sample, tokens, ended in written:
            sample.num_sequences += 1
            sample.num_written += len(tokens)
            text = tokens[:-1] if ended else tokens
            if sample.mode != "questions" or sample.messages:
                self._take_answer(sample, text, tokens[-1] if ended else None)
            elif self._take_question(sample, text, ended):
                asked.append(sample)
        self._give_messages(asked)

    def _take_question(self, sample: Sample, tokens: list[int], ended: bool) -> bool:
        """Make the text the sample's first message; returns whether it is worth an answer."""
        text = sample.topic + self.tokenizer.decode(tokens, skip_special_tokens=True)
        stop = self._after.strip()
        if self.turn_end is None and stop:
            text, stopped, _ = text.partition(stop)
            ended = ended or bool(stopped)
        found = np.array(tokens)
        start = loop_start(found)
        if start is not None:
            text, ended = (
                sample.topic + self.tokenizer.decode(tokens[:start], skip_special_tokens=True),
                False,
            )
        asked = text if ended else first_sentences(text)
        if not asked.strip():
            sample.dropped = "empty"
        elif is_repetitive(found[:start]):
            sample.dropped = "loop"
        else:
            sample.question_was_cut = not ended
            kept = tokens if ended else self._encode(asked.removeprefix(sample.topic))
            sample.num_lost += max(0, len(tokens) - len(kept))
            sample.messages = [{"role": "user", "content": asked.strip()}]
            sample.question = signature(found[:start], _QUESTION)
        return sample.dropped is None

    def _take_answer(self, sample: Sample, tokens: list[int], end: int | None) -> None:
        if not tokens or (len(tokens) < 8 and not self.tokenizer.decode(tokens).strip()):
            sample.dropped = "empty"
            return
        numbers = np.array(tokens)
        start = repeats_from(numbers)
        if start is not None:
            sample.was_cut = True
            sample.num_lost += len(tokens) - start
            tokens, numbers, end = tokens[:start], numbers[:start], None
        if start is not None and start < _LEAST_ROOM:
            sample.dropped = "loop"
        else:
            sample.add(tokens if end is None else [*tokens, end], Role.TEXT)
            if len(tokens) >= _LEAST_COMPARED:
                sample.answers.append(signature(numbers, _ANSWER))
            self._go_on(sample, tokens, end)

    def _go_on(self, sample: Sample, answer: list[int], end: int | None) -> None:
        """Add the user's next turn, if there is one, the answer before it is complete, and there is room."""
        sample.finished = True
        if not sample.turns or end is None:
            return
        text = self.tokenizer.decode(answer)
        turn = {"role": "user", "content": sample.turns[0]}
        messages = [*sample.messages, {"role": "assistant", "content": text}, turn]
        rendered = self._render(messages)
        before = sample.rendered + text
        if not rendered.startswith(before):
            return  # the template changes earlier answers, so the next turn would not continue this text
        new = self._encode(rendered[len(before) :])
        new = new[1:] if new[:1] == [end] else new
        if self._options.seq_length - len(sample.tokens) - len(new) >= _LEAST_ROOM:
            sample.messages, sample.turns, sample.rendered = messages, sample.turns[1:], rendered
            sample.add(new, Role.PROMPT)
            sample.finished = False

    def _give_messages(self, samples: list[Sample]) -> None:
        """Render and encode the messages of samples, a few dozen at a time, because a call has overhead."""
        for first in range(0, len(samples), AT_ONCE):
            few = samples[first : first + AT_ONCE]
            texts = render_chats(self.tokenizer, [sample.messages for sample in few], open_turn=True)
            encoded = self._encode_all(texts)
            for sample, text, tokens in zip(few, texts, encoded, strict=True):
                sample.rendered = text
                sample.add(tokens, Role.PROMPT)
                if self._options.seq_length - len(sample.tokens) < _LEAST_ROOM:
                    sample.dropped = "too long"

    def _give_document(self, sample: Sample, rank: int, offset: float) -> None:
        """Give a piece of a document that begins at a random place."""
        assert self._documents is not None
        text, given = read_document(self._documents[rank % len(self._documents)]), self._options.given_tokens
        # Only what is needed is tokenised: a document may be a whole book.
        start = int(offset * max(1, len(text) - _LIKELY_CHARACTERS * given + 1))
        start = text.find(" ", start) if start else 0
        tokens = self._encode(text[max(0, start) :][: _MOST_CHARACTERS * given])
        sample.add(tokens[:given], Role.PROMPT)

    def _render(self, messages: list[dict[str, str]]) -> str:
        return render_chat(self.tokenizer, messages, open_turn=True)

    def _encode(self, text: str) -> list[int]:
        return self._encode_all([text])[0]

    def _encode_all(self, texts: list[str]) -> list[list[int]]:
        with tokenizer_explained("the target's tokenizer cannot read a text"):
            return list(self.tokenizer(texts, add_special_tokens=False)["input_ids"])

    def _draws(self, first: int, stop: int, stream: int) -> NDArray[np.float64]:
        """A number in [0, 1) for each sample."""
        seed, samples = torch.tensor(self._options.seed), torch.arange(first, stop)
        drawn: NDArray[np.float64] = uniform(seed, samples, torch.tensor(stream)).numpy()
        return drawn
