"""Linear maps that bring a sender's E closer to the receiver's: apply, write and read them.

    corrected E = E + E · matrix + bias      E: `[tokens, hidden]`, at the block's first layer

A profile names each map by its layer, dtype and digest. The tensors are in a safetensors file
beside the profile.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from cachetree.errors import ProfileError, written
from cachetree.files import replacing
from cachetree.planning import EMap, PairProfile

__all__ = ["Correction", "maps_path", "read_corrections", "write_corrections"]


@dataclass(frozen=True, slots=True, eq=False)
class Correction:
    """One linear map for E: two tensors of one dtype on one device."""

    bias: Tensor
    """Bias that is added to E, `[hidden]`."""
    matrix: Tensor
    """Matrix by which E is multiplied, `[hidden, hidden]`."""

    def __call__(self, e: Tensor, into: Tensor | None = None) -> Tensor:
        """Return the corrected `e`. It is `[tokens, hidden]`, and has the dtype and device of the
        map. Products are summed in float32. Writes the result to `into`, if given."""
        return torch.addmm(e, e, self.matrix, out=into).add_(self.bias)

    @property
    def tensors(self) -> tuple[Tensor, Tensor]:
        return self.bias, self.matrix

    def named(self, layer: int) -> EMap:
        """Return what a profile stores about this map: `layer`, dtype and digest. The tensors have
        to be on the host."""
        digest = hashlib.sha256()
        for tensor in self.tensors:
            digest.update(tensor.contiguous().view(torch.uint8).numpy().data)
        dtype = str(self.bias.dtype).removeprefix("torch.")
        return EMap(layer=layer, dtype=dtype, sha256=digest.hexdigest())

    def to(self, device: torch.device | str, dtype: torch.dtype) -> Correction:
        return Correction(*(it.to(device, dtype).contiguous() for it in self.tensors))


def maps_path(profile: Path) -> Path:
    """Return the path of the file with the maps of the profile at `profile`."""
    return profile.with_name(profile.name.removesuffix(".json") + ".maps.safetensors")


def write_corrections(
    profile: PairProfile, corrections: Mapping[str, Correction], path: Path
) -> None:
    """Write the maps that the profile names into the file beside the profile's `path`.
    `corrections` has the maps by digest. Replaces the file, or removes it if the profile names no
    map."""
    file = maps_path(path)
    if not profile.e_maps:
        file.unlink(missing_ok=True)
        return
    tensors = {
        name: tensor
        for it in profile.e_maps
        for name, tensor in zip(_names(it), corrections[it.sha256].tensors, strict=True)
    }
    with replacing(file) as fresh:
        save_file(tensors, fresh)


def read_corrections(profile: PairProfile, path: Path) -> dict[str, Correction]:
    """Read all maps that the profile at `path` names into host memory. Return them by digest.

    Raises ProfileError naming the field, its value and the remedy if maps are missing, or have
    other shapes, dtypes or content.
    """
    if not profile.e_maps:
        return {}
    file, hidden = maps_path(path), profile.receiver.hidden_size
    for plan in profile.blocks:
        if plan.e_map is not None and plan.e_map.layer != plan.start:
            block = f"the layer of the map of block {plan.start}:{plan.stop}"
            raise _refused(file, block, str(plan.e_map.layer), str(plan.start))
    try:
        with safe_open(file, "pt") as opened:
            return {it.sha256: _read(file, opened, it, hidden) for it in profile.e_maps}
    except OSError as exc:
        raise ProfileError(
            f"maps {written(file)} of profile {path.name} cannot be read: {exc}; copy "
            "them beside the profile, or set e_correction: none"
        ) from exc
    except SafetensorError as exc:
        raise _refused(file, "format", str(exc), "safetensors with its maps") from exc


def _read(file: Path, opened: Any, named: EMap, hidden: int) -> Correction:
    names, needed = _names(named), [[hidden], [hidden, hidden]]
    shapes = [opened.get_slice(name).get_shape() for name in names]
    if shapes != needed:
        raise _refused(file, f"shape of {named.name}", str(shapes), str(needed))
    # Copies: checked tensors must not change with the file.
    correction = Correction(*(opened.get_tensor(name).clone() for name in names))
    if (actual := correction.named(named.layer)) != named:
        texts = (f"{each.dtype} of sha256 {each.sha256}" for each in (actual, named))
        raise _refused(file, named.name, *texts)
    return correction


def _refused(file: Path, field: str, value: str, needed: str) -> ProfileError:
    return ProfileError(
        f"maps {written(file)}: {field} is {value}, and the profile needs {needed}; copy profile "
        "and maps together, make both again with `droidspeak profile`, or set e_correction: none"
    )


def _names(named: EMap) -> tuple[str, str]:
    """Return the names of the map's tensors in the file."""
    name = f"{named.name}, full, {named.sha256[:8]}"  # a layer may have two maps.
    return f"{name}: bias", f"{name}: 0"
