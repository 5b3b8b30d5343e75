"""Receipts: what the answers of one text model depend on, and the requests that repeat them."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from itertools import zip_longest
from typing import Any

from genserve.backends.backend import ModelSource
from genserve.backends.libraries import import_onnxruntime, import_torch
from genserve.engine.generation_request import GenerationRequest
from genserve.engine.receipt import FORMAT, Receipt, receipt_sha256
from genserve.errors import InvalidRequest, ModelFailed
from genserve.kernels import sources_sha256
from genserve.prompt import Chat, Message, Prompt, TextFormat, Tool
from genserve.sampling.param_table import is_token_id
from genserve.sampling.sampling_params import PARAMETERS, SamplingParams, sampling_params
from genserve.text.tokenizer import Tokenizer
from genserve.textmodel.disk_prefixes import files_sha256
from genserve.textmodel.logits_config import FileStates, file_states, logits_files
from genserve.textmodel.logits_runtime import LogitsFigures, engine_placements
from genserve.textmodel.runtimes.cached_logits import CachedLogits
from genserve.version import __version__

# Parameters that do not change the tokens, besides those of the log-probabilities and of the prompt, whose
# tokens the receipt has; the seed has a field of its own.
_LEFT_OUT = frozenset({"seed", "stream_interval"})
_SECTIONS_LEFT_OUT = frozenset({"logprobs", "prompt"})


class ModelReceipts:
    """Begins the receipts of a text model's answers. Safe from any thread.

    The digests of the files are computed for the first receipt: a gigabyte takes about a second.
    """

    def __init__(
        self, stages: Mapping[str, ModelSource], *, name: str, tokenizer: Tokenizer, files: FileStates
    ) -> None:
        """Describe the model `name`.

        Args:
            stages: its stages "tokenizer", "logits" and "decoder".
            name: its name.
            tokenizer: its tokenizer.
            files: the `file_states` of the stages before they were loaded.
        """
        self._stages = stages
        self._name = name
        self._tokenizer = tokenizer
        self._files = files
        self._lock = threading.Lock()
        self._digests: Mapping[str, str | None] = {}

    def begin(
        self,
        request: GenerationRequest,
        *,
        choice: int,
        max_tokens: int,
        logits: LogitsFigures,
    ) -> Receipt:
        """Return the receipt of an answer before its first token.

        Args:
            request: the request.
            choice: the number of the answer among its choices.
            max_tokens: how many tokens it can have.
            logits: the figures of the model.

        Raises:
            ModelFailed: the files are not those any more that were loaded.
        """
        prompt = request.prompt
        return Receipt(
            {
                **self.facts(logits),
                "prompt_token_ids": [*request.prompt_token_ids],
                "chat": _written_chat(prompt) if isinstance(prompt, Chat) else None,
                "begins_reasoning": request.begins_reasoning,
                "params": _written_params(request.params, max_tokens=max_tokens),
                "seed": str(request.seeds[choice]),     # above what a number of JavaScript holds
            }
        )

    def facts(self, logits: LogitsFigures) -> dict[str, Any]:
        """Return the fields of a receipt that describe the model and what runs it. Raises as `begin`."""
        stage = self._stages["logits"]
        types: set[str] = set()
        if isinstance(logits, CachedLogits):
            types = {str(buffer.dtype).removeprefix("torch.") for buffer in logits.cache.buffers.values()}
        runtime = import_torch() if stage.config.backend == "pytorch" else import_onnxruntime()
        return {
            "model": self._name,
            "digests": dict(self._file_digests()),
            "precision": logits.metadata.get("genserve.precision", "unknown"),
            "kv_cache": ", ".join(sorted(types)) or None,
            "made_by": {
                "genserve": __version__,
                "kernels": sources_sha256(),
                stage.config.backend: str(runtime.__version__),
                "device": engine_placements(stage.config)[0].kind,
            },
        }

    def _file_digests(self) -> Mapping[str, str | None]:
        with self._lock:
            if not self._digests:
                digests = self._computed()
                if file_states(self._stages) != self._files:
                    raise ModelFailed(
                        f"the files of model {self._name!r} have changed since it was loaded, so that no "
                        "receipt can name them",
                        remedy="load the model again",
                    )
                self._digests = digests
            return self._digests

    def _computed(self) -> dict[str, str | None]:
        digests: dict[str, str | None] = {
            name: files_sha256(stage.folder) for name, stage in self._stages.items()
        }
        # The folder may have several graphs, of which the config names one.
        logits = self._stages["logits"]
        graphs = [path.name for path in logits_files(logits.config, logits.folder)]
        digests["logits"] = _sha256(repr((digests["logits"], graphs)))
        # The parameters of the decoder stage are arguments of its plug-ins.
        parameters = sorted(self._stages["decoder"].config.parameters.items())
        digests["decoder"] = _sha256(repr((digests["decoder"], parameters)))
        templates = (self._tokenizer.chat_template, self._tokenizer.tool_template)
        sources = [None if template is None else template.source for template in templates]
        return digests | {"chat_template": _sha256(repr(sources)) if any(sources) else None}


def described(receipt: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a receipt, or the facts of a model, says of the model: digests, precision and KV cache."""
    digests, adapter = receipt.get("digests"), receipt.get("adapter")
    named = dict(digests) if isinstance(digests, Mapping) else {}
    if isinstance(adapter, Mapping):
        named["adapter"] = adapter.get("sha256")
    return named | {name: receipt.get(name) for name in ("precision", "kv_cache")}


