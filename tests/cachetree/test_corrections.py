"""Maps of E: their results, and files of maps that are refused."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file
from test_profile import profile

from cachetree.corrections import Correction, maps_path, read_corrections, write_corrections
from cachetree.errors import ProfileError
from cachetree.planning.profile import BlockQuality, PairProfile, read_profile, write_profile

HIDDEN = 8


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


CORRECTIONS = [
    Correction(drawn(HIDDEN), drawn(HIDDEN, HIDDEN)),
    Correction(drawn(HIDDEN), 2 * drawn(HIDDEN, HIDDEN)),
    Correction(drawn(HIDDEN).bfloat16(), drawn(HIDDEN, HIDDEN).bfloat16()),
]
NAMES = [f"layer {1 + i}, full, {it.named(1 + i).sha256[:8]}" for i, it in enumerate(CORRECTIONS)]


@pytest.fixture
def made(tmp_path: Path) -> tuple[PairProfile, Path]:
    """Write a profile with one plan without a map, and three plans with one."""
    path = tmp_path / "pair.json"
    plain = BlockQuality(start=0, stop=4, quality=0.79)
    blocks = [
        BlockQuality(start=1 + i, stop=2 + i, quality=0.78, e_map=it.named(1 + i))
        for i, it in enumerate(CORRECTIONS)
    ]
    corrected = msgspec.structs.replace(profile(blocks[0]), blocks=(*blocks, plain))
    write_profile(corrected, path)
    write_corrections(corrected, {it.named(0).sha256: it for it in CORRECTIONS}, path)
    return corrected, path


def test_a_map_adds_what_its_matrix_and_its_bias_say():
    e = drawn(5, HIDDEN)
    for correction in CORRECTIONS[:2]:
        assert torch.allclose(
            correction(e).double(), e + e.double() @ correction.matrix.double() + correction.bias
        )


def test_zeros_change_nothing():
    e = drawn(5, HIDDEN)
    assert torch.equal(Correction(torch.zeros(HIDDEN), torch.zeros(HIDDEN, HIDDEN))(e), e)


def test_maps_survive_the_disk(made):
    written, path = made
    assert read_profile(path) == written
    read = read_corrections(written, path)
    assert list(read) == [it.sha256 for it in written.e_maps]
    for name, correction in zip(read, CORRECTIONS, strict=True):
        assert len(read[name].tensors) == len(correction.tensors)
        assert all(map(torch.equal, read[name].tensors, correction.tensors))


def test_a_layer_may_have_two_maps(made):
    written, path = made
    zeros = Correction(torch.zeros(HIDDEN), torch.zeros(HIDDEN, HIDDEN))
    other = BlockQuality(start=1, stop=2, quality=0.7, e_map=zeros.named(1))
    both = msgspec.structs.replace(written, blocks=(*written.blocks, other))
    maps = {it.named(0).sha256: it for it in (*CORRECTIONS, zeros)}
    write_corrections(both, maps, path)
    assert read_corrections(both, path).keys() == maps.keys()


def test_without_maps_nothing_is_read_and_nothing_is_left(tmp_path):
    path = tmp_path / "pair.json"
    plain = profile(BlockQuality(start=1, stop=3, quality=0.78))
    maps_path(path).write_bytes(b"of before")
    write_corrections(plain, {}, path)
    assert not maps_path(path).exists()
    assert read_corrections(plain, path) == {}
    write_profile(plain, path)
    assert "e_map" not in path.read_text(), "as profiles were before there were maps"


def test_profiles_of_different_names_have_different_maps():
    names = "llama-3.1_to_x", "llama-3.2_to_x.json", "llama-3.3_to_x.json"
    assert [maps_path(Path("profiles") / it).name for it in names] == [
        f"llama-3.{i}_to_x.maps.safetensors" for i in (1, 2, 3)
    ]


def refusal(made: tuple[PairProfile, Path]) -> str:
    with pytest.raises(ProfileError) as refused:
        read_corrections(*made)
    assert "\n" not in str(refused.value)
    return str(refused.value)


def rewrite(path: Path, change: dict[str, torch.Tensor | None]) -> None:
    """Write the file anew with changed tensors."""
    file = maps_path(path)
    tensors = load_file(file) | change
    save_file({name: it for name, it in tensors.items() if it is not None}, file)


def test_a_missing_file_is_refused(made):
    maps_path(made[1]).unlink()
    text = refusal(made)
    assert "pair.maps.safetensors of profile pair.json cannot be read: No such file" in text


def test_maps_of_another_pair_are_refused(made):
    written, path = made
    its = BlockQuality(start=1, stop=3, quality=0.78, e_map=CORRECTIONS[1].named(1))
    theirs = {its.e_map.sha256: CORRECTIONS[1]}
    write_corrections(msgspec.structs.replace(written, blocks=(its,)), theirs, path)
    text = refusal(made)
    assert f"does not contain tensor {NAMES[0]}: bias, and the profile needs" in text
    assert "set e_correction: none" in text


def test_other_numbers_are_refused(made):
    rewrite(made[1], {f"{NAMES[0]}: bias": torch.zeros(HIDDEN)})
    text, digest = refusal(made), made[0].e_maps[0].sha256
    assert "layer 1 is float32 of sha256 " in text
    assert f"and the profile needs float32 of sha256 {digest}" in text


def test_other_shapes_and_dtypes_are_refused(made):
    rewrite(made[1], {f"{NAMES[1]}: 0": drawn(HIDDEN, 1)})
    text = refusal(made)
    assert "shape of layer 2 is [[8], [8, 1]], and the profile needs [[8], [8, 8]]" in text
    rewrite(made[1], {f"{NAMES[1]}: 0": drawn(HIDDEN, HIDDEN).half()})
    assert "layer 2 is float32 of sha256 " in refusal(made)
    rewrite(made[1], {f"{NAMES[1]}: 0": CORRECTIONS[1].matrix})
    halves = zip((f"{NAMES[2]}: bias", f"{NAMES[2]}: 0"), CORRECTIONS[2].tensors, strict=True)
    rewrite(made[1], {name: it.view(torch.float16) for name, it in halves})
    assert "layer 3 is float16 of sha256 " in refusal(made), "the bytes are the same"
    rewrite(made[1], {f"{NAMES[1]}: 0": None})
    assert f"does not contain tensor {NAMES[1]}: 0" in refusal(made)


def test_other_tensors_in_the_file_are_not_read(made):
    rewrite(made[1], {"more": torch.zeros(1 << 20)})
    assert len(read_corrections(*made)) == len(CORRECTIONS)


@pytest.mark.parametrize("raw", [b"", b"no safetensors", b"\x08\0\0\0\0\0\0\0notjson!"])
def test_file_that_is_not_safetensors_is_refused(made, raw):
    maps_path(made[1]).write_bytes(raw)
    assert "format is " in refusal(made)


def test_a_map_of_another_layer_is_refused(made):
    written, path = made
    moved = msgspec.structs.replace(written.blocks[0], start=2, stop=3)
    wrong = msgspec.structs.replace(written, blocks=(moved,))
    text = refusal((wrong, path))
    assert "the layer of the map of block 2:3 is 1, and the profile needs 2" in text


def test_without_corrected_plans_another_is_recommended(made):
    corrected, _ = made
    plain = corrected.uncorrected()
    assert (plain.blocks, plain.recommended) == (corrected.blocks[-1:], None)
    assert not plain.passed, "what is left are all layers"
    smaller = BlockQuality(start=1, stop=3, quality=0.78)
    both = msgspec.structs.replace(corrected, blocks=(*corrected.blocks, smaller))
    assert both.uncorrected().recommended == smaller
    assert both.uncorrected().passed
    assert plain.uncorrected() is plain
