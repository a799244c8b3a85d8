"""Plans of a pair in service: alarms, the next plan, and the record after a restart."""

from __future__ import annotations

import json
from itertools import count
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from line_parts import line_of
from profile_parts import identity
from test_policy import PROFILE

from cachetree import ConfigError
from cachetree.disk import lock_file
from cachetree.names import ModelNames
from cachetree.planning import BlockQuality, LineProfile, PairProfile, PlanId
from sglang_droidspeak.cli.ask import guard_lines
from sglang_droidspeak.engine import asking
from sglang_droidspeak.guard import service
from sglang_droidspeak.guard.plans import (
    NOISE,
    GuardQuestion,
    GuardState,
    Shadow,
    WatchedPair,
    after,
    left_of,
    watched,
)
from sglang_droidspeak.guard.service import PairsInService, check_record, read_record, write_record
from sglang_droidspeak.metrics import Metrics
from sglang_droidspeak.request.answers import Answers
from sglang_droidspeak.request.meta_info import KEY
from sglang_droidspeak.start.config import Settings

NUM_LAYERS = PROFILE.receiver.num_layers
SENDER, RECEIVER = PROFILE.sender.model_id, PROFILE.receiver.model_id
BEST = BlockQuality(start=1, stop=6, quality=0.97, tv_bound=0.03)
NEXT = BlockQuality(start=2, stop=6, quality=0.96)
LEAST = BlockQuality(start=3, stop=5, quality=0.95)
ONE = BlockQuality(start=3, stop=4, quality=0.1)
ALL_LAYERS = BlockQuality(start=0, stop=NUM_LAYERS, quality=0.98)
PAIR = msgspec.structs.replace(
    PROFILE, blocks=(LEAST, ALL_LAYERS, BEST, NEXT), recommended=LEAST, passed=True
)


def plan(block: BlockQuality) -> PlanId:
    return PlanId(SENDER, RECEIVER, (block.start, block.stop), False)


