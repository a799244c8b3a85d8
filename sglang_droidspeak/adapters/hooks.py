"""Hooks on SGLang's functions that load, check and unload LoRA adapters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from cachetree import ConfigError
from sglang_droidspeak.adapters.activated import ActivatedAdapters
from sglang_droidspeak.adapters.models import Models
from sglang_droidspeak.engine import Hooks, HookType, release
from sglang_droidspeak.engine.names import LoRARef
from sglang_droidspeak.ranks import Ranks
from sglang_droidspeak.start.this_server import folder_of


@dataclass(frozen=True, slots=True)
class AdapterHooks:
    """Hooks for loading, checking and unloading LoRA adapters. Scheduler thread only."""

    models: Models
    activated: ActivatedAdapters
    ranks: Ranks
    forget: Callable[[str], None]
    """Function that is called with the id of each unloaded adapter."""

    def table(self) -> Hooks:
        return {
            release.LOAD_LORA: (self.load, HookType.AROUND),
            release.UNLOAD_LORA: (self.unload, HookType.AFTER),
            release.VALIDATE_LORA: (self.validate, HookType.BEFORE),
            release.PREPARE_LORA: (self.activated.prepare, HookType.AROUND),
            release.FITS_LORA_GRAPH: (self.activated.fits_graph, HookType.AROUND),
            release.CAN_SCHEDULE_LORA: (self.activated.can_schedule, HookType.AROUND),
        }

    def load(self, original: Any, manager: Any, lora_ref: LoRARef) -> Any:
        """Load an adapter on all ranks or on none: SGLang reports only the first rank's result."""
        lora_id = lora_ref.lora_id

        def load() -> None:
            result = original(manager, lora_ref)
            if not result.success:
                raise ConfigError(result.error_message)
            self.ranks.agree()

        try:
            with self.ranks.together():
                self.models.load(lora_id, folder_of(lora_ref.lora_path), load)
        except Exception as exc:  # noqa: BLE001  # SGLang, too, answers with what went wrong.
            if lora_id in manager.lora_refs:
                manager.unload_lora_adapter(lora_ref)
            self.models.drop(lora_id)
            return manager.create_lora_update_result(success=False, error_message=str(exc))
        return manager.create_lora_update_result(success=True)

    def validate(self, manager: Any, _config: object, lora_ref: LoRARef) -> None:
        """Check an adapter before SGLang loads it. SGLang sends a ConfigError to its client."""
        self.activated.require_room(manager, lora_ref)

    def unload(self, result: Any, _manager: object, lora_ref: LoRARef) -> None:
        if result.success:
            self.models.drop(lora_ref.lora_id)
            self.forget(lora_ref.lora_id)