def receipts_in(value: Any) -> Iterator[Mapping[str, Any]]:
    """Yield the receipts in a JSON value, such as an answer or a list of events."""
    if isinstance(value, dict) and isinstance(value.get("receipt"), int):
        yield value
    elif isinstance(value, dict | list):
        for part in value.values() if isinstance(value, dict) else value:
            yield from receipts_in(part)


def first_difference(then: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Return the first difference between two receipts of one request; empty: they are equal."""
    for position, (one, other) in enumerate(zip_longest(then["token_ids"], now["token_ids"])):
        if one != other:
            words = ["the end" if token is None else f"{token}" for token in (one, other)]
            return f"token {position} of the answer was {words[0]}, and is {words[1]}"
    if then["logits_sha256"] not in (None, now["logits_sha256"]):
        return "the tokens are equal, and the logits are not"
    for name in ("finish_reason", "stop_reason"):
        if then[name] != now[name]:
            return f"the tokens are equal; {name} was {then[name]!r}, and is {now[name]!r}"
    return ""


def repeated_request(receipt: Mapping[str, Any]) -> GenerationRequest:
    """Return the request whose answer has the same receipt, if nothing has changed.

    Raises:
        InvalidRequest: it is no receipt, was changed, is of another version of genserve, or says that its
            answer cannot be repeated.
    """
    if receipt.get("receipt") != FORMAT:
        raise InvalidRequest(
            f"the format of the receipt is {receipt.get('receipt')!r}; this genserve reads {FORMAT}",
            field="receipt",
        )
    if receipt.get("sha256") != receipt_sha256(receipt):
        raise InvalidRequest(
            "the receipt was changed: its field sha256 is not that of the others", field="sha256"
        )
    try:
        if not receipt["is_repeatable"]:
            raise InvalidRequest(
                "the answer cannot be repeated: a call has ended its reasoning while it ran",
                field="is_repeatable",
            )
        prompt_token_ids = tuple(receipt["prompt_token_ids"])
        seed = int(receipt["seed"])
        if not (0 <= seed < 2**64 and prompt_token_ids and all(map(is_token_id, prompt_token_ids))):
            raise ValueError("prompt_token_ids must be token ids, and seed a number below 2^64")
        if not (isinstance(receipt["token_ids"], list) and isinstance(receipt["made_by"], Mapping)):
            raise TypeError("token_ids must be a list, and made_by an object")
        if missing := {"finish_reason", "stop_reason", "logits_sha256"} - receipt.keys():
            raise ValueError(f"{', '.join(sorted(missing))} is missing")
        chat = receipt["chat"]
        return GenerationRequest(
            model=receipt["model"],
            prompt=prompt_token_ids if chat is None else _read_chat(chat),
            prompt_token_ids=prompt_token_ids,
            params=sampling_params({**receipt["params"], "return_receipt": True}),
            seeds=(seed,),
            begins_reasoning=receipt["begins_reasoning"] is True,
            adapter=str(receipt["adapter"]["name"]) if "adapter" in receipt else None,
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InvalidRequest(f"the receipt is not complete: {error}", field="receipt") from None


def _written_params(params: SamplingParams, *, max_tokens: int) -> dict[str, Any]:
    given = replace(params, max_tokens=max_tokens, return_receipt=False).given()
    return {
        name: {str(key): part for key, part in value.items()} if isinstance(value, Mapping) else value
        for name, value in given.items()
        if name not in _LEFT_OUT and PARAMETERS[name].section not in _SECTIONS_LEFT_OUT
    }


def _written_chat(chat: Chat) -> dict[str, Any]:
    """Return what the text of an answer to a chat depends on, besides the tokens of the prompt."""
    return {
        "tools": [asdict(tool) for tool in chat.tools],
        "tool_choice": chat.tool_choice,
        "allowed_tools": [*chat.allowed_tools],
        "parallel_tool_calls": chat.parallel_tool_calls,
        "continue_final_message": chat.continue_final_message,
    }


def _read_chat(written: Mapping[str, Any]) -> Prompt:
    """Return a chat with any message: the receipt has the tokens of the prompt."""
    forms = [tool["input_format"] and TextFormat(**tool["input_format"]) for tool in written["tools"]]
    tools = [
        Tool(**{**tool, "input_format": form}) for tool, form in zip(written["tools"], forms, strict=True)
    ]
    return Chat(
        messages=(Message(role="user"),),
        tools=tuple(tools),
        tool_choice=written["tool_choice"],
        allowed_tools=tuple(written["allowed_tools"]),
        parallel_tool_calls=written["parallel_tool_calls"],
        continue_final_message=written["continue_final_message"],
    )


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
