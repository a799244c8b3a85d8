"""Pair profiles on disk, the family of a model, and models or files that do not fit."""

from __future__ import annotations

import json

import msgspec
import pytest
from profile_parts import family, identity, profile_of

from cachetree.checkpoint.family import Codec, Family
from cachetree.errors import ConfigError, FamilyMismatch, ProfileError
from cachetree.ids import EMPTY_SPAN, Span
from cachetree.planning.profile import PROFILE_VERSION as VERSION
from cachetree.planning.profile import BlockQuality, PairProfile, read_profile, write_profile

BLOCK = BlockQuality(start=1, stop=3, quality=0.78)


def profile(recommended: BlockQuality | None) -> PairProfile:
    return profile_of(identity("s", 4), identity("r", 4), BLOCK, recommended=recommended)


def test_a_profile_survives_the_disk(tmp_path):
    file = tmp_path / "pair.json"
    write_profile(profile(BLOCK), file)
    assert read_profile(file) == profile(BLOCK)
    assert read_profile(file).recommended == BLOCK
    assert BLOCK.block == Span(1, 3)


def test_a_profile_whose_plans_could_refresh_layers_is_refused(tmp_path):
    """The blocks of such a profile were never proven without the refreshed layers."""
    file = tmp_path / "pair.json"
    write_profile(profile(BLOCK), file)
    content = json.loads(file.read_text())
    content["recommended"]["refreshed"] = [4, 5]
    file.write_text(json.dumps(content | {"version": 3}))
    with pytest.raises(ProfileError, match="make the profile again"):
        read_profile(file)


def test_profile_names_the_transition_layers_of_its_plans():
    assert profile(BLOCK).transition_layers() == {1}
    assert profile(BlockQuality(start=0, stop=3, quality=0.8)).transition_layers() == frozenset()
    assert profile(None).transition_layers() == frozenset()


def test_models_that_are_equal_below_a_layer_need_no_gate():
    failed = msgspec.structs.replace(profile(BLOCK), passed=False)
    assert failed.lossless is None and not failed.is_usable
    assert failed.transition_layers() == frozenset()
    upper = msgspec.structs.replace(failed, first_difference=3)
    assert upper.lossless == Span(3, 4) and upper.is_usable
    assert upper.transition_layers() == {3}
    assert msgspec.structs.replace(upper, passed=True).transition_layers() == {1, 3}
    equal = msgspec.structs.replace(failed, first_difference=4)
    assert equal.lossless == EMPTY_SPAN and equal.is_usable
    assert equal.transition_layers() == frozenset()


def test_unknown_fields_are_ignored_and_unknown_versions_are_not(tmp_path):
    file = tmp_path / "pair.json"
    raw = msgspec.to_builtins(profile(None))
    file.write_bytes(msgspec.json.encode({**raw, "later": 1}))
    assert read_profile(file) == profile(None)
    file.write_bytes(msgspec.json.encode({**raw, "version": VERSION + 1}))
    with pytest.raises(ProfileError, match=rf"pair\.json has version {VERSION + 1}"):
        read_profile(file)


def test_invalid_profile_is_refused_with_its_fault(tmp_path):
    file = tmp_path / "pair.json"
    with pytest.raises(ProfileError, match=r"pair\.json cannot be read"):
        read_profile(file)
    raw = msgspec.to_builtins(profile(None))
    for broken in (b"", b"[]", msgspec.json.encode({**raw, "blocks": [{"start": 1}]})):
        file.write_bytes(broken)
        with pytest.raises(ProfileError, match="is not a pair profile"):
            read_profile(file)


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"first_difference": -1}, r"span \[0, -1\) is not 0 <= start <= stop"),
        ({"first_difference": 5}, "layers 0:5 of a model of 4"),
        ({"blocks": [{"start": 1, "stop": 5, "quality": 0.8}]}, "layers 1:5 of a model of 4"),
        ({"blocks": [{"start": 3, "stop": 2, "quality": 0.8}]}, r"span \[3, 2\) is not"),
        ({"recommended": {"start": -1, "stop": 2, "quality": 0.8}}, r"span \[-1, 2\) is not"),
    ],
)
def test_a_profile_names_no_layers_that_there_are_not(tmp_path, wrong, named):
    file = tmp_path / "pair.json"
    good = msgspec.to_builtins(profile(BLOCK))
    file.write_bytes(msgspec.json.encode({**good, **wrong}))
    with pytest.raises(ProfileError, match=f"pair.json is not a pair profile: {named}"):
        read_profile(file)
    whole = {"start": 0, "stop": 4, "quality": 0.8}
    file.write_bytes(msgspec.json.encode({**good, "blocks": [whole], "first_difference": 4}))
    assert read_profile(file).first_difference == 4


