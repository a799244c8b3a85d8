"""A cross-model KV cache: what the models of one family have computed, found by prefix.

`Cache` is the public face; `store`, `match` and `fetch` are its verbs. Nothing here imports
SGLang.
"""

from cachetree.cache import Cache, CacheStatus
from cachetree.checkpoint.family import Family, ModelIdentity
from cachetree.clock import Deadline
from cachetree.config import CacheConfig
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
)
from cachetree.ids import (
    DISK,
    EMPTY_SPAN,
    LOCAL,
    PAGE_HASH_BYTES,
    Location,
    ModelId,
    PageHash,
    Span,
)
from cachetree.memory.budget import BudgetedStaging
from cachetree.memory.staging import Allocate, Staging, pageable
from cachetree.planning.plan import Kind, Plan, Step
from cachetree.planning.profile import PairProfile, read_profile, write_profile
from cachetree.tier import MakeTier, NoteSpeed, Search, Tier
from cachetree.transport import (
    Peer,
    PeerConfig,
    PeerState,
    PeerStatus,
    PusherStatus,
    Worker,
    WorkerConfig,
)
from cachetree.tree.entries import Match
from cachetree.tree.eviction import Retention
from cachetree.tree.lease import Lease, Reservation
from cachetree.tree.tree import CacheTree

__all__ = [
    "DISK",
    "EMPTY_SPAN",
    "LOCAL",
    "PAGE_HASH_BYTES",
    "Allocate",
    "AuthenticationError",
    "BudgetedStaging",
    "Cache",
    "CacheConfig",
    "CacheStatus",
    "CacheTree",
    "CacheTreeError",
    "Cancelled",
    "ConfigError",
    "Deadline",
    "DeadlineExceeded",
    "DiskStatus",
    "Family",
    "FamilyMismatch",
    "FetchError",
    "Kind",
    "Lease",
    "Location",
    "MakeTier",
    "Match",
    "ModelId",
    "ModelIdentity",
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
    "PusherStatus",
    "Reservation",
    "Retention",
    "Search",
    "Span",
    "Staging",
    "StaleEntry",
    "Step",
    "Tier",
    "Worker",
    "WorkerConfig",
    "pageable",
    "read_profile",
    "write_profile",
]
