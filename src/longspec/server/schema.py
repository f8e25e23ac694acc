"""The fields of requests. A field that is not here is refused, never ignored."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

Number = Annotated[float, Field(allow_inf_nan=False)]
# A body may hold millions of values, so checking stops at the first wrong one.
Texts = Annotated[list[str], Field(fail_fast=True)]
Ids = Annotated[list[int], Field(fail_fast=True)]
MOST_CHOICES = 128
MOST_LOGPROBS = 20
MOST_MESSAGES = 10_000


class Strict(BaseModel):
    """No value is converted and no unknown field is accepted; null means that a field is absent."""

    model_config = ConfigDict(extra="forbid", strict=True)

    neutral: ClassVar[dict[str, tuple[Any, ...]]] = {}
    """Fields that are not supported, with the values that change nothing and are therefore accepted."""

    @model_validator(mode="before")
    @classmethod
    def _without_neutral(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        kept = {}
        for name, value in given.items():
            harmless = cls.neutral.get(name, ())
            if value is None or any(type(value) is type(one) and value == one for one in harmless):
                continue
            kept[name] = value
        return kept


class StreamOptions(Strict):
    """What a stream sends beside the text."""

    neutral = {"include_obfuscation": (False,)}

    include_usage: bool = False
    """Whether the last chunk has the usage."""
    continuous_usage_stats: bool = False
    """Whether every chunk has the usage; load generators for vLLM ask for this."""


class Message(Strict):
    """One message of a conversation."""

    neutral = {"annotations": ([],), "tool_calls": ([],)}

    role: Literal["system", "developer", "user", "assistant"]
    content: str
    name: str | None = None
    """The client's name for who speaks; it changes nothing, because chat templates have no place for it."""

    @field_validator("content", mode="before")
    @classmethod
    def _joined(cls, given: Any) -> Any:
        """Join a content that comes in parts, which must all be texts."""
        if not isinstance(given, list):
            return given
        if len(given) > MOST_MESSAGES:
            raise ValueError(f"a content may have up to {MOST_MESSAGES} parts")
        for part in given:
            if not isinstance(part, dict) or part.keys() != {"type", "text"} or part["type"] != "text":
                raise ValueError("only parts of type 'text' are supported, each with a text")
            if not isinstance(part["text"], str):
                raise ValueError("a part's text must be a string")
        return "\n".join(part["text"] for part in given)

    def as_prompt(self) -> dict[str, str]:
        """The message for the chat template, which has no role for a developer."""
        return {"role": "system" if self.role == "developer" else self.role, "content": self.content}


class JsonSchema(Strict):
    """A JSON schema and the client's name for it. The answer always follows it, also if `strict` is false."""

    name: str = "answer"
    description: str | None = None
    schema_: dict[str, Any] | bool = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(Strict):
    """What the answer must be: any text, any JSON object, or JSON that follows a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _has_schema(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("json_schema belongs to the type 'json_schema', which needs it")
        return self


class _Asked(Strict):
    """The fields that chat and plain completions share."""

    neutral = {
        "frequency_penalty": (0, 0.0),
        "presence_penalty": (0, 0.0),
        "logit_bias": ({},),
        "service_tier": ("auto", "default"),
        "min_tokens": (0,),
        "length_penalty": (1, 1.0),
        "skip_special_tokens": (True,),
        "use_beam_search": (False,),
    }

    model: str | None = None
    max_tokens: int | None = Field(None, ge=1)
    temperature: Number | None = Field(None, ge=0)
    top_p: Number | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1)
    min_p: Number | None = Field(None, ge=0, le=1)
    repetition_penalty: Number | None = Field(None, gt=0)
    seed: int | None = Field(None, ge=0, lt=2**63)
    stop: str | list[str] | None = None
    n: int = Field(1, ge=1, le=MOST_CHOICES)
    stream: bool = False
    stream_options: StreamOptions | None = None
    ignore_eos: bool = False
    response_format: ResponseFormat | None = None
    user: str | None = None
    """The client's name for its user; like the other labels here it changes nothing."""
    metadata: dict[str, Any] | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None
    store: bool | None = None

    method: str | None = None
    """The decoding method; the answer is the same with every method."""
    explain: bool = False
    """Whether chunks say how each of their tokens came."""
    max_seconds: Number | None = Field(None, gt=0)
    """The most seconds for the answer, if the server's own limit is not shorter."""

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options belongs to stream: true")
        if self.explain and not self.stream:
            raise ValueError("explain belongs to stream: true")
        if self.is_constrained and self.ignore_eos:
            raise ValueError("ignore_eos would have no end with response_format")
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        if len(stops) > 16 or any(not one or len(one) > 1000 for one in stops):
            raise ValueError("stop may hold up to 16 texts of 1 to 1000 characters")
        return self

    @property
    def is_constrained(self) -> bool:
        """Whether the answer must be JSON."""
        return self.response_format is not None and self.response_format.type != "text"

    @property
    def schema_size(self) -> int:
        schema = self.response_format and self.response_format.json_schema
        return len(schema.model_dump_json()) if schema else 0

    @property
    def num_new(self) -> int | None:
        return self.max_tokens

    @property
    def num_answers(self) -> int:
        return self.n

    def options(self) -> dict[str, Any]:
        """The options for `longspec.options.read_options`; None means the model's default."""
        return {
            "max_new_tokens": self.num_new,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": 0 if self.top_k == -1 else self.top_k,
            "min_p": self.min_p,
            "repetition_penalty": self.repetition_penalty,
            "seed": self.seed,
            "stop": self.stop,
            "eos_ids": () if self.ignore_eos else None,
        }


class ChatRequest(_Asked):
    """The body of /v1/chat/completions."""

    neutral = _Asked.neutral | {
        "tools": ([],),
        "tool_choice": ("none", "auto"),
        "parallel_tool_calls": (True, False),
        "modalities": (["text"],),
        "add_generation_prompt": (True,),
    }

    messages: list[Message] = Field(min_length=1, max_length=MOST_MESSAGES, fail_fast=True)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=MOST_LOGPROBS)

    @model_validator(mode="after")
    def _has_one_limit(self) -> ChatRequest:
        given = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(given) > 1:
            raise ValueError("max_tokens and max_completion_tokens differ; give one of them")
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs belongs to logprobs: true")
        return self

    @property
    def num_new(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def prompts(self) -> list[list[dict[str, str]]]:
        return [[one.as_prompt() for one in self.messages]]

    @property
    def prompt_size(self) -> int:
        return sum(len(one.content) for one in self.messages)


class CompletionRequest(_Asked):
    """The body of /v1/completions."""

    neutral = _Asked.neutral | {"echo": (False,), "best_of": (1,), "suffix": ("",)}

    prompt: str | Texts | Ids | Annotated[list[Ids], Field(fail_fast=True)]
    logprobs: int | None = Field(None, ge=0, le=MOST_LOGPROBS)

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def num_answers(self) -> int:
        return self.n * len(self.prompts)

    @property
    def prompt_size(self) -> int:
        return sum(map(len, self.prompts))

    @property
    def prompts(self) -> list[str | list[int]]:
        if isinstance(self.prompt, str) or (self.prompt and isinstance(self.prompt[0], int)):
            return [self.prompt]
        return list(self.prompt)  # type: ignore[arg-type]


Asked = ChatRequest | CompletionRequest
