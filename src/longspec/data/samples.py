"""What the target is asked to write: each sample from its index alone, in one of three modes.

questions   the target asks itself: the chat template's user prefix, continued to the end of that turn, is
            a question, which it then answers
prompts     it answers given prompts, conversations, or several turns one after the other
documents   it continues pieces of given documents, without the chat template
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from longspec.data.screen import is_repetitive, loop_start, signature
from longspec.data.shards import Role
from longspec.decoding.choose import hash_bits, uniform
from longspec.decoding.methods import VANILLA
from longspec.decoding.sampling import Sampling
from longspec.engine.sequence import Sequence
from longspec.errors import UserError, naming
from longspec.prompts import PromptEncoder
from longspec.records import parse_record
from longspec.templates import render_chat

MODES = ("documents", "prompts", "questions")
"""In the order in which they are written: long prompts first, so that those of like length meet."""
# Streams of numbers that belong to a sample.
_MODE, _TEMPERATURE, _OFFSET, _TOPIC, _NOISE = range(5)
# An answer that would have less room than this is not begun, and one cut to less is dropped.
_LEAST_ROOM = 32
# Answers shorter than this may well be alike.
_LEAST_COMPARED = 32
_QUESTION, _ANSWER = 0, 1
_MARK = "7f3a9c51"
# Seeds are below this.
_SEEDS = 2**63
# Of a token, in prose and at the most that is reckoned with.
_LIKELY_CHARACTERS, _MOST_CHARACTERS = 4, 8


@dataclass(frozen=True)
class Mix:
    """What to sample, and how."""

    modes: dict[str, float]
    """Shares; they need not add up to 1."""
    temperatures: tuple[float, ...]
    """Each answer is written at one of them."""
    question_temperature: float
    max_new_tokens: int
    max_question_tokens: int
    given_tokens: int
    """How much of a document is given."""
    seq_length: int
    seed: int


@dataclass
class Sample:
    """One text in the making."""

    index: int
    mode: str
    temperature: float
    noise: int
    """Seed of its sequences' noise."""
    topic: str = ""
    messages: list[dict[str, str]] = field(default_factory=list)
    turns: list[str] = field(default_factory=list)
    """What the user says later."""
    rendered: str = ""
    """The conversation as the chat template writes it."""
    tokens: list[int] = field(default_factory=list)
    roles: list[int] = field(default_factory=list)
    num_sequences: int = 0
    """What the target has answered of it so far."""
    question: NDArray[np.uint64] | None = None
    """The signature of a question that was just written, until it is compared."""
    answers: list[NDArray[np.uint64]] = field(default_factory=list)
    was_cut: bool = False
    dropped: str | None = None
    """Why, if it was."""
    finished: bool = False

    def add(self, tokens: list[int], role: Role) -> None:
        """Append tokens of one role."""
        self.tokens += tokens
        self.roles += [int(role)] * len(tokens)


class JsonLines:
    """The objects of a JSONL file, checked once and read when they are asked for."""

    def __init__(self, path: Path, check: Callable[[Mapping[str, Any]], object]) -> None:
        self.path, self._offsets = path, [0]
        digest = hashlib.sha256()
        try:
            with open(path, "rb") as file:
                for number, line in enumerate(file, 1):
                    digest.update(line)
                    if line.strip():
                        with naming(f"{path}, line {number}"):
                            check(_parse(line))
                        self._offsets[-1:] = [file.tell() - len(line), file.tell()]
                    else:
                        self._offsets[-1] = file.tell()
        except OSError as error:
            raise UserError(f"cannot read {path}: {error.strerror}") from error
        if not len(self):
            raise UserError(f"{path} has no lines; one JSON object per line is needed")
        self.fingerprint = digest.hexdigest()[:16]

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        with open(self.path, "rb") as file:
            file.seek(self._offsets[index])
            return _parse(file.readline())


def _parse(line: bytes) -> Mapping[str, Any]:
    return parse_record(line, dict[str, Any], "this line")


