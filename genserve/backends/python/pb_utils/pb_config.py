"""Model config as a model.py reads it, and completes it in `auto_complete_config`."""

from __future__ import annotations

import json
from typing import Any


def get_input_config_by_name(model_config: dict[str, Any], name: str) -> dict[str, Any] | None:
    """Return the properties of an input of a parsed config by name, or None."""
    return _named(model_config.get("input", []), name)


def get_output_config_by_name(model_config: dict[str, Any], name: str) -> dict[str, Any] | None:
    """Return the properties of an output of a parsed config by name, or None."""
    return _named(model_config.get("output", []), name)


def using_decoupled_model_transaction_policy(model_config: dict[str, Any]) -> bool:
    """Whether the model of a parsed config is decoupled."""
    return bool(model_config.get("model_transaction_policy", {}).get("decoupled", False))


class ModelConfig:
    """The argument of `auto_complete_config`: a config that the model completes."""

    def __init__(self, model_config: str) -> None:
        self._model_config: dict[str, Any] = json.loads(model_config)

    def as_dict(self) -> dict[str, Any]:
        """Return the config, with the field names of config.pbtxt."""
        return self._model_config

    def set_max_batch_size(self, max_batch_size: int) -> None:
        """Set `max_batch_size`.

        Raises:
            ValueError: config.pbtxt has a larger one.
        """
        configured = self._model_config["max_batch_size"]
        if configured > max_batch_size:
            raise ValueError(
                f"configuration specified max_batch_size {configured}, but in auto-complete-config function "
                f"for model '{self._name}' specified max_batch_size {max_batch_size}"
            )
        self._model_config["max_batch_size"] = max_batch_size

    def set_dynamic_batching(self) -> None:
        """Enable dynamic batching.

        Raises:
            ValueError: config.pbtxt has another scheduler.
        """
        for other in ("sequence_batching", "ensemble_scheduling"):
            if other in self._model_config:
                raise ValueError(
                    f"Configuration specified scheduling_choice as '{other}', but auto-complete-config "
                    f"function for model '{self._name}' tries to set scheduling_choice as 'dynamic_batching'"
                )
        self._model_config.setdefault("dynamic_batching", {})

    def add_input(self, input: dict[str, Any]) -> None:  # noqa: A002  # Triton's name
        """Add an input, or complete an input of config.pbtxt.

        Args:
            input: the keys name, data_type ("TYPE_FP32"), dims, and optional.

        Raises:
            ValueError: a key is unknown or missing, or a value contradicts config.pbtxt.
        """
        self._add("input", input, allowed=("name", "data_type", "dims", "optional"))

    def add_output(self, output: dict[str, Any]) -> None:
        """Add an output, or complete an output of config.pbtxt.

        Args:
            output: the keys name, data_type ("TYPE_FP32") and dims.

        Raises:
            ValueError: a key is unknown or missing, or a value contradicts config.pbtxt.
        """
        self._add("output", output, allowed=("name", "data_type", "dims"))

    def set_model_transaction_policy(self, transaction_policy_dict: dict[str, Any]) -> None:
        """Set whether the model is decoupled.

        Args:
            transaction_policy_dict: `{"decoupled": bool}`.

        Raises:
            ValueError: a key is unknown, or the value contradicts config.pbtxt.
        """
        if set(transaction_policy_dict) - {"decoupled"}:
            raise ValueError(
                f"model transaction property in auto-complete-config function for model '{self._name}' "
                "contains property other than 'decoupled'."
            )
        policy = self._model_config.setdefault("model_transaction_policy", {})
        if "decoupled" not in transaction_policy_dict:
            return
        decoupled = transaction_policy_dict["decoupled"]
        if policy.get("decoupled", decoupled) != decoupled:
            raise ValueError(
                f"trying to change decoupled property in auto-complete-config for model '{self._name}', "
                f"which is already set to '{policy['decoupled']}'."
            )
        policy["decoupled"] = decoupled

    @property
    def _name(self) -> str:
        return str(self._model_config["name"])

    def _add(self, kind: str, tensor: dict[str, Any], *, allowed: tuple[str, ...]) -> None:
        self._check_properties(kind, tensor, allowed)
        existing = _named(self._model_config[kind], tensor["name"])
        if existing is None:
            self._model_config[kind].append(tensor)
            return
        self._check_agrees(kind, tensor, existing)
        existing.update(tensor)

    def _check_properties(self, kind: str, tensor: dict[str, Any], allowed: tuple[str, ...]) -> None:
        where = f"in auto-complete-config function for model '{self._name}'"
        if set(tensor) - set(allowed):
            words = ", ".join(f"'{word}'" for word in allowed[:-1]) + f" and '{allowed[-1]}'"
            raise ValueError(f"{kind} '{tensor['name']}' {where} contains property other than {words}.")
        if "name" not in tensor:
            raise ValueError(f"{kind} {where} is missing 'name' property.")
        for needed in ("data_type", "dims"):
            if needed not in tensor:
                raise ValueError(f"{kind} '{tensor['name']}' {where} is missing '{needed}' property.")

    def _check_agrees(self, kind: str, tensor: dict[str, Any], existing: dict[str, Any]) -> None:
        if existing["data_type"] not in ("TYPE_INVALID", tensor["data_type"]):
            raise ValueError(
                f"unable to load model '{self._name}', configuration expects datatype "
                f"{existing['data_type']} for {kind} '{tensor['name']}', model provides {tensor['data_type']}"
            )
        of = f"model '{self._name}', tensor '{tensor['name']}': the model expects"
        if existing["dims"] and existing["dims"] != tensor["dims"]:
            raise ValueError(
                f"{of} dims {tensor['dims']} but the model configuration specifies dims {existing['dims']}"
            )
        optional = tensor.get("optional")
        if optional is not None and existing.get("optional", optional) != optional:
            raise ValueError(
                f"{of} optional {optional} but the model configuration specifies optional "
                f"{existing['optional']}"
            )


def _named(tensors: list[dict[str, Any]], name: str) -> dict[str, Any] | None:
    return next((tensor for tensor in tensors if tensor["name"] == name), None)