def seen(pair: WatchedPair, block: BlockQuality, tv: float, num: int = 0, **of: Any) -> WatchedPair:
    """Return the pair after one more shadow. There are ten per hour."""
    return after(pair, Shadow(plan=plan(block), tv=tv, hour=num // 10, **of))


def shadows_until_alarm(pair: Any, block: BlockQuality, tv: float) -> tuple[Any, int]:
    num, num_left = 0, pair.num_left
    while pair.num_left == num_left:
        pair, num = seen(pair, block, tv, num), num + 1
        assert num < 1000
    return pair, num


def blocks_of(profile: PairProfile) -> set[tuple[int, int]]:
    return {(it.start, it.stop) for it in profile.blocks}


def test_after_an_alarm_the_next_best_plans_serve_and_then_what_is_exact():
    pair = watched(PAIR)
    assert [it.block for it in pair.plans] == [(1, 6), (2, 6), (3, 5)]
    assert [it.allowed for it in pair.plans] == pytest.approx([0.03 + NOISE, NOISE, NOISE])
    assert left_of(PAIR, pair) == PAIR and not list(pair.suspects)

    pair, num = shadows_until_alarm(pair, LEAST, 0.8)
    assert num < 60
    left = left_of(PAIR, pair)
    assert blocks_of(left) == {(1, 6), (2, 6), (0, NUM_LAYERS)}
    assert (left.recommended, left.passed) == (NEXT, True)
    assert set(pair.suspects) == {plan(BEST), plan(NEXT)}, "what is left is watched closely"

    assert seen(pair, LEAST, 1.0) is pair, "what is out of service is not observed"
    pair, _ = shadows_until_alarm(pair, BEST, 0.8)
    left = left_of(PAIR, pair)
    assert blocks_of(left) == {(0, NUM_LAYERS)}, "none is kept that promises less"
    assert not left.is_usable and "drift guard" in left.reason


def test_a_suspect_is_watched_closely_before_there_is_an_alarm():
    pair = watched(PAIR)
    for _ in range(20):
        pair = seen(pair, NEXT, 0.0)
    assert not list(pair.suspects)
    while not list(pair.suspects):
        pair = seen(pair, NEXT, 0.05)
    assert pair.num_left == 3 and pair.strength < 1000


def test_the_first_twenty_answers_of_a_plan_are_compared_once_one_is():
    pair = watched(PAIR)
    assert not list(pair.suspects)
    for _ in range(20):
        pair = seen(pair, NEXT, 0.0)
        suspects, num_shadows = list(pair.suspects), pair.plans[1].num_shadows
        assert suspects == [plan(NEXT)] * (num_shadows < 20)


def test_plan_at_its_measured_distance_stays_in_service():
    """A plan stays in service for ever at the distance that its profile states. A plan without a
    stated distance does not."""
    random, pair = Random(1), watched(PAIR)
    for _ in range(20_000):
        pair = seen(pair, BEST, random.betavariate(0.06, 1.94))
    assert pair.num_left == 3
    for num in range(2_000):
        pair = seen(pair, LEAST, random.betavariate(0.12, 1.88), num)
    assert pair.num_left == 2


def test_an_hour_of_hard_documents_takes_nothing_out_of_service():
    pair = watched(PAIR)
    for _ in range(300):
        pair = seen(pair, LEAST, 1.0)
    assert pair.num_left == 3 and list(pair.suspects) == [plan(LEAST)]
    assert shadows_until_alarm(pair, LEAST, 1.0)[0].num_left == 2, "hours of them do"


def test_a_document_adds_evidence_once():
    pair = watched(PAIR)
    for num in range(300):
        pair = seen(pair, LEAST, 1.0, num, document="the hard one")
    least = pair.plans[-1]
    assert (pair.num_left, least.num_shadows, least.mean_tv) == (3, 300, 1.0)
    assert shadows_until_alarm(pair, LEAST, 1.0)[0].num_left == 2, "others do"


class Planner:
    def __init__(self) -> None:
        self.profiles = {(SENDER, RECEIVER): PAIR}
        self.generation = 0
        self.out_of_service: frozenset[PlanId] = frozenset()

    def serves(self, model: str) -> bool:
        return model == RECEIVER

    def put_in_service(self, profile: PairProfile) -> None:
        self.profiles[SENDER, RECEIVER] = profile
        self.generation += 1


def guard_of(planner: Any, path: Path, *, keeps_record: bool = True) -> PairsInService:
    settings = Settings(shadow_rate=0.05, guard_path=str(path))
    names = ModelNames()
    names.call(SENDER, "reader")
    metrics = Metrics(enabled=False)
    return PairsInService(planner, metrics, settings, names, keeps_record=keeps_record)


def tell(guard: PairsInService, **question: Any) -> GuardState:
    said = msgspec.json.encode(GuardQuestion(**question)).decode()
    return msgspec.convert(json.loads(json.dumps(guard.answer(said))), GuardState)


_hours = count()


def worst(tv: float = 1.0) -> Shadow:
    """Return a shadow of the plan LEAST, an hour after the last one."""
    return Shadow(plan=plan(LEAST), tv=tv, hour=next(_hours))


def test_an_alarm_reaches_the_planner_and_lasts_over_a_restart(tmp_path, caplog):
    path, planner = tmp_path / "made" / "guard.json", Planner()
    guard = guard_of(planner, path)
    while not planner.generation:
        state = tell(guard, shadow=worst())
    (pair,) = state.pairs
    assert (pair.num_left, planner.generation) == (2, 1) and pair.plans[2].num_shadows < 30
    assert planner.out_of_service == {plan(LEAST)}
    assert (3, 5) not in blocks_of(planner.profiles[SENDER, RECEIVER])
    (line,) = [it.message for it in caplog.records if "plans in service" in it.message]
    assert "2 of 3" in line and "[3, 5)" in line and "1.000 from full prefill" in line
    assert path.stat().st_mode & 0o777 == 0o600

    restarted = Planner()
    assert tell(guard_of(restarted, path)).pairs == state.pairs
    assert restarted.profiles == planner.profiles and restarted.generation == 1

    measured_anew = Planner()
    measured_anew.profiles[SENDER, RECEIVER] = msgspec.structs.replace(PAIR, num_questions=99)
    other = guard_of(measured_anew, path)
    assert tell(other).pairs[0].num_left == 3, "another profile of the pair begins anew"
    tell(other, shadow=worst(0.0))
    assert {it.num_left for it in read_record(path)} == {2, 3}, "and the other one is not forgotten"


def test_a_block_that_only_requests_name_is_watched_as_one_that_promises_nothing(tmp_path):
    path, planner = tmp_path / "guard.json", Planner()
    guard = guard_of(planner, path)
    nothing = PlanId(SENDER, RECEIVER, None, False)
    tell(guard, shadow=Shadow(plan=nothing, tv=0.9))
    tell(guard, shadow=Shadow(plan=plan(ONE), tv=0.0))
    while not planner.out_of_service:
        state = tell(guard, shadow=Shadow(plan=nothing, tv=0.9, hour=next(_hours)))
    (pair,) = state.pairs
    assert [it.block for it in pair.plans] == [(1, 6), (2, 6), (3, 5), (3, 4), None]
    assert pair.num_left == 4 and [it.allowed for it in pair.plans[3:]] == [NOISE, NOISE]
    assert planner.out_of_service == {nothing}
    assert planner.profiles[SENDER, RECEIVER] == PAIR

    restarted = Planner()
    again = guard_of(restarted, path)
    assert restarted.out_of_service == {nothing}
    assert tell(again, reset="all").pairs == (watched(PAIR),)
    assert not restarted.out_of_service


def test_a_profile_that_allows_nothing_of_its_own_is_named_at_the_start(tmp_path, caplog):
    guard_of(Planner(), tmp_path / "guard.json")
    (line,) = [it.message for it in caplog.records]
    assert "how far layers [2, 6), layers [3, 5) may be" in line and "calibrate" in line


@pytest.mark.parametrize("reset", ["reader", SENDER, "all"])
def test_an_operator_begins_anew(tmp_path, reset):
    planner = Planner()
    guard = guard_of(planner, tmp_path / "guard.json")
    while not planner.generation:
        tell(guard, shadow=worst())
    with pytest.raises(LookupError, match="sender anothr; give reader or all"):
        tell(guard, reset="anothr")
    assert tell(guard).pairs[0].num_left == 2
    (pair,) = tell(guard, reset=reset).pairs
    assert pair == watched(PAIR) and planner.profiles[SENDER, RECEIVER] == PAIR
    assert read_record(tmp_path / "guard.json") == (pair,)


@pytest.mark.parametrize(
    "question",
    [
        {"missed": {"dropped": -1}},
        {"missed": {"dropped": int("9" * 400)}},
        {"missed": {"stolen": 1}},
        {"shadow": {"plan": msgspec.to_builtins(plan(LEAST)), "tv": 1e308}},
        {"shadow": {"plan": msgspec.to_builtins(plan(LEAST)), "tv": -0.1}},
        {"shadow": {"plan": {**msgspec.to_builtins(plan(LEAST)), "block": [0, 2**70]}, "tv": 0}},
        {"florp": 1},
        {"reset": "another"},
    ],
    ids=str,
)
def test_impossible_question_is_answered_with_its_fault(tmp_path, question):
    guard = guard_of(Planner(), tmp_path / "guard.json")
    before = guard.answer("")
    cache = SimpleNamespace(names=ModelNames())
    answers = Answers(cache, None, None, {}, 16, guard.answer)  # type: ignore[arg-type]
    asked = SimpleNamespace(rid=f"{asking.GUARD}: {json.dumps(question)}")
    answers.add(output := SimpleNamespace(), SimpleNamespace(), asked)  # type: ignore[arg-type]
    assert output.internal_state[KEY].keys() == {"error"}
    assert guard.answer("") == before and not (tmp_path / "guard.json").exists()


def test_evidence_of_before_a_restart_counts(tmp_path):
    path = tmp_path / "guard.json"
    planner, num = Planner(), 0
    while planner.profiles[SENDER, RECEIVER] == PAIR:
        planner, num = Planner(), num + 1
        tell(guard_of(planner, path), shadow=worst())
    assert 1 < num < 30


def test_only_the_first_rank_writes(tmp_path):
    tell(guard_of(Planner(), tmp_path / "guard.json", keeps_record=False), shadow=worst())
    assert not list(tmp_path.iterdir())


def test_a_disk_that_fails_does_not_end_the_guard(tmp_path, caplog):
    (tmp_path / "file").touch()
    planner = Planner()
    guard = guard_of(planner, tmp_path / "guard.json")
    guard._path = tmp_path / "file" / "guard.json"  # type: ignore[misc]
    while not planner.generation:
        tell(guard, shadow=worst())
    assert "is not written" in caplog.text


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "has no drift guard's record"),
        ('{"version": 9, "pairs": []}', "has version 9"),
        (" " * ((16 << 20) + 1), "more than 16 MiB"),
    ],
)
def test_a_record_that_is_none_is_refused(tmp_path, content, words):
    (tmp_path / "guard.json").write_text(content)
    with pytest.raises(ConfigError, match=words) as raised:
        check_record(tmp_path / "guard.json")
    assert "remove it" in str(raised.value)


