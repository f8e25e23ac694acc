"""The entry point: teaches vLLM's arguments to recognise a draft of ours."""

from __future__ import annotations

import functools
import logging
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.engine.arg_utils import EngineArgs

TESTED = ("0.25.0", "0.32.0")
# vLLM's short arguments (--spec-method, --spec-model, --spec-tokens), and their keys in a speculative config.
_SHORT = {"spec_method": "method", "spec_model": "model", "spec_tokens": "num_speculative_tokens"}
_log = logging.getLogger("vllm.longspec")


def register() -> None:
    """Let `speculative_config` name a draft of ours. vLLM calls this in each of its processes.

    vLLM has no place for methods of other packages, so the function that reads this setting is wrapped.
    Everything else it is given passes through unchanged.
    """
    try:
        from vllm.engine.arg_utils import EngineArgs

        original = EngineArgs.create_speculative_config
    except (ImportError, AttributeError) as error:
        # Not raised: who has longspec installed may still use vLLM without it.
        _log.warning("longspec drafts cannot be used with this vLLM: %s", error)
        return
    if hasattr(original, "__wrapped__"):
        return

    @functools.wraps(original)
    def create_speculative_config(self: EngineArgs, *args: Any, **kwargs: Any) -> Any:
        translate(self)
        return original(self, *args, **kwargs)

    EngineArgs.create_speculative_config = create_speculative_config


def translate(arguments: EngineArgs) -> None:
    """Where vLLM's arguments name a draft of ours, replace it by our proposer and tell that where it is."""
    from longspec.vllm.settings import read_settings

    given = dict(arguments.speculative_config or {})
    short = {
        flag: key
        for flag, key in _SHORT.items()
        if key not in given and getattr(arguments, flag, None) is not None
    }
    settings = read_settings(given | {key: getattr(arguments, flag) for flag, key in short.items()} or None)
    if settings is None:
        return
    for flag in short:  # vLLM would add them to our config
        setattr(arguments, flag, None)
    warn_of_version()
    arguments.speculative_config = settings.speculative_config()
    arguments.additional_config = {**(arguments.additional_config or {}), **settings.additional_config()}


def warn_of_version() -> None:
    """Say so if this version of vLLM is not one that the draft was tested with."""
    import vllm

    if vllm.__version__.split("+")[0] not in TESTED:
        _log.warning(
            "longspec drafts are tested with vLLM %s, and this is %s", " and ".join(TESTED), vllm.__version__
        )
