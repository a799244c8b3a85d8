"""Digests and sketches of the weights that a server runs. An update replaces some weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import msgspec

from cachetree.checkpoint.digests import Digests, digest_of, tensor_digests
from cachetree.checkpoint.family import ModelIdentity
from cachetree.checkpoint.safetensors_files import read_tensors, weight_files
from cachetree.checkpoint.sketches import EMPTY, Sketches, distances, folder_sketches
from cachetree.errors import ConfigError

_EMBEDDINGS: Final = "model.embed_tokens.weight"
_HEAD: Final = "lm_head.weight"
_ROTATIONS: Final = ".rotary_emb."
"""Infix of the names of rotation tables in old checkpoints. Servers do not load these tables."""

Layout = tuple[str, tuple[int, ...]]
"""Type of a tensor, as a safetensors header writes it, and its shape."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """Types, shapes and known digests of a model's tensors."""

    started_as: ModelIdentity
    """Identity of the model at start. An update changes only its field `weights`, because a server
    reads config and tokenizer once."""
    computing: Mapping[str, Any]
    """Fields of the config that change the computation."""
    layouts: Mapping[str, Layout]
    """Type and shape of every tensor of the model. Keys are names."""
    digests: Digests
    """Digests of the tensors with known content."""
    sketches: Sketches | None = None
    """Sketches of the tensors with known content. None if no distances are needed."""

    @property
    def identity(self) -> ModelIdentity | None:
        """Identity of a model with these weights; None while the content of a tensor is unknown."""
        if self.digests.keys() != self.layouts.keys():
            return None
        weights = digest_of([loaded(self.digests), self.computing])
        return msgspec.structs.replace(self.started_as, weights=weights)

    def takes(self, name: str, layout: Layout) -> bool:
        """Return whether a tensor of an update replaces one of the model's tensors. Servers skip
        all other tensors. Raises ConfigError if the tensor does not fit the model."""
        if "quantization_config" in self.computing:
            raise ConfigError("the checkpoint is quantised, and its weights are packed when loaded")
        known = self.layouts.get(name)
        is_tied_head = name == _HEAD and known is None
        if _ROTATIONS in name or is_tied_head:
            return False
        if known != layout:
            dtype, shape = layout
            of_ours = f"has {known[0]} of shape {list(known[1])}" if known else "has no such tensor"
            raise ConfigError(
                f"the update has {name}, {dtype} of shape {list(shape)}; the checkpoint {of_ours}"
            )
        return True

    def after(self, digests: Digests, sketches: Sketches = EMPTY) -> Weights:
        """Return the weights after tensors with these names and digests were replaced. If distances
        are needed, `sketches` has the sketches of the same tensors."""
        left = self.sketches
        if left is not None:
            left = {name: it for name, it in left.items() if name not in digests} | {**sketches}
        return replace(self, digests={**self.digests, **digests}, sketches=left)

    def after_folder(self, path: Path, cache_dir: Path | None = None) -> Weights:
        """Return the weights after a checkpoint folder was loaded. Raises ConfigError as `takes`
        does."""
        files = weight_files(path)
        tensors = read_tensors(files)
        names = [name for name, it in tensors.items() if self.takes(name, (it.dtype, it.shape))]
        digests = tensor_digests(files, cache_dir)
        sketches = EMPTY if self.sketches is None else folder_sketches(files)
        return self.after(
            {name: digests[name] for name in names},
            {name: sketches[name] for name in names if name in sketches},
        )

    def unknown(self) -> Weights:
        """Return the weights after a write of unknown content: no tensor has a digest."""
        return replace(self, digests={}, sketches=None if self.sketches is None else EMPTY)

    def sketched(self, path: Path) -> Weights:
        """Return the same weights with sketches, which are read from the checkpoint folder `path`.
        Raises ConfigError if a tensor's type has no sketch."""
        sketches = folder_sketches(weight_files(path))
        return replace(self, sketches={name: sketches[name] for name in self.layouts})

    def distances_from(self, sender: Weights) -> tuple[float, ...] | None:
        """Return the relative changes from the sender's weights to these, as `sketches.distances`
        does. None if a tensor has no sketch, or differs in name, type or shape."""
        ours, theirs = self.sketches or EMPTY, sender.sketches or EMPTY
        if (
            not ours.keys() == theirs.keys() == self.layouts.keys()
            or self.layouts != sender.layouts
        ):
            return None
        return distances(theirs, ours, self.started_as.num_layers)


def of_folder(
    path: Path, identity: ModelIdentity, computing: Mapping[str, Any], cache_dir: Path | None
) -> Weights:
    """Return the weights of the checkpoint in folder `path`. `identity` and `computing` come from
    its config."""
    files = weight_files(path)
    digests = tensor_digests(files, cache_dir)
    is_tied = computing.get("tie_word_embeddings")
    digests = loaded(digests) if is_tied else _without_rotations(digests)
    layouts = {name: (it.dtype, it.shape) for name, it in read_tensors(files).items()}
    return Weights(
        started_as=identity,
        computing=computing,
        layouts={name: layouts[name] for name in digests},
        digests=digests,
    )


def loaded(digests: Digests) -> Digests:
    """Return only the digests of tensors that servers load: no tables of rotations, and no output
    head that equals the embeddings."""
    made = _without_rotations(digests)
    if made.get(_HEAD) == made.get(_EMBEDDINGS):
        made.pop(_HEAD, None)
    return made


def _without_rotations(digests: Digests) -> dict[str, str]:
    return {name: it for name, it in digests.items() if _ROTATIONS not in name}
