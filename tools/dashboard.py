"""Write the Grafana dashboard of deploy/: `python -m tools.dashboard`. A test writes it again."""

from __future__ import annotations

from pathlib import Path
from string import ascii_uppercase
from typing import Final, NamedTuple

from grafana_foundation_sdk.builders import common, dashboard, prometheus, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.common import LegendDisplayMode, LegendPlacement
from grafana_foundation_sdk.models.dashboard import DataSourceRef

PATH: Final = Path(__file__).resolve().parents[1] / "deploy/grafana/droidspeak.json"
_SOURCE: Final = DataSourceRef(type_val="prometheus", uid="${source}")


class Panel(NamedTuple):
    title: str
    unit: str
    """Grafana's name of it."""
    queries: dict[str, str]
    """By legend."""


def _rate(name: str, by: str) -> str:
    return f"sum by ({by}) (rate({name}[$__rate_interval]))"


def _by(name: str, by: str) -> dict[str, str]:
    """A rate by one label, which is the legend."""
    return {f"{{{{{by}}}}}": _rate(name, by)}


def _quantiles(name: str) -> dict[str, str]:
    buckets = f"sum by (le) (rate({name}_bucket[$__rate_interval]))"
    return {f"p{it}": f"histogram_quantile({it / 100}, {buckets})" for it in (50, 95)}


def _outcomes(some: str) -> str:
    """Requests with one of these."""
    return f'droidspeak:requests_total{{outcome=~"{some}"}}'


_PAIR: Final = "{{instance}} {{sender_name}} for {{receiver_name}}"
_BY_PAIR: Final = "instance, sender, receiver"


def _named(query: str) -> str:
    """A query by pair, with the names that the pair's server has for both models."""
    for role in ("sender", "receiver"):
        info = f'label_replace(droidspeak:model_info == 1, "{role}", "$1", "model", "(.+)")'
        name = f'label_replace({info}, "{role}_name", "$1", "name", "(.+)")'
        query = f"({query}) * on (instance, {role}) group_left ({role}_name) {name}"
    return query


ROWS: Final[dict[str, tuple[Panel, ...]]] = {
    "Reuse": (
        Panel("Requests by outcome", "reqps", _by("droidspeak:requests_total", "outcome")),
        Panel(
            "Prompt tokens not prefilled in full",
            "short",
            _by("droidspeak:reused_tokens_total", "instance"),
        ),
        Panel("Fallbacks by cause", "reqps", _by("droidspeak:fallbacks_total", "cause")),
    ),
    "Time": (
        Panel(
            "Time to first token, all requests",
            "s",
            _quantiles("sglang:time_to_first_token_seconds"),
        ),
        Panel("Reused requests in the queue", "s", _quantiles("droidspeak:queued_seconds")),
        Panel("Partial prefill of a batch", "s", _quantiles("droidspeak:recompute_seconds")),
    ),
    "Links": (
        Panel("Fetched", "Bps", _by("cachetree:fetched_bytes_total", "location")),
        Panel(
            "Fetches by how they ended",
            "ops",
            {"{{location}} {{outcome}}": _rate("cachetree:fetches_total", "location, outcome")},
        ),
        Panel(
            "Peers",
            "short",
            {
                "ready {{instance}} {{location}}": "cachetree:peer_ready",
                "left alone {{instance}} {{location}}": "cachetree:breaker_open",
            },
        ),
        Panel("Served to peers", "Bps", _by("cachetree:sent_bytes_total", "instance")),
    ),
    "Memory and disk": (
        Panel(
            "In use, of what is allowed",
            "percentunit",
            {"{{instance}} {{tier}}": "cachetree:bytes / cachetree:budget_bytes"},
        ),
        Panel("Cannot be evicted", "bytes", {"{{instance}}": "cachetree:held_bytes"}),
        Panel("Evictions", "ops", _by("cachetree:evictions_total", "tier")),
        Panel(
            "Faults of the disk",
            "ops",
            {
                "not written": _rate("cachetree:disk_failed_writes_total", "instance"),
                "damaged": _rate("cachetree:disk_damaged_entries_total", "instance"),
            },
        ),
    ),
    "Trust": (
        Panel(
            "Share of answers that are approximate",
            "percentunit",
            {
                "{{instance}}": f"{_rate('droidspeak:approximate_requests_total', 'instance')} / "
                f"{_rate('droidspeak:requests_total', 'instance')}"
            },
        ),
        Panel(
            "Pairs that are on (1) or off (0)",
            "short",
            {_PAIR: _named("droidspeak:pair_usable")},
        ),
        Panel(
            "Requests whose pair may not be reused",
            "reqps",
            _by(
                _outcomes("no_profile|gate_failed|longer_than_measured|weights_updated"), "outcome"
            ),
        ),
        Panel(
            "Peers that were turned away",
            "ops",
            {
                "key": _rate("cachetree:failed_handshakes_total", "instance"),
                "family or release": _rate("cachetree:refused_peers_total", "instance"),
            },
        ),
    ),
    "Drift guard": (
        Panel(
            "Distance from exact runs, of 1 at most",
            "short",
            {
                _PAIR: _named(
                    f"{_rate('droidspeak:shadow_tv_sum', _BY_PAIR)} / "
                    f"{_rate('droidspeak:shadow_tv_count', _BY_PAIR)}"
                )
            },
        ),
        Panel("Evidence, alarm at 100,000", "short", {_PAIR: _named("droidspeak:guard_evidence")}),
        Panel("Plans in service", "short", {_PAIR: _named("droidspeak:guard_plans")}),
        Panel("Shadows", "ops", _by("droidspeak:shadows_total", "result")),
    ),
    "Adapters": (
        Panel(
            "Adapters that do not share yet",
            "reqps",
            _by(_outcomes("reading_adapter|unknown_adapter"), "outcome"),
        ),
    ),
}


def made() -> str:
    board = (
        dashboard.Dashboard("Cross-model KV reuse")
        .uid("droidspeak")
        .tags(["sglang", "droidspeak"])
        .refresh("10s")
        .time("now-1h", "now")
        .with_variable(dashboard.DatasourceVariable("source").type("prometheus"))
    )
    for title, panels in ROWS.items():
        board = board.with_row(dashboard.Row(title))
        for panel in panels:
            board = board.with_panel(_panel(panel, 24 // len(panels)))
    return JSONEncoder(sort_keys=True, indent=1).encode(board.build()) + "\n"


def _panel(panel: Panel, width: int) -> timeseries.Panel:
    drawn = timeseries.Panel().title(panel.title).unit(panel.unit).min(0).datasource(_SOURCE)
    legend = common.VizLegendOptions().display_mode(LegendDisplayMode.LIST).show_legend(True)
    drawn = drawn.legend(legend.placement(LegendPlacement.BOTTOM))
    for ref, (name, query) in zip(ascii_uppercase, panel.queries.items(), strict=False):
        target = prometheus.Dataquery().expr(query).legend_format(name).ref_id(ref)
        drawn = drawn.with_target(target)
    return drawn.span(min(width, 12)).height(7)


if __name__ == "__main__":
    PATH.write_text(made())
