"""The configuration that a model completes in `auto_complete_config`, as Triton's class of that name."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any

_INPUT, _OUTPUT = ("name", "data_type", "dims", "optional"), ("name", "data_type", "dims")


class ModelConfig:
    """A configuration in JSON form. Methods raise ValueError for what contradicts the file config.pbtxt."""

    def __init__(self, model_config: str) -> None:
        self._model_config: dict[str, Any] = json.loads(model_config)
        for field in ("input", "output"):
            self._model_config.setdefault(field, [])

    def as_dict(self) -> dict[str, Any]:
        return self._model_config

    @property
    def _where(self) -> str:
        return f"in auto-complete-config function for model '{self._model_config.get('name', '')}'"

    def set_max_batch_size(self, max_batch_size: int) -> None:
        known = self._model_config.get("max_batch_size", 0)
        if known > max_batch_size:
            raise ValueError(
                f"configuration specified max_batch_size {known}, but {self._where} specified max_batch_size "
                f"{max_batch_size}"
            )
        self._model_config["max_batch_size"] = max_batch_size

    def set_dynamic_batching(self) -> None:
        found = next((one for one in ("sequence_batching", "ensemble_scheduling") if one in self._model_config), None)
        if found is not None:
            raise ValueError(
                f"Configuration specified scheduling_choice as '{found}', but {self._where} tries to set "
                "scheduling_choice as 'dynamic_batching'"
            )
        self._model_config.setdefault("dynamic_batching", {})

    def add_input(self, input: Mapping[str, Any]) -> None:  # noqa: A002 - the name that Triton has
        self._add("input", input, _INPUT)

    def add_output(self, output: Mapping[str, Any]) -> None:
        self._add("output", output, _OUTPUT)

    def set_model_transaction_policy(self, transaction_policy_dict: Mapping[str, Any]) -> None:
        if set(transaction_policy_dict) - {"decoupled"}:
            raise ValueError(f"model transaction property {self._where} contains property other than 'decoupled'.")
        policy = self._model_config.setdefault("model_transaction_policy", {})
        if "decoupled" in transaction_policy_dict:
            wanted = transaction_policy_dict["decoupled"]
            if policy.get("decoupled", wanted) != wanted:
                raise ValueError(
                    f"trying to change decoupled property {self._where}, which is already set to "
                    f"'{policy['decoupled']}'."
                )
            policy["decoupled"] = wanted

    def _add(self, what: str, tensor: Mapping[str, Any], properties: Collection[str]) -> None:
        name = tensor.get("name")
        if set(tensor) - set(properties):
            listed = ", ".join(f"'{one}'" for one in list(properties)[:-1])
            raise ValueError(
                f"{what} '{name}' {self._where} contains property other than {listed} and '{list(properties)[-1]}'."
            )
        missing = next((one for one in ("name", "data_type", "dims") if one not in tensor), None)
        if missing is not None:
            which = f"{what} '{name}'" if name is not None else what
            raise ValueError(f"{which} {self._where} is missing '{missing}' property.")
        known = next((one for one in self._model_config[what] if one["name"] == name), None)
        if known is None:
            self._model_config[what].append(dict(tensor))
            return
        self._check_same(what, known, tensor)
        known.update(tensor)

    def _check_same(self, what: str, known: Mapping[str, Any], tensor: Mapping[str, Any]) -> None:
        model, name = self._model_config.get("name", ""), tensor["name"]
        if known.get("data_type", "TYPE_INVALID") not in {"TYPE_INVALID", tensor["data_type"]}:
            raise ValueError(
                f"unable to load model '{model}', configuration expects datatype {known['data_type']} for {what} "
                f"'{name}', model provides {tensor['data_type']}"
            )
        for field in ("dims", "optional"):
            if field in tensor and known.get(field) and known[field] != tensor[field]:
                raise ValueError(
                    f"model '{model}', tensor '{name}': the model expects {field} {tensor[field]} but the model "
                    f"configuration specifies {field} {known[field]}"
                )
