"""Metrics and health of a cache for its operator, and the page that serves both."""

from cachetree.metrics.http import Health, StatusPage, health_of
from cachetree.metrics.metrics import METRICS, StatusCollector

__all__ = ["METRICS", "Health", "StatusCollector", "StatusPage", "health_of"]
