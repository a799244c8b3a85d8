"""Files that users name are written, whatever kind of file they are. None of them is moved away."""

import os
import threading

import msgspec
import pytest
from test_corrections import CORRECTIONS
from test_profile import BLOCK, profile

from cachetree.corrections import maps_path, read_corrections, write_corrections
from cachetree.files import replacing
from cachetree.planning.profile import read_profile, write_profile

CORRECTED = msgspec.structs.replace(BLOCK, start=1, stop=2, e_map=CORRECTIONS[0].named(1))


@pytest.mark.parametrize("is_there", [True, False])
def test_a_link_is_kept_and_its_target_written(tmp_path, is_there):
    (tmp_path / "shared").mkdir()
    if is_there:
        (tmp_path / "shared/pair.json").touch()
    link, maps = tmp_path / "link.json", tmp_path / "link.maps.safetensors"
    link.symlink_to("shared/pair.json")
    maps.symlink_to("shared/pair.maps.safetensors")
    written = msgspec.structs.replace(profile(CORRECTED), blocks=(CORRECTED,))
    write_profile(written, link)
    write_corrections(written, {CORRECTIONS[0].named(1).sha256: CORRECTIONS[0]}, link)
    target = tmp_path / "shared/pair.json"
    assert link.is_symlink() and maps.is_symlink() and maps == maps_path(link)
    assert read_profile(target) == written and read_corrections(written, target)
    assert len(list((tmp_path / "shared").iterdir())) == 2


def test_a_pipe_gets_the_bytes(tmp_path):
    os.mkfifo(pipe := tmp_path / "pipe")
    got: list[bytes] = []
    reader = threading.Thread(target=lambda: got.append(pipe.read_bytes()))
    reader.start()
    write_profile(profile(BLOCK), pipe)
    reader.join(10)
    assert pipe.is_fifo() and got and got[0].startswith(b"{")


def test_a_failed_write_leaves_the_old_content(tmp_path):
    (path := tmp_path / "a").write_text("old")
    with pytest.raises(OSError, match="full"), replacing(path) as fresh:
        fresh.write_text("ne")
        raise OSError("full")
    assert path.read_text() == "old" and len(list(tmp_path.iterdir())) == 1
