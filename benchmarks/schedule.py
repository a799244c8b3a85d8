"""When each layer is loaded or recomputed, and how long requests wait for their first token.

One link brings layers in and one device computes; each does one thing at a time. Requests are
served in the order of their arrival. Three strategies (DroidSpeak, NSDI '26, section 4.3 and its
figure on pipelined loading):

    EVERYTHING_FIRST  a request loads E and the KV of all layers, then recomputes its block;
                      nothing else runs until it is done
    REUSED_FIRST      the same, without the KV of the layers that it recomputes anyway
    PIPELINED         the link goes on with E, then the reused KV in layer order, of one request
                      after the other; a block starts as soon as its E is there and the device free

The paper's example: 10 layers, each load and each recompute takes 1 unit, and so does a load of E.
A arrives at 0, recomputes layers 4 to 10 and loads 1 to 3. B arrives at 2, recomputes 1 to 3 and
loads 4 to 10; its block begins at the first layer, so it starts from embeddings and needs no E.

    EVERYTHING_FIRST  A: 1 E + 10 KV + 7 recomputed = 18. B: waits until 18, 10 KV + 3 = done at
                      31, TTFT 29. Total 47.
    REUSED_FIRST      A: 1 E + 3 KV + 7 recomputed = 11. B: waits until 11, 7 KV + 3 = done at
                      21, TTFT 19. Total 30.
    PIPELINED         A: E until 1, recompute 1 to 8 (KV arrives meanwhile, 1 to 4): 8. B: KV 4 to
                      11, recompute 8 to 11 once A has left the device: done at 11, TTFT 9.
                      Total 17.

That all three come out exact is what fixes the reading: E costs as much as one layer's KV, only
requests with a transition layer load it, and the first two strategies never overlap anything.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from cachetree import Span
from cachetree.planning import Strategy


class Resource(StrEnum):
    LINK = "link"
    DEVICE = "device"


class Work(StrEnum):
    LOAD_E = "load_e"
    LOAD_KV = "load_kv"
    RECOMPUTE = "recompute"
    FORWARD = "forward"


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One request's work, in any one unit of time; durations are per layer, layer 0 first.

    layers [0, block.start)           loaded
    layers [block.start, block.stop)  recomputed, from E at block.start (from embeddings at 0)
    layers [block.stop, len(load))    loaded
    """

    block: Span
    load: Sequence[float]
    """Of each layer's KV."""
    recompute: Sequence[float]
    """Of each layer over the reused tokens; the last of a block may be cheaper (K and V only)."""
    e_load: float = 0.0
    """Of E at one layer; counts only where the block needs it."""
    forward: Sequence[float] = ()
    """Of each layer over the request's own new tokens, which needs that layer's KV; may be left
    out. It runs after the block."""
    arrival: float = 0.0

    def __post_init__(self) -> None:
        num_layers = len(self.load)
        if len(self.recompute) != num_layers or len(self.forward) not in (0, num_layers):
            raise ValueError("load, recompute and forward must name the same layers")
        if self.block.stop > num_layers:
            raise ValueError(f"{self.block} exceeds the {num_layers} layers")

    @property
    def needs_e(self) -> bool:
        return len(self.block) > 0 and self.block.start > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One bar of the picture: `request` is an index, `layer` counts from 0."""

    request: int
    work: Work
    layer: int
    resource: Resource
    start: float
    stop: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    tasks: tuple[Task, ...]
    """In the order of their start."""
    ttfts: tuple[float, ...]
    """Per request, from its arrival to the end of its last task."""

    @property
    def total_ttft(self) -> float:
        return sum(self.ttfts)

    def busy(self, resource: Resource) -> float:
        """For how long `resource` works; with the makespan this gives the share that is hidden."""
        return sum(task.stop - task.start for task in self.tasks if task.resource is resource)


def schedule(requests: Sequence[Request], strategy: Strategy) -> Timeline:
    """What runs where and when; requests that arrive together keep their order."""
    order = sorted(range(len(requests)), key=lambda index: requests[index].arrival)
    # A batch is what may overlap: all requests where loading is pipelined, else each one alone.
    batches = [order] if strategy is Strategy.PIPELINED else [[index] for index in order]
    tasks: list[Task] = []
    free_at = 0.0
    for batch in batches:
        link_at = free_at
        queues = []
        for index in batch:
            loads = list(_loads(index, requests[index], strategy, link_at))
            link_at = loads[-1].stop if loads else link_at
            tasks += loads
            queues.append(_Queue(index, requests[index], strategy, loads))
        tasks += _compute(queues, free_at)
        free_at = max((task.stop for task in tasks), default=0.0)
    ttfts = tuple(
        max((task.stop - it.arrival for task in tasks if task.request == index), default=0.0)
        for index, it in enumerate(requests)
    )
    return Timeline(tasks=tuple(sorted(tasks, key=lambda task: task.start)), ttfts=ttfts)


def _loads(index: int, request: Request, strategy: Strategy, free_at: float) -> Iterator[Task]:
    """E first, then KV in layer order, back to back."""
    at = max(free_at, request.arrival)
    everything = strategy is Strategy.EVERYTHING_FIRST
    wanted = [(Work.LOAD_E, request.block.start, request.e_load)] if request.needs_e else []
    wanted += [
        (Work.LOAD_KV, layer, duration)
        for layer, duration in enumerate(request.load)
        if everything or layer not in request.block
    ]
    for work, layer, duration in wanted:
        yield Task(
            request=index,
            work=work,
            layer=layer,
            resource=Resource.LINK,
            start=at,
            stop=at + duration,
        )
        at += duration


class _Queue:
    """What one request still has to compute, in order, and when the next of it may start."""

    def __init__(
        self, index: int, request: Request, strategy: Strategy, loads: Sequence[Task]
    ) -> None:
        self.index = index
        landed = {(task.work, task.layer): task.stop for task in loads}
        is_pipelined = strategy is Strategy.PIPELINED
        earliest = (
            request.arrival if is_pipelined else max(landed.values(), default=request.arrival)
        )
        steps = [(Work.RECOMPUTE, layer, request.recompute[layer]) for layer in request.block]
        steps += [(Work.FORWARD, layer, took) for layer, took in enumerate(request.forward)]
        needs = {Work.RECOMPUTE: Work.LOAD_E, Work.FORWARD: Work.LOAD_KV}
        self.steps = [
            (max(earliest, landed.get((needs[work], layer), 0.0)), work, layer, duration)
            for work, layer, duration in steps
        ]

    def pop(self, free_at: float) -> Task:
        ready_at, work, layer, duration = self.steps.pop(0)
        start = max(free_at, ready_at)
        return Task(
            request=self.index,
            work=work,
            layer=layer,
            resource=Resource.DEVICE,
            start=start,
            stop=start + duration,
        )


def _compute(queues: Sequence[_Queue], free_at: float) -> Iterator[Task]:
    """The device takes what can start first; of several, the request that arrived first."""
    waiting = [queue for queue in queues if queue.steps]
    while waiting:
        queue = min(waiting, key=lambda queue: max(free_at, queue.steps[0][0]))
        task = queue.pop(free_at)
        free_at = task.stop
        yield task
        waiting = [queue for queue in waiting if queue.steps]