def test_a_record_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot be"):
        check_record(tmp_path / "file" / "guard.json")


def test_a_record_is_one_servers_alone(tmp_path, monkeypatch):
    """If two servers shared it, each would overwrite the other's evidence."""
    path = tmp_path / "guard.json"
    for _ in range(2):
        check_record(path)
    # The system locks an open file, so a server that has not opened this one is another.
    monkeypatch.setattr(service, "_lock", lock_file)
    with pytest.raises(ConfigError) as refused:
        check_record(path)
    assert str(refused.value).startswith(
        f"guard_path {path} is another server's; give each server a file"
    )


def test_last_record_of_the_former_server_is_kept(tmp_path, monkeypatch):
    """The former server writes as it ends and releases the record."""
    path, last = tmp_path / "guard.json", (watched(PAIR),)
    monkeypatch.setattr(service, "_lock", lambda _: write_record(path, last))
    check_record(path)
    assert read_record(path) == last


def test_pairs_whose_profiles_are_gone_stay_in_the_record(tmp_path):
    gone = msgspec.structs.replace(watched(PAIR), profile="gone")
    write_record(tmp_path / "guard.json", [gone])
    tell(guard_of(Planner(), tmp_path / "guard.json"), shadow=worst())
    assert gone in read_record(tmp_path / "guard.json")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"shadow_rate": 1.5, "guard_path": "g"}, "shadow_rate is 1.5; give 0 to 1"),
        ({"shadow_rate": 0.1}, "guard_path is None, so its evidence would be lost"),
        ({"shadow_deadline_s": 0}, "shadow_deadline_s is 0"),
        ({"shadow_busy_share": 2, "guard_path": "g"}, "shadow_busy_share is 2; give 0 to 1"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings, words):
    with pytest.raises(ConfigError, match=words):
        Settings(**settings)


