"""Chat template: chat messages to the one text that a model was trained on."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from genserve.errors import SEE_LOG, InvalidRequest, ModelFailed, RepositoryError
from genserve.request import Chat
from genserve.text.template_process import (
    ChatRefused,
    NotSerializable,
    TemplateExceeded,
    TemplateFailed,
    TemplateProcess,
)

__all__ = ["ChatTemplate"]

logger = logging.getLogger(__name__)

# Stands at the end of a message that is continued; no character, so that no message has it.
_MARK = "\udfff"
_REMEDY = "take the template from the model's original checkpoint"
# The variables that a request does not set by name.
_OURS = frozenset({"messages", "tools", "documents", "add_generation_prompt"})


class ChatTemplate:
    """A Jinja template as `transformers.apply_chat_template` renders it, in a process of its own.

    Safe from any thread.

    Args:
        source: the template.
        special_tokens: the variables `bos_token`, `eos_token` and so on.
        name: what the log calls the template: its file.

    Attributes:
        source: the template.
        variables: what a request may set beside the messages.

    Raises:
        RepositoryError: the template is no valid Jinja, or takes too much time or memory to compile.
    """

    def __init__(self, source: str, *, special_tokens: Mapping[str, str], name: str) -> None:
        self.source = source
        self._name = name
        self._process = TemplateProcess(source, special_tokens=special_tokens)
        try:
            self.variables = self._process.compile() - _OURS
        except TemplateFailed as error:
            place = "the chat template cannot be compiled: " if isinstance(error, TemplateExceeded) else ""
            raise RepositoryError(f"{name}: {place}{error}", remedy=_REMEDY) from None

    def render(self, chat: Chat) -> str:
        """The prompt for the assistant's next turn, or for the rest of the last one.

        Raises:
            InvalidRequest: the template refuses these messages, or drops the one that is to be continued:
                `field` is `messages`; or it knows nothing of one of `chat.template_kwargs`.
            ModelFailed: the template itself is at fault, or exceeded its limit on time, memory or output. The
                log says why.
        """
        for name in chat.template_kwargs:
            self._require_variable(name)
        messages = [message.as_dict() for message in chat.messages]
        if chat.continue_final_message:
            messages[-1]["content"] += _MARK + " "
        rendered = self._render(messages, chat)
        return _up_to_mark(rendered) if chat.continue_final_message else rendered

    def close(self) -> None:
        """End the process, after the chat that it renders now; a later `render` starts another."""
        self._process.close()

    def _require_variable(self, name: str) -> None:
        if name not in self.variables:
            field = f"chat_template_kwargs.{name[:128]}"
            known = ", ".join(sorted(self.variables)) or "none"
            remedy = f"its variables are: {known}"
            raise InvalidRequest(f"{field}: the chat template does not use it", field=field, remedy=remedy)

    def _render(self, messages: list[dict[str, str]], chat: Chat) -> str:
        variables = {
            "messages": messages,
            "tools": None,
            "documents": None,
            "add_generation_prompt": chat.begins_turn,
            **chat.template_kwargs,
        }
        try:
            return self._process.render(variables)
        except ChatRefused as error:
            raise InvalidRequest(
                f"the model's chat template refuses these messages: {error}", field="messages"
            ) from None
        except TemplateFailed as error:
            logger.error("%s: the chat template failed: %s", self._name, error)  # noqa: TRY400  its words are all
            limits = ": it exceeded its limit on time, memory or output"
            exceeded = limits if isinstance(error, TemplateExceeded) else ""
            raise ModelFailed(f"the chat template failed{exceeded}", remedy=f"{SEE_LOG}; {_REMEDY}") from None
        except NotSerializable as error:    # of a caller in this process
            field = "chat_template_kwargs"
            raise InvalidRequest(f"{field} must be JSON-serializable: {error}", field=field) from None


def _up_to_mark(rendered: str) -> str:
    """Return what stands before the end of the last message; as transformers finds it."""
    before, mark, after = rendered.rpartition(_MARK)
    if not mark:
        raise InvalidRequest(
            "the model's chat template leaves out the end of the last message", field="messages"
        )
    if not after.startswith(" "):  # the template has trimmed the message
        before = before.rstrip()
    return before.replace(_MARK + " ", "").replace(_MARK, "")  # where it shows the message twice