def read_prompt(record: Mapping[str, Any]) -> tuple[list[dict[str, str]], list[str]]:
    """The messages to answer, and what the user says after that."""
    messages, turns = record.get("messages"), record.get("turns")
    if isinstance(messages, list) and messages:
        if not all(
            isinstance(one, Mapping) and _texts(one.get("role"), one.get("content")) for one in messages
        ):
            raise UserError("each of 'messages' needs texts 'role' and 'content'")
        found = [{"role": one["role"], "content": one["content"]} for one in messages]
        while found and found[-1]["role"] == "assistant":
            found.pop()
        if not found or found[-1]["role"] != "user":
            raise UserError("'messages' have no user's message to answer")
        return found, []
    if isinstance(turns, list) and turns and _texts(*turns):
        return [{"role": "user", "content": turns[0]}], list(turns[1:])
    if _texts(record.get("prompt")) and record["prompt"].strip():
        return [{"role": "user", "content": record["prompt"]}], []
    raise UserError("a text 'prompt', a list of texts 'turns' or a list 'messages' is needed")


def read_document(record: Mapping[str, Any]) -> str:
    """The text of a document."""
    if not _texts(record.get("text")) or not record["text"].strip():
        raise UserError("a text 'text' is needed")
    return str(record["text"])


def _texts(*values: Any) -> bool:
    """Whether all are texts that can be encoded; JSON can hold halves of characters."""
    return all(
        isinstance(value, str) and value.encode("utf-8", "replace").decode() == value for value in values
    )