def test_a_model_is_all_of_its_identity():
    one = identity("r")
    assert one.model_id == identity("r").model_id
    changes = {"weights": "x", "tokenizer": "x", "rope": "x", "num_layers": 5}
    ids = {msgspec.structs.replace(one, **{key: it}).model_id for key, it in changes.items()}
    assert len(ids | {one.model_id}) == 5


def test_page_sizes_in_bytes():
    whole = family(model_dtype="bfloat16", kv_dtype="bfloat16")
    assert whole.kv_page_bytes == 16 * 2 * 2 * 2 * 2  # tokens, K and V, heads, head_dim, bytes
    assert whole.e_page_bytes == 16 * 8 * 2
    sharded = family(tp_size=2, tp_rank=1)
    assert sharded.kv_page_bytes == 16 * 2 * 1 * 2 * 4
    assert sharded.e_page_bytes == 16 * (8 // 2) * 4
    assert msgspec.structs.replace(sharded, codec=Codec.INT8).e_page_bytes * 2 == (
        msgspec.structs.replace(whole, codec=Codec.INT8).e_page_bytes
    )


@pytest.mark.parametrize("codec", [Codec.NONE, Codec.INT8])
def test_e_that_ranks_cannot_share_out_is_refused(codec):
    with pytest.raises(ConfigError, match="tp_size is 3, which does not divide hidden_size 8"):
        _ = family(codec=codec, tp_size=3).e_page_bytes
    of_eight = family(codec=codec, tp_size=8)
    if codec is Codec.NONE:
        assert of_eight.e_page_bytes == 16 * 1 * 4
    else:
        with pytest.raises(ConfigError, match="not divide hidden_size 8 over tp_size 8; use codec"):
            _ = of_eight.e_page_bytes


@pytest.mark.parametrize("codec", [Codec.NONE, Codec.INT8])
def test_e_has_the_models_dtype_and_kv_its_own(codec):
    def of(model_dtype: str, kv_dtype: str) -> Family:
        return family(model_dtype=model_dtype, kv_dtype=kv_dtype, codec=codec)

    mixed = of("float32", "bfloat16")
    assert mixed.e_page_bytes == of("float32", "float32").e_page_bytes
    assert mixed.kv_page_bytes == of("bfloat16", "bfloat16").kv_page_bytes
    with pytest.raises(FamilyMismatch, match="model_dtype is 'float16' there and 'bfloat16' here"):
        of("bfloat16", "bfloat16").require_equal(of("float16", "bfloat16"), who="peer")


def test_a_family_mismatch_names_the_field():
    ours = family()
    ours.require_equal(family(), who="peer")
    changes = {"page_size": 32, "tokenizer": "x", "rope": "x", "num_layers": 5, "tp_rank": 1}
    for field, value in changes.items():
        with pytest.raises(FamilyMismatch, match=rf"peer .* {field} is {value!r} there"):
            ours.require_equal(family(**{field: value}), who="peer")
    with pytest.raises(FamilyMismatch, match=r"copy one tokenizer\.json into both folders"):
        ours.require_equal(family(tokenizer="x"), who="peer")
