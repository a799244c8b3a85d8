"""Use SGLang's HiCache storage backends as a store of byte objects, with memory that we allocate.

the backend has   objects move as
batch_get_v1      whole slots of a host pool that is registered with the backend
otherwise         tensors of the objects' own sizes, by batch_get and batch_set
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from sglang.srt.environ import envs
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, HiCacheStorageConfig
from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory

from cachetree import ConfigError

_DYNAMIC: Final = ("backend_name", "module_path", "class_name")
_KEEP_NOTHING: Final = frozenset({"sim", "shm"})
"""Backends that answer calls, but store nothing."""
_NAME: Final = "droidspeak"
"""Model name that backends get, and make a part of their keys. It is the same for all models, so
that they can share objects."""


def check_backend(name: str, config: Mapping[str, Any]) -> None:
    """Raise ConfigError if a backend of this name and options cannot be made.

    Imports the backend's module and makes the folders of `file` and `nixl`. Opens no connection.
    """
    known = StorageBackendFactory._registry
    if name == "dynamic":
        missing = [key for key in _DYNAMIC if key not in config]
        if missing:
            raise ConfigError(
                f"hicache_backend is 'dynamic' and hicache_config has no {', '.join(missing)}; "
                "name the class to load"
            )
        return
    if name in _KEEP_NOTHING:
        raise ConfigError(f"hicache_backend is {name!r}, which keeps no bytes; choose another")
    if name not in known:
        names = sorted(known.keys() - _KEEP_NOTHING)
        raise ConfigError(f"hicache_backend is {name!r}; SGLang has {', '.join(names)} and dynamic")
    try:
        known[name]["loader"]()
        folders = _folders(name, config)
    except Exception as exc:
        raise ConfigError(
            f"hicache_backend is {name!r} and cannot be loaded: {exc}; install what it needs"
        ) from exc
    for field, folder in folders:
        _require_private(field, folder)


def _folders(name: str, config: Mapping[str, Any]) -> list[tuple[str, object]]:
    """Return the folders in which the backend stores files, each with the setting that names it."""
    if name == "file":
        folder = envs.SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR.get()
        return [("file_storage_path", folder or config.get("file_storage_path"))]
    if name == "nixl":
        from sglang.srt.mem_cache.storage.nixl import nixl_utils as nixl

        plugin = nixl.NixlBackendConfig(dict(config)).get_specified_plugin()
        if plugin not in nixl.NixlBackendSelection.OBJ_PLUGINS:
            variable = envs.SGLANG_HICACHE_NIXL_BACKEND_STORAGE_DIR
            return [(variable.name, it.strip()) for it in (variable.get() or "").split(",")]
    return []


def _require_private(field: str, folder: object) -> None:
    """Make the folder if it is missing. Raises ConfigError if other users can reach it.

    A reader of KV can reconstruct prompts from it, and a writer can change answers.
    """
    if not isinstance(folder, str) or not folder:
        raise ConfigError(f"{field} is {folder!r}; name a folder that only this user can reach")
    try:
        Path(folder).mkdir(0o700, parents=True, exist_ok=True)
        status = Path(folder).stat()
    except OSError as exc:
        raise ConfigError(f"{field} is {folder!r}: {exc.strerror}; name another folder") from exc
    if status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise ConfigError(
            f"{field} is {folder!r}, which has mode {status.st_mode & 0o777:o} and is of "
            f"user {status.st_uid}, and this is user {os.geteuid()}; name a folder of this user "
            "with mode 700, and nothing in it that others could have written"
        )


class Backend:
    """One HiCache backend, and `num_slots` slots of host memory. Objects move between the two.

    Every method may block without a limit, and may raise any error of the backend. Several threads
    may call it at the same time, each with its own slots, if the backend allows that.
    """

    def __init__(
        self,
        name: str,
        config: Mapping[str, Any],
        *,
        tp_rank: int,
        tp_size: int,
        slot_bytes: int,
        num_slots: int,
    ) -> None:
        """Make the backend. Raises ConfigError if that fails."""
        self._pool = _HostPool(slot_bytes, num_slots)
        self.slots: Final[Sequence[memoryview]] = [
            row.numpy().data for row in self._pool.kv_buffer.unbind()
        ]
        check_backend(name, config)
        try:
            self._storage: HiCacheStorage = StorageBackendFactory.create_backend(
                name,
                HiCacheStorageConfig(
                    tp_rank=tp_rank,
                    tp_size=tp_size,
                    pp_rank=0,
                    pp_size=1,
                    attn_cp_rank=0,
                    attn_cp_size=1,
                    is_mla_model=False,
                    enable_storage_metrics=False,
                    is_page_first_layout=True,
                    model_name=_NAME,
                    extra_config=dict(config),
                ),
                self._pool,
            )
            self._storage.register_mem_pool_host(self._pool)
            self._storage.on_host_pools_registered()
        except Exception as exc:
            raise ConfigError(
                f"hicache_backend {name!r} cannot be made with hicache_config (it has "
                f"{', '.join(config) or 'no keys'}): {type(exc).__name__}: {exc}"
            ) from exc
        self._is_paged = type(self._storage).batch_get_v1 is not HiCacheStorage.batch_get_v1

    def num_leading(self, keys: Sequence[str]) -> int:
        """Return how many of the keys the backend has, up to the first missing key."""
        return int(self._storage.batch_exists(list(keys)))

    def read(self, keys: Sequence[str], slots: Sequence[int], sizes: Sequence[int]) -> list[bool]:
        """Read the object of `keys[i]` into the first `sizes[i]` bytes of slot `slots[i]`. A
        backend with `batch_get_v1` fills the whole slot. Return for each key whether the backend
        had its object; an empty list if the backend returned nothing."""
        if self._is_paged:
            return list(self._storage.batch_get_v1(list(keys), torch.tensor(slots)) or ())
        targets = self._tensors(slots, sizes)
        answers = self._storage.batch_get(list(keys), targets)
        return [_has_landed(it, to) for it, to in zip(answers or (), targets, strict=False)]

    def write(self, keys: Sequence[str], slots: Sequence[int], sizes: Sequence[int]) -> bool:
        """Store the first `sizes[i]` bytes of slot `slots[i]` under `keys[i]`. A backend with
        `batch_get_v1` stores the whole slot. Return False if the backend refused an object."""
        if self._is_paged:
            return all(self._storage.batch_set_v1(list(keys), torch.tensor(slots)) or (False,))
        return bool(self._storage.batch_set(list(keys), self._tensors(slots, sizes)))

    def close(self) -> None:
        if hasattr(self._storage, "close"):
            self._storage.close()

    def _tensors(self, slots: Sequence[int], sizes: Sequence[int]) -> list[torch.Tensor]:
        return [self._pool.kv_buffer[slot, :size] for slot, size in zip(slots, sizes, strict=True)]


def _has_landed(answer: torch.Tensor | None, target: torch.Tensor) -> bool:
    """Return whether the backend had the object. Some backends fill the target. Others return a
    tensor of their own, which this function copies to the target."""
    if answer is None:
        return False
    if answer.data_ptr() != target.data_ptr():
        if answer.nbytes != target.nbytes:
            return False
        target.copy_(answer.view(torch.uint8).flatten())
    return True


class _HostPool:
    """Host memory that backends take for SGLang's host pool, because it has the attributes that
    they read. Its layout is `page_first`, with one slot for each page."""

    layout: Final = "page_first"
    page_size: Final = 1
    dtype: Final = torch.uint8
    device: Final = "cpu"
    pin_memory: Final = False
    layer_num: Final = 1
    target_layer_num: Final = 1
    start_layer: Final = 0
    end_layer: Final = 1
    head_num: Final = 1
    dcp_size: Final = 1
    dcp_rank: Final = 0
    stores_page_envelope: Final = False

    def __init__(self, slot_bytes: int, num_slots: int) -> None:
        self.head_dim: Final = slot_bytes // 2
        self.size_per_token: Final = slot_bytes
        self.size: Final = num_slots
        self.page_num: Final = num_slots
        # mmap aligns to memory pages. Backends with direct I/O need that.
        pages = mmap.mmap(-1, num_slots * slot_bytes)
        self.kv_buffer: Final = torch.frombuffer(pages, dtype=torch.uint8).view(-1, slot_bytes)

    def get_size_per_token(self) -> int:
        return self.size_per_token

    def get_ksize_per_token(self) -> int:
        return self.head_dim

    def get_page_buffer_meta(self, indices: torch.Tensor) -> tuple[list[int], list[int]]:
        """Return the addresses and sizes of both halves of each slot. In SGLang's own pool, the
        halves are K and V."""
        base = self.kv_buffer.data_ptr()
        starts = [base + slot * self.size_per_token for slot in indices.tolist()]
        halves = [start + offset for start in starts for offset in (0, self.head_dim)]
        return halves, [self.head_dim] * len(halves)

    def get_data_page(self, index: int, flat: bool = True) -> torch.Tensor:
        return self.kv_buffer[int(index)]

    def get_dummy_flat_data_page(self) -> torch.Tensor:
        return torch.zeros(self.size_per_token, dtype=self.dtype)

    def set_from_flat_data_page(self, index: int, data_page: torch.Tensor) -> None:
        self.kv_buffer[int(index)] = data_page

    def is_stride_page_aligned(self, page_size_bytes: int = 4096) -> bool:
        places = (self.kv_buffer.data_ptr(), self.head_dim)
        return all(place % page_size_bytes == 0 for place in places)