class Script:
    """Makes samples, the sequences that write them, and texts of what was written."""

    def __init__(
        self,
        mix: Mix,
        encoder: PromptEncoder,
        prompts: JsonLines | None = None,
        documents: JsonLines | None = None,
        topics: tuple[str, ...] = (),
        eos_ids: frozenset[int] = frozenset(),
    ) -> None:
        self._mix, self._tokenizer = mix, encoder.tokenizer
        self._prompts, self._documents, self._topics = prompts, documents, topics
        self.turn_end: int | None = None
        """The token that ends a user's turn, where the template has one."""
        self._before = self._after = ""
        if mix.modes.get("questions") or mix.modes.get("prompts"):
            if not self._tokenizer.chat_template:
                raise UserError("the target has no chat template; --mode documents goes without one")
            rendered = self._render([{"role": "user", "content": _MARK}])
            self._before, found, self._after = rendered.partition(_MARK)
            if not found:
                raise UserError("the target's chat template hides the user's message; use --mode documents")
            first = self._encode(self._after)[:1]
            if first and first[0] in self._tokenizer.all_special_ids:
                self.turn_end = first[0]
        ends = {*eos_ids, self._tokenizer.eos_token_id, self.turn_end}
        self._eos_ids = frozenset(end for end in ends if end is not None)
        self._asking = {topic: self._encode(self._before + topic) for topic in topics or ("",)}

    def samples(self, first: int, count: int) -> list[Sample]:
        """Samples `first` to `first + count`, ready for their first sequence."""
        mix, stop = self._mix, first + count
        names = [name for name in MODES if mix.modes.get(name)]
        shares = np.cumsum([mix.modes[name] for name in names])
        kinds = np.searchsorted(shares, self._draws(0, stop, _MODE) * shares[-1], side="right")
        temperatures, offsets, topics = (
            self._draws(first, stop, stream) for stream in (_TEMPERATURE, _OFFSET, _TOPIC)
        )
        noise = hash_bits(torch.tensor(mix.seed), torch.arange(first, stop), torch.tensor(_NOISE)).tolist()
        # So many of its mode came before a sample: files are gone through in order, again and again.
        one_hot = kinds[:, None] == np.arange(len(names))
        ranks = (np.cumsum(one_hot, 0) - 1)[one_hot][first:]
        found = []
        for index in range(first, stop):
            kind, at = kinds[index], index - first
            temperature = mix.temperatures[int(temperatures[at] * len(mix.temperatures))]
            sample = Sample(index, names[kind], temperature, int(noise[at]))
            rank = int(ranks[at])
            if sample.mode == "documents":
                self._give_document(sample, rank, offsets[at])
            elif sample.mode == "prompts":
                assert self._prompts is not None
                sample.messages, sample.turns = read_prompt(self._prompts[rank % len(self._prompts)])
                self._give_messages(sample)
            elif self._topics:
                sample.topic = self._topics[int(topics[at] * len(self._topics))]
            found.append(sample)
        return found

    def sequence(self, sample: Sample) -> Sequence:
        """What the target is to continue next, of a sample that is neither finished nor dropped."""
        mix = self._mix
        if sample.mode == "questions" and not sample.messages:
            prompt = self._asking[sample.topic]
            room, temperature = mix.max_question_tokens, mix.question_temperature
        else:
            prompt, room, temperature = sample.tokens, mix.max_new_tokens, sample.temperature
        limit = min(room, mix.seq_length - len(prompt))
        seed = (sample.noise ^ sample.num_sequences) % _SEEDS
        return Sequence(list(prompt), limit, Sampling(temperature), seed, self._eos_ids, VANILLA)

    def take(self, sample: Sample, tokens: list[int], ended: bool) -> None:
        """Add to a sample what the target wrote; where it `ended` the text, the last token says so."""
        sample.num_sequences += 1
        text = tokens[:-1] if ended else tokens
        if sample.mode == "questions" and not sample.messages:
            self._take_question(sample, text, ended)
        else:
            self._take_answer(sample, text, tokens[-1] if ended else None)

    def _take_question(self, sample: Sample, tokens: list[int], ended: bool) -> None:
        text = sample.topic + self._tokenizer.decode(tokens, skip_special_tokens=True)
        stop = self._after.strip()
        if self.turn_end is None and stop:
            text, stopped, _ = text.partition(stop)
            ended = ended or bool(stopped)
        if not text.strip():
            sample.dropped = "empty"
        elif not ended:
            sample.dropped = "unfinished question"
        elif is_repetitive(found := np.array(tokens)) or loop_start(found) is not None:
            sample.dropped = "loop"
        else:
            sample.messages = [{"role": "user", "content": text.strip()}]
            self._give_messages(sample)
            sample.question = signature(found, _QUESTION)

    def _take_answer(self, sample: Sample, tokens: list[int], end: int | None) -> None:
        if not tokens or (len(tokens) < 8 and not self._tokenizer.decode(tokens).strip()):
            sample.dropped = "empty"
            return
        start = loop_start(np.array(tokens))
        if start is not None:
            sample.was_cut = True
            tokens, end = tokens[:start], None
        if start is not None and start < _LEAST_ROOM:
            sample.dropped = "loop"
        elif is_repetitive(np.array(tokens)):
            sample.dropped = "repetitive"
        else:
            sample.add(tokens if end is None else [*tokens, end], Role.TEXT)
            if len(tokens) >= _LEAST_COMPARED:
                sample.answers.append(signature(np.array(tokens), _ANSWER))
            self._go_on(sample, tokens, end)

    def _go_on(self, sample: Sample, answer: list[int], end: int | None) -> None:
        """Give the user's next turn, where there is one, the answer before it is whole, and it fits."""
        sample.finished = True
        if not sample.turns or end is None:
            return
        text = self._tokenizer.decode(answer)
        turn = {"role": "user", "content": sample.turns[0]}
        messages = [*sample.messages, {"role": "assistant", "content": text}, turn]
        rendered = self._render(messages)
        before = sample.rendered + text
        if not rendered.startswith(before):
            return  # the template writes earlier answers in another way: what follows would not fit on
        new = self._encode(rendered[len(before) :])
        new = new[1:] if new[:1] == [end] else new
        if self._mix.seq_length - len(sample.tokens) - len(new) >= _LEAST_ROOM:
            sample.messages, sample.turns, sample.rendered = messages, sample.turns[1:], rendered
            sample.add(new, Role.PROMPT)
            sample.finished = False

    def _give_messages(self, sample: Sample) -> None:
        sample.rendered = self._render(sample.messages)
        sample.add(self._encode(sample.rendered), Role.PROMPT)
        if self._mix.seq_length - len(sample.tokens) < _LEAST_ROOM:
            sample.dropped = "too long"

    def _give_document(self, sample: Sample, rank: int, offset: float) -> None:
        """A piece from anywhere in the document."""
        assert self._documents is not None
        text, given = read_document(self._documents[rank % len(self._documents)]), self._mix.given_tokens
        # Only what is needed is tokenised: a document may be a whole book.
        start = int(offset * max(1, len(text) - _LIKELY_CHARACTERS * given + 1))
        start = text.find(" ", start) if start else 0
        tokens = self._encode(text[max(0, start) :][: _MOST_CHARACTERS * given])
        sample.add(tokens[:given], Role.PROMPT)

    def _render(self, messages: list[dict[str, str]]) -> str:
        return render_chat(self._tokenizer, messages, open_turn=True)

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def _draws(self, first: int, stop: int, stream: int) -> NDArray[np.float64]:
        """A number in [0, 1) for each sample."""
        seed, samples = torch.tensor(self._mix.seed), torch.arange(first, stop)
        drawn: NDArray[np.float64] = uniform(seed, samples, torch.tensor(stream)).numpy()
        return drawn