def test_one_in_twenty_is_compared_where_there_is_a_place_for_what_is_found():
    rates = (Settings(), Settings(guard_path="g"), Settings(guard_path="g", shadow_rate=0.0))
    assert [it.shadow_share for it in rates] == [0.0, 0.05, 0.0]


def test_a_person_reads_what_is_out_of_service():
    pair, _ = shadows_until_alarm(watched(PAIR), LEAST, 1.0)
    off = GuardState(shadow_rate=0.05, pairs=(pair,), suspects=(), off="weights; restart it")
    assert list(guard_lines(off)) == ["off: weights; restart it"]
    shown = list(guard_lines(GuardState(shadow_rate=0.05, pairs=(pair,), suspects=())))
    assert shown[0] == "compares 5.0% of reused requests"
    assert sum("OUT OF SERVICE" in it for it in shown) == 1
    assert "layers [3, 5) anew: distance 1.0000 in" in shown[-1]


# Pairs that inherit from a line.

V = [identity(it) for it in ("v1", "v2", "v3", "v4")]
LINE = line_of(V[:3], proven=(0.01,) * 11)
NOTHING = (0.0,) * 11


class Inheriting:
    """A planner without profiles of its own."""

    def __init__(self) -> None:
        self.profiles: dict[Any, PairProfile] = {}
        self.heirs: dict[Any, str] = {}
        self.out_of_service: frozenset[PlanId] = frozenset()

    def serves(self, model: str) -> bool:
        return True

    def inherit(self, heirs: Any) -> None:
        self.profiles = dict(heirs)

    def put_in_service(self, profile: PairProfile) -> None:
        self.profiles[profile.sender.model_id, profile.receiver.model_id] = profile


