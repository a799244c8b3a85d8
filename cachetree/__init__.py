"""A cross-model KV cache: what the models of one family have computed, found by prefix.

`Cache` is the public face; `store`, `match` and `fetch` are its verbs. Nothing here imports
SGLang.
"""

from cachetree.cache import Cache
from cachetree.checkpoint import Family, ModelIdentity
from cachetree.clock import Clock, Deadline
from cachetree.config import CacheConfig, read_yaml, settings_of
from cachetree.disk import DiskStatus
from cachetree.errors import (
    AuthenticationError,
    CacheTreeError,
    Cancelled,
    ConfigError,
    DeadlineExceeded,
    FamilyMismatch,
    FetchError,
    OrderDenied,
    PinRefused,
    ProfileError,
    ProtocolError,
    StaleEntry,
    printable,
)
from cachetree.files import claim
from cachetree.ids import (
    DISK,
    EMPTY_SPAN,
    LOCAL,
    PAGE_HASH_BYTES,
    POOL_PREFIX,
    Kind,
    Location,
    ModelId,
    PageHash,
    Span,
    Step,
    entry_steps,
    is_pool,
)
from cachetree.memory import Register, Staging
from cachetree.names import ModelNames, with_names
from cachetree.planning import Match, PairProfile, Plan, read_profile, write_profile
from cachetree.status import CacheStatus, FetchCounts
from cachetree.tier import (
    STALL_S,
    Calls,
    MakeTier,
    NoteSpeed,
    Search,
    Tier,
    Turns,
    WriteBehind,
    give_way,
)
from cachetree.transport import (
    Peer,
    PeerConfig,
    PeerState,
    PeerStatus,
    PullStatus,
    Worker,
    WorkerConfig,
)
from cachetree.tree import CacheTree, Change, Lease, Reservation, Retention, page_hashes

__all__ = [
    "DISK",
    "EMPTY_SPAN",
    "LOCAL",
    "PAGE_HASH_BYTES",
    "POOL_PREFIX",
    "STALL_S",
    "AuthenticationError",
    "Cache",
    "CacheConfig",
    "CacheStatus",
    "CacheTree",
    "CacheTreeError",
    "Calls",
    "Cancelled",
    "Change",
    "Clock",
    "ConfigError",
    "Deadline",
    "DeadlineExceeded",
    "DiskStatus",
    "Family",
    "FamilyMismatch",
    "FetchCounts",
    "FetchError",
    "Kind",
    "Lease",
    "Location",
    "MakeTier",
    "Match",
    "ModelId",
    "ModelIdentity",
    "ModelNames",
    "NoteSpeed",
    "OrderDenied",
    "PageHash",
    "PairProfile",
    "Peer",
    "PeerConfig",
    "PeerState",
    "PeerStatus",
    "PinRefused",
    "Plan",
    "ProfileError",
    "ProtocolError",
    "PullStatus",
    "Register",
    "Reservation",
    "Retention",
    "Search",
    "Span",
    "Staging",
    "StaleEntry",
    "Step",
    "Tier",
    "Turns",
    "Worker",
    "WorkerConfig",
    "WriteBehind",
    "claim",
    "entry_steps",
    "give_way",
    "is_pool",
    "page_hashes",
    "printable",
    "read_profile",
    "read_yaml",
    "settings_of",
    "with_names",
    "write_profile",
]
