"""From records to tokens with roles, through real tokenizers and chat templates."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from longspec.data.align import ALIGNERS, BadRecord
from longspec.data.encode import Encoder
from longspec.data.options import Recipe
from longspec.data.shards import Role
from longspec.prompts import PromptEncoder

# Opens the thought itself, and drops the thoughts of earlier turns, as published reasoning models do.
THINKING = (
    "{% for m in messages %}{% if m.role == 'assistant' %}<|im_start|>"
    "{{ m.content if loop.last else m.content.split('</think>')[-1] }}<|im_end|>"
    "{% else %}<|im_start|>user {{ m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|><think>\n{% endif %}"
)


def encoder(folder: Path, template: str, chat_template: str | None = "own", **more: Any) -> Encoder:
    tokenizer = PromptEncoder(folder).tokenizer
    if chat_template != "own":
        tokenizer.chat_template = chat_template
    return Encoder(Recipe(template=template, **more), tokenizer)


def runs(made: Encoder, record: dict[str, Any]) -> list[tuple[str, str]]:
    """The document as (role, text) for each run of one role."""
    (document,) = made.documents([made.render(made.align(record, "here"))])
    pairs = zip(document.roles.tolist(), document.tokens.tolist(), strict=True)
    return [
        (Role(role).name, made.tokenizer.decode([token for _, token in group]))
        for role, group in groupby(pairs, key=lambda pair: pair[0])
    ]


def conversation(turns: list[str]) -> list[dict[str, str]]:
    roles = ("user", "assistant") * 2
    return [{"role": role, "content": text} for role, text in zip(roles, turns, strict=True)]


def test_the_whole_text_gives_the_ids(smollm2_folder: Path) -> None:
    """Also where a token reaches over the border of two pieces: it belongs to the later one."""
    tokenizer = AutoTokenizer.from_pretrained(smollm2_folder)
    made = encoder(smollm2_folder, "source_target")
    record = {"source": "The answer to everything is ", "target": "forty-two."}
    (document,) = made.documents([made.render(record)])
    expected = tokenizer("The answer to everything is forty-two.")["input_ids"]
    assert document.tokens.tolist() == [*expected, tokenizer.eos_token_id]
    assert runs(made, record) == [
        ("PROMPT", "The answer to everything is"),
        ("TEXT", " forty-two.<|im_end|>"),
    ]


def test_text_ends_in_eos_and_ids_stay_as_they_are(smollm2_folder: Path) -> None:
    made = encoder(smollm2_folder, "text")
    assert runs(made, {"text": "Good day 👋🏽"}) == [("TEXT", "Good day 👋🏽<|im_end|>")]
    assert runs(made, {"text": ""}) == []
    ids = encoder(smollm2_folder, "ids")
    (document,) = ids.documents([ids.render({"prompt_ids": [5, 6], "ids": [7]})])
    assert (document.tokens.tolist(), document.roles.tolist()) == ([5, 6, 7], [1, 1, 3])
    with pytest.raises(BadRecord, match="49152 is not one"):
        ids.render({"ids": [7, 49152]})


def test_prompt_answer_is_what_decoding_will_see(smollm2_folder: Path) -> None:
    made = encoder(smollm2_folder, "prompt_answer")
    prompt = made.tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi?"}], tokenize=False, add_generation_prompt=True
    )
    record = {"prompt": "Hi?", "answer": "Hello."}
    assert runs(made, record) == [("PROMPT", prompt), ("TEXT", "Hello.<|im_end|>\n")]
    plain = encoder(smollm2_folder, "prompt_answer", None)
    assert runs(plain, record) == [("PROMPT", "Hi?\n"), ("TEXT", "Hello.<|im_end|>")]


@pytest.mark.parametrize("chat_template", ["own", THINKING])
def test_messages_tell_the_assistants_turns(smollm2_folder: Path, chat_template: str) -> None:
    made = encoder(smollm2_folder, "messages", chat_template)
    turns = ["Hi", "Hi", "And you?", "Hi, fine."]
    messages = conversation(turns)
    found = runs(made, {"messages": messages})
    assert [role for role, _ in found] == ["PROMPT", "TEXT", "PROMPT", "TEXT"]
    assert [text.split("<|im_end|>")[0] for role, text in found if role == "TEXT"] == ["Hi", "Hi, fine."]
    whole = made.tokenizer.apply_chat_template(messages, tokenize=False)
    assert "".join(text for _, text in found) == whole


def test_thoughts_that_the_template_drops_from_earlier_turns(smollm2_folder: Path) -> None:
    turns = ["Hi", "<think>greet</think>Hi", "And you?", "<think>am I?</think>Fine."]
    messages = conversation(turns)
    made = encoder(smollm2_folder, "messages", THINKING)
    found = runs(made, {"messages": messages})
    assert [role for role, _ in found] == ["PROMPT", "TEXT", "PROMPT", "TEXT"]
    # The template begins the last thought itself, so that its <think> is the prompt's.
    assert [text for role, text in found if role == "TEXT"] == [
        "Hi<|im_end|>",
        "am I?</think>Fine.<|im_end|>",
    ]
    shouting = encoder(
        smollm2_folder, "messages", "{% for m in messages %}{{ m.content | upper }}{% endfor %}"
    )
    with pytest.raises(BadRecord, match="message 2"):
        runs(shouting, {"messages": messages})


# Gives the system message to a user's message at the end of the conversation only.
SYSTEM_LAST = (
    "{% set ns = namespace(system='') %}{% for m in messages %}"
    "{% if m.role == 'system' %}{% set ns.system = m.content %}"
    "{% elif m.role == 'user' %}[INST] {{ ns.system + '\n\n' if loop.last else '' }}{{ m.content }}[/INST]"
    "{% else %} {{ m.content }}<|im_end|>{% endif %}{% endfor %}"
)


def test_a_template_that_moves_the_system_message(smollm2_folder: Path) -> None:
    turns = ["Is 3 odd?", "Yes", "Is 5 odd? Say Yes or No.", "No"]
    made = encoder(smollm2_folder, "messages", SYSTEM_LAST)
    for system in ("Be brief.", "Answer the question in one word, and never say why. " * 3):
        messages = [{"role": "system", "content": system}, *conversation(turns)]
        assert runs(made, {"messages": messages}) == [
            ("PROMPT", "[INST] Is 3 odd?[/INST]"),
            ("TEXT", " Yes<|im_end|>"),
            ("PROMPT", "[INST] Is 5 odd? Say Yes or No.[/INST]"),
            ("TEXT", " No<|im_end|>"),
        ]


COT = {"question": "1+1?", "reasoning": "One and one.", "answer": "Two."}


@pytest.mark.parametrize(
    ("chat_template", "think", "reasoning", "expected"),
    [
        ("own", False, "One and one.", "One and one.\n"),
        ("own", True, "One and one.", "<think>\nOne and one.\n</think>\n\n"),
        ("own", False, "<think>One and one.</think>", "<think>\nOne and one.\n</think>\n\n"),
        (THINKING, False, "One and one.", "One and one.\n</think>\n\n"),
        (THINKING, False, "<think>One and one.</think>", "One and one.\n</think>\n\n"),
        (None, False, "One and one.", "One and one.\n"),
    ],
)
def test_chain_of_thought(
    smollm2_folder: Path, chat_template: str | None, think: bool, reasoning: str, expected: str
) -> None:
    made = encoder(smollm2_folder, "cot", chat_template, think=think)
    prompt, thought, answer = runs(made, COT | {"reasoning": reasoning})
    assert (prompt[0], "1+1?" in prompt[1]) == ("PROMPT", True)
    assert prompt[1].endswith("<think>\n") == (chat_template == THINKING)
    assert thought == ("REASONING", expected)
    assert answer[0] == "TEXT"
    assert answer[1].rstrip() == "Two.<|im_end|>"


def test_aligners(smollm2_folder: Path) -> None:
    made = encoder(smollm2_folder, "text", renames=(("meta.body", "text"), ("n", "id")), aligners=("id",))
    assert made.align({"n": 3, "meta": {"body": "x"}}, "f line 1") == {
        "id": 3,
        "text": "x",
        "meta": {"body": "x"},
    }
    assert made.align({}, "f line 1") == {"id": "f line 1"}
    alpaca = {"instruction": "Add.", "input": "1 1", "output": "2"}
    assert ALIGNERS["alpaca"](alpaca, "").items() >= {"prompt": "Add.\n\n1 1", "answer": "2"}.items()
    chat = {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}
    assert ALIGNERS["sharegpt"](chat, "")["messages"] == [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
    ]
    split = ALIGNERS["think"]({"answer": "<think>hm</think>\nb"}, "")
    assert (split["reasoning"], split["answer"]) == ("<think>hm</think>", "\nb")
    for name, record in (("alpaca", {"instruction": 3}), ("sharegpt", {}), ("think", {"answer": "b"})):
        with pytest.raises(BadRecord):
            ALIGNERS[name](record, "")