def heir(sender: int, receiver: int, distances: tuple[float, ...] = NOTHING) -> LineProfile:
    return LINE.inherited(V[sender], V[receiver], distances)


def loaded(sender: int, receiver: int, tv: float, document: str = "") -> Shadow:
    plan = PlanId(V[sender].model_id, V[receiver].model_id, None, False)
    return Shadow(plan=plan, tv=tv, document=document, hour=7)


def states(planner: Inheriting) -> list[str]:
    return list(planner.heirs.values())


def test_an_heir_is_compared_at_every_request_until_its_own_evidence_is_enough(tmp_path):
    planner = Inheriting()
    guard = guard_of(planner, tmp_path / "guard.json")
    assert tell(guard).pairs == ()
    guard.inherit([heir(1, 2)])
    assert states(planner) == ["probation"]
    assert tell(guard).suspects == (loaded(1, 2, 0.0).plan,), "before the first comparison"
    for _ in range(100):
        tell(guard, shadow=loaded(1, 2, 0.0, "one document"))
    assert states(planner) == ["probation"]
    num = 1
    while states(planner) == ["probation"]:
        num += 1
        state = tell(guard, shadow=loaded(1, 2, 0.0, str(num)))
        assert num < 100
    assert num == 69 and state.suspects == () and states(planner) == ["in_service"]
    guard.inherit([heir(1, 2)])
    assert states(planner) == ["in_service"], "an update that changes nothing"


def test_the_first_alarm_takes_the_plan_from_the_line_until_an_operator_begins_anew(tmp_path):
    planner, path = Inheriting(), tmp_path / "guard.json"
    guard = guard_of(planner, path)
    guard.inherit([heir(1, 2)])
    for num in range(12):
        tell(guard, shadow=loaded(1, 2, 1.0, str(num)))
    assert states(planner) == ["out_of_service"], "within the hour"
    (profile,) = planner.profiles.values()
    assert not profile.is_usable and planner.out_of_service == {loaded(1, 2, 1.0).plan}
    guard.inherit([heir(1, 3), heir(2, 3)])
    assert states(planner) == ["out_of_service"] * 2, "later heirs, too"
    assert planner.out_of_service == {loaded(it, 3, 1.0).plan for it in (1, 2)}
    assert not any(it.is_usable for it in planner.profiles.values())
    tell(guard, reset=V[1].model_id)
    guard.inherit([heir(2, 3)])
    assert states(planner) == ["out_of_service"]
    assert tell(guard, reset="all").pairs == (watched(heir(2, 3)),)
    guard.inherit([heir(1, 2)])
    assert states(planner) == ["probation"]


def test_the_record_has_no_pairs_that_inherit(tmp_path):
    path = tmp_path / "guard.json"
    guard = guard_of(Inheriting(), path)
    guard.inherit([heir(1, 2)])
    tell(guard, shadow=loaded(1, 2, 1.0))
    assert read_record(path) == ()


def test_a_pair_that_changed_too_much_has_no_plan_and_is_told(tmp_path):
    planner = Inheriting()
    guard = guard_of(planner, tmp_path / "guard.json")
    guard.inherit([heir(1, 3, distances=(0.5,) * 11), heir(2, 3)])
    assert states(planner) == ["too_far", "probation"]
    far = planner.profiles[V[1].model_id, V[3].model_id]
    assert not far.is_usable and "changed by 0.5" in far.reason
    counts = {it.labels["state"]: it.value for it in guard._metrics.heirs.collect()[0].samples}
    assert counts == {"probation": 1, "in_service": 0, "out_of_service": 0, "too_far": 1}


def test_a_pair_with_a_profile_of_its_own_inherits_nothing(tmp_path):
    planner = Planner()
    guard = guard_of(planner, tmp_path / "guard.json")
    guard.inherit([LINE.inherited(PAIR.sender, PAIR.receiver, NOTHING)])
    assert planner.profiles == {(SENDER, RECEIVER): PAIR}
    assert tell(guard).pairs == (watched(PAIR),)


def test_a_person_reads_which_plan_is_on_probation():
    state = GuardState(shadow_rate=0.05, pairs=(watched(heir(1, 2)),), suspects=())
    assert "on probation    no layer anew" in [*guard_lines(state)][-1]
