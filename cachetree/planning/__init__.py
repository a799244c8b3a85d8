"""Which of a sender's layers to load and which to recompute. Pure: values in, a value out."""

from cachetree.planning.demand import Demand, Gate, Mode, NoReuse, Reason, Requested
from cachetree.planning.gate import Profiles, index_profiles
from cachetree.planning.link import FREE as FREE_LINK
from cachetree.planning.link import Link
from cachetree.planning.margin import Margin, most_of, weighted_median
from cachetree.planning.plan import Match, Plan, Strategy
from cachetree.planning.policy import Considered, Weighed, best_of_each, choose, saving_s, weigh
from cachetree.planning.prediction import (
    Costs,
    bytes_of,
    full_prefill_s,
    layers_of_work,
    recompute_s,
    times_of,
)
from cachetree.planning.prefill_cost import SECONDS_PER_TOKEN, PrefillCost
from cachetree.planning.profile import (
    BEYOND,
    PROFILE_VERSION,
    BlockQuality,
    EMap,
    LayerTimes,
    PairProfile,
    WrittenBlock,
    profile_files,
    read_profile,
    read_profile_as,
    write_profile,
)

__all__ = [
    "BEYOND",
    "FREE_LINK",
    "PROFILE_VERSION",
    "SECONDS_PER_TOKEN",
    "BlockQuality",
    "Considered",
    "Costs",
    "Demand",
    "EMap",
    "Gate",
    "LayerTimes",
    "Link",
    "Margin",
    "Match",
    "Mode",
    "NoReuse",
    "PairProfile",
    "Plan",
    "PrefillCost",
    "Profiles",
    "Reason",
    "Requested",
    "Strategy",
    "Weighed",
    "WrittenBlock",
    "best_of_each",
    "bytes_of",
    "choose",
    "full_prefill_s",
    "index_profiles",
    "layers_of_work",
    "most_of",
    "profile_files",
    "read_profile",
    "read_profile_as",
    "recompute_s",
    "saving_s",
    "times_of",
    "weigh",
    "weighted_median",
    "write_profile",
]
